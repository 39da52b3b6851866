"""K3 drafts on vLLM's V1 runner: our own module, with its latent rows beside vLLM's cache.

vLLM's class for these drafts needs a GPU. Here the draft is ``dspark.model.draft``, the very module
that was trained, and its rows lie in one plain tensor per layer that has a row for every slot of
the target's cache: vLLM's block tables then say where a request's rows are, and prefix hits,
preemption and chunked prefill work as for the target itself. Verification stays vLLM's.

The rows are allocated beside the cache that ``VLLM_CPU_KVCACHE_SPACE`` limits, and come on top.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dspark.model.spans import BlockContext, Segment, groups_of
from dspark.vllm_plugin.drawing import draw_block

if TYPE_CHECKING:
    from dspark.model.draft import DSparkDraft

logger = init_logger("vllm.dspark_plugin")


class LatentProposer(DFlashProposer):
    """Drafts ``num_speculative_tokens`` tokens per request and step; see the module.

    A DFlash proposer only by name, because the runner asserts that it is one of its own kinds: what
    that class prepares is passed over.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        SpecDecodeBaseProposer.__init__(
            self, vllm_config, device, pass_hidden_states_to_model=True, runner=runner
        )
        layers = get_eagle3_aux_layers_from_config(vllm_config.speculative_config)
        runner.use_aux_hidden_state_outputs = True
        runner._get_eagle3_aux_layers_from_config = lambda: layers
        runner._input_fits_in_drafter = lambda metadata: metadata is not None
        self._runner = runner
        self._draft: DSparkDraft
        self._rows: list[Tensor] = []
        self._anchors = self._anchor_positions = torch.empty(0, dtype=torch.int64)

    def load_model(self, target_model: Any) -> None:
        from dspark.checkpoint.draft import load_draft
        from dspark.model.layers import pack_linears

        del target_model  # its head is asked for logits; its embedding is in the draft's files
        folder = Path(self.draft_model_config.model)
        draft, _ = load_draft(folder, dtype=self.dtype, device=self.device)
        self._draft = draft.eval().requires_grad_(False)
        for layer in self._draft.draft_layers:
            layer.self_attn.prepare_serving()
            pack_linears(layer, self.dtype)
        self.model = self._draft
        self._draft_attn_layer_names: set[str] = set()

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """No draft layer is in vLLM's cache."""

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """Allocate a row per slot and layer, in the shape of the target's full-attention group."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        full = [i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        if not full:
            raise ValueError("dspark on a CPU: the target has no layer with full attention")
        self.kv_cache_gid = full[0]
        self.block_size = specs[full[0]].block_size
        slots = kv_cache_config.num_blocks * self.block_size
        config = self._draft.config
        shape = (slots, config.row_width)
        self._rows = [
            torch.zeros(shape, dtype=self.dtype, device=self.device)
            for _ in range(config.num_hidden_layers)
        ]
        size = sum(r.numel() * r.element_size() for r in self._rows)
        logger.info("Draft rows: %.1f MiB beside the cache of %d tokens", size / 2**20, slots)

    def dummy_run(self, *args: Any, **named: Any) -> None:
        """Nothing to compile or to profile."""

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        """Write this step's rows, run every request's block: [R, num_speculative_tokens].

        Shapes as in :meth:`dspark.vllm_plugin.proposer.DSparkProposer.set_inputs_first_pass`;
        ``target_hidden_states`` [M, L x H] are the taps side by side.
        """
        cad = common_attn_metadata
        requests, tokens = cad.batch_size(), target_token_ids.shape[0]
        starts = cad.query_start_loc[: requests + 1].long()
        last = starts[1:] - 1
        if num_rejected_tokens_gpu is not None:
            last = last - num_rejected_tokens_gpu
        owner = torch.repeat_interleave(torch.arange(requests), starts.diff())
        kept = torch.arange(tokens) <= last[owner]
        taps = target_hidden_states.view(tokens, len(self._draft.config.target_layer_ids), -1)
        self._write(taps[kept], target_positions[kept], cad.slot_mapping[:tokens][kept])
        # The anchor sits behind the last token whose state is known.
        at = target_positions[last] + 1
        self._anchors, self._anchor_positions = next_token_ids.long(), at
        states = self._block(at, cad.block_table_tensor[:requests])[:, :num_speculative_tokens]
        drawn = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        found, probs = self._draw(states, sampling_metadata if drawn else None)
        shape = (requests, num_speculative_tokens)
        self._last_draft_probs = None if probs is None else probs.view(*shape, -1).contiguous()
        return found.view(shape)

    def _write(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Rows of tokens with taps [M, L, H] at ``positions`` [M] into ``slots`` [M]."""
        context = self._draft.context(taps.unsqueeze(0))
        fresh = self._draft.context_rows(context, positions.unsqueeze(0))
        for rows, new in zip(self._rows, fresh, strict=True):
            rows[slots.long()] = new[0]

    def _block(self, at: Tensor, table: Tensor) -> Tensor:
        """Backbone states [R, K, H] of the blocks whose anchors sit at ``at`` [R]."""
        draft, width = self._draft, self._draft.config.block_size
        positions = at.unsqueeze(1) + torch.arange(width)
        positions = positions.clamp(max=draft.config.max_position_embeddings - 1)
        groups = groups_of([Segment((), start, width) for start in at.tolist()])
        contexts = [self._context(at[low:high], table[low:high]) for low, high in groups]
        return draft.serve(draft.block_ids(self._anchors), positions, contexts)

    def _context(self, at: Tensor, table: Tensor) -> BlockContext:
        """What blocks at ``at`` [B] read, in the pages of ``table`` [B, pages]."""
        steps = torch.arange(int(at.max()))
        slots = table.long()[:, steps // self.block_size] * self.block_size
        slots = (slots + steps % self.block_size).masked_fill(steps >= at.unsqueeze(1), 0)
        rows = [rows[slots] for rows in self._rows]
        return BlockContext.padded(rows, at, self._draft.config.block_size)

    def _draw(self, states: Tensor, sampling: Any | None) -> tuple[Tensor, Tensor | None]:
        target, markov = self._runner.get_model(), self._draft.markov_head
        base = target.compute_logits(states.flatten(0, 1).contiguous())
        state = markov.start(states[:, 0])

        def bias(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            m, _, state = markov.step(previous, states[:, k], state)
            return F.linear(m, markov.markov_w2.weight)

        shaped = base.view(*states.shape[:2], -1)
        return draw_block(shaped, self._anchors, bias, sampling, fp64=self.use_fp64_gumbel)
