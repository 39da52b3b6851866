"""The ridge start of the context path: where heads look, what they say, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tiny_models import one_thread  # noqa: F401 (autouse)
from torch import Tensor

from dspark.config.architecture import K3DraftConfig
from dspark.errors import TrainingError
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.model.layers import rotate
from dspark.model.mla import LatentAttention
from dspark.training.contextstart import context_sample, ridge, warm_start_context

HIDDEN, VOCAB, MASK, PROMPT, LENGTH, BLOCK = 128, 60, 59, 6, 40, 4


def config(**changes: object) -> K3DraftConfig:
    sizes: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 12,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "target_layer_ids": (1, 3),
        "target_num_hidden_layers": 6,
        "target_hidden_size": HIDDEN,
        "mask_token_id": MASK,
        "markov_rank": 8,
        "block_size": BLOCK,
    }
    return K3DraftConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def records(count: int = 40) -> list[HiddenRecord]:
    """Final states turn inside a space of 12 dimensions; taps show them beside a constant."""
    generator = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=generator))[0]
    basis = torch.randn(12, HIDDEN, generator=generator) / 12**0.5
    shown = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5
    made = []
    for i in range(count):
        final = [torch.randn(12, generator=generator)]
        for _ in range(LENGTH - 1):
            noise = 0.1 * torch.randn(12, generator=generator)
            final.append(final[-1] @ turn + noise)
        states = torch.stack(final) @ basis
        taps = states @ shown + 0.05 * torch.randn(LENGTH, 2 * HIDDEN, generator=generator)
        mask = torch.zeros(LENGTH, dtype=torch.uint8)
        mask[PROMPT:] = 1
        made.append(
            HiddenRecord(
                id=f"{i:03}",
                category="x",
                temperature=0.0,
                layer_ids=(1, 3),
                norm_state="post",
                ids=torch.randint(0, 20, (LENGTH,), generator=generator, dtype=torch.int32),
                loss_mask=mask,
                taps=(taps + 4.0).view(LENGTH, 2, HIDDEN),
                final=states,
                greedy=torch.full((LENGTH,), -1, dtype=torch.int32),
                log_z=torch.full((LENGTH,), float("nan")),
            )
        )
    return made


def started(made: list[HiddenRecord]) -> DSparkDraft:
    draft = initialise(DSparkDraft(config()), 0.2 * torch.randn(VOCAB, HIDDEN), 0)
    warm_start_context(draft, made, 0)
    return draft.eval()


def head_distances(draft: DSparkDraft, record: HiddenRecord, slot: int) -> Tensor:
    """How far back each head looks hardest from block row ``slot`` behind anchor 30."""
    anchor = 30
    attention = draft.draft_layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    d = attention.dims
    positions = torch.arange(anchor).unsqueeze(0)
    [rows, _] = draft.context_rows(draft.context(record.taps[:anchor].unsqueeze(0)), positions)
    ids = draft.block_ids(record.ids[anchor : anchor + 1].long())
    x = draft.draft_layers[0].input_layernorm(draft.embed_tokens(ids))
    _, query = attention.queries(x, draft.rotation(torch.arange(anchor, anchor + BLOCK)[None]))
    own = attention.rows(x, draft.rotation(torch.arange(anchor, anchor + BLOCK)[None]))
    keys = torch.cat([rows, own], 1)[0, :, d.kv_lora :]
    scores = query[0, slot] @ keys.T
    return anchor + slot - scores.argmax(-1)


def test_ridge_solves_the_normal_equations() -> None:
    x, w = torch.randn(200, 12), torch.randn(12, 3)
    assert torch.allclose(ridge(x, x @ w, 1e-9), w, atol=1e-3)
    assert ridge(x, x @ w, 10.0).norm() < w.norm()


def test_the_sample_leaves_the_sink_out_and_pairs_taps_with_the_states_behind_them() -> None:
    [record] = records(1)
    sample = context_sample([record], BLOCK, torch.Generator().manual_seed(0))
    assert len(sample.tokens) == LENGTH - BLOCK - (PROMPT - 1)
    row = int((sample.taps - record.taps[PROMPT - 1].flatten()).abs().sum(-1).argmin())
    assert int(sample.tokens[row]) == int(record.ids[PROMPT])
    apart = sample.finals[row] - record.final[PROMPT : PROMPT + BLOCK]
    everywhere = sample.finals[0] - sample.finals[row]  # the mean that was taken away cancels
    assert torch.isfinite(everywhere).all()
    assert apart.std(0).mean() < record.final.std(0).mean()


def test_each_head_looks_its_own_distance_back_from_every_slot_that_can() -> None:
    made = records()
    draft = started(made)
    for slot in range(BLOCK):
        found = head_distances(draft, made[0], slot).tolist()
        # Nearer distances lie inside the block, which has nothing to say.
        assert found[slot:] == list(range(slot + 1, 7))


def test_the_first_layer_predicts_the_states_of_every_slot_before_any_step() -> None:
    made = records()
    draft, plain = (
        started(made),
        initialise(DSparkDraft(config()), 0.2 * torch.randn(VOCAB, HIDDEN), 0),
    )
    anchor = 30

    def agreement(model: DSparkDraft, slot: int) -> float:
        total = 0.0
        for record in made[:10]:
            context = model.context(record.taps[:anchor].unsqueeze(0))
            rows = model.context_rows(context, torch.arange(anchor).unsqueeze(0))
            ids = model.block_ids(record.ids[anchor : anchor + 1].long())
            where = torch.arange(anchor, anchor + BLOCK).unsqueeze(0)
            with torch.no_grad():
                h = model.backbone(ids, where, rows, None)[0, slot]
            total += float(torch.cosine_similarity(h, record.final[anchor + slot], 0))
        return total / 10

    for slot in range(BLOCK):
        assert agreement(draft, slot) > 0.25
        assert abs(agreement(plain, slot)) < 0.15


@pytest.mark.parametrize("fault", ["few", "wide"])
def test_what_cannot_be_fitted_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = records(1 if fault == "few" else 4)
    if fault == "few":
        made = [
            type(made[0])(
                **{**made[0].__dict__, "loss_mask": made[0].loss_mask.clone().index_fill_(
                    0, torch.arange(LENGTH - 8), 0)}
            )
        ]  # fmt: skip
    else:
        monkeypatch.setattr("dspark.training.contextstart.MAX_INPUTS", 10)
    with pytest.raises(TrainingError) as error:
        started(made)
    assert error.value.where == "train.warm_start.context"


def test_rotating_a_query_backwards_is_what_looking_back_means() -> None:
    """cos((p - q - j) w) summed over frequencies is largest at p - q = j: the construction's idea."""
    attention = DSparkDraft(config()).draft_layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    constant = torch.zeros(1, 1, 16)
    constant[..., ::2] = 1
    keys = rotate(constant.expand(20, 1, 16), attention.rope.at(torch.arange(20)))[:, 0]
    query = rotate(rotate(constant, attention.rope.at(torch.tensor([-3]))),
                   attention.rope.at(torch.tensor([15])))[0, 0]  # fmt: skip
    assert int((keys @ query).argmax()) == 12
