"""Files of Kimi-K3's kind, which transformers does not know: names, loading, sizes, refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

import tiny_model
from dspark.checkpoint.k3 import k3_shapes, write_k3
from dspark.checkpoint.sizes import read_sizes
from dspark.checkpoint.source import find_target
from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.config.target import TargetConfig
from dspark.errors import TargetError
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from model.kimi_k3 import CONFIG, PlainK3, made, shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = copy.deepcopy(CONFIG)
    config["text_config"]["eos_token_id"] = 2
    write_k3(tmp_path, config, made())
    tiny_model.make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_names_and_shapes_are_the_published_ones() -> None:
    assert k3_shapes(TargetConfig.from_hf(copy.deepcopy(CONFIG))) == shapes()


def test_a_saved_model_is_the_one_that_was_written(folder: Path) -> None:
    loaded = load_target(TargetSection(source=str(folder), max_context=64))
    assert (loaded.end_ids, loaded.adapter_reason) == ((2,), "")
    target = loaded.build((0, 2))
    assert isinstance(target, DecoderTarget)
    ids = list(range(3, 30))
    want, sums, _ = PlainK3(made()).run(ids)
    with torch.inference_mode():
        out = target.forward(torch.tensor([ids]), Span.alone(1, len(ids), target.device))
        assert float((target.logits(out.final)[0] - want).abs().max() / want.abs().max()) < 1e-4
    assert float((out.taps[0, :, 1] - sums[2]).abs().max() / sums[2].abs().max()) < 1e-4


def test_its_sizes_need_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    section = TargetSection(source=str(folder), max_context=64)
    sizes = read_sizes(section, find_target(str(folder)))
    # All but the routers' corrections, which are no parameters, and A_log's spare numbers.
    spare = 6 * 5 + 5 * (8 - 3)
    assert sizes.parameters == sum(t.numel() for t in made().values()) - spare
    assert sizes.own_decoder
    assert sizes.state_bytes > 0


def test_what_is_damaged_or_not_covered_is_told(folder: Path) -> None:
    section = TargetSection(source=str(folder), max_context=64)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TargetError, match="damaged or truncated"):
        load_target(section)
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="quantized weights are not covered"):
        load_target(section)
    del config["text_config"]["linear_attn_config"]["kda_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="kda_layers"):
        load_target(section)
