"""Which linears become FP8: two recipes, patterns of one's own, and the rules of fused modules.

Engines join linears: gate and up are one product, so are q_a and kv_a, and vLLM keeps the kv_a
rows of ALL layers in one more module for the context rows. A module is FP8 as a whole or not at
all. Ignore patterns cannot say "only layer 3" either, because engines number a draft's layers
differently (vLLM from the target's depth, ATOM from 0). So a choice is made per :class:`Part`: the
linears that share a precision, in every layer.

"phase1" quantizes the large products of each layer, 55 % of a Kimi-K3 draft. "phase2" adds the path
of the context rows: a few percent more bytes saved, and errors that reach every later block through
the cache. It is there to be measured, not to be the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from dspark.checkpoint.quantization import is_ignored
from dspark.config.architecture import Flavour
from dspark.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Linears that are FP8 together or not at all.

    Args:
        runtime: what an engine calls the joined module, below its layer if ``layered``.
        members: checkpoint names of its linears, in the engine's order.
        ignore: patterns that keep it in float under every engine's names.
        reason: why a recipe leaves it in float.
        layered: once in every layer.
    """

    runtime: str
    members: tuple[str, ...]
    ignore: tuple[str, ...]
    reason: str
    layered: bool = True


CONTEXT = "every context row is made of it: its error stays in the cache and reaches each block"
CHOSEN = "excluded by the patterns given"
LATENT = "self_attn.fused_qkv_a_proj"
CONTEXT_ROWS = "context_kv_proj"
"""vLLM's module of all layers' kv_a rows; to patterns it is called as a layer's joined module."""

_MLP = (
    Part(
        "mlp.gate_up_proj",
        ("mlp.gate_proj", "mlp.up_proj"),
        (r"re:.*mlp\.(gate_proj|up_proj|gate_up_proj)$",),
        CHOSEN,
    ),
    Part("mlp.down_proj", ("mlp.down_proj",), (r"re:.*mlp\.down_proj$",), CHOSEN),
)
_OUT = Part("self_attn.o_proj", ("self_attn.o_proj",), (r"re:.*self_attn\.o_proj$",), CHOSEN)

_K3_CONTEXT = Part(
    "context_proj", ("context_proj",), (r"re:.*context_proj$",), CONTEXT, layered=False
)
_K3_LATENT = Part(
    LATENT,
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    (
        r"re:.*context_kv_proj$",
        r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)$",
    ),
    CONTEXT,
)
_FC = Part("fc", ("fc",), (r"re:.*\.fc$",), CONTEXT, layered=False)

PARTS: dict[Flavour, tuple[Part, ...]] = {
    "k3": (
        _K3_CONTEXT,
        _K3_LATENT,
        Part(
            "self_attn.q_b_proj", ("self_attn.q_b_proj",), (r"re:.*self_attn\.q_b_proj$",), CHOSEN
        ),
        Part(
            "self_attn.kv_b_proj",
            ("self_attn.kv_b_proj",),
            (r"re:.*self_attn\.kv_b_proj$",),
            CHOSEN,
        ),
        _OUT,
        *_MLP,
    ),
    "qwen3": (
        Part(
            "self_attn.qkv_proj",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (r"re:.*self_attn\.(q_proj|k_proj|v_proj|qkv_proj)$",),
            CHOSEN,
        ),
        _OUT,
        *_MLP,
        _FC,
    ),
}
"""Flavour -> every part that may be FP8, in the order of the ignore list."""

HEADS: dict[str, str] = {
    r"re:.*markov_head.*": "applied to every drafted token, small, and added to float logits",
    r"re:.*confidence_head.*": "one row, and its probabilities decide how much is verified",
    r"re:.*embed_tokens$": "the target's own, which must stay byte-identical",
    r"re:.*lm_head$": "the target's own",
}
"""Patterns of what is never FP8, and why."""

RECIPES: dict[str, dict[Flavour, frozenset[str]]] = {
    "phase1": {
        "k3": frozenset(p.runtime for p in PARTS["k3"] if p not in (_K3_CONTEXT, _K3_LATENT)),
        "qwen3": frozenset(p.runtime for p in PARTS["qwen3"] if p is not _FC),
    },
    "phase2": {flavour: frozenset(p.runtime for p in parts) for flavour, parts in PARTS.items()},
}
"""Recipe -> flavour -> parts that become FP8."""


@dataclass(frozen=True)
class Choice:
    """What a draft's linears become.

    Args:
        linears: checkpoint names that become FP8, in the module's order.
        modules: engine module -> the checkpoint names it is made of.
        ignore: patterns for config.json.
        exclusions: pattern -> why.
    """

    linears: tuple[str, ...]
    modules: dict[str, tuple[str, ...]]
    ignore: tuple[str, ...]
    exclusions: dict[str, str]


def choose(
    flavour: Flavour,
    layers: int,
    linears: Sequence[str],
    recipe: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Choice:
    """Apply a recipe and then patterns to a draft.

    Args:
        flavour: of the draft.
        layers: how many it has.
        linears: names of all its ``Linear`` modules.
        recipe: one of :data:`RECIPES`.
        include: shell patterns of linears to add (``layers.*.self_attn.q_a_proj``).
        exclude: shell patterns of linears to leave out; these win.

    Raises:
        ConfigError: an unknown recipe, a pattern without effect, a module torn apart, or nothing
            left to quantize.
    """
    if recipe not in RECIPES:
        _refuse("--recipe", f"one of {', '.join(RECIPES)}", repr(recipe), "Name one of these.")
    parts = PARTS[flavour]
    ours = {name for part in parts for name in _names(part, layers)}
    picked = RECIPES[recipe][flavour]
    chosen = {name for part in parts if part.runtime in picked for name in _names(part, layers)}
    for pattern in include:
        chosen |= _matching("--include", pattern, linears, ours)
    for pattern in exclude:
        chosen -= _matching("--exclude", pattern, linears, set(linears))
    kept = [part for part in parts if _whole(part, layers, chosen)]
    if not kept:
        _refuse("--exclude", "at least one linear to quantize", "none", "Exclude less.")
    base = PARTS["k3"][:2]  # named for every flavour: engines share one list
    listed = [*base, *(part for part in parts if part not in base)]
    exclusions = {p: part.reason for part in listed if part not in kept for p in part.ignore}
    late = {p: why for p, why in exclusions.items() if p in _FC.ignore}
    exclusions = {p: why for p, why in exclusions.items() if p not in late} | HEADS | late
    return Choice(
        linears=tuple(name for name in linears if name in chosen),
        modules=_modules(kept, layers),
        ignore=tuple(exclusions),
        exclusions=exclusions,
    )


def _names(part: Part, layers: int) -> list[str]:
    if not part.layered:
        return list(part.members)
    return [f"layers.{i}.{member}" for i in range(layers) for member in part.members]


def _matching(option: str, pattern: str, linears: Sequence[str], allowed: set[str]) -> set[str]:
    found = {name for name in linears if fnmatchcase(name, pattern)}
    if not found:
        fix = "Patterns are those of a shell, for checkpoint names: layers.*.mlp.down_proj"
        _refuse(option, "a pattern that names a linear of this draft", repr(pattern), fix)
    wrong = sorted(found - allowed)
    if wrong:
        fix = "Heads and embeddings stay in float: engines build them without quantization."
        _refuse(option, "linears of layers or of the context", wrong[0], fix)
    return found


def _whole(part: Part, layers: int, chosen: set[str]) -> bool:
    """Whether all of ``part`` is chosen; refuses some of it."""
    names = _names(part, layers)
    inside = [name for name in names if name in chosen]
    if inside and len(inside) < len(names):
        left = next(name for name in names if name not in chosen)
        _refuse(
            "--include/--exclude",
            f"all of {', '.join(part.members)} in every layer, or none of it",
            f"{inside[0]} in FP8 and {left} in float",
            "Engines run them as one module and number layers in their own ways; name whole "
            "groups, with layers.* for the number.",
        )
    return bool(inside)


def _modules(kept: Sequence[Part], layers: int) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for part in kept:
        if not part.layered:
            out[part.runtime] = part.members
    for i in range(layers):
        for part in kept:
            if part.layered:
                out[f"layers.{i}.{part.runtime}"] = tuple(f"layers.{i}.{m}" for m in part.members)
    if any(part.runtime == LATENT for part in kept):
        rows = _K3_LATENT.members[1]
        out[CONTEXT_ROWS] = tuple(f"layers.{i}.{rows}" for i in range(layers))
    return out


def check_patterns(choice: Choice, linears: Sequence[str]) -> None:
    """The patterns must leave exactly the chosen linears: a fault of ours otherwise.

    Raises:
        ValueError: a pattern names too much or too little.
    """
    wrong = [n for n in linears if is_ignored(n, choice.ignore) == (n in choice.linears)]
    if wrong:
        raise ValueError(f"ignore patterns are wrong about {wrong}")


def _refuse(option: str, expected: str, found: str, fix: str) -> NoReturn:
    raise ConfigError(expected=expected, found=found, where=f"dspark quantize {option}", fix=fix)
