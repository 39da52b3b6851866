"""Two thousand requests through a cache that is far too small: nothing leaks, nothing is wrong."""

from __future__ import annotations

import random

import pytest

from dspark.decoding.params import SamplingParams
from engine.pairs import Pair, run
from resident import resident

REQUESTS = 2000


def random_request(pair: Pair, rng: random.Random, seed: int) -> tuple[list[int], SamplingParams]:
    prompt = list(rng.choice(pair.prompts[:12]))
    if rng.random() < 0.3:
        prompt = rng.choice(pair.prompts[:3])[:-1] * rng.randint(1, 3) + prompt
    fields = {"seed": seed, "max_new_tokens": rng.choice((1, 3, 8, 20, 40))}
    if rng.random() < 0.5:
        fields["temperature"] = rng.choice((0.7, 1.0, 2.0))
    if rng.random() < 0.3:
        fields["top_k"] = rng.randint(2, 8)
    if rng.random() < 0.2:
        fields["stop"] = (rng.choice((". so", "has ", "=")),)
    if rng.random() < 0.2:
        fields["repetition_penalty"] = 1.2
    if rng.random() < 0.2:
        fields["ignore_eos"] = True
    if rng.random() < 0.1:
        fields["logprobs"] = 2
    return prompt, SamplingParams(**fields)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak(pair: Pair) -> None:
    rng = random.Random(0)
    work = [random_request(pair, rng, seed) for seed in range(REQUESTS)]
    reference = pair.engine(prefix_cache=False, max_requests=8)
    wanted = run(reference, [p for p, _ in work], [q for _, q in work])
    engine = pair.engine(pages=22, max_requests=8, max_batch_tokens=96)
    waiting, names, aborted, memory = list(range(REQUESTS)), {}, set(), []
    preempted = 0
    while waiting or engine.unfinished:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                index = waiting.pop()
                names[index] = engine.submit(*work[index])
        if engine.unfinished:
            engine.step()
        if names and rng.random() < 0.05:
            index = rng.choice(list(names))
            if engine.abort(names[index]):
                aborted.add(index)
        for index in [i for i in names if engine.finished(names[i])]:
            done = engine.collect(names.pop(index)).completions[0]
            preempted += done.preemptions
            if index in aborted:
                assert done.ids == wanted[index].ids[: len(done.ids)]
            else:
                assert (done.ids, done.text) == (wanted[index].ids, wanted[index].text), index
                assert done.acceptance == wanted[index].acceptance
        if len(waiting) % 250 == 0:
            memory.append(resident())
    assert engine.pool.available == engine.pool.count
    assert not engine._answers
    assert not engine._groups
    assert not engine.runner.samplers
    assert preempted > 50
    assert len(aborted) > 20
    assert memory[-1] - memory[len(memory) // 4] < 32 * 2**20, memory
