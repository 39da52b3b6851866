"""The MASK token against the target's tokenizer.

MASK is fed to the draft in every block. An id that the target's text can hold, or that an engine
gives a meaning (pad, bos, eos), is served differently from how it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.doctor.findings import Check, failed, passed

ASKED = "mask_token_id is a reserved id of the target's tokenizer"


def check_mask(raw: Mapping[str, Any], usable: Mapping[int, str], name: str) -> Check:
    """``usable`` ids that may be MASK and their names; ``name`` of the id in the config."""
    mask = raw.get("mask_token_id")
    if isinstance(mask, int) and mask in usable:
        return passed("tokens.mask", ASKED, f"{mask} {usable[mask]}")
    listed = ", ".join(f"{i} {token}" for i, token in list(usable.items())[:8])
    return failed(
        "tokens.mask", ASKED, f"{mask} is {name}",
        "it was guessed from pad or eos, or changed after training; the draft sees another "
        "embedding than it learnt, or text that contains it is misread",
        f"Write the id the draft was trained with. Reserved here: {listed or 'none'}.",
        "SpecForge #604, Automodel #2461 and #3238",
    )  # fmt: skip
