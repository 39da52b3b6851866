"""Inside the vLLM environment: the module vLLM builds from a full-size config.json, without memory.

Everything lies on the meta device, so names, shapes and runtime names are those of the real thing.
"""

from __future__ import annotations

import torch
from engine_setup import engine_config, job_folder, let_v1_pass, single_process, write_answer
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


def main() -> None:
    folder = job_folder()
    let_v1_pass()
    config = engine_config(folder / "target", folder / "draft", max_model_len=1024)
    draft = config.speculative_config.draft_model_config
    with single_process(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        model = initialize_model(vllm_config=config, model_config=draft)
    attention = model.model.layers[0].self_attn
    write_answer(
        folder,
        {
            "shapes": {n: list(p.shape) for n, p in model.named_parameters()},
            "kv_cache_layers": model.get_draft_kv_cache_layer_names(),
            "row_width": attention.head_size,
            "softmax_scale": attention.scale,
            "rotary_rows": attention.rotary_emb.cos_sin_cache.shape[0],
        },
    )


if __name__ == "__main__":
    main()
