"""A target that is made where the run is: how large, and how long it learns."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from dspark.config.architecture import Frozen
from dspark.config.target import TargetConfig


class MakeSection(Frozen):
    """A tiny model of Kimi-K3's kind that learns to answer order messages.

    Made once, into the folder ``target.source``. ``config`` are the keys of Kimi-K3's own
    ``text_config``; ``tickets`` is how many different messages there are to learn from
    (``dspark.data.order_tickets``), in conversations of one to four of them. A step learns from as
    many conversations as ``batch_tokens`` hold.
    """

    config: dict[str, Any]
    tickets: PositiveInt = 8192
    steps: PositiveInt = 300
    batch_tokens: PositiveInt = 3072
    learning_rate: float = Field(default=4e-3, gt=0)
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _is_of_the_kind(self) -> MakeSection:
        try:
            made = self.target_config
        except KeyError as error:
            raise ValueError(f"config: {error.args[0]} is missing") from error
        for name, there in (
            ("a full-rank gate", made.linear is not None and made.linear.full_rank_gate),
            ("attn_res_block_size", made.residual_block is not None),
            ("mla_use_output_gate", made.output_gate),
            ("q_lora_rank", made.q_lora_rank is not None),
            (
                "experts of routed_expert_hidden_size",
                made.experts is not None and made.experts.routed_expert_hidden_size is not None,
            ),
        ):
            if not there:
                raise ValueError(f"config: a model of Kimi-K3's kind has {name}")
        return self

    @property
    def target_config(self) -> TargetConfig:
        """What our decoder makes of ``config``."""
        return TargetConfig.from_hf({**self.config, "model_type": "kimi_k3"})
