"""The only file that changes vLLM, and only its V1 (CPU) runner: six changes.

1. ``VllmConfig._get_v1_model_runner_unsupported_features`` lists ``dspark speculative decoding``
   whole. The entry is replaced by what this plugin cannot do, so that vLLM's own error names it.
2. ``gpu_model_runner.EagleProposer``, which the V1 runner would construct for the method, is
   replaced by a subclass that makes our proposer for it and stays itself for every other method.
3. ``rejection_sampler.expand_batch_to_tokens`` spreads a request's temperature, top_k and top_p
   over its drafted tokens. The C++ stand-in of 0.32.0 writes into a copy unless the tensor is
   int64, so that every sampled request under any kind of speculation is judged at the temperature
   that happened to lie in memory: plain tensor operations instead. Greedy ones never came there.
4. ``CPUModelRunner._sample`` and ``_bookkeeping_sync``: a request with a seed whose prompt is not
   finished yet gets its generator rewound, by an offset that generators on a CPU do not have;
   0.32.0 dies of it, with and without a draft. The generator's state is put back instead.
5. ``dispatcher._rebind_kernels`` looks into every attribute of every loaded module, and trips over
   llvmlite's, which answers any question. Loading a K3 draft's class brings llvmlite along.
6. ``rejection_sampler.apply_sampling_constraints`` dies of a step without a drafted token when a
   request has top_k and no top_p: such a step has nothing to constrain.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.triton_utils import dispatcher
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from dspark.vllm_plugin.latent import LatentProposer
from dspark.vllm_plugin.proposer import DSparkProposer

LATENT = "K3DSparkModel"
REFUSED_BY_V1 = "dspark speculative decoding"
_MARK = "_dspark_plugin"


def apply() -> None:
    """Patch this process, once."""
    if getattr(VllmConfig, _MARK, False):
        return
    listed = VllmConfig._get_v1_model_runner_unsupported_features

    def unsupported(self: Any) -> list[str]:
        features: list[str] = listed(self)
        if REFUSED_BY_V1 not in features:
            return features
        return [f for f in features if f != REFUSED_BY_V1] + refusals(self)

    eagle: Any = gpu_model_runner.EagleProposer

    class EagleOrDSpark(eagle):
        """Constructed for drafts of the EAGLE family, to which vLLM counts DSpark."""

        def __new__(cls, vllm_config: Any, device: Any, runner: Any = None) -> Any:
            speculative = vllm_config.speculative_config
            if speculative.method != "dspark":
                return super().__new__(cls)
            latent = LATENT in speculative.draft_model_config.architectures
            made = LatentProposer if latent else DSparkProposer
            return made(vllm_config, device, runner)

    VllmConfig._get_v1_model_runner_unsupported_features = unsupported
    gpu_model_runner.EagleProposer = EagleOrDSpark
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    constrain = rejection_sampler.apply_sampling_constraints
    rejection_sampler.apply_sampling_constraints = lambda logits, counts, metadata: (
        constrain(logits, counts, metadata) if logits.shape[0] else logits
    )
    _rewind_by_state(CPUModelRunner)
    dispatcher._rebind_kernels = _blind_to_llvmlite(dispatcher._rebind_kernels)
    setattr(VllmConfig, _MARK, True)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """``x`` [R] repeated per drafted token [N]; ``replace_from`` becomes ``replace_to``.

    ``cu_num_tokens`` [R] are cumulative counts, the last of them ``num_tokens``.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    spread = x.repeat_interleave(counts)
    if spread.shape[0] != num_tokens:
        raise ValueError(f"{num_tokens} drafted tokens, but counts of {spread.shape[0]}")
    return spread.masked_fill(spread == replace_from, replace_to)


def _rewind_by_state(runner: Any) -> None:
    """Unfinished prompts draw from their own generator and give the numbers back, on ``runner``."""
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def unfinished(self: Any) -> dict[int, torch.Generator]:
        found = self.input_batch.generators
        gone = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return {row: found[row] for row in range(len(gone)) if gone[row] and row in found}

    def sample_and_rewind(self: Any, *args: Any, **named: Any) -> Any:
        before = [(g, g.get_state()) for g in unfinished(self).values()]
        output = sample(self, *args, **named)
        for generator, state in before:
            generator.set_state(state)
        return output

    def bookkeep_without(self: Any, *args: Any, **named: Any) -> Any:
        aside = unfinished(self)
        for row in aside:
            del self.input_batch.generators[row]
        try:
            return bookkeep(self, *args, **named)
        finally:
            self.input_batch.generators.update(aside)

    runner._sample, runner._bookkeeping_sync = sample_and_rewind, bookkeep_without


def _blind_to_llvmlite(rebind: Any) -> Any:
    """``rebind`` without llvmlite's modules, which hold no kernel of vLLM's."""

    def rebound(overrides: Any) -> None:
        aside = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "llvmlite"}
        for name in aside:
            del sys.modules[name]
        try:
            rebind(overrides)
        finally:
            sys.modules.update(aside)

    return rebound


def refusals(config: Any) -> list[str]:
    """What of a DSpark configuration this plugin cannot do, as vLLM will print it."""
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    fields = draft.hf_config
    out: list[str] = []
    if not {"Qwen3DSparkModel", LATENT} & set(draft.architectures):
        out.append(f"dspark drafts of the kind {', '.join(draft.architectures)} on a CPU")
    if speculative.rejection_sample_method != "standard":
        out.append(
            f"rejection_sample_method {speculative.rejection_sample_method} with dspark on a CPU "
            "(use standard)"
        )
    if not getattr(fields, "sample_from_anchor", True):
        out.append("dspark drafts with a bonus anchor (sample_from_anchor false) on a CPU")
    if getattr(fields, "dspark_draft_topk", None) is not None:
        out.append("dspark_draft_topk on a CPU")
    if speculative.num_speculative_tokens_per_batch_size:
        out.append("num_speculative_tokens_per_batch_size with dspark on a CPU")
    trained = getattr(fields, "block_size", None)
    if trained is not None and speculative.num_speculative_tokens > trained:
        out.append(
            f"num_speculative_tokens {speculative.num_speculative_tokens}, more than the block of "
            f"{trained} this draft was trained with"
        )
    if getattr(fields, "draft_vocab_size", fields.vocab_size) not in (None, fields.vocab_size):
        out.append("dspark drafts with a vocabulary of their own on a CPU")
    positions = getattr(fields, "max_position_embeddings", None)
    if positions is not None and config.model_config.max_model_len > positions:
        out.append(
            f"max_model_len {config.model_config.max_model_len} beyond the draft's {positions} "
            f"positions (use --max-model-len {positions})"
        )
    return out
