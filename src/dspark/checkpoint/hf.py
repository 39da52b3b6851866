"""Drafts as transformers knows models: ``AutoConfig`` and ``AutoModel`` on a checkpoint folder.

transformers is generous where a draft needs strictness. Missing weights are drawn at random with a
warning, and a saved config gains keys (its version, a second name for the dtype, a converted
rotary section) that other engines read in their own ways. So only its front door is used: loading
and saving go through ``dspark.checkpoint.draft``, and a config gives back exactly the keys that
dspark writes.

``k3_dspark`` is registered with the Auto classes by :func:`register`. A qwen3 draft calls itself
``qwen3`` in ``model_type``, as published, which is Qwen3's own name: ``AutoModel`` would build a
Qwen3 of it. Such a folder is loaded with :meth:`DSparkModel.from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from dspark.checkpoint.draft import load_draft, save_draft
from dspark.checkpoint.published import CONFIG, PROVENANCE, read_config, read_raw
from dspark.checkpoint.shards import open_weights
from dspark.checkpoint.source import fetch, find_target
from dspark.checkpoint.tensors import TORCH_DTYPES
from dspark.config.architecture import DraftConfig
from dspark.errors import CheckpointError
from dspark.model.draft import DSparkDraft

if TYPE_CHECKING:
    # transformers is untyped here; a base of type Any cannot be subclassed under strict typing.
    class _ConfigBase:
        def __init__(self, **options: Any) -> None: ...

    class _ModelBase(torch.nn.Module):
        def __init__(self, config: Any) -> None: ...
else:
    _ConfigBase, _ModelBase = PretrainedConfig, PreTrainedModel

MODEL_TYPE = "k3_dspark"
MEANINGLESS = frozenset({"trust_remote_code", "use_safetensors", "_from_auto"})
"""Options that change nothing here: there is no remote code, and no other file format."""


class DSparkConfig(_ConfigBase):
    """A draft's config.json. Attributes are its keys; ``draft`` is the checked schema.

    Raises:
        CheckpointError: the keys do not make a draft.
    """

    model_type = MODEL_TYPE

    def __init__(self, **written: Any) -> None:
        super().__init__()
        try:
            self.draft = DraftConfig.from_json(written)
        except ValueError as error:
            raise CheckpointError(
                expected="the config.json of a DSpark draft",
                found=" ".join(str(error).split())[:300],
                where=str(written.get("_name_or_path") or CONFIG),
                fix="Restore the config.json that came with the weights.",
            ) from error
        dtype = written.get("dtype", written.get("torch_dtype", "bfloat16"))
        self.dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
        self.provenance = dict(written.get(PROVENANCE) or {})
        self.architectures = [self.draft.architecture]

    def __getattr__(self, name: str) -> Any:
        """Keys of config.json that are no attributes of transformers' own."""
        draft = self.__dict__.get("draft")
        if draft is not None:
            written = draft.to_json()
            if name in written:
                return written[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def validate(self) -> None:
        """Nothing: the schema has checked more than transformers would."""

    def to_dict(self) -> dict[str, Any]:
        """The file as dspark writes it, key for key."""
        dtype = str(self.dtype).removeprefix("torch.")
        out: dict[str, Any] = {**self.draft.to_json(), "torch_dtype": dtype}
        return {**out, PROVENANCE: self.provenance}

    def to_diff_dict(self) -> dict[str, Any]:
        """Everything: a key left out at its default is another default in another engine."""
        return self.to_dict()


class DSparkModel(_ModelBase):
    """A :class:`~dspark.model.draft.DSparkDraft` behind transformers' interface, as ``draft``."""

    config_class = DSparkConfig
    base_model_prefix = "draft"
    main_input_name = "block_ids"

    def __init__(self, config: DSparkConfig, draft: DSparkDraft | None = None) -> None:
        super().__init__(config)
        self.draft = DSparkDraft(config.draft) if draft is None else draft

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *arguments: Any,
        config: DSparkConfig | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        device_map: str | torch.device | None = None,
        **options: Any,
    ) -> DSparkModel:
        """The draft in a folder or of a hub id, strictly: nothing is drawn at random.

        ``dtype`` None or ``auto`` keeps the stored one; ``device_map`` is one device.

        Raises:
            CheckpointError: a tensor is missing, superfluous, mis-shaped or not finite, or an
                option that this loader does not have.
            TargetError: no such folder or hub id.
        """
        source = str(pretrained_model_name_or_path)
        unknown = [str(argument) for argument in arguments]
        unknown += sorted(k for k, v in options.items() if v and k not in MEANINGLESS)
        if unknown or isinstance(device_map, dict):
            raise CheckpointError(
                expected="dtype, revision and device_map (one device)",
                found=", ".join(unknown) or "a device map of several devices",
                where=f"from_pretrained {source}",
                fix="Leave the option out. Without a network, set HF_HUB_OFFLINE=1.",
            )
        folder = Path(fetch(find_target(source, revision)).location)
        own = _config_of(folder)
        if config is not None and config.draft != own.draft:
            raise CheckpointError(
                expected="the config of this very folder",
                found="another one",
                where=f"from_pretrained {source}, config",
                fix="Leave config out: weights and config.json belong together.",
            )
        wanted = dtype or torch_dtype or "auto"
        if wanted != "auto":
            own.dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, wanted)
        draft, _ = load_draft(folder, dtype=own.dtype, device=device_map or "cpu")
        return cls(own, draft).eval()

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Both files as dspark writes them, atomically, in the parameters' dtype.

        Raises:
            CheckpointError: an option of transformers' writer (sharding, another state dict).
            StorageError: disk full or not writable.
        """
        harmless = {"is_main_process": True, "safe_serialization": True, "push_to_hub": False}
        changed = sorted(k for k, v in options.items() if v is not None and harmless.get(k) != v)
        if changed:
            raise CheckpointError(
                expected="no option: a draft is one file",
                found=", ".join(changed),
                where=f"save_pretrained {save_directory}",
                fix="Leave the option out.",
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        assert isinstance(self.config, DSparkConfig)
        provenance = self.config.provenance
        save_draft(folder, self.draft, provenance, self.draft.context_norm.weight.dtype)

    def forward(
        self,
        block_ids: Tensor,
        positions: Tensor,
        context_rows: list[Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Block ids and positions [B, Q] over cached rows -> states [B, Q, H] after the norm.

        Logits need the target's lm_head and the Markov head; see ``dspark.engine.drafter``.
        """
        return self.draft.backbone(block_ids, positions, context_rows, mask)


def _config_of(folder: Path) -> DSparkConfig:
    """The folder's config, of whatever tool; its dtype is the weights' own where nobody says it."""
    draft, provenance = read_config(folder)
    raw = read_raw(folder)
    dtype = raw.get("torch_dtype") or raw.get("dtype") or _stored_dtype(folder)
    return DSparkConfig(**draft.to_json(), **{PROVENANCE: provenance}, torch_dtype=dtype)


def _stored_dtype(folder: Path) -> str:
    """dtype of the first tensor of the file."""
    first = next(iter(open_weights(folder).entries.values()))
    return str(TORCH_DTYPES[first.dtype]).removeprefix("torch.")


def register() -> None:
    """Teach ``AutoConfig`` and ``AutoModel`` the model type ``k3_dspark``; may be called again.

    Not for a process that also runs vLLM: it registers a class of its own under the same name.
    """
    AutoConfig.register(MODEL_TYPE, DSparkConfig, exist_ok=True)
    AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)
