"""vLLM's ``--speculative-config`` for our own engine: the same keys, or a word on why not.

A launch line that was written for vLLM works here. Keys that choose kernels or devices mean nothing
to this engine: they are named in the banner as not used. Keys that would change what is sampled are
followed or refused, never dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dspark.cli.launch import Served, check_vllm, speculative_config
from dspark.cli.serve_options import ServeOptions
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


HANDOVER_GIB = 1.0
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


def engine_options(options: ServeOptions, block: int, found: Speculation) -> EngineOptions:
    """Options of the engine behind the server; ``--scheduler`` wins over the speculative config.

    A server with a role needs room for the pages of prompts in flight: 1 GiB unless told.

    Raises:
        ConfigError: options of offloading or of roles that do not go together.
    """
    _check_offload(options)
    budget = max(1024, options.max_num_seqs * (block + 1))
    scheduler = {} if options.scheduler is None else {"scheduler": options.scheduler}
    return EngineOptions(
        max_requests=options.max_num_seqs,
        max_batch_tokens=budget,
        cache_gib=options.cache_gib,
        offload_host_gib=options.offload_memory or (0.0 if options.role is None else HANDOVER_GIB),
        offload_disk_gib=options.offload_disk,
        offload_path=None if options.offload_path is None else str(options.offload_path),
        offload_fp8=options.offload_fp8,
        **{**found.options, **scheduler},
    )


def _check_offload(options: ServeOptions) -> None:
    if (options.offload_disk > 0) != (options.offload_path is not None):
        raise ConfigError(
            expected="--offload-disk and --offload-path together",
            found="one of them",
            where="dspark serve",
            fix="Name the folder and how much may lie there.",
        )
    if (options.role is None) != (options.peer is None):
        raise ConfigError(
            expected="--role and --peer together",
            found="one of them",
            where="dspark serve",
            fix="prefill: --peer tcp://0.0.0.0:5700; decode: --peer tcp://PREFILL:5700",
        )
    if options.peer is not None and not re.fullmatch(r"tcp://[^/]+:[0-9]{1,5}", options.peer):
        raise ConfigError(
            expected="tcp://HOST:PORT",
            found=options.peer,
            where="dspark serve --peer",
            fix="For instance tcp://10.0.0.5:5700.",
        )
    nothing = not options.offload_memory and not options.offload_disk and options.role is None
    if options.offload_fp8 and nothing:
        raise ConfigError(
            expected="somewhere to keep pages",
            found="--offload-fp8 alone",
            where="dspark serve",
            fix="Add --offload-memory or --offload-disk.",
        )


def _refusal(key: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=f"dspark serve: --speculative-config {key}",
        fix="Leave it out.",
    )
