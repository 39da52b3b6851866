"""A recipe's ``serving`` section: a target and a cluster that are only reckoned with, on paper.

``dspark serve --plan RECIPE`` computes from it; nothing else reads it. Every number that is not a
fact of the model is an assumption and has a name here; docs/kimi-k3.md says where each enters.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from dspark.config.architecture import Frozen
from dspark.config.target import TargetConfig

PositiveFloat = Annotated[float, Field(gt=0)]


class ServingSection(Frozen):
    """What a cluster would have to hold and move.

    Args:
        target_config: entries of the target's published config.json that its layers depend on.
        expert_bits, other_bits: bits per weight of routed experts (scales included), of the rest.
        draft_bits: of the draft.
        rows: number format of cached rows; fp8 adds one fp32 scale per row and layer.
        tensor_parallel: GPUs that hold one copy; each is reckoned.
        device_gb, reserve_gb: memory of a GPU, and what is kept back of it (activations, graphs,
            communication), in GB of 1e9 bytes.
        requests: answers decoded together, each ``context`` tokens into its text.
            ``state_snapshots``: kept recurrent states.
        memory_gbs, bandwidth_share: memory bandwidth of a GPU, and the share that a step reaches.
        device_tflops, compute_share: dense peak in the products' format, and the share reached.
        layer_us: per layer and step, what does not shrink with the tensors (collectives, launches).
        prompt_tokens: of a prompt that moves from prefill to decode. ``network_gbit``: its link.
        acceptance: acceptance lengths to reckon with.
    """

    target_config: dict[str, Any]
    expert_bits: PositiveFloat
    other_bits: PositiveFloat = 16.0
    draft_bits: PositiveFloat = 16.0
    rows: Literal["bfloat16", "fp8"] = "fp8"
    tensor_parallel: tuple[PositiveInt, ...] = Field(min_length=1)
    device_gb: PositiveFloat
    reserve_gb: PositiveFloat
    requests: PositiveInt
    context: PositiveInt
    state_snapshots: PositiveInt
    memory_gbs: PositiveFloat
    bandwidth_share: float = Field(gt=0, le=1)
    device_tflops: PositiveFloat
    compute_share: float = Field(gt=0, le=1)
    layer_us: float = Field(ge=0)
    prompt_tokens: PositiveInt
    network_gbit: PositiveFloat
    acceptance: tuple[Annotated[float, Field(ge=1)], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _a_target_we_know(self) -> ServingSection:
        if self.target.attention != "mla":
            raise ValueError("target_config: reckoned for latent attention (MLA) only")
        return self

    @property
    def target(self) -> TargetConfig:
        """The target's sizes.

        Raises:
            ValueError: a family or feature that our decoder does not cover.
        """
        return TargetConfig.from_hf(self.target_config)
