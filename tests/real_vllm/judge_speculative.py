"""Inside the vLLM environment: which speculative configurations are legal, by trying them.

Reads ``cases.json`` (name -> keys beside model and method, or a whole configuration under
``whole``) and writes for each what vLLM resolved, or the first lines of its refusal.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine_setup import engine_config, job_folder, let_v1_pass, write_answer


def resolve(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    try:
        config = engine_config(folder / "target", folder / "draft", **case)
    except (ValueError, TypeError) as error:
        return {"refused": " ".join(str(error).split())[:300]}
    speculative = config.speculative_config
    backend = speculative.attention_backend
    return {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "draft_sample_method": speculative.draft_sample_method,
        "rejection_sample_method": speculative.rejection_sample_method,
        "attention_backend": backend and backend.name,
    }


def main() -> None:
    folder = job_folder()
    answer = {"V1 untouched": resolve(folder, {})}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    answer["V2 untouched"] = resolve(folder, {})
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
    let_v1_pass()
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    write_answer(folder, answer | {name: resolve(folder, case) for name, case in cases.items()})


if __name__ == "__main__":
    main()
