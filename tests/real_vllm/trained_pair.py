"""A tiny Qwen3 target and a draft of either flavour for it, trained on the spot, for real vLLM.

Heads are 32 wide because vLLM's CPU attention takes no narrower ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

import tiny_model
from conftest import dspark, write_prompts

RECIPE = """\
name: grouped
output: {root}/{flavour}
target: {{source: {root}/target, max_context: 256}}
prompts:
  workload: [sums]
  max_prompt_tokens: 64
  sources: [{{kind: file, path: {root}/prompts.jsonl, category: sums, train: 160, held_out: 12}}]
regenerate: {{max_new_tokens: 64, batch_size: 32}}
capture: {{batch_tokens: 1024, dtype: float32}}
draft:
  flavour: {flavour}
  num_hidden_layers: 3
  intermediate_size: 192
  {sizes}
  mask_token_id: 4
  markov_rank: 24
  target_layer_ids: [0, 1, 2]
train:
  epochs: 8
  batch_size: 4
  num_anchors: 24
  learning_rate: 4e-3
  precision: float32
  loss: {{ce_first: 0.3}}
  warm_start: {{markov: true}}
  eval_every: 100
bench: {{max_new_tokens: 64, speed_prompts: 2, repeats: 1}}
"""


SIZES = {
    "qwen3": "head_dim: 32",
    "k3": "q_lora_rank: 48\n  kv_lora_rank: 32\n  qk_nope_head_dim: 16\n  qk_rope_head_dim: 16\n"
    "  v_head_dim: 16",
}


@dataclass(frozen=True)
class TrainedPair:
    """Folders below ``root``: ``target`` and a finished run per flavour; ``prompts.jsonl``."""

    root: Path
    flavour: str

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def run(self) -> Path:
        return self.root / self.flavour

    @property
    def draft(self) -> Path:
        return self.run / "draft"

    @property
    def recipe(self) -> Path:
        return self.root / f"{self.flavour}.yaml"

    def questions(self, count: int) -> list[str]:
        """From the end of the file: few of them were trained on."""
        lines = (self.root / "prompts.jsonl").read_text().splitlines()[-count:]
        return [json.loads(line)["prompt"] for line in lines]


def make_target(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tiny_model.SPECIAL) + len(tiny_model.CHARACTERS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=tiny_model.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    tokenizer, model = tiny_model.make_tokenizer(), Qwen3ForCausalLM(config)
    tiny_model.train_target(model, tokenizer, steps=160)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trained_pair(cache: Path, flavour: str = "qwen3") -> TrainedPair:
    """Made once for the content of the files that decide it, and kept below ``cache``."""
    files = (Path(__file__), Path(tiny_model.__file__))
    key = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]
    root = cache / f"grouped-{key}"
    with FileLock(f"{root}.lock"):
        pair = TrainedPair(root, flavour)
        if not (root / "done").exists():
            shutil.rmtree(root, ignore_errors=True)
            make_target(root / "target")
            write_prompts(root / "prompts.jsonl")
            (root / "done").touch()
        if not (pair.run / "summary.json").exists():
            pair.recipe.write_text(RECIPE.format(root=root, flavour=flavour, sizes=SIZES[flavour]))
            done = dspark("run", str(pair.recipe))
            assert done.returncode == 0, done.stdout + done.stderr
    return pair
