"""A recipe: one YAML file describes one whole run, a section per stage.

Every section refuses unknown keys, wrong types and sizes that make no sense, so that a run fails
before it starts rather than after an hour of flat losses. Cross-section rules live in
:class:`Recipe`; rules that need the target itself are checked when its config is known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from dspark.config.answers import RegenerateSection, Temperature
from dspark.config.architecture import (
    Flavour,
    Frozen,
    K3DraftConfig,
    MarkovHeadType,
    Qwen3DraftConfig,
    RopeParameters,
)
from dspark.config.layers import check_layer_order
from dspark.config.made import MakeSection
from dspark.config.prompts import PackageSource, PromptsSection, TokenizerSection
from dspark.config.serving import ServingSection
from dspark.config.stream import ClusterSection, StreamSection
from dspark.config.target import TargetShape

PositiveFloat = Annotated[float, Field(gt=0)]


class TargetSection(Frozen):
    """The big model: ``package:NAME`` (a GGUF shipped in a Python package), a path or a hub id.

    ``sizes`` writes its sizes down, for targets whose files are not on this machine; they are
    checked against the target when it is loaded. With ``make``, ``source`` is a folder that is made
    by the first command that needs it.
    """

    source: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    max_context: PositiveInt = 2048
    sizes: TargetShape | None = None
    make: MakeSection | None = None

    @model_validator(mode="after")
    def _is_made_in_a_folder(self) -> TargetSection:
        if self.make is not None and (self.source.startswith("package:") or self.revision):
            raise ValueError("make: source is the folder to make, without a revision")
        return self


class CaptureSection(Frozen):
    """Hidden states of answers, replayed through the target by prefill.

    ``engine: vllm`` lets the real vLLM do it, in an environment of its own (``make vllm``), where
    ``precision`` is the dtype of the whole engine.
    """

    engine: Literal["embedded", "vllm"] = "embedded"
    precision: Literal["float32", "bfloat16"] = "float32"
    batch_tokens: PositiveInt = 4096
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def identity(self) -> dict[str, Any]:
        """What decides the states; the usual engine is left out, as before there was a choice."""
        plain = self.model_dump(mode="json")
        if self.engine == "embedded":
            del plain["engine"]
        return plain


class DraftSection(Frozen):
    """Draft sizes; ``null`` means "follow the target" (see docs/architecture.md).

    ``flavour`` decides the attention: ``k3`` reads the five MLA sizes, ``qwen3`` ``head_dim`` and
    ``num_key_value_heads``. A size of the other flavour is refused rather than ignored.
    """

    flavour: Flavour = "k3"
    num_hidden_layers: PositiveInt = 2
    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    q_lora_rank: PositiveInt = 256
    kv_lora_rank: PositiveInt = 128
    qk_nope_head_dim: PositiveInt = 64
    qk_rope_head_dim: PositiveInt = 32
    v_head_dim: PositiveInt = 64
    head_dim: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: NonNegativeInt
    block_size: int = Field(default=7, ge=1, le=64)
    markov_rank: PositiveInt = 64
    markov_head_type: MarkovHeadType = "vanilla"
    rope_parameters: RopeParameters = RopeParameters()
    vocabulary_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _layer_ids_are_ordered(self) -> DraftSection:
        if self.target_layer_ids is not None:
            check_layer_order(self.target_layer_ids)
        return self

    @model_validator(mode="after")
    def _sizes_belong_to_the_flavour(self) -> DraftSection:
        k3, qwen3 = set(K3DraftConfig.model_fields), set(Qwen3DraftConfig.model_fields)
        foreign = qwen3 - k3 if self.flavour == "k3" else k3 - qwen3
        for name, field in DraftSection.model_fields.items():
            if name in foreign and getattr(self, name) != field.default:
                raise ValueError(f"{name} means nothing to a draft of flavour {self.flavour}")
        return self

    @model_validator(mode="after")
    def _support_needs_vanilla(self) -> DraftSection:
        if self.vocabulary_size is not None and self.markov_head_type != "vanilla":
            raise ValueError(
                "vocabulary_size is folded into a spare rank of a vanilla Markov head; "
                f"markov_head_type {self.markov_head_type} cannot hold it"
            )
        return self


class WarmStart(Frozen):
    """Closed-form starts, both fitted on the training answers.

    ``markov``: truncated SVD of bigram counts. ``context``: ridge regression from taps to final
    states, put into the first layer (k3 flavour).
    """

    markov: bool = False
    context: bool = False


class LossSection(Frozen):
    """Loss = ce * CE + l1 * L1 + confidence * BCE; slot weight exp(-k / decay)."""

    ce: float = Field(default=0.1, ge=0)
    l1: float = Field(default=0.9, ge=0)
    confidence: float = Field(default=1.0, ge=0)
    decay: PositiveFloat = 4.0
    detach_confidence: bool = False
    ce_first: float = Field(default=0.0, ge=0, le=1)
    chunk_rows: PositiveInt = 1024

    @model_validator(mode="after")
    def _something_to_learn(self) -> LossSection:
        if self.ce == 0 and self.l1 == 0:
            raise ValueError("ce and l1 are both 0: nothing would train the draft")
        return self


class TrainSection(Frozen):
    """Optimisation. Stops at whichever of ``epochs`` and ``max_seconds`` comes first.

    ``init_from`` is a draft's folder whose weights (nothing else) are the start instead of random
    ones; it must be of the same flavour, sizes and conventions. A run that was cut resumes by
    itself, exactly; the two are different things.

    ``mode``: ``offline`` reads states from disk; ``replay`` has a teacher prefill cached answers
    and stream their states; ``online`` has it answer the prompts too. ``order``: batches of rows
    of similar ``length``, or ``shuffled`` without looking at rows, which is all that online can do.
    ``accumulate`` micro-batches, of all ranks together, are one step. With ``batch_tokens`` (order
    ``length``), rows share a batch only with rows of their length bucket (powers of two), and so
    few that the padded batch has no more tokens: long rows need not share a short row's batch size.
    """

    mode: Literal["offline", "replay", "online"] = "offline"
    order: Literal["length", "shuffled"] = "length"
    stream: StreamSection = StreamSection()
    init_from: str | None = Field(default=None, min_length=1)
    seed: NonNegativeInt = 0
    epochs: PositiveFloat = 1.0
    max_seconds: PositiveFloat | None = None
    batch_size: PositiveInt = 8
    batch_tokens: PositiveInt | None = None
    accumulate: PositiveInt = 1
    num_anchors: PositiveInt = 512
    packed: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    ema: float | None = Field(default=None, gt=0, lt=1)
    learning_rate: PositiveFloat = 6e-4
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    max_grad_norm: PositiveFloat = 1.0
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    loss: LossSection = LossSection()
    warm_start: WarmStart = WarmStart()
    checkpoint_activations: bool = False
    compile: bool = False
    log: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ()
    eval_every: PositiveInt = 50
    decode_every: NonNegativeInt = 0
    checkpoint_every: PositiveInt = 100

    @model_validator(mode="after")
    def _online_knows_no_answers(self) -> TrainSection:
        if self.mode == "online" and self.order != "shuffled":
            raise ValueError("mode online needs order: shuffled, lengths are not known beforehand")
        if self.batch_tokens is not None and self.order != "length":
            raise ValueError("batch_tokens sorts rows by length: it needs order: length")
        return self

    def batch_of(self, length: int) -> int:
        """Rows of ``length`` tokens that share a micro-batch."""
        if self.batch_tokens is None:
            return self.batch_size
        return max(1, min(self.batch_size, self.batch_tokens // length))


class BenchSection(Frozen):
    """Local measurement: acceptance and speed against the plain arm of the same engine.

    ``speed_prompts`` are timed ``repeats`` times in each group (workload, general), spread over the
    group's categories; every other held-out prompt is decoded once by each arm.
    """

    temperatures: tuple[Temperature, ...] = Field(default=(0.0, 1.0), min_length=1)
    max_new_tokens: int = Field(default=128, ge=8)
    prompts_per_category: PositiveInt = 16
    speed_prompts: PositiveInt = 8
    repeats: PositiveInt = 5
    verification: Literal["standard", "block"] = "block"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    seed: NonNegativeInt = 0


class Recipe(Frozen):
    """One whole run. ``output`` is the run folder; every stage writes one folder in it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output: str = Field(min_length=1)
    target: TargetSection
    prompts: PromptsSection
    regenerate: RegenerateSection = RegenerateSection()
    capture: CaptureSection = CaptureSection()
    draft: DraftSection
    train: TrainSection = TrainSection()
    cluster: ClusterSection | None = None
    serving: ServingSection | None = None
    bench: BenchSection = BenchSection()

    @model_validator(mode="after")
    def _starts_fit(self) -> Recipe:
        start = self.train.warm_start
        if start.markov and self.draft.markov_head_type != "vanilla":
            raise ValueError(
                "train.warm_start.markov: bigrams only fit a vanilla Markov head, found "
                f"draft.markov_head_type {self.draft.markov_head_type}"
            )
        if start.context and self.draft.flavour != "k3":
            raise ValueError(
                "train.warm_start.context: is built from latent rows (flavour k3), found "
                f"draft.flavour {self.draft.flavour}"
            )
        for key, part in (("markov", "Markov head"), ("context", "first layer")):
            if getattr(start, key) and self.train.init_from is not None:
                raise ValueError(
                    f"train.warm_start.{key}: would overwrite the {part} of train.init_from"
                )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        longest = max(self.regenerate.most_new_tokens(), self.bench.max_new_tokens)
        need = self.prompts.max_prompt_tokens + longest
        for number, source in enumerate(self.prompts.sources):
            if not isinstance(source, PackageSource) and source.train == "all":
                raise ValueError(
                    f"prompts.sources.{number}.train: all is for recipes of prompts alone; a run "
                    "needs a number, so that its plan is known before it starts"
                )
        if not any(s.held_out for s in self.prompts.sources):
            raise ValueError("prompts.sources: no source holds any prompt out, nothing to measure")
        if 0.0 not in self.regenerate.temperatures:
            raise ValueError(
                "regenerate.temperatures: 0.0 is needed, greedy answers prove the hidden states"
            )
        if len(set(self.bench.temperatures)) != len(self.bench.temperatures):
            raise ValueError("bench.temperatures: names a temperature twice")
        if need > self.target.max_context:
            raise ValueError(
                f"prompts.max_prompt_tokens {self.prompts.max_prompt_tokens} + max_new_tokens "
                f"{longest} = {need} exceeds target.max_context {self.target.max_context}"
            )
        return self


class DataRecipe(Frozen):
    """Prompts and answers alone: no target on this machine and no draft, at any scale.

    ``tokenizer`` is needed for token counts, ``max_prompt_tokens`` and token n-grams; without one
    the report says that these were not looked at. ``regenerate`` needs ``endpoints``, since there
    is no target here, and checks what they say with the tokenizer.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output: str = Field(min_length=1)
    tokenizer: TokenizerSection | None = None
    prompts: PromptsSection
    regenerate: RegenerateSection | None = None

    @model_validator(mode="after")
    def _answers_come_from_servers(self) -> DataRecipe:
        if self.regenerate is None:
            return self
        if not self.regenerate.endpoints:
            raise ValueError(
                "regenerate.endpoints: a recipe without a target needs servers that answer"
            )
        if self.tokenizer is None:
            raise ValueError("tokenizer: is needed to check what the servers of regenerate say")
        return self
