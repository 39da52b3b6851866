"""A target that is made where the run is: it learns, and is an ordinary target afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from dspark.checkpoint.target import load_target
from dspark.cli.console import Screen
from dspark.cli.made_target import conversations_of, ensure_made
from dspark.config.load import load_recipe
from dspark.config.made import MakeSection
from dspark.config.recipe import TargetSection
from dspark.errors import ConfigError
from dspark.training.made_target import encode, make_target, make_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-k3.yaml"
QUIET = Screen(Console(quiet=True))


def small(**fields: object) -> MakeSection:
    """The recipe's own section with narrower and fewer layers."""
    section = load_recipe(RECIPE).target.make
    assert section is not None
    plain = section.model_dump()
    own = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 400, "q_lora_rank": 16}
    linear = {**plain["config"]["linear_attn_config"], "kda_layers": [1, 2]}
    config = {**plain["config"], **own, "linear_attn_config": linear}
    usual = {"tickets": 40, "batch_tokens": 512, "steps": 8, "config": config}
    return MakeSection.model_validate({**plain, **usual, **fields})


def test_a_conversation_is_encoded_as_the_template_has_it_and_answers_are_learnt() -> None:
    conversations = conversations_of(small())
    tokenizer = make_tokenizer(conversations, 400)
    assert [len(c) for c in conversations[:4]] == [5, 7, 9, 3]
    for messages in conversations[:4]:
        text = encode(tokenizer, messages)
        assert text.ids == tokenizer.apply_chat_template(messages, return_dict=False)
        learnt = [i for i, own in zip(text.ids, text.learnt, strict=True) if own]
        answers = [str(m["content"]) for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(learnt) == "<eos>".join([*answers, ""])


def test_it_learns_and_loads_and_is_made_once(tmp_path: Path) -> None:
    folder, losses = tmp_path / "target", []
    for steps in (2, 16):
        section = small(steps=steps)
        losses.append(make_target(section, conversations_of(section), tmp_path / str(steps)))
    assert losses[1] < 0.8 * losses[0]
    section = small()
    ensure_made(folder, section, QUIET)
    before = (folder / "model.safetensors").read_bytes()
    ensure_made(folder, section, QUIET)
    assert (folder / "model.safetensors").read_bytes() == before
    assert json.loads((folder / "made.json").read_text())["cross_entropy"] > 0
    loaded = load_target(TargetSection(source=str(folder), max_context=64))
    assert loaded.config is not None
    assert loaded.config.recurrent_layers == (0, 1)
    assert loaded.end_ids == (2,)
    with pytest.raises(ConfigError, match="other settings"):
        ensure_made(folder, small(seed=1), QUIET)
    (folder / "made.json").unlink()
    with pytest.raises(ConfigError, match="another model"):
        ensure_made(folder, section, QUIET)


def test_a_model_of_another_kind_is_refused_by_the_recipe() -> None:
    config = small().config
    for missing, says in (("q_lora_rank", "q_lora_rank"), ("attn_res_block_size", "attn_res")):
        with pytest.raises(ValidationError, match=says):
            small(config={k: v for k, v in config.items() if k != missing})
    with pytest.raises(ValidationError, match="without a revision"):
        TargetSection(source="x", revision="y", make=small())
