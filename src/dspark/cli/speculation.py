"""vLLM's ``--speculative-config`` for our own engine: the same keys, or a word on why not.

A launch line that was written for vLLM works here. Keys that choose kernels or devices mean nothing
to this engine: they are named in the banner as not used. Keys that would change what is sampled are
followed or refused, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.cli.launch import Served, check_vllm, speculative_config
from dspark.config.engine import EngineOptions
from dspark.errors import ConfigError

UNUSED = {
    "attention_backend": "this engine has one attention",
    "moe_backend": "a draft has no experts",
    "kv_cache_dtype": "rows are kept in the dtype of the weights",
    "draft_tensor_parallel_size": "this engine runs on one device",
    "max_model_len": "the draft has the target's context; see --max-model-len",
    "revision": "the draft is a folder",
    "code_revision": "no code is loaded with a draft",
    "quantization": "read from the draft's own config.json",
    "enforce_eager": "nothing is captured in graphs",
    "draft_load_config": "there is one loader",
    "use_local_argmax_reduction": "this engine runs on one device",
    "disable_eagle_block_drop": "not an EAGLE draft",
}
REFUSED = {
    "num_speculative_tokens_per_batch_size": "the number of drafted tokens is fixed",
    "dspark_draft_topk": "a draft is truncated by the request's own top_k, top_p and min_p",
}


ADAPTIVE = "sync"
"""The scheduler of ``enable_adaptive_verification``: the paper's Algorithm 1."""


@dataclass(frozen=True)
class Speculation:
    """Engine options a config asks for, what of it is not used, and what is to be warned of."""

    options: dict[str, Any]
    unused: tuple[str, ...]
    warnings: tuple[str, ...]


def read_speculation(draft: Served, text: str | None) -> Speculation:
    """``text`` is the JSON object, or None for the checkpoint's own way.

    Raises:
        ConfigError: not an object, a key that vLLM does not know, another draft or method, more
            tokens than were trained, or a way of verification that is not here.
    """
    given = speculative_config(text) if text is not None else {}
    warnings = check_vllm(draft, given)
    if given.get("rejection_sample_method") == "synthetic":
        raise _refusal("rejection_sample_method", "standard or block", "synthetic")
    for key, why in REFUSED.items():
        if given.get(key):
            raise _refusal(key, f"nothing: {why}", repr(given[key]))
    options: dict[str, Any] = {}
    if "rejection_sample_method" in given:
        options["verification"] = given["rejection_sample_method"]
    if "draft_sample_method" in given:
        options["draft_sample_method"] = given["draft_sample_method"]
    if options.get("draft_sample_method") == "greedy" and "verification" not in options:
        options["verification"] = "standard"
    if given.get("enable_adaptive_verification"):
        options["scheduler"] = ADAPTIVE
    if "num_speculative_tokens" in given:
        options["draft_tokens"] = int(given["num_speculative_tokens"])
    unused = tuple(f"{key}: {UNUSED[key]}" for key in given if key in UNUSED)
    return Speculation(options, unused, tuple(warnings))


def engine_options(
    max_num_seqs: int, cache_gib: float, block: int, found: Speculation, scheduler: str | None
) -> EngineOptions:
    """Options of the engine behind the server; ``scheduler`` wins over the speculative config."""
    budget = max(1024, max_num_seqs * (block + 1))
    chosen = {**found.options, **({} if scheduler is None else {"scheduler": scheduler})}
    return EngineOptions(
        max_requests=max_num_seqs, max_batch_tokens=budget, cache_gib=cache_gib, **chosen
    )


def _refusal(key: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=f"dspark serve: --speculative-config {key}",
        fix="Leave it out.",
    )
