"""Inside the vLLM environment: vLLM's loader reads a checkpoint of `dspark quantize`.

Told are the modules that are FP8 with what arrived in them, what no weight arrived in, and what the
matchers of vLLM and of compressed-tensors make of the ignore list, whole and with each pattern
left out, for names given in ``names.json``.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from compressed_tensors.utils.match import match_name
from engine_setup import engine_config, job_folder, let_v1_pass, single_process, write_answer
from loading import build_poisoned, load_checked
from safetensors.torch import save_file
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer


def matched(names: list[str], ignore: list[str]) -> dict[str, list[str]]:
    """Names that each library says are ignored."""
    return {
        "vllm": [n for n in names if should_ignore_layer(n, ignore=ignore)],
        "compressed_tensors": [n for n in names if any(match_name(n, p) for p in ignore)],
    }


def main() -> None:
    folder = job_folder()
    let_v1_pass()
    config = engine_config(folder / "target", folder / "draft")
    hf_config = config.speculative_config.draft_model_config.hf_config
    ignore = hf_config.quantization_config["ignore"]
    outputs: dict[str, Tensor] = {}
    runtime: dict[str, str] = {}
    with single_process(config):
        model = build_poisoned(config)
        load_checked(model, config)
        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                runtime[name] = module.prefix
                if module.weight.dtype == torch.float8_e4m3fn:
                    outputs[f"{name}.weight"] = module.weight.data.view(torch.uint8).contiguous()
                    outputs[f"{name}.weight_scale"] = module.weight_scale.data.contiguous()
        # The attention's own cache scales are set later, and no draft has a mask embedding.
        left = [
            name
            for name, parameter in model.named_parameters()
            if name.endswith((".weight", ".weight_scale", ".bias"))
            and bool(parameter.float().isnan().any())
        ]
    save_file(outputs, folder / "outputs.safetensors")
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    answer: dict[str, Any] = {
        "runtime": runtime,
        "unloaded": left,
        "whole": matched(names, ignore),
        "without": {p: matched(names, [q for q in ignore if q != p]) for p in ignore},
    }
    write_answer(folder, answer)


if __name__ == "__main__":
    main()
