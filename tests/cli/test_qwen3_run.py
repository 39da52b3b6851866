"""The whole product with a qwen3 draft on a grouped-query target, through the real command."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tiny_model
from conftest import dspark, write_prompts

RECIPE = """\
name: grouped
output: {root}/run
target: {{source: {root}/target, max_context: 128}}
prompts:
  workload: [sums]
  max_prompt_tokens: 40
  sources: [{{kind: file, path: {root}/prompts.jsonl, category: sums, train: 24, held_out: 3}}]
regenerate: {{max_new_tokens: 24, batch_size: 24}}
capture: {{batch_tokens: 1024, dtype: float32}}
draft:
  flavour: qwen3
  num_hidden_layers: 2
  intermediate_size: 64
  head_dim: 12
  mask_token_id: 4
  markov_rank: 8
  target_layer_ids: [0, 2]
train: {{epochs: 2, batch_size: 4, num_anchors: 8, precision: float32, learning_rate: 4e-3}}
bench: {{max_new_tokens: 16, speed_prompts: 1, repeats: 1, prompts_per_category: 3}}
"""


def write_target(folder: Path) -> None:
    """A random Qwen3, loud enough that its greedy choices are not near ties."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tiny_model.SPECIAL) + len(tiny_model.CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tiny_model.make_tokenizer().save_pretrained(folder)


def test_a_qwen3_draft_is_trained_served_and_published(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 40)
    recipe = tmp_path / "grouped.yaml"
    recipe.write_text(RECIPE.format(root=tmp_path))
    done = dspark("run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = {(r["prompts"], r["temperature"]): r for r in summary["results"]}
    assert rows["workload", 0]["identical_to_plain"] == [3, 3]
    raw = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert (raw["model_type"], raw["head_dim"], raw["num_key_value_heads"]) == ("qwen3", 12, 2)
    found = json.loads(dspark("inspect", str(tmp_path / "run" / "draft"), "--json").stdout)
    assert found["row_width"] == 2 * 2 * 12
    assert found["tensors"] == 3 + 1 + 2 + 2 + 2 * 11
    plan = dspark("run", str(recipe), "--plan")
    assert plan.returncode == 0, plan.stderr
    # As DeepSpec would have published it: an lm_head beside it, and nothing that names the target.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    kept = {k: v for k, v in raw.items() if k not in {"sample_from_anchor", "dspark_provenance"}}
    (theirs / "config.json").write_text(json.dumps(kept))
    head = load_file(str(tmp_path / "target" / "model.safetensors"))["lm_head.weight"]
    tensors = load_file(str(tmp_path / "run" / "draft" / "model.safetensors"))
    save_file({**tensors, "lm_head.weight": head}, theirs / "model.safetensors")
    bench = ["bench", str(theirs), "--prompts", str(tmp_path / "prompts.jsonl"),
             "bench.prompts_per_category=2", "bench.repeats=1", "bench.max_new_tokens=8"]  # fmt: skip
    unnamed = dspark(*bench)
    assert unnamed.returncode == 1
    assert "--target" in unnamed.stderr
    named = dspark(*bench, "--target", str(tmp_path / "target"))
    assert named.returncode == 0, named.stderr
    assert "2 of 2" in named.stdout
