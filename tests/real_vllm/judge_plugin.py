"""Inside the vLLM environment: when dspark's plugin acts, and what it refuses.

``cases.json``: name -> keys of --speculative-config and, under ``engine``, of the engine. Told is
vLLM's own message for each ("" = accepted).
"""

from __future__ import annotations

import json
from typing import Any

import vllm.plugins
from engine_setup import job_folder, write_answer
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner

import dspark.vllm_plugin as plugin


def acted() -> bool:
    return bool(gpu_model_runner.EagleProposer.__name__ == "EagleOrDSpark")


def refusal(target: str, draft: str, case: dict[str, Any]) -> str:
    engine = {"max_model_len": 512, **case.pop("engine", {})}
    try:
        EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            speculative_config={"model": draft, "method": "dspark", **case},
            **engine,
        ).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def main() -> None:
    folder = job_folder()
    vllm.plugins.plugins_loaded = True  # or vLLM calls register() before we do
    answer: dict[str, Any] = {"at once": acted()}
    known, cpu = plugin.KNOWN_VERSIONS, type(current_platform).is_cpu
    plugin.KNOWN_VERSIONS = ("9.9.9",)
    plugin.register()
    answer["another version"] = acted()
    plugin.KNOWN_VERSIONS = known
    type(current_platform).is_cpu = lambda self: False
    plugin.register()
    answer["on a GPU"] = acted()
    type(current_platform).is_cpu = cpu
    target, draft = str(folder / "target"), str(folder / "draft")
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    answer["without"] = refusal(target, draft, {})
    plugin.register()
    once = gpu_model_runner.EagleProposer
    plugin.register()
    answer["here"] = acted()
    answer["twice is once"] = gpu_model_runner.EagleProposer is once
    answer["cases"] = {name: refusal(target, draft, case) for name, case in cases.items()}
    write_answer(folder, answer)


if __name__ == "__main__":
    main()
