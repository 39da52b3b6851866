"""Checkpoints broken on purpose, each in one way that a public project has shipped.

Most faults are an edit of config.json or of the weights of a sound draft. Three are mistakes of
training (labels, layout, norm): the sound draft is trained on for a few steps under the mistake,
with the real training step, until it has learnt it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.target import LoadedTarget
from dspark.doctor.engine import example_of
from dspark.hidden.disk import DiskStore
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.training.anchors import Blocks
from dspark.training.batches import BatchPlan
from dspark.training.step import Vocabulary, training_step, window_weight

Config = dict[str, Any]
Weights = dict[str, Tensor]


def copy_of(sound: Path, folder: Path) -> Path:
    """The two files of a checkpoint, as a user would copy them: no manifest, no run beside it."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(sound / name, folder / name)
    return folder


def edit_config(folder: Path, change: Callable[[Config], object]) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return folder


def edit_weights(folder: Path, change: Callable[[Weights], object]) -> Path:
    path = folder / "model.safetensors"
    weights = load_file(str(path))
    change(weights)
    save_file({n: t.contiguous() for n, t in weights.items()}, str(path))
    # A tool that writes wrong weights writes their right hash.
    return edit_config(folder, lambda raw: raw["dspark_provenance"].pop("files", None))


def set_everywhere(raw: Config, key: str, alias: str, value: Any) -> None:
    """A field and its alias, as a tool that means it would write them; provenance forgets."""
    raw[key] = raw[alias] = value
    raw["dspark_provenance"].pop("trained", None)


def keep_taps(folder: Path, kept: list[int]) -> Path:
    """Leave a draft that only reads the taps ``kept`` (of the layers 0, 1, 2)."""
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]

    def narrow(weights: Weights) -> None:
        columns = weights["context_proj.weight"].unflatten(1, (-1, hidden))
        weights["context_proj.weight"] = columns[:, kept].flatten(1)

    edit_weights(folder, narrow)
    return declare_layers(folder, kept)


def declare_layers(folder: Path, ids: list[int]) -> Path:
    """Write ``ids`` wherever a config names the tapped layers."""

    def declare(raw: Config) -> None:
        set_everywhere(raw, "target_layer_ids", "dspark_target_layer_ids", ids)
        raw["num_target_layers"] = len(ids)

    return edit_config(folder, declare)


def of_layers(records: list[HiddenRecord], kept: list[int]) -> list[HiddenRecord]:
    """The same records as if only these layers had been tapped."""
    return [replace(r, layer_ids=tuple(kept), taps=r.taps[:, kept]) for r in records]


def records_of(run: Path) -> list[HiddenRecord]:
    store = DiskStore(run / "states" / "records")
    return [store.get(name) for name in store.ids()]


def before_the_norm(records: list[HiddenRecord], target: LoadedTarget) -> list[HiddenRecord]:
    """The same records with the last state taken on the wrong side of the final norm."""
    model = target.build(records[0].layer_ids)
    return [replace(r, final=example_of(model, r.ids.tolist(), 0).before) for r in records]


def train_wrongly(
    folder: Path,
    records: list[HiddenRecord],
    head: Tensor,
    *,
    shift: int = 0,
    fill_in: bool = False,
    steps: int = 40,
) -> Path:
    """Train the draft in ``folder`` on: labels moved by ``shift``, or in the fill-in layout.

    The loss is distillation almost alone: the text's own tokens would hide which distribution the
    draft is taught.
    """
    draft, _ = load_draft(folder)
    width = draft.config.block_size + fill_in
    if fill_in:
        # One row more in the block; the weights do not know how many there are.
        wider = DSparkDraft(draft.config.model_copy(update={"block_size": width}))
        wider.load_state_dict(draft.state_dict(), assign=True)
        draft, shift = wider, -1
    draft.train().requires_grad_(True)
    draft.embed_tokens.requires_grad_(False)
    plan = BatchPlan(records, batch_size=4, num_anchors=16, block_size=width, seed=1)
    vocabulary = Vocabulary.of(head, None, torch.float32)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for step in range(steps):
        blocks = _moved(plan.batch(step), shift)
        out = training_step(
            draft, blocks, vocabulary, coefficients=(0.0, 1.0, 0.1), decay=4.0,
            denominator=window_weight([blocks], 4.0), chunk=2048,
        )  # fmt: skip
        sum(out.terms.values()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trained = {name: t.detach().clone() for name, t in draft.state_dict().items()}
    return edit_weights(folder, lambda weights: weights.update(trained))


def _moved(blocks: Blocks, shift: int) -> Blocks:
    if shift == 0:
        return blocks
    size = blocks.ids.shape[1]
    rows = torch.arange(len(blocks.ids)).view(-1, 1, 1)
    source = (blocks.source + shift).clamp(0, size - 2)
    mask = blocks.slot_mask.clone()
    mask[..., 0 if shift < 0 else -1] = False
    return replace(
        blocks, source=source, labels=blocks.ids[rows, source + 1],
        previous=blocks.ids[rows, source], slot_mask=mask,
    )  # fmt: skip
