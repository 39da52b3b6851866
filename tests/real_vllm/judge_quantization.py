"""Inside the vLLM environment: which modules a ``quantization_config`` makes FP8, under which names.

The draft is built by vLLM from config.json alone; each linear module is then asked for its runtime
name (which is what ignore patterns see) and for the parameters it wants from a checkpoint. The same
patterns also go directly to vLLM's ``should_ignore_layer``, which decides it.
"""

from __future__ import annotations

from typing import Any

from engine_setup import engine_config, job_folder, let_v1_pass, single_process, write_answer
from loading import build_poisoned
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def main() -> None:
    folder = job_folder()
    let_v1_pass()
    config = engine_config(folder / "target", folder / "draft")
    hf_config = config.speculative_config.draft_model_config.hf_config
    ignore = hf_config.quantization_config["ignore"]
    modules: dict[str, Any] = {}
    with single_process(config):
        for name, module in build_poisoned(config).named_modules():
            if isinstance(module, (LinearBase, VocabParallelEmbedding)):
                modules[name] = {
                    "runtime_name": module.prefix if isinstance(module, LinearBase) else name,
                    "method": type(module.quant_method).__name__,
                    "parameters": {
                        key: [str(tensor.dtype), list(tensor.shape)]
                        for key, tensor in module.named_parameters(recurse=False)
                    },
                }
    for module in modules.values():
        module["ignored"] = should_ignore_layer(module["runtime_name"], ignore=ignore)
    write_answer(folder, {"modules": modules})


if __name__ == "__main__":
    main()
