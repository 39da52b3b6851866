"""vLLM as the teacher: answers are prefilled in it, and what its layers said becomes records.

States come from vLLM's own ``extract_hidden_states`` method through our connector, in the dtype the
engine computes in, before anything is rounded for storage. Tapped are the residual streams after
the draft's layers and, as one more slot, the stream behind the last layer, to which the engine's
own final norm is applied here: vLLM hands it out before that norm.

The greedy tokens of a record are vLLM's own: the best token of its prompt log-probabilities, and
the one it generated behind the last. The trainer's self-test holds the states against them. With
prefix caching on, states of a shared beginning would be missing; it is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from dspark.capture.embedded import make_record
from dspark.config.layers import to_convention
from dspark.errors import DataError, TargetError
from dspark.hidden.answers import Answer
from dspark.hidden.record import HiddenRecord
from dspark.vllm_plugin import connector, vllm_version


@dataclass(frozen=True)
class TeacherOptions:
    """``model`` is a folder of safetensors. States are computed in ``precision`` and
    stored in ``dtype``; ``scratch`` holds the engine's files until they are read."""

    model: str
    layer_ids: tuple[int, ...]
    scratch: Path
    precision: str = "float32"
    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 2048
    batch_tokens: int = 4096
    max_num_seqs: int = 16


class VllmTeacher:
    """An engine in this process that makes records of answers.

    Raises:
        TargetError: vLLM cannot load the target, or cannot tap it.
    """

    def __init__(self, options: TeacherOptions) -> None:
        self.options = options
        options.scratch.mkdir(parents=True, exist_ok=True)
        try:
            self.llm = LLM(**engine_arguments(options))
        except Exception as error:
            raise TargetError(
                expected="a target that vLLM can load and tap",
                found=f"{type(error).__name__}: {error}",
                where=f"{options.model} in vLLM {vllm_version()}",
                fix="Its own message is above; capture.engine embedded does without vLLM.",
            ) from error
        self.name = f"vllm {vllm_version()} {options.precision} torch {torch.__version__}"

    def records(self, answers: Sequence[Answer]) -> Iterator[HiddenRecord]:
        """One record per answer, in their order.

        Raises:
            DataError: an answer longer than the context.
            DamagedArtifactError: states that are shortened or not finite.
        """
        for answer, output, states in self._observed(answers):
            stored, log_z = self._finish(states[:, -1], answer.prompt_length - 1)
            yield make_record(
                answer,
                states[:, :-1],
                stored,
                dtype=self.options.dtype,
                layer_ids=self.options.layer_ids,
                greedy=_greedy(output, answer.prompt_length - 1),
                log_z=log_z,
                engine=self.name,
            )

    def states(self, answers: Sequence[Answer]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every answer: taps [S, L, H], and both sides of the engine's final norm [S, H].

        In the dtype the engine computes in, final ones in ``options.dtype``; raises as
        :meth:`records`.
        """
        for _, _, states in self._observed(answers):
            final, _ = self._finish(states[:, -1], len(states) - 1)
            yield states[:, :-1], states[:, -1], final

    def generate(self, prompts: Sequence[Sequence[int]], asked: Sequence[SamplingParams]) -> Any:
        """vLLM's own outputs, whose states are thrown away."""
        wanted = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.llm.generate(wanted, list(asked), use_tqdm=False)
        self._hand_over()
        for output in outputs:
            _taken(Path(output.kv_transfer_params["hidden_states_path"]))
        return outputs

    def _observed(self, answers: Sequence[Answer]) -> Iterator[tuple[Answer, Any, Tensor]]:
        """(answer, vLLM's output, streams [S, L + 1, H]), a batch of the engine at a time."""
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
        for start in range(0, len(answers), self.options.max_num_seqs):
            part = answers[start : start + self.options.max_num_seqs]
            for answer in part:
                self._require_room(answer)
            prompts = [{"prompt_token_ids": list(a.ids)} for a in part]
            outputs = self.llm.generate(prompts, asked, use_tqdm=False)
            self._hand_over()
            # All at once: whoever stops listening half-way must leave no file behind.
            streams = [_streams(a, o) for a, o in zip(part, outputs, strict=True)]
            yield from zip(part, outputs, streams, strict=True)

    def _hand_over(self) -> None:
        """Finished requests give up their states in the step after their last, which an engine in
        this process only takes when it is asked to; in a process of its own it goes on by itself.
        """
        engine = self.llm.llm_engine
        inside = getattr(engine.engine_core, "engine_core", None)
        while inside is not None and inside.scheduler.has_requests():
            engine.step()

    def _require_room(self, answer: Answer) -> None:
        if len(answer.ids) >= self.options.max_model_len:
            raise DataError(
                expected=f"at most {self.options.max_model_len - 1} tokens in an answer",
                found=str(len(answer.ids)),
                where=f"answer {answer.id}",
                fix="Raise max_model_len: one more token is generated behind the answer.",
            )

    def _finish(self, last: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """States after the engine's final norm [S, H], as stored; log-partitions from ``first``."""

        def head(model: Any) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                inner = (
                    model.get_language_model() if hasattr(model, "get_language_model") else model
                )
                device = next(inner.parameters()).device
                final = inner.model.norm(last.to(device))
                stored = final.to(self.options.dtype)
                logits = inner.compute_logits(stored[first:].to(final.dtype)).float()
                return stored.cpu(), torch.logsumexp(logits, -1).cpu()

        found: tuple[Tensor, Tensor] = self.llm.apply_model(head)[0]
        return found


def engine_arguments(options: TeacherOptions) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine that is read from; eager on a CPU, where compiling
    costs minutes."""
    from vllm.platforms import current_platform

    # The last layer's stream is no tap of a draft; it is what the final norm is applied to here.
    wanted = (*options.layer_ids, _depth(options.model) - 1)
    slots = list(to_convention(wanted, "eagle_aux_hidden_state_layer_ids"))
    return {
        "model": options.model,
        "dtype": options.precision,
        "enforce_eager": bool(current_platform.is_cpu()),
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(options.batch_tokens, options.max_num_seqs),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": slots}},
        },
        "kv_transfer_config": {
            "kv_connector": connector.NAME,
            "kv_connector_module_path": connector.MODULE,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(options.scratch),
                "use_synchronization_lock": True,
            },
        },
    }


def _depth(model: str) -> int:
    """Number of decoder layers."""
    return int(_config(model).num_hidden_layers)


def room_for(model: str, longest: int) -> int:
    """Context for sequences of ``longest`` tokens and the one vLLM generates behind them, as far as
    the target goes: a sequence as long as the target can read has no token behind it in vLLM."""
    return min(longest + 1, int(getattr(_config(model), "max_position_embeddings", longest + 1)))


def _config(model: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()


def _streams(answer: Answer, output: Any) -> Tensor:
    """The streams behind every tapped layer and the last one, [S, L + 1, H]."""
    path = Path(output.kv_transfer_params["hidden_states_path"])
    states = _taken(path)
    if states["token_ids"].tolist() != list(answer.ids):
        raise DataError(
            expected=f"states of the {len(answer.ids)} tokens of answer {answer.id}",
            found=f"states of {len(states['token_ids'])} other tokens",
            where=str(path),
            fix="This is a bug in the connector: please report it.",
        )
    return states["hidden_states"]


def _taken(path: Path) -> dict[str, Tensor]:
    """Read and remove one request's file; waits for its writer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    tensors: dict[str, Tensor] = load_hidden_states(str(path))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    cleanup_hidden_states(str(path))
    return tensors


def _greedy(output: Any, first: int) -> Tensor:
    """The engine's best token behind every position from ``first`` on [S - first], int32."""
    best = []
    for entry in output.prompt_logprobs[first + 1 :]:
        best.append(next(i for i, found in entry.items() if found.rank == 1))
    best.append(output.outputs[0].token_ids[0])
    return torch.tensor(best, dtype=torch.int32)
