"""The whole stage on a real (tiny) target: refusals first, then a finished draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    before_norm,
    one_thread,  # noqa: F401 (autouse)
    target_parts,
    tiny_config,
    tiny_draft,
    tiny_records,
    tiny_section,
    tiny_target,
)

from dspark.config.architecture import Flavour
from dspark.config.recipe import TrainSection, WarmStart
from dspark.errors import SelfTestError, TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.support import read_support
from dspark.training.stage import TrainedDraft, train_draft
from dspark.training.warmstart import continue_from

TARGET = tiny_target()
RECORDS = tiny_records(TARGET, 8)


def train(
    folder: Path, records: list[HiddenRecord], size: int | None = None, **changes: Any
) -> TrainedDraft:
    folder.mkdir(exist_ok=True)
    section = tiny_section(warm_start=WarmStart(markov=True), **changes)
    return train_draft(
        tiny_config(), target_parts(TARGET), records, section, folder, vocabulary_size=size
    )


@pytest.mark.parametrize("flavour", ["k3", "qwen3"])
def test_a_draft_with_its_own_vocabulary_comes_out_folded(tmp_path: Path, flavour: Flavour) -> None:
    notes: list[str] = []
    trained = train_draft(
        tiny_config(flavour=flavour),
        target_parts(TARGET),
        RECORDS,
        tiny_section(),
        tmp_path,
        vocabulary_size=40,
        on_note=notes.append,
    )
    support = read_support(trained.draft)
    assert support is not None
    assert len(support) == trained.support_size == 40
    # The rank of the fold was spare all along: nothing was learnt in it that the fold overwrote.
    assert not bool(trained.draft.confidence_head.proj.weight[:, -1].any())
    assert bool(trained.draft.confidence_head.proj.weight[:, :-1].all())
    assert trained.agreement.states == trained.agreement.order == 1.0
    assert "self-test" in notes[0]
    assert torch.equal(trained.draft.embed_tokens.weight, TARGET.embedding_weight())
    trainable = (
        sum(p.numel() for p in trained.draft.parameters()) - TARGET.embedding_weight().numel()
    )
    assert trained.parameters == trainable


def test_states_before_the_norm_train_the_draft_that_normed_states_train(tmp_path: Path) -> None:
    """Honest ``pre`` records pass the self-test, so the loss must norm them too, exactly once."""
    honest = [replace(r, final=before_norm(TARGET, r), norm_state="pre") for r in RECORDS]
    assert not torch.allclose(honest[0].final, RECORDS[0].final, atol=0.1)
    want = train(tmp_path / "post", RECORDS).history["steps"]
    got = train(tmp_path / "pre", honest).history["steps"]
    for a, b in zip(got, want, strict=True):
        assert a["l1"] == pytest.approx(b["l1"], rel=1e-4)
        assert a["ce"] == pytest.approx(b["ce"], rel=1e-4)


def test_records_of_other_layers_are_refused(tmp_path: Path) -> None:
    off_by_one = [*RECORDS[:3], replace(RECORDS[3], layer_ids=(1, 3)), *RECORDS[4:]]
    with pytest.raises(TrainingError, match=r"\[0, 2\].*\[1, 3\]") as caught:
        train(tmp_path, off_by_one)
    assert RECORDS[3].id in caught.value.where


def test_unsound_states_are_refused_before_a_step_is_taken(tmp_path: Path) -> None:
    with pytest.raises(SelfTestError):
        train(tmp_path, [replace(r, final=before_norm(TARGET, r)) for r in RECORDS])
    assert not any(tmp_path.iterdir())


def test_the_same_seed_gives_the_same_draft_and_another_seed_another(tmp_path: Path) -> None:
    drafts = [
        train(tmp_path / str(i), RECORDS, seed=seed).draft.state_dict()
        for i, seed in enumerate((0, 0, 1))
    ]
    assert all(torch.equal(drafts[1][n], w) for n, w in drafts[0].items())
    assert not torch.equal(drafts[2]["context_proj.weight"], drafts[0]["context_proj.weight"])


@pytest.mark.parametrize("flavour", ["k3", "qwen3"])
def test_a_draft_continues_where_another_one_stopped(tmp_path: Path, flavour: Flavour) -> None:
    """Weights only: the first step sees the parent's loss, not that of random weights."""
    section = tiny_section(epochs=20.0, learning_rate=6e-3)

    def run(name: str, section: TrainSection, start: DSparkDraft | None) -> TrainedDraft:
        (tmp_path / name).mkdir()
        return train_draft(
            tiny_config(flavour=flavour), target_parts(TARGET), RECORDS, section, tmp_path / name,
            vocabulary_size=40, start=start,
        )  # fmt: skip

    parent = run("parent", section, None)
    child = run("child", tiny_section(learning_rate=1e-9), parent.draft)
    last, first = parent.history["evals"][-1], child.history["evals"][0]
    assert first["l1"] == pytest.approx(last["l1"], rel=1e-4)
    assert first["tau_all"] > parent.history["evals"][0]["tau_all"]
    kept, again = read_support(parent.draft), read_support(child.draft)
    assert kept is not None
    assert again is not None
    assert torch.equal(kept, again)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_size": 3}, "block_size 4 instead of 3"),
        ({"mask_token_id": 95}, "mask_token_id 96 instead of 95"),
        ({"target_layer_ids": (1, 2)}, r"target_layer_ids \[0, 2\] instead of \[1, 2\]"),
        ({"markov_rank": 5, "v_head_dim": 6}, "v_head_dim 5 instead of 6.*|markov_rank 6 instead"),
    ],
)
def test_a_start_that_differs_is_refused_with_all_that_differs(
    change: dict[str, Any], says: str
) -> None:
    wanted = tiny_config().model_copy(update=change)
    with pytest.raises(TrainingError, match=says) as caught:
        continue_from(DSparkDraft(wanted), DSparkDraft(tiny_config()), None)
    assert caught.value.found.count("instead of") == len(change)


def test_a_start_of_another_flavour_vocabulary_or_target_is_refused() -> None:
    draft, start = tiny_draft(target=TARGET), tiny_draft(target=TARGET)
    with pytest.raises(TrainingError, match="flavour qwen3 instead of k3"):
        continue_from(draft, tiny_draft(flavour="qwen3", target=TARGET), None)
    with pytest.raises(TrainingError, match="vocabulary_size None instead of 40"):
        continue_from(draft, start, 40)
    with pytest.raises(TrainingError, match="embed_tokens of another target"):
        continue_from(draft, tiny_draft(target=tiny_target(seed=5)), None)
    rounded = tiny_draft(target=TARGET, seed=3).bfloat16().float()
    assert continue_from(draft, rounded, None) is None
    assert torch.equal(draft.final_norm.weight, rounded.final_norm.weight)
    assert torch.equal(draft.embed_tokens.weight, TARGET.embedding_weight())
    longer = DSparkDraft(tiny_config().model_copy(update={"max_position_embeddings": 999}))
    longer.load_state_dict(start.state_dict())
    assert continue_from(draft, longer, None) is None
