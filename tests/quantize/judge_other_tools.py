"""Runs in the environment of the other quantizers: FOLDER/source by llm-compressor and by Quark.

    python judge_other_tools.py FOLDER compressor|quark PATTERN...

PATTERNs are the ignore list of our own config.json. Writes FOLDER/compressor or FOLDER/quark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def compressor(folder: Path, ignore: list[str]) -> None:
    from llmcompressor import model_free_ptq

    # Their preset of the same scheme: per-channel weights, dynamic per-token activations.
    model_free_ptq(folder / "source", folder / "compressor", scheme="FP8_DYNAMIC", ignore=ignore,
                   device="cpu")  # fmt: skip


def quark(folder: Path, ignore: list[str]) -> None:
    from quark.torch.quantization.config.config import FP8E4M3PerChannelSpec, QConfig, QLayerConfig
    from quark.torch.quantization.file2file_quantization import quantize_model_per_safetensor

    weights = FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0).to_quantization_spec()
    inputs = FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1).to_quantization_spec()
    config = QConfig(
        global_quant_config=QLayerConfig(weight=weights, input_tensors=inputs), exclude=ignore
    )
    quantize_model_per_safetensor(
        str(folder / "source"), config, str(folder / "quark"), device="cpu"
    )


if __name__ == "__main__":
    place, tool, *patterns = sys.argv[1:]
    {"compressor": compressor, "quark": quark}[tool](Path(place), patterns)
    print(json.dumps(sorted(p.name for p in (Path(place) / tool).iterdir())))
