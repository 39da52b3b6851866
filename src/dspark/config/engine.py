"""Options of the embedded engine: memory, batch and verification. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from dspark.config.architecture import Frozen


class EngineOptions(Frozen):
    """How an engine runs, whatever it is asked.

    Args:
        max_requests: requests that are decoded together.
        max_batch_tokens: tokens of one step over all requests; prompts are prefilled in chunks of
            what is left of it. At least (block size + 1) * max_requests.
        cache_gib: memory for cached rows, in GiB. It is only taken as rows are written, and never
            more than ``max_requests`` whole contexts.
        page_size: rows per page.
        prefix_cache: reuse rows of texts that begin alike.
        state_snapshots: of hybrid targets only: how many recurrent states are kept for texts that
            begin alike. Their memory, and that of ``max_requests`` running ones, is part of
            ``cache_gib``.
        offload_host_gib: host memory for pages that leave the cache, in GiB; 0 keeps none there.
        offload_disk_gib: the same on disk, below ``offload_path``, for what leaves host memory.
        offload_path: a folder of this engine's own; it may be used again by the next one.
        offload_fp8: store them as fp8: half the bytes of bfloat16, but rows come back rounded, so a
            hit is no longer bit-equal to a cold start.
        verification: ``block`` or ``standard`` at a positive temperature; at temperature 0 every
            request is verified greedily. ``greedy`` refuses positive temperatures.
        draft_sample_method: ``probabilistic``, or ``greedy`` for argmax drafts.
        draft_tokens: tokens drafted a block at most; None is the draft's block size. The block pass
            is the trained one either way, only its first slots are used.
        truncate_draft: draw drafted tokens under the request's own top_k, top_p and min_p.
        scheduler: which drafted tokens are verified: ``fixed`` all of them; ``threshold`` those
            whose survival is at least ``confidence_threshold``; ``sync`` and ``async`` as many as
            make the step's expected rate the largest (``dspark.decoding.schedule``). All but
            ``fixed`` leave out drafting where it does not pay. The text's distribution is the same
            for each; above temperature 0 the text of a seed is the same only under ``fixed``.
        confidence_threshold: of the ``threshold`` scheduler.
        min_gain: share by which drafting must be predicted to beat plain decoding, and trimming to
            beat verifying all.
    """

    max_requests: PositiveInt = 16
    max_batch_tokens: PositiveInt = 1024
    cache_gib: float = Field(default=1.0, gt=0)
    page_size: PositiveInt = 16
    prefix_cache: bool = True
    state_snapshots: PositiveInt = 16
    offload_host_gib: float = Field(default=0.0, ge=0)
    offload_disk_gib: float = Field(default=0.0, ge=0)
    offload_path: str | None = None
    offload_fp8: bool = False
    verification: Literal["greedy", "standard", "block"] = "block"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    draft_tokens: PositiveInt | None = None
    truncate_draft: bool = True
    scheduler: Literal["fixed", "threshold", "sync", "async"] = "fixed"
    confidence_threshold: float = Field(default=0.3, ge=0, le=1)
    min_gain: float = Field(default=0.04, ge=0, le=1)

    @model_validator(mode="after")
    def _has_a_folder(self) -> EngineOptions:
        if (self.offload_disk_gib > 0) != (self.offload_path is not None):
            raise ValueError("offload_disk_gib and offload_path go together")
        return self
