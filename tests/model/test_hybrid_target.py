"""Kimi Linear in our decoder against transformers, and taking verified tokens back from its states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dspark.config.target import TargetConfig
from dspark.errors import DecodingError
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from model.hybrid_models import KIMI, Slots, kimi_model
from model.tiny_targets import decoder_of, gap, random_ids

CPU = torch.device("cpu")
TOLERANCE = 3e-5  # the decays of 90 tokens, summed in another order
# Relative, of states that were reached in different cuts, fp32: the first recurrent layer, whose
# inputs are the same bits, and all of them, which see each other's rounding.
FIRST, EXACT = 1e-6, 5e-6
DEFAULT = torch.get_default_dtype()


@pytest.fixture(scope="module", params=sorted(KIMI))
def pair(request: pytest.FixtureRequest) -> tuple[Any, DecoderTarget]:
    model = kimi_model(request.param)
    return model, decoder_of(model, (0, 1, 3))


@pytest.fixture(scope="module")
def target() -> DecoderTarget:
    return decoder_of(kimi_model("kimi-mixed"), (0, 1, 3))


@pytest.mark.parametrize("length", [1, 3, 40, 90])
def test_logits_and_taps_equal_transformers(pair, length: int) -> None:
    model, target = pair
    ids = random_ids(2, length)
    want = model(ids, output_hidden_states=True, use_cache=False)
    got = target.forward(ids, Span.alone(2, length, CPU))
    assert gap(target.logits(got.final), want.logits) <= TOLERANCE
    assert gap(got.final, want.hidden_states[-1]) <= TOLERANCE
    for slot, layer in enumerate(target.layer_ids):
        assert gap(got.taps[..., slot, :], want.hidden_states[layer + 1]) <= TOLERANCE
        assert gap(got.taps[..., slot, :], want.hidden_states[layer]) > 0.05


def test_cached_steps_of_any_width_equal_one_forward(pair) -> None:
    _, target = pair
    ids = random_ids(2, 60)
    whole = target.forward(ids, Span.alone(2, 60, CPU))
    cache = target.new_cache(2, 60)
    cuts = [0, 6, 7, 8, 12, 50, 59, 60]
    parts = [
        target.forward(ids[:, a:b], Span.at(a, b - a, 2, CPU), cache)
        for a, b in itertools.pairwise(cuts)
    ]
    assert gap(torch.cat([p.final for p in parts], 1), whole.final) <= TOLERANCE
    assert gap(torch.cat([p.taps for p in parts], 1), whole.taps) <= TOLERANCE


def test_packed_products_equal_plain_ones() -> None:
    model = kimi_model("kimi")
    plain, packed = decoder_of(model), decoder_of(model)
    assert packed.pack() == sum(isinstance(m, torch.nn.Linear) for m in plain.modules())
    ids = random_ids(2, 20)
    want, got = (t.forward(ids, Span.alone(2, 20, CPU)).final for t in (plain, packed))
    assert gap(got, want) <= TOLERANCE


def test_a_bfloat16_hybrid_keeps_its_states_and_gates_in_float32() -> None:
    model = kimi_model("kimi-kernel")  # dense: rounding would choose other experts
    ids = random_ids(1, 40)
    want = decoder_of(model).forward(ids, Span.alone(1, 40, CPU)).final
    rounded = decoder_of(model).to(torch.bfloat16)
    gate = rounded.layers[0].self_attn.forget
    assert gate.rate.dtype == gate.offset.dtype == torch.float32
    cache = rounded.new_cache(1, 40)
    got = rounded.forward(ids, Span.at(0, 40, 1, CPU), cache).final
    assert cache.states.matrices.dtype == torch.float32
    assert got.dtype == torch.bfloat16
    assert gap(got.float(), want) < 0.15


def test_a_state_that_would_have_to_go_back_is_refused(target) -> None:
    cache = target.new_cache(1, 30)
    ids = random_ids(1, 20)
    target.forward(ids[:, :10], Span.at(0, 10, 1, CPU), cache)
    with pytest.raises(DecodingError, match="cannot go back"):
        target.forward(ids[:, 8:12], Span.at(8, 4, 1, CPU), cache)
    again = target.forward(ids, Span.at(0, 20, 1, CPU), cache).final  # from the start: afresh
    assert gap(again, target.forward(ids, Span.alone(1, 20, CPU)).final) <= TOLERANCE


def test_a_prefix_run_once_seeds_every_sequence(target) -> None:
    ids = random_ids(3, 30)
    ids[:, :17] = ids[0, :17]
    prefix, cache = target.new_cache(1, 17), target.new_cache(3, 30)
    target.forward(ids[:1, :17], Span.at(0, 17, 1, CPU), prefix)
    cache.seed(prefix, 17)
    got = target.forward(ids[:, 17:], Span.at(17, 13, 3, CPU), cache).final
    assert gap(got, target.forward(ids, Span.alone(3, 30, CPU)).final[:, 17:]) <= TOLERANCE


def plainly(target: DecoderTarget, text: list[int], prompt: int) -> tuple[Any, Any]:
    """(states, inputs) behind ``text`` after one prefill and single tokens."""
    slots = Slots(target, 1)
    for piece in (text[:prompt], *([t] for t in text[prompt:])):
        slots.run([0], [piece])
        slots.commit([len(piece)])
    return slots.state(0)


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert gap(a[0], b[0]) <= FIRST
        assert gap(a, b) <= EXACT


LENGTHS, WIDTHS = (9, 41, 3), (8, 5, 2)


@pytest.mark.parametrize("first", range(9))
def test_after_accepting_k_of_n_states_are_those_of_plain_decoding(target, first: int) -> None:
    """Three requests of different lengths and widths in one forward, each with its own k."""
    ids = random_ids(3, 60, seed=first).tolist()
    prompts = [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]
    drafts = [row[n : n + w] for row, n, w in zip(ids, LENGTHS, WIDTHS, strict=True)]
    counts = [first, first % (WIDTHS[1] + 1), (first + 1) % (WIDTHS[2] + 1)]
    slots = Slots(target, 3)
    slots.run(range(3), prompts)
    slots.commit(LENGTHS)
    before = [slots.state(r) for r in range(3)]
    slots.run(range(3), drafts)
    for request in range(3):  # verifying alone changes nothing
        assert all(map(torch.equal, slots.state(request), before[request]))
    slots.commit(counts)
    for request, count in enumerate(counts):
        if count == 0:
            assert all(map(torch.equal, slots.state(request), before[request]))
        text = ids[request][: LENGTHS[request] + count]
        matrices, inputs = plainly(target, text, LENGTHS[request])
        same(slots.state(request), (matrices, inputs))
    # and what comes next is what a text without any draft would give
    nexts = [row[n + c : n + c + 4] for row, n, c in zip(ids, LENGTHS, counts, strict=True)]
    out = slots.run(range(3), nexts).final[0]
    for request, count in enumerate(counts):
        length = LENGTHS[request] + count
        text = torch.tensor([ids[request][: length + 4]])
        want = target.forward(text, Span.alone(1, length + 4, CPU)).final[0, length:]
        assert gap(out[4 * request : 4 * request + 4], want) <= TOLERANCE


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoderTarget]:
    """The target with every fp32 step of its layers and states done in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        yield decoder_of(kimi_model("kimi-mixed"), (0, 1, 3)).to(torch.float64)
    finally:
        torch.set_default_dtype(DEFAULT)


@pytest.mark.parametrize("first", range(9))
def test_in_double_precision_taking_back_is_exact(doubled, monkeypatch, first: int) -> None:
    """What float32 leaves between the two ways is rounding, and nothing else."""
    for bound in ("FIRST", "EXACT", "TOLERANCE"):
        monkeypatch.setitem(globals(), bound, 1e-12)
    test_after_accepting_k_of_n_states_are_those_of_plain_decoding(doubled, first)


def test_a_second_state_of_one_forward_is_saved_beside_the_first(target) -> None:
    """As a page boundary inside accepted tokens or a prompt wants it."""
    ids = random_ids(2, 80).tolist()
    slots = Slots(target, 2)
    slots.run([0, 1], [ids[0][:70], ids[1][:20]])
    slots.commit([70, 20], saved=[(0, 64, 2), (1, 16, 3)])
    for row, length, slot in ((0, 64, 2), (1, 16, 3), (0, 70, 0), (1, 20, 1)):
        found, wanted = slots.state(slot), plainly(target, ids[row][:length], length)
        same(found, wanted)
    slots.states.copy(2, 0)
    slots.at[0] = 64
    out = slots.run([0], [ids[0][64:80]]).final[0]
    want = target.forward(torch.tensor([ids[0]]), Span.alone(1, 80, CPU)).final[0, 64:]
    assert gap(out, want) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "not covered"),
        ({"layer_types": ["full_attention"] * 4}, "entries"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"]}, "dense layers first"),
        ({"linear_conv_kernel_dim": 1}, "no state"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_covered_is_said(change: dict[str, Any], reason: str) -> None:
    raw = kimi_model("kimi").config.to_dict()
    TargetConfig.from_hf(raw)
    with pytest.raises(ValueError, match=reason):
        TargetConfig.from_hf({**raw, **change})
