"""The folder itself: config.json, its own rules, its manifest, and what provenance promises.

Questions about the raw dictionary come first and are asked one by one, so that a file with three
faults gets three names; only then is it parsed as a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.artifacts import MANIFEST, verify
from dspark.checkpoint.published import read_raw as read_raw_config
from dspark.config.layers import check_layer_ids
from dspark.doctor.findings import Check, failed, passed, skipped, warned
from dspark.doctor.predicates import provenance_of
from dspark.errors import ArtifactError, CheckpointError

LAYERS = "tapped layers are distinct, ascending and inside [0, depth - 2]"
MASK = "mask_token_id is written and inside the vocabulary"
BLOCK = "block_size is written"
NORM = "the draft was trained on states after the target's final norm"
SEALED = "files are as the run that made them left them"


def read_raw(folder: Path) -> tuple[dict[str, Any], Check]:
    """The JSON object of config.json (empty when unreadable) and the check about it."""
    asked = "config.json is a JSON object"
    try:
        raw = read_raw_config(folder)
    except CheckpointError as error:
        return {}, failed(
            "files.config", asked, error.found, f"{error.where} is absent or damaged",
            "Point at the folder that holds the draft's config.json.",
        )  # fmt: skip
    return raw, passed("files.config", asked, f"{len(raw)} keys")


def check_sealed(folder: Path) -> Check:
    """Hashes of a folder that a run finished; a copied or foreign folder has no manifest."""
    if not (folder / MANIFEST).is_file():
        return skipped("files.sealed", SEALED, "no manifest.json beside the checkpoint")
    try:
        manifest = verify(folder, deep=True)
    except ArtifactError as error:
        return failed(
            "files.sealed", SEALED, error.found, f"{error.where} is not what its manifest says",
            "Copy the folder again, or remove manifest.json if the change was meant.",
        )  # fmt: skip
    return passed("files.sealed", SEALED, f"{len(manifest.files)} files, every hash")


def check_config(raw: dict[str, Any]) -> list[Check]:
    """Rules of the contract that need no engine: layers, mask, block, norm state."""
    return [_layers(raw), _mask(raw), _block(raw), _norm(raw)]


def _layers(raw: dict[str, Any]) -> Check:
    ids, depth = raw.get("target_layer_ids"), raw.get("target_num_hidden_layers")
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not isinstance(ids, list) or not whole or type(depth) is not int:
        return failed(
            "config.layers", LAYERS,
            f"target_layer_ids = {ids!r}, target_num_hidden_layers = {depth!r}",
            "without both, nobody knows which states the draft is fed with",
            "Write the ids the draft was trained with and the target's depth.",
        )  # fmt: skip
    try:
        check_layer_ids(tuple(ids), depth)
    except ValueError as error:
        return failed(
            "config.layers", LAYERS, str(error).removeprefix("target_layer_ids: "),
            "no engine can serve these taps as they were trained (the last layer is normed in one "
            "tool and not in the next; duplicates are dropped by some)",
            "Train with ids that every engine can tap; an id of a wrong file is corrected to the "
            "trained one.", "contract, section 2",
        )  # fmt: skip
    return passed("config.layers", LAYERS, f"{ids} of {depth}")


def _mask(raw: dict[str, Any]) -> Check:
    mask, vocabulary = raw.get("mask_token_id"), raw.get("vocab_size")
    if type(mask) is int and type(vocabulary) is int and 0 <= mask < vocabulary:
        return passed("config.mask_token", MASK, f"{mask} of {vocabulary}")
    return failed(
        "config.mask_token", MASK, f"mask_token_id = {mask!r}, vocab_size = {vocabulary!r}",
        "an engine would guess it (from pad or eos) or read a row that does not exist",
        "Write the id the draft was trained with.",
    )  # fmt: skip


def _block(raw: dict[str, Any]) -> Check:
    size = raw.get("block_size")
    if type(size) is int and 1 <= size <= 64:
        return passed("config.block_size", BLOCK, f"{size} drafted tokens a step")
    return failed(
        "config.block_size", BLOCK, f"block_size = {size!r}",
        "engines take --num-speculative-tokens instead; a wrong one costs acceptance in silence",
        "Write the block size the draft was trained with.", "vllm-project/vllm #50012",
    )  # fmt: skip


def _norm(raw: dict[str, Any]) -> Check:
    state = provenance_of(raw).get("norm_state")
    if state is None:
        return skipped("config.norm_state", NORM, "provenance says nothing; live.norm measures it")
    if state == "post":
        return passed("config.norm_state", NORM, "norm_state post")
    return failed(
        "config.norm_state", NORM, f"norm_state = {state!r}",
        "a draft distilled from states before the norm learns another distribution and loses 6 to "
        "33 % of its acceptance", "Train again from states after the norm.", "TorchSpec #169",
    )  # fmt: skip


def check_trained(raw: dict[str, Any]) -> list[Check]:
    """Fields that must stay as they were in training, against provenance's own copy of them.

    The weights do not show a block size or a mask that was edited later: the draft runs with any.
    """
    trained = provenance_of(raw).get("trained", {})
    out: list[Check] = []
    if not isinstance(trained, dict):
        return out
    for key, then in trained.items():
        id, asked = f"trained.{key}", f"{key} is the one the draft was trained with"
        if raw.get(key) == then:
            out.append(passed(id, asked, str(then)))
            continue
        out.append(
            failed(
                id, asked, f"{raw.get(key)!r} here, trained with {then!r}",
                "config.json was edited after training; engines draft with the new value in "
                "silence and accept less", f"Restore {key}: {then!r}.",
                "vllm-project/vllm #50012, Automodel #3238",
            )
        )  # fmt: skip
    return out


def check_target_facts(raw: dict[str, Any], facts: dict[str, Any]) -> list[Check]:
    """Sizes the draft must share with its target; ``facts`` are the target's own."""
    out = []
    for key, fact in (
        ("target_num_hidden_layers", "num_hidden_layers"),
        ("target_hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
    ):
        asked = f"{key} is the target's {fact}"
        found = f"{raw.get(key)!r}, the target has {facts[fact]}"
        if raw.get(key) == facts[fact]:
            out.append(passed(f"target.{key}", asked, str(facts[fact])))
        else:
            out.append(
                failed(
                    f"target.{key}", asked, found, "the draft belongs to another target",
                    "Give --target the model the draft was trained for.",
                )
            )  # fmt: skip
    return out


DIFFERS = {
    "template_hash": "prompts are rendered otherwise than those the draft learnt from",
    "tokenizer_hash": "ids mean other tokens than in training",
    "target_config_hash": "the target runs under another configuration",
    "target_weights_hash": "other weights: fine-tuned, quantized again, or another model",
}
"""What another value means. The last two may be meant, and are warnings."""


def check_recorded(raw: dict[str, Any], recorded: Mapping[str, str | None]) -> list[Check]:
    """Hashes of the target at hand against those in provenance.

    ``recorded`` maps a provenance key to what the target at hand gives; None cannot be known.
    """
    provenance = provenance_of(raw)
    out = []
    for key, now in recorded.items():
        id, asked = f"target.{key}", f"the target's {key.replace('_', ' ')} is the recorded one"
        then = provenance.get(key)
        if not isinstance(then, str) or not then or not now:
            why = "not recorded" if not then else "unknown for this target"
            out.append(skipped(id, asked, why))
        elif then == now:
            out.append(passed(id, asked, f"{now[:12]}"))
        else:
            make = failed if key in ("template_hash", "tokenizer_hash") else warned
            out.append(
                make(
                    id, asked, f"recorded {then[:12]}, here {now[:12]}", DIFFERS[key],
                    "Serve with the target in provenance, or measure acceptance with "
                    "`dspark bench --target` before trusting it.",
                )
            )  # fmt: skip
    return out
