"""Hands out the hidden states that vLLM's ``extract_hidden_states`` method collects in its cache.

vLLM's own example connector does all of it on a GPU and asks for pinned memory, which a CPU build
does not have. This subclass gathers the rows with plain tensors where the cache lies on a CPU and
leaves everything else, GPUs included, to vLLM. One writer under tensor parallelism: rank 0.

Named to vLLM by ``kv_connector: StateConnector`` with ``kv_connector_module_path`` of this file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

MODULE = __name__
NAME = "StateConnector"


class _Copied:
    """Stands for the event of a copy that is done when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class StateConnector(ExampleHiddenStatesConnector):
    """One safetensors file a request: ``hidden_states`` [S, L + 1, H] and ``token_ids`` [S]."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        pages = torch.tensor(pending.block_ids, dtype=torch.long).unsqueeze(1)
        slots = (pages * self._block_size + torch.arange(self._block_size)).flatten()
        count = pending.token_ids.shape[0]
        if slots.shape[0] < count:
            raise RuntimeError(f"{slots.shape[0]} rows are left of {count} tokens")
        tensors = {
            "hidden_states": extract_from_kv_cache(self._kv_cache, slots, count).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        event = _Copied()
        future = self._executor.submit(
            self._write_tensors,
            tensors,
            event,
            pending.filename,
            self._lock_fds.pop(pending.req_id, None),
        )
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
