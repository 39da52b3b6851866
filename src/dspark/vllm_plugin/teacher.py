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
    """``model`` is a folder of safetensors or a hub id. States are computed in ``precision`` and
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
        for start in range(0, len(answers), self.options.max_num_seqs):
            part = answers[start : start + self.options.max_num_seqs]
            for answer in part:
                self._require_room(answer)
            prompts = [{"prompt_token_ids": list(a.ids)} for a in part]
            asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
            outputs = self.llm.generate(prompts, asked, use_tqdm=False)
            self._hand_over()
            for answer, output in zip(part, outputs, strict=True):
                yield self._record(answer, output)

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

    def _record(self, answer: Answer, output: Any) -> HiddenRecord:
        path = Path(output.kv_transfer_params["hidden_states_path"])
        states = _taken(path)
        if states["token_ids"].tolist() != list(answer.ids):
            raise DataError(
                expected=f"states of the {len(answer.ids)} tokens of answer {answer.id}",
                found=f"states of {len(states['token_ids'])} other tokens",
                where=str(path),
                fix="This is a bug in the connector: please report it.",
            )
        taps, last = states["hidden_states"][:, :-1], states["hidden_states"][:, -1]
        stored, log_z = self._finish(last, answer.prompt_length - 1)
        return make_record(
            answer,
            taps,
            stored,
            dtype=self.options.dtype,
            layer_ids=self.options.layer_ids,
            greedy=_greedy(output, answer.prompt_length - 1),
            log_z=log_z,
            engine=self.name,
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
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model).get_text_config()
    return int(text.num_hidden_layers)


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
