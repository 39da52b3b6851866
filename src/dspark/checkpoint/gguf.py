"""GGUF targets of families our decoder covers, read without building a transformers model.

transformers parses the file's metadata anew for config, tokenizer and model and fills a model
module; our decoder needs the tensors alone. So the ``gguf`` package reads the header once and
dequantizes each tensor, and names and layout become those of a transformers checkpoint. Values are
bit-equal to transformers' (a slow test compares them), because the same function dequantizes.

llama.cpp stores q and k of the Llama family with rotary pairs beside each other; transformers keeps
halves. Rows are put back into halves here, since ``dspark.model.weights`` expects that layout.

Rotary scaling is refused for nearly every GGUF: transformers ignores these keys and tensors without
a word, and the target would answer with the wrong positions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoint.source import TargetFiles, first_line
from dspark.config.target import TargetConfig
from dspark.errors import DSparkError, MissingDependencyError, TargetError

# Architecture -> whether q and k rows are stored as rotary pairs.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
READS_SCALING = frozenset({"gpt-oss"})  # transformers reads its rope.scaling keys
SCALING_TENSORS = ("rope_freqs", "rope_factors")
WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def require_gguf(source: str) -> None:
    """Refuse at once when the optional packages are not there.

    Raises:
        MissingDependencyError: names the extra.
    """
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise MissingDependencyError(
            expected="the packages gguf and accelerate, to read GGUF weights",
            found=f"not installed: {', '.join(missing)}",
            where=f"target.source {source}",
            fix="pip install 'dspark[gguf]'",
        )


class GGUFFile:
    """An open GGUF. ``covered`` says whether :meth:`config` and :meth:`state` can read it.

    Raises:
        TargetError: damaged, or with a rotary scaling that would be lost.
    """

    def __init__(self, files: TargetFiles) -> None:
        assert files.gguf is not None
        self.path = Path(files.location) / files.gguf
        with self._readable():
            from gguf import GGUFReader

            self._reader = GGUFReader(self.path)
            self.architecture = str(self._value("general.architecture"))
        self.covered = self.architecture in ARCHITECTURES
        self._refuse_scaling()

    def config(self) -> TargetConfig:
        """Sizes of the model, as transformers would read them.

        Raises:
            TargetError: a size is missing or makes no sense.
        """
        names = {tensor.name: tensor for tensor in self._reader.tensors}
        with self._readable():
            heads = int(self._own("attention.head_count"))
            hidden = int(self._own("embedding_length"))
            head_dim = self._own("attention.key_length", None)
            if head_dim is None and self.architecture == "llama":
                head_dim = self._own("rope.dimension_count", None)
            raw = {
                "model_type": self.architecture,
                "hidden_size": hidden,
                "intermediate_size": int(self._own("feed_forward_length")),
                "num_hidden_layers": int(self._own("block_count")),
                "num_attention_heads": heads,
                "num_key_value_heads": int(self._own("attention.head_count_kv", heads)),
                "head_dim": int(head_dim or hidden // heads),
                "vocab_size": int(names["token_embd.weight"].shape[-1]),
                "rms_norm_eps": float(self._own("attention.layer_norm_rms_epsilon")),
                "max_position_embeddings": int(self._own("context_length")),
                "rope_theta": float(self._own("rope.freq_base", 10_000.0)),
                "tie_word_embeddings": "output.weight" not in names,
            }
            return TargetConfig.from_hf(raw)

    def end_ids(self) -> tuple[int, ...]:
        """The end-of-sequence id, if the file names one."""
        eos = self._value("tokenizer.ggml.eos_token_id", None)
        return () if eos is None else (int(eos),)

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights under transformers' names, dequantized in fp32 and rounded to ``dtype``.

        Raises:
            TargetError: a tensor that these families do not have, or a truncated file.
        """
        with self._readable():
            heads = int(self._own("attention.head_count"))
            groups = {"q": heads, "k": int(self._own("attention.head_count_kv", heads))}
            return dict(self._tensor(tensor, groups, dtype) for tensor in self._reader.tensors)

    def _tensor(self, tensor: Any, heads: dict[str, int], dtype: torch.dtype) -> tuple[str, Tensor]:
        from gguf.quants import dequantize

        name = _hf_name(tensor.name)
        if name is None:
            raise self._refusal(
                "only tensors of a dense model of this family", f"{tensor.name} in it"
            )
        array = dequantize(tensor.data, tensor.tensor_type)
        # What is stored as fp32 comes as a view of the file.
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
        for part, count in heads.items():
            if ARCHITECTURES[self.architecture] and f".attn_{part}." in tensor.name:
                value = _halves(value, count)
        return name, value.to(dtype)

    def _value(self, key: str, *default: Any) -> Any:
        if default and key not in self._reader.fields:
            return default[0]
        return self._reader.fields[key].contents()

    def _own(self, key: str, *default: Any) -> Any:
        return self._value(f"{self.architecture}.{key}", *default)

    def _refuse_scaling(self) -> None:
        if self.architecture in READS_SCALING:
            return
        kind = self._own("rope.scaling.type", "none")
        tensors = [t.name for t in self._reader.tensors if t.name.startswith(SCALING_TENSORS)]
        if kind != "none" or tensors:
            raise self._refusal(
                "rotary positions without scaling: scaling in a GGUF is not read",
                f"rope.scaling.type {kind}" + (f" and a tensor {tensors[0]}" if tensors else ""),
                "Use this target's safetensors, whose config.json says the same.",
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except DSparkError:
            raise
        except Exception as error:  # the reader trusts the file: anything may come
            raise self._refusal(
                "a whole GGUF file with the sizes of its model", first_line(error)
            ) from error

    def _refusal(
        self, expected: str, found: str, fix: str = "Copy or download the file again."
    ) -> TargetError:
        return TargetError(expected=expected, found=found, where=str(self.path), fix=fix)


def _hf_name(name: str) -> str | None:
    """transformers' name of a tensor; None when these families have no such tensor."""
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    found = LAYER_TENSOR.fullmatch(name)
    if found is None or found.group(2) not in PER_LAYER:
        return None
    layer, part, kind = found.groups()
    return f"model.layers.{layer}.{PER_LAYER[part]}.{kind}"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (0, d/2, 1, d/2+1, ...) back to halves (0..d/2-1, d/2..d-1)."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    halves: Tensor = pairs.transpose(1, 2).flatten(0, 2)
    return halves
