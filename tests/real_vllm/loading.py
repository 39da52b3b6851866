"""Inside the vLLM environment: what vLLM reads from config.json, and its weight loader at work.

Parameters are NaN before loading, so that a tensor which never arrived shows whatever the model's
own bookkeeping says (``Qwen3DSparkForCausalLM`` keeps none).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id


def config_seen(config: VllmConfig) -> dict[str, Any]:
    """Every decision that vLLM takes from config.json, by the functions that take it."""
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    fields = draft.hf_config.to_dict()
    return {
        "config_class": type(draft.hf_config).__name__,
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "lookahead_slots": config.num_lookahead_tokens,
        "aux_layers": list(get_eagle3_aux_layers_from_config(speculative)),
        "mask_token": get_parallel_drafting_token_id(draft.hf_config),
        "uses_latent_cache": draft.use_mla,
        "max_model_len": draft.max_model_len,
        "fields": {k: v for k, v in fields.items() if isinstance(v, (int, float, str, list, dict))},
    }


def build_poisoned(config: VllmConfig) -> nn.Module:
    """vLLM's draft module for this configuration, every parameter NaN."""
    draft = config.speculative_config.draft_model_config
    with set_default_torch_dtype(draft.dtype):
        model = initialize_model(vllm_config=config, model_config=draft)
    poison(model)
    return model


def poison(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else -1)


def unloaded(model: nn.Module) -> list[str]:
    """Parameters that loading left as they were."""
    return [n for n, p in model.named_parameters() if bool(p.isnan().any())]


def load_checked(model: nn.Module, config: VllmConfig) -> None:
    """The loader's own path: read the files, map names, refuse what is missing or unknown."""
    loader = get_model_loader(config.load_config)
    loader.load_weights(model, config.speculative_config.draft_model_config)


def attempt(model: nn.Module, config: VllmConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Load ``weights`` instead: what vLLM says, first line ("" = accepted), and what is left."""
    loader = get_model_loader(config.load_config)
    poison(model)
    said = ""
    try:
        loaded = model.load_weights(iter(weights.items()))
        if loaded is not None:  # the loader's own condition
            loader.track_weights_loading(model, loaded)
    except ValueError as error:
        said = str(error).splitlines()[0]
    return {"said": said, "unloaded": unloaded(model)}


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if n not in names}
