"""Who made this draft, from what: the ``dspark_provenance`` block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark import __version__
from dspark.artifacts import MANIFEST, sha256_file
from dspark.pairing import target_identity

if TYPE_CHECKING:
    from dspark.checkpoint.source import TargetFiles
    from dspark.checkpoint.target import LoadedTarget
    from dspark.cli.context import RunContext
    from dspark.config.architecture import DraftConfig
    from dspark.training.stage import TrainedDraft


def draft_provenance(
    run: RunContext, target: LoadedTarget, trained: TrainedDraft
) -> dict[str, Any]:
    """Everything a later command or another engine needs to check before trusting the draft."""
    last = trained.history["evals"][-1]
    return {
        "tool": f"dspark {__version__}",
        "target": run.recipe.target.source,
        "target_path": _absolute(target.files),
        "target_dtype": run.recipe.target.dtype,
        "target_max_context": run.recipe.target.max_context,
        **target_identity(target),
        "trained": trained_conventions(trained.draft.config),
        "norm_state": "post",
        "tapped_stream": "residual after each decoder layer",
        "states_dtype": run.recipe.capture.dtype,
        "data_manifest_sha256": sha256_file(run.folder(run.data_kind) / MANIFEST)[1],
        "training_mode": run.recipe.train.mode,
        "init_from_sha256": run.start_hash,
        "draft_vocabulary_size": trained.support_size,
        "self_test": {"states": trained.agreement.states, "order": trained.agreement.order},
        "expected_acceptance": {"teacher_forced_tau": last["tau_all"]},
    }


def _absolute(files: TargetFiles) -> str | None:
    """Where a target given by a path was, None for a package or a hub id.

    The recipe's own path may be relative to a folder that a later command is not run from.
    """
    path = Path(files.source).expanduser()
    return str(path.resolve()) if path.exists() else None


def trained_conventions(config: DraftConfig) -> dict[str, Any]:
    """Settings that no tensor shows: without them, a later edit of config.json goes unnoticed."""
    written = config.to_json()
    names = ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor")
    return {name: written[name] for name in names}
