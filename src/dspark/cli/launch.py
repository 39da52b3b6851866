"""Launch lines: the exact command that serves a draft in another engine, from the checkpoint alone.

Everything that must agree with the draft (method, model, block size, sampling of drafts, their
verification) is written out, because engines guess what is left out and accept what contradicts:
vLLM takes any number of speculative tokens in silence and, without a method, takes a K3 draft for
an ordinary small model. What belongs to the machine (parallelism, memory, quantization of the
target) is the user's and is passed on behind ``--``; where it touches speculation it is compared
with the checkpoint first.

Keys and defaults: vLLM 0.32.0 config/speculative.py and the published cards; ROCm/ATOM at ffdf3bb,
atom/model_engine/arg_utils.py and recipes/DSpark.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark.doctor.predicates import flavour_of
from dspark.doctor.rules import check_rules
from dspark.errors import ConfigError

Engine = Literal["vllm", "atom"]
TOKENS = "--num-speculative-tokens"
VLLM_VALUES = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "block", "synthetic"),
}
VLLM_KEYS = frozenset(
    {"method", "model", "num_speculative_tokens", "attention_backend", "kv_cache_dtype",
     "draft_tensor_parallel_size", "max_model_len", "revision", "code_revision", "quantization",
     "enforce_eager", "moe_backend", "enable_adaptive_verification", "dspark_draft_topk",
     "num_speculative_tokens_per_batch_size", "disable_eagle_block_drop",
     "use_local_argmax_reduction", "draft_load_config", *VLLM_VALUES}
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A command as words, and what of it contradicts the checkpoint."""

    command: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def shell(self) -> str:
        """The command quoted for a POSIX shell, one option a line."""
        lines: list[list[str]] = [[]]
        for word in self.command:
            if word.startswith("--") and lines[-1]:
                lines.append([])
            lines[-1].append(shlex.quote(word))
        return " \\\n  ".join(" ".join(line) for line in lines)


@dataclass(frozen=True)
class Served:
    """The draft to be served: where it is, its config.json, and its trained slots.

    ``accept_rates`` are the teacher-forced acceptance rates per slot, where training.json is there.
    """

    path: str
    raw: Mapping[str, Any]
    accept_rates: Sequence[float] = ()

    @property
    def block_size(self) -> int:
        size = self.raw.get("block_size")
        if not isinstance(size, int) or size < 1:
            raise _refusal("block_size", "the trained number of drafted tokens", repr(size))
        return size


def launch(
    engine: Engine, draft: Served, target: str, extra: Sequence[str], *, cpu: bool = False
) -> Launch:
    """The command for ``engine``; ``extra`` are the user's own words for it.

    ``cpu``: for vLLM on a CPU, where dspark's plugin drafts: see ``dspark.vllm_plugin``.

    Raises:
        ConfigError: a word that makes another model of the draft, or that the engine refuses.
    """
    if engine == "atom":
        out = _atom(draft, target, list(extra))
    else:
        out = _vllm(draft, target, list(extra), cpu=cpu)
    rules = [f"{c.asked}: {c.found}. {c.cause}. {c.mend}" for c in check_rules(draft.raw, (engine,))
             if c.status != "pass"]  # fmt: skip
    return Launch(out.command, (*out.warnings, *rules))


def _vllm(draft: Served, target: str, extra: list[str], *, cpu: bool) -> Launch:
    spec: dict[str, Any] = {
        "model": draft.path,
        "method": "dspark",
        "num_speculative_tokens": draft.block_size,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    }
    if flavour_of(draft.raw) == "k3":
        # Rows of one latent for all heads, read without a causal mask: few backends can.
        spec["attention_backend"] = "FLASHINFER_MLA"
    if cpu:
        extra = _on_cpu(spec, extra)
    extra, given = _take(extra, "--speculative-config")
    extra, tokens = _take(extra, TOKENS)
    for word in extra:
        if word.startswith(("--spec-", "--speculative")):
            raise _refusal(word, "speculation in --speculative-config '{...}'", word)
    changes = speculative_config(given) if given is not None else {}
    if tokens is not None:
        changes["num_speculative_tokens"] = _count(tokens, TOKENS)
    warnings = check_vllm(draft, changes)
    spec |= changes
    if cpu and spec["rejection_sample_method"] != "standard":
        raise _refusal(
            "rejection_sample_method", "standard: all that vLLM has on a CPU",
            repr(spec["rejection_sample_method"]),
        )  # fmt: skip
    if (spec["draft_sample_method"], spec["rejection_sample_method"]) == ("greedy", "block"):
        warnings.append(
            "rejection_sample_method block with greedy drafts: block verification gains nothing "
            "when the draft is a point mass. Use draft_sample_method probabilistic, or standard "
            "verification."
        )
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(spec), *extra]
    return Launch(tuple(command), tuple(warnings))


def _on_cpu(spec: dict[str, Any], extra: list[str]) -> list[str]:
    """Change ``spec`` to what the CPU build can do; the words with its own settings added.

    ``auto`` would round an fp32 target to bf16, and compiling takes minutes there.
    """
    spec.pop("attention_backend", None)  # our own module attends there
    spec["rejection_sample_method"] = "standard"
    given = {word.partition("=")[0] for word in extra}
    if "--dtype" not in given:
        extra = [*extra, "--dtype", "float32"]
    return extra if "--enforce-eager" in given else [*extra, "--enforce-eager"]


def speculative_config(text: str) -> dict[str, Any]:
    """The keys of ``--speculative-config``.

    Raises:
        ConfigError: not a JSON object.
    """
    return _json_object(text, "--speculative-config")


def check_vllm(draft: Served, changes: Mapping[str, Any]) -> list[str]:
    """Warnings about the user's keys of --speculative-config.

    Raises:
        ConfigError: a key that vLLM does not know, or a value that makes another model.
    """
    unknown = sorted(set(changes) - VLLM_KEYS)
    if unknown:
        raise _refusal(
            f"--speculative-config {unknown[0]}", f"one of {', '.join(sorted(VLLM_KEYS))}",
            "a key that vLLM refuses",
        )  # fmt: skip
    for key, own in (("method", "dspark"), ("model", draft.path)):
        if changes.get(key, own) != own:
            raise _refusal(f"--speculative-config {key}", own, repr(changes[key]))
    for key, values in VLLM_VALUES.items():
        if key in changes and changes[key] not in values:
            raise _refusal(
                f"--speculative-config {key}", f"one of {', '.join(values)}", repr(changes[key])
            )
    if "dspark_draft_topk" in changes and flavour_of(draft.raw) == "k3":
        raise _refusal(
            "--speculative-config dspark_draft_topk", "a draft of the qwen3 kind", "a K3 draft"
        )
    warnings = []
    if "num_speculative_tokens" in changes:
        count = _count(changes["num_speculative_tokens"], "num_speculative_tokens")
        warnings += _width(draft, count)
    backend = changes.get("attention_backend")
    if backend is not None and flavour_of(draft.raw) == "k3" and "MLA" not in str(backend).upper():
        warnings.append(
            f"attention_backend {backend}: a K3 draft needs a latent-attention backend that can "
            "run without a causal mask (FLASHINFER_MLA; TRITON_MLA on AMD)."
        )
    return warnings


def _atom(draft: Served, target: str, extra: list[str]) -> Launch:
    if flavour_of(draft.raw) != "k3":
        raise _refusal(
            "--engine atom", "a draft of the K3 kind: ATOM has no class for other separate drafts",
            f"architectures {draft.raw.get('architectures')!r}",
        )  # fmt: skip
    own = {"--method": "dspark", "--draft-model": draft.path}
    for flag, value in own.items():
        extra, given = _take(extra, flag)
        if given not in {None, value}:
            raise _refusal(flag, value, repr(given))
    extra, tokens = _take(extra, TOKENS)
    count = draft.block_size if tokens is None else _count(tokens, TOKENS)
    warnings = _width(draft, count)
    _, schedule = _take(list(extra), "--dspark-config")
    if schedule is not None and _json_object(schedule, "--dspark-config").get(
        "confidence_schedule"
    ):
        warnings.append(
            "--dspark-config confidence_schedule: ATOM does not load the confidence head of a "
            "separate K3 draft; every request verifies the whole block."
        )
    command = ["python", "-m", "atom.entrypoints.openai_server", "--model", target]
    for flag, value in own.items():
        command += [flag, value]
    command += [TOKENS, str(count)]
    given_flags = {word.partition("=")[0] for word in extra}
    # As in ATOM's recipe for K3 drafts, which share the target's cache of latent rows.
    if "--block-size" not in given_flags:
        command += ["--block-size", "128"]
    if not {"--enable_prefix_caching", "--no-enable_prefix_caching"} & given_flags:
        command.append("--no-enable_prefix_caching")
    elif "--enable_prefix_caching" in given_flags:
        warnings.append(
            "--enable_prefix_caching: ATOM's recipe for K3 drafts turns it off; a hit whose draft "
            "rows were never written drafts with an acceptance near 1 (vllm-project/vllm #47930)."
        )
    return Launch((*command, *extra), tuple(warnings))


def _width(draft: Served, count: int) -> list[str]:
    """More tokens than trained are refused, fewer get a figure."""
    size = draft.block_size
    if count == size:
        return []
    if count > size:
        raise _refusal(
            "num_speculative_tokens", f"{size}, the block the draft was trained with, or less",
            f"{count}: slots behind the {size}th were never trained, and engines accept them in "
            "silence (4 % acceptance in vllm-project/vllm #50012)",
        )  # fmt: skip
    figure = ""
    if len(draft.accept_rates) >= size:
        figure = (
            f" Teacher-forced acceptance length {_length(draft.accept_rates[:size]):.2f} with "
            f"{size}, {_length(draft.accept_rates[:count]):.2f} with {count}."
        )
    return [
        f"num_speculative_tokens {count}, trained with {size}: the draft never saw a block of "
        f"{count}, and drafts fewer tokens a step (vllm-project/vllm #50012).{figure}"
    ]


def _length(rates: Sequence[float]) -> float:
    """1 + sum_k prod_{j<=k} c_j."""
    total, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
    return total


def _take(words: list[str], flag: str) -> tuple[list[str], str | None]:
    """``words`` without ``flag`` and its value (``--flag value`` or ``--flag=value``)."""
    kept, found = [], None
    rest = iter(words)
    for word in rest:
        name, equal, value = word.partition("=")
        if name != flag:
            kept.append(word)
            continue
        found = value if equal else next(rest, None)
        if found is None:
            raise _refusal(flag, "a value", "nothing behind it")
    return kept, found


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _refusal(where, "a JSON object", f"{error}") from error
    if not isinstance(value, dict):
        raise _refusal(where, "a JSON object", f"a JSON {type(value).__name__}")
    return value


def _count(value: Any, where: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise _refusal(where, "an integer of at least 1", repr(value))
    return int(text)


def _refusal(where: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=f"dspark serve: {where}",
        fix="Leave it out: the launch line takes it from the checkpoint.",
    )
