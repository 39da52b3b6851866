"""A TorchSpec file becomes a recipe; what does not is named, never dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from conftest import dspark
from dspark.config.load import load_recipe
from dspark.config.torchspec import import_torchspec, leaves
from dspark.errors import ConfigError

# The keys users of that tool have in such a file; values are made up.
FILE = """
model:
  target_model_path: some-org/Some-Target
  draft_model_config: draft.json
  trust_remote_code: true
dataset:
  train_data_path: prompts.jsonl
  eval_interval: 70
  chat_template: qwen
training:
  max_seq_length: 4096
  micro_batch_size: 2
  draft_accumulation_steps: 4
  training_num_nodes: 2
  training_num_gpus_per_node: 4
  learning_rate: 5.0e-5
  lr_decay_style: WSD
  lr_wsd_decay_ratio: 0.3
  min_lr: 1e-6
  num_epochs: 5
  gradient_checkpointing: true
  train_with_decode: true
  dflash_block_size: 7
  dspark_num_anchors: 256
  dspark_ce_loss_alpha: 0.2
  attention_backend: flex_attention
  new_option_of_theirs: 3
inference:
  inference_engine_type: vllm
  inference_num_gpus: 32
  inference_num_gpus_per_engine: 8
  aux_hidden_states_layers: [2, 9, 20]
  max_sample_pool_size: 16
  vllm: {tp_size: 8}
mooncake: {protocol: rdma, hidden_dim: 1024}
decode: {max_new_tokens: 1024, temperature: 0.7}
logging: {report_to: wandb, wandb_project: p}
output_dir: ./outputs/x
"""
DRAFT = {
    "num_hidden_layers": 3,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mask_token_id": 77,
    "markov_rank": 32,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "draft.json").write_text(json.dumps(DRAFT))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 9)
    path = tmp_path / "theirs.yaml"
    path.write_text(FILE)
    return path


def test_the_verb_writes_a_recipe_that_loads(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    done = dspark("import-config", str(source), "--out", str(out))
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(out)
    train = recipe.train
    assert recipe.target.source == "some-org/Some-Target"
    assert (train.mode, train.order) == ("online", "shuffled")
    # 8 ranks of 4 micro-batches are 32 in one step.
    assert (train.batch_size, train.accumulate) == (2, 32)
    assert (train.schedule, train.decay_ratio) == ("wsd", 0.3)
    assert (train.learning_rate, train.epochs, train.eval_every) == (5e-5, 5, 70)
    assert train.checkpoint_activations
    assert (train.num_anchors, train.loss.ce, train.loss.l1) == (256, 0.2, 0.9)
    assert (train.stream.transport, train.stream.teachers) == ("mooncake", 0)
    assert recipe.draft.target_layer_ids == (2, 9, 20)
    assert (recipe.draft.mask_token_id, recipe.draft.num_hidden_layers) == (77, 3)
    assert recipe.cluster is not None
    assert (recipe.cluster.trainer_ranks, recipe.cluster.teachers) == (8, 4)
    assert recipe.regenerate.temperatures == (0.0, 0.7)
    assert set(train.log) == {"jsonl", "wandb"}
    for key in ("training.min_lr", "training.new_option_of_theirs", "inference.vllm.tp_size"):
        assert key in done.stderr
    again = dspark("import-config", str(source), "--out", str(out))
    assert again.returncode == 2


def test_every_key_is_used_or_named(source: Path) -> None:
    found = import_torchspec(source)
    left = {key for key, _, reason in found.left if reason}
    every = {key for key, value in leaves(yaml.safe_load(FILE)) if value is not None}
    used = every - left
    # Changing any used key changes the recipe.
    for key in sorted(used - {"model.target_model_backend"}):
        data = yaml.safe_load(FILE)
        *sections, last = key.split(".")
        node = data
        for section in sections:
            node = node[section]
        node[last] = None
        source.write_text(yaml.safe_dump(data))
        assert import_torchspec(source).recipe != found.recipe or key in INDIFFERENT, key


# Their absence means what they say here, or another key says it too.
INDIFFERENT = {"training.dflash_block_size", "inference.inference_engine_type"}


def test_what_the_file_leaves_open_is_null_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("model:\n  target_model_path: ???\ntraining: {num_epochs: 1}\n")
    found = import_torchspec(path)
    assert {"target.source", "draft.mask_token_id", "prompts.sources.0.path"} <= set(found.missing)
    out = tmp_path / "ours.yaml"
    out.write_text(yaml.safe_dump(found.recipe))
    with pytest.raises(ConfigError) as caught:
        load_recipe(out)
    assert "mask_token_id" in str(caught.value)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text in ("a: 1\n", "[]\n", "model: [\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            import_torchspec(path)
    with pytest.raises(ConfigError):
        import_torchspec(tmp_path / "absent.yaml")
