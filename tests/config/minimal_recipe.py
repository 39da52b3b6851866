"""The least a recipe may say, and how it is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.config.load import load_recipe
from dspark.errors import ConfigError

MINIMAL = """\
name: tiny
output: runs/tiny
target:
  source: package:tiny
  max_context: 512
prompts:
  sources:
    - kind: word_problems
      train: 8
      held_out: 4
    - kind: human_eval
      category: code
      held_out: 3
  workload: [maths]
  max_prompt_tokens: 128
draft:
  mask_token_id: 3
train:
  learning_rate: 5e-5
"""


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value


def write(tmp_path: Path, **changes: Any) -> Path:
    """The minimal recipe with top-level sections merged in, as a YAML file."""
    data = copy.deepcopy(yaml.safe_load(MINIMAL))
    data["train"]["learning_rate"] = 5e-5
    for section, value in changes.items():
        data[section] = {**data.get(section, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path
