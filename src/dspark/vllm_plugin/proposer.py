"""DSpark drafting on vLLM's V1 runner: vLLM's model class and kernels, our layout and our loop.

The model, its weights, paged cache and attention are vLLM's own (``Qwen3DSparkForCausalLM``); its
V2 runner drives them on GPUs, and needs triton-cpu to run on a CPU. This subclass of the V1
runner's DFlash proposer does the driving instead, in plain tensor operations:

* context rows of every token the target has just computed are written, rejected ones left out;
* a block of K queries per request, the anchor first, starts at the first uncommitted position;
* the Markov head walks the slots, so that slot k is drawn given slot k-1.

Two things differ from what the V1 runner does for other drafts. Rows are written in every step,
also when one request of the batch has no room for a whole block: otherwise all others would get
holes in their cache, and shared prefixes with them. And blocks are cut at ``max_model_len`` by
padding slots instead.

The grouped RMSNorm of context keys is computed layer by layer: the CPU kernel of 0.32.0 takes the
weights of the first layer for all of them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dspark.vllm_plugin.drawing import draw_block


class DSparkProposer(DFlashProposer):
    """Drafts ``num_speculative_tokens`` tokens per request and step; see the module."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        speculative = vllm_config.speculative_config
        # The constructor asserts its own method; everything it prepares serves this one as well.
        speculative.method = "dflash"
        try:
            super().__init__(vllm_config, device, runner)
        finally:
            speculative.method = "dspark"
        size = max(self.max_num_tokens, self.max_query_tokens)
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self._runner = runner
        self._anchors = self._anchor_positions = torch.empty(0, dtype=torch.int64, device=device)
        layers = get_eagle3_aux_layers_from_config(speculative)
        runner.use_aux_hidden_state_outputs = True
        runner._get_eagle3_aux_layers_from_config = lambda: layers
        runner._input_fits_in_drafter = lambda metadata: metadata is not None

    def _get_model(self) -> Any:
        model = load_dspark_model(self._runner.get_model(), self.vllm_config)
        inner = model.model
        inner._normalize_context_k = MethodType(_normalize_layer_by_layer, inner)
        return model

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Context rows of this step's tokens [M], and the block of every request [R x K].

        Args:
            target_token_ids, target_positions: [M], requests one after another.
            next_token_ids: [R], the anchors.
            target_hidden_states: [M, H], combined taps.
            cad: of the target's step; ``slot_mapping`` [M] in the draft's cache group.
            num_rejected_tokens_gpu: [R] at the end of each request's tokens, or None.
        """
        requests, width = cad.batch_size(), self.num_speculative_tokens
        starts = cad.query_start_loc[: requests + 1].long()
        last = starts[1:] - 1
        valid = cad.seq_lens[:requests].long()
        if num_rejected_tokens_gpu is not None:
            last = last - num_rejected_tokens_gpu
            valid = valid - num_rejected_tokens_gpu
        tokens = target_token_ids.shape[0]
        owner = torch.repeat_interleave(torch.arange(requests), starts.diff())
        kept = torch.arange(tokens) <= last[owner]
        self._keep_context(
            target_hidden_states[kept], target_positions[kept], cad.slot_mapping[:tokens][kept]
        )
        # The anchor sits behind the last token whose state is known.
        wanted = (target_positions[last] + 1).unsqueeze(1) + torch.arange(width)
        slots = self._block_slots(cad.block_table_tensor[:requests], wanted)
        total = requests * width
        self.input_ids[:total] = self.parallel_drafting_token_id
        self.input_ids[:total].view(requests, width)[:, 0] = next_token_ids
        self.positions[:total] = wanted.clamp(max=self.max_model_len - 1).flatten()
        self._anchors, self._anchor_positions = next_token_ids.long(), wanted[:, 0]
        query_start = torch.arange(requests + 1, dtype=torch.int32) * width
        upper = cad.seq_lens_cpu_upper_bound
        block = CommonAttentionMetadata(
            query_start_loc=query_start,
            query_start_loc_cpu=query_start,
            seq_lens=(valid + width).clamp(max=self.max_model_len).int(),
            seq_lens_cpu_upper_bound=(
                None if upper is None else (upper + width).clamp(max=self.max_model_len)
            ),
            num_reqs=cad.num_reqs,
            num_actual_tokens=total,
            max_query_len=width,
            max_seq_len=min(cad.max_seq_len + width, self.max_model_len),
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=slots,
            causal=self.dflash_causal,
        )
        return total, torch.arange(total), block

    def _keep_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Where :meth:`build_model_inputs_first_pass` of the base class looks for the rows."""
        count = states.shape[0]
        self._dflash_num_context = count
        self._dflash_hidden_states = states
        self._context_positions_buffer[:count] = positions
        self._context_slot_mapping_buffer[:count] = slots

    def _block_slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """Cache slots [R x K] of ``positions`` [R, K]; padding behind the longest context."""
        inside = positions < self.max_model_len
        at = positions.clamp(max=self.max_model_len - 1)
        pages = table.long().gather(1, at // self.block_size)
        slots: Tensor = pages * self.block_size + at % self.block_size
        return slots.masked_fill(~inside, PADDING_SLOT_ID).flatten()

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [R x K] of backbone states [R x K, H], request after request, and what they were
        drawn from [R x K, V]: None for argmax drafts, which vLLM then verifies as such."""
        width = self.num_speculative_tokens
        base = self.model.compute_draft_logits(hidden_states)
        base = base.view(-1, width, base.shape[-1])
        drawn = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy

        def bias(k: int, previous: Tensor) -> Tensor:
            found: Tensor = self.model.markov_bias(self.model.markov_embed(previous))
            return found

        return draw_block(
            base,
            self._anchors,
            bias,
            sampling_metadata if drawn else None,
            fp64=self.use_fp64_gumbel,
        )


def _normalize_layer_by_layer(model: Any, keys: Tensor) -> Tensor:
    """RMSNorm of context keys [L, M, heads, head_dim], layer i with row i of the weights."""
    out = torch.empty_like(keys)
    for i, weight in enumerate(model._k_norm_weights):
        _custom_ops.rms_norm(out[i], keys[i], weight, model._rms_norm_eps)
    return out
