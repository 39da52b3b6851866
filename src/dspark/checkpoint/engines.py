"""What each engine makes of a draft: served or not, which layer ids it counts, what it passes over.

Engines share one config.json and read it differently. The table says what stands in their code
(vLLM 0.32, which ``tests/real_vllm`` also asks; ROCm/ATOM and SGLang of August 2026). It is
knowledge, not a measurement on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.config.architecture import DraftConfig, Flavour

EMBEDDING = "embed_tokens: it shares the target's"
PROVENANCE = "dspark_provenance"
AS_WRITTEN = "as written"
ANY_HEAD = ("vanilla", "gated", "rnn")
VANILLA = ("vanilla",)


@dataclass(frozen=True)
class EngineView:
    """One engine's view of one draft; ``layer_ids`` are in that engine's own counting."""

    engine: str
    served: str
    layer_ids: tuple[int, ...]
    counting: str
    ignores: tuple[str, ...]


@dataclass(frozen=True)
class _Known:
    """``served`` says how, or begins with "no"; ``shift`` is added to every layer id."""

    engine: str
    served: str
    ignores: tuple[str, ...] = ()
    heads: tuple[str, ...] = VANILLA
    shift: int = 0
    counting: str = AS_WRITTEN


_DSPARK = _Known("dspark", "yes, in process", heads=ANY_HEAD)
_VLLM_COUNTING = "adds 1 itself: its aux_hidden_state_layers count from the embedding"

KNOWN: dict[Flavour, tuple[_Known, ...]] = {
    "k3": (
        _DSPARK,
        _Known(
            "vLLM",
            "method dspark, on GPU: the draft's layers are more layers of the target's cache",
            (EMBEDDING, PROVENANCE),
            shift=1,
            counting=_VLLM_COUNTING,
        ),
        _Known(
            "ATOM",
            "--method dspark --draft-model, on GPU, drafting greedily",
            (
                "confidence_head: it verifies a fixed number of tokens",
                EMBEDDING,
                "block_size, where --num-speculative-tokens is given",
                PROVENANCE,
            ),
        ),
        _Known("SGLang", "no: its draft loader builds grouped keys and values"),
    ),
    "qwen3": (
        _DSPARK,
        _Known(
            "vLLM",
            "method dspark, on GPU; on CPU with a plug-in",
            (EMBEDDING, PROVENANCE),
            shift=1,
            counting=_VLLM_COUNTING,
        ),
        _Known("ATOM", "no: its drafts are those of Kimi-K3 and DeepSeek-V4"),
        _Known(
            "SGLang",
            "untried: --speculative-algorithm DSPARK knows the class, and may want the draft's "
            "fields in a dflash_config block, which our files must not have",
            (PROVENANCE,),
        ),
    ),
}
"""Flavour -> engines."""


def engine_views(config: DraftConfig) -> list[EngineView]:
    """What each known engine does with this draft."""
    views = []
    for known in KNOWN[config.flavour]:
        served = known.served
        if config.markov_head_type not in known.heads and not served.startswith("no"):
            served = f"no: it knows no Markov head of type {config.markov_head_type}"
        ids = tuple(i + known.shift for i in config.target_layer_ids)
        views.append(EngineView(known.engine, served, ids, known.counting, known.ignores))
    return views
