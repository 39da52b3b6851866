"""Made-up hidden records of every dtype a store must keep bit for bit."""

from __future__ import annotations

import torch

from dspark.hidden.record import HiddenRecord


def made_record(
    name: str = "extraction-train-0123", length: int = 9, dtype: torch.dtype = torch.bfloat16
) -> HiddenRecord:
    """Three prompt tokens without greedy token and log_z, then an answer with both."""
    g = torch.Generator().manual_seed(length)
    mask = torch.ones(length, dtype=torch.uint8)
    mask[:3] = 0
    greedy = torch.randint(0, 50, (length,), generator=g, dtype=torch.int32)
    log_z = torch.randn(length, generator=g)
    greedy[:2], log_z[:2] = -1, float("nan")
    return HiddenRecord(
        id=name,
        category="extraction",
        temperature=0.0,
        layer_ids=(1, 4, 7),
        norm_state="post",
        ids=torch.randint(0, 50, (length,), generator=g, dtype=torch.int32),
        loss_mask=mask,
        taps=torch.randn(length, 3, 16, generator=g).to(dtype),
        final=torch.randn(length, 16, generator=g).to(dtype),
        greedy=greedy,
        log_z=log_z,
    )
