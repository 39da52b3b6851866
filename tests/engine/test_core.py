"""The batched engine: what a request gets does not depend on who shares its batch or its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.decoding.params import SamplingParams
from dspark.errors import DecodingError
from dspark.model.hf_target import HFTarget
from dspark.model.spans import Span
from engine.pairs import END, Pair, run


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 48, **fields})


def sampled(seed: int, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_new_tokens": 48, **fields})


def mixed(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests of several shapes, side by side."""
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5},
             {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02}]  # fmt: skip
    return [greedy(seed=i, **kinds[i % 4]) for i in range(count)]


def test_batched_equals_alone_at_every_temperature(pair: Pair) -> None:
    prompts, params = pair.prompts[:12], mixed(12)
    alone = [
        run(pair.engine(max_requests=1), [p], [q])[0] for p, q in zip(prompts, params, strict=True)
    ]
    for width in (3, 12):
        together = run(pair.engine(max_requests=width), prompts, params)
        assert [c.ids for c in together] == [c.ids for c in alone]
        assert [c.acceptance for c in together] == [c.acceptance for c in alone]
        assert [c.text for c in together] == [c.text for c in alone]
    assert sum(c.acceptance.accepted for c in alone) > 100


def test_greedy_text_is_the_plain_text_in_batches(pair: Pair) -> None:
    plain = run(pair.engine(draft=False), pair.prompts, greedy())
    draft = run(pair.engine(), pair.prompts, greedy())
    assert [c.ids for c in draft] == [c.ids for c in plain]
    assert plain[0].acceptance is None


def test_preempted_requests_end_as_if_they_had_never_been(pair: Pair) -> None:
    prompts, params = pair.prompts[:10], mixed(10)
    free = run(pair.engine(), prompts, params)
    tight = run(pair.engine(pages=16, prefix_cache=False), prompts, params)
    assert sum(c.preemptions for c in tight) > 3
    assert [c.ids for c in tight] == [c.ids for c in free]
    assert [c.acceptance for c in tight] == [c.acceptance for c in free]


def test_prompts_prefilled_in_chunks_answer_as_whole_ones(pair: Pair) -> None:
    prompts, params = pair.prompts[:6], mixed(6)
    whole = run(pair.engine(prefix_cache=False), prompts, params)
    chunked = pair.engine(prefix_cache=False, max_requests=2, max_batch_tokens=16)
    assert [c.ids for c in run(chunked, prompts, params)] == [c.ids for c in whole]


def test_a_prefix_hit_accepts_as_much_as_a_cold_start(pair: Pair) -> None:
    engine = pair.engine()
    prompt = (pair.prompts[0][:-1] * 3)[:60] + pair.prompts[1]
    names, outputs = [], []
    for seed in (5, 5, 5):
        names.append(engine.submit(prompt, sampled(seed)))
        while engine.unfinished:
            engine.step()
        outputs.append(engine.collect(names[-1]))
    cold, hit, again = outputs
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == again.cached_tokens == len(prompt) // 16 * 16
    for other in (hit, again):
        assert other.completions[0].ids == cold.completions[0].ids
        assert other.acceptance == cold.acceptance
    assert cold.acceptance.accepted > 5


def test_a_hit_on_a_whole_prompt_writes_into_a_copy(pair: Pair) -> None:
    """Two requests with one prompt of whole pages, the second while the first still decodes."""
    engine = pair.engine()
    prompt = (pair.prompts[0] * 3)[:64]
    first = engine.submit(prompt, greedy())
    engine.step()
    second = engine.submit(prompt, greedy())
    while engine.unfinished:
        engine.step()
    one, two = engine.collect(first), engine.collect(second)
    assert two.cached_tokens == 63
    assert one.completions[0].ids == two.completions[0].ids
    assert one.acceptance == two.acceptance


def test_hits_do_not_depend_on_the_draft(pair: Pair) -> None:
    shared = (pair.prompts[0][:-1] * 5)[:100]
    found = []
    for draft in (True, False):
        engine = pair.engine(draft=draft, max_requests=2)
        names = [engine.submit(shared + p, greedy()) for p in pair.prompts[:8]]
        while engine.unfinished:
            engine.step()
        found.append([engine.collect(name).cached_tokens for name in names])
    assert found[0] == found[1]
    assert sum(count >= 96 for count in found[0]) >= 6


RULES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {10: 6.0, 12: -4.0, 49: -1.0}},
    {"min_new_tokens": 44},
    {"min_p": 0.2, "temperature": 0.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {2: 3.0},
     "min_new_tokens": 20},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES)
def test_rules_give_the_plain_text_at_temperature_zero(pair: Pair, rules) -> None:
    prompts = pair.prompts[:10]
    plain = run(pair.engine(draft=False), prompts, greedy(**rules))
    draft = run(pair.engine(), prompts, greedy(**rules))
    assert [c.ids for c in draft] == [c.ids for c in plain]
    bare = run(pair.engine(), prompts, greedy())
    if "min_p" not in rules:
        assert [c.ids for c in bare] != [c.ids for c in draft], "the rule changed nothing"
    assert sum(c.acceptance.accepted for c in draft) > 10


def test_plain_text_with_penalties_is_vllms_formula(pair: Pair) -> None:
    """The rules against ten lines of their own, token by token."""
    params = greedy(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3,
                    logit_bias={20: 2.0}, max_new_tokens=24)  # fmt: skip
    for prompt in pair.prompts[:3]:
        ids: list[int] = []
        while len(ids) < 24 and (not ids or ids[-1] != 2):
            text = torch.tensor([[*prompt, *ids]])
            with torch.no_grad():
                out = pair.target.forward(text, Span.alone(1, text.shape[1], text.device), None)
                row = pair.target.logits(out.final[0, -1]).clone()
            row[20] += 2.0
            for token in {*prompt, *ids}:
                row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
            for token in set(ids):
                row[token] -= 0.5 * ids.count(token) + 0.3
            ids.append(int(row.argmax()))
        assert list(run(pair.engine(), [prompt], params)[0].ids) == ids


def test_logprobs_are_the_plain_ones(pair: Pair) -> None:
    params = greedy(logprobs=3)
    plain = run(pair.engine(draft=False), pair.prompts[:8], params)
    draft = run(pair.engine(), pair.prompts[:8], params)
    for a, b in zip(plain, draft, strict=True):
        assert len(b.logprobs) == len(b.ids)
        assert [x.token for x in b.logprobs] == list(b.ids)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert y.logprob == pytest.approx(x.logprob, abs=1e-4)
            assert y.top[0] == (y.token, pytest.approx(y.logprob))
            assert [t for t, _ in x.top] == [t for t, _ in y.top]
            assert len(y.top) == 3


def test_a_stop_string_inside_an_accepted_run_trims_everything_together(pair: Pair) -> None:
    params = greedy(stop=(". so ",), logprobs=0)
    plain = run(pair.engine(draft=False), pair.prompts, params)
    draft = run(pair.engine(), pair.prompts, params)
    full = run(pair.engine(), pair.prompts, greedy())
    inside = 0
    for a, b, c in zip(plain, draft, full, strict=True):
        assert (a.ids, a.text) == (b.ids, b.text)
        assert len(b.ids) == len(b.kinds) == len(b.logprobs)
        if b.stop_reason == ". so ":
            assert b.finish_reason == "stop"
            assert b.text == c.text[: c.text.index(". so ")]
            assert pair.decode(list(b.ids)) == b.text + ". so "
            inside += len(c.ids) > len(b.ids) and c.kinds[len(b.ids)] == "accepted"
        assert b.acceptance.accepted >= b.kinds.count("accepted")
    assert inside > 3, "no stop string ended within an accepted run"


def test_pieces_of_a_stream_add_up_and_never_show_a_stop_string(pair: Pair) -> None:
    engine = pair.engine()
    names = [engine.submit(p, greedy(stop=("so tom", "so mia"))) for p in pair.prompts[:12]]
    texts, ids = dict.fromkeys(names, ""), {name: [] for name in names}
    while engine.unfinished:
        for delta in engine.step():
            texts[delta.id] += delta.text
            ids[delta.id] += delta.ids
            assert "so tom" not in texts[delta.id]
            assert not texts[delta.id].endswith("so mi") or delta.finish_reason
    for name in names:
        done = engine.collect(name).completions[0]
        assert texts[name] == done.text
        assert tuple(ids[name]) == done.ids


def test_stop_ids_and_ignore_eos(pair: Pair) -> None:
    comma = pair.loaded.tokenizer.encode(".", add_special_tokens=False)[-1]
    (stopped,) = run(pair.engine(), pair.prompts[:1], greedy(stop_ids=(comma,)))
    assert stopped.stop_reason == comma == stopped.ids[-1]
    assert "." not in stopped.text
    (endless,) = run(pair.engine(), pair.prompts[:1], greedy(ignore_eos=True))
    assert endless.finish_reason == "length"
    assert len(endless.ids) == 48
    assert 2 in endless.ids


def test_several_answers_share_their_prompt_and_differ(pair: Pair) -> None:
    engine = pair.engine()
    name = engine.submit(pair.prompts[0] * 2, sampled(3, n=5, temperature=2.0))
    while engine.unfinished:
        engine.step()
    out = engine.collect(name)
    assert [c.index for c in out.completions] == list(range(5))
    assert len({c.ids for c in out.completions}) == 5
    for completion in out.completions:
        (again,) = run(pair.engine(), [pair.prompts[0] * 2],
                       sampled(completion.seed, temperature=2.0))  # fmt: skip
        assert again.ids == completion.ids


def test_a_seed_that_was_not_given_is_reported(pair: Pair) -> None:
    params = SamplingParams(temperature=2.0, max_new_tokens=20)
    one, two = run(pair.engine(), [pair.prompts[0]] * 2, params)
    assert one.ids != two.ids
    (again,) = run(pair.engine(), [pair.prompts[0]],
                   SamplingParams(temperature=2.0, max_new_tokens=20, seed=one.seed))  # fmt: skip
    assert again.ids == one.ids


def test_aborted_requests_give_their_pages_back_in_every_state(pair: Pair) -> None:
    engine = pair.engine(max_requests=2, max_batch_tokens=16)
    names = [engine.submit(p * 2, greedy()) for p in pair.prompts[:5]]
    for steps, name in enumerate(names):
        for _ in range(steps):
            engine.step()
        (delta,) = engine.abort(name)
        assert delta.finish_reason == "abort"
        assert engine.collect(name).completions[0].finish_reason == "abort"
    assert engine.abort("nobody") == []
    assert engine.pool.available == engine.pool.count
    assert not engine.unfinished
    assert not engine.runner.samplers
    assert not engine._answers


def test_the_transformers_adapter_serves_a_batch_one_sequence_at_a_time(
    pair: Pair, tiny_target: Path
) -> None:
    from transformers import AutoModelForCausalLM

    adapter = HFTarget(AutoModelForCausalLM.from_pretrained(tiny_target), (0, 1, 2))
    prompts, params = pair.prompts[:4], mixed(4)
    ours = run(pair.engine(), prompts, params)
    theirs = run(pair.engine(target=adapter, pages=10), prompts, params)
    assert [c.ids for c in theirs] == [c.ids for c in ours]
    assert [c.acceptance for c in theirs] == [c.acceptance for c in ours]


def test_what_cannot_be_served_is_refused(pair: Pair) -> None:
    engine = pair.engine()
    with pytest.raises(DecodingError, match="prompt"):
        engine.submit([1] * 256, greedy())
    with pytest.raises(DecodingError, match="logit_bias"):
        engine.submit([1], greedy(logit_bias={50: 1.0}))
    engine.submit([1], greedy(), "a")
    with pytest.raises(DecodingError, match="not in use"):
        engine.submit([1], greedy(), "a")
    strict = pair.engine(verification="greedy")
    with pytest.raises(DecodingError, match="greedy"):
        strict.submit([1], sampled(0))
    one_hot = pair.engine(verification="block", draft_sample_method="greedy")
    with pytest.raises(DecodingError, match="probabilistic"):
        one_hot.submit([1], sampled(0))
    assert not strict.runner.samplers
    assert not strict.unfinished
    assert END
