"""``dspark doctor --engine vllm``: the live checks on what the real vLLM answers and computes.

Two processes of vLLM's environment, one after the other: with the draft, as ``dspark serve --engine
vllm`` would start it, and without it, handing out the states that ``capture.engine: vllm`` stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from dspark.checkpoint.draft import is_slim
from dspark.checkpoint.materialise import safetensors_source
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.launch import Served, launch
from dspark.cli.vllm_process import VllmFound, find_vllm, run_module, vllm_python
from dspark.data.chat import end_ids
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import Generation
from dspark.doctor.engine import Text
from dspark.doctor.findings import Check, passed, skipped
from dspark.doctor.predicates import provenance_of
from dspark.doctor.probe import EMBEDDING_LAYER, Example
from dspark.errors import ConfigError

ENGINE = "the live checks are run by the engine that was named"
MODULE = "dspark.vllm_plugin.examine"


@dataclass(frozen=True)
class VllmEngine:
    """vLLM with the draft that ``speculative`` names, on a target whose safetensors lie in
    ``model``; ``layer_ids`` are tapped."""

    found: VllmFound
    model: str
    speculative: dict[str, Any]
    target: LoadedTarget
    layer_ids: tuple[int, ...]
    folder: Path
    ours: ClassVar[bool] = False

    def drafted(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[Generation]:
        """Raises EngineProcessError: vLLM failed."""
        block = int(self.speculative["num_speculative_tokens"])
        job = {"speculative": self.speculative, "prompts": list(prompts)}
        for answer in self._run(job, prompts, params, block):
            counter = AcceptanceCounter(block)
            counter.steps = answer["num_drafts"]
            counter.drafted = counter.admitted = answer["num_draft_tokens"]
            counter.accepted = answer["num_accepted_tokens"]
            yield Generation(ids=answer["ids"], counter=counter)

    def observed(
        self, prompts: Sequence[list[int]], params: SamplingParams, texts: Sequence[Text]
    ) -> tuple[list[Generation], list[Example]]:
        """Raises EngineProcessError: vLLM failed."""
        job = {
            "speculative": None,
            "prompts": list(prompts),
            "texts": [(t.ids, t.prompt_length) for t in texts],
            "layer_ids": self.layer_ids,
        }
        room = [*prompts, *(t.ids for t in texts)]
        answers = [Generation(ids=a["ids"]) for a in self._run(job, room, params, 0)]
        states = load_file(self.folder / "states.safetensors", device=str(self.target.device))
        embedding = self.target.build(()).embedding_weight()
        examples = []
        for number, text in enumerate(texts):
            taps = states[f"{number}.taps"]
            ids = torch.tensor(text.ids, device=self.target.device)
            streams = {i: taps[:, k] for k, i in enumerate(self.layer_ids)}
            streams[EMBEDDING_LAYER] = embedding[ids]
            sides = (states[f"{number}.{side}"] for side in ("final", "before"))
            examples.append(Example(ids, text.prompt_length, streams, *sides))
        return answers, examples

    def _run(
        self,
        job: Mapping[str, Any],
        texts: Sequence[list[int]],
        params: SamplingParams,
        block: int,
    ) -> list[dict[str, Any]]:
        longest = max(map(len, texts)) + params.max_new_tokens + block + 1
        whole = {
            **job,
            "model": self.model,
            "precision": str(self.target.dtype).removeprefix("torch."),
            "max_model_len": min(longest, self.target.max_context),
            "max_tokens": params.max_new_tokens,
            "end_ids": sorted(end_ids(self.target)),
            "folder": str(self.folder),
        }
        path = self.folder / "job.json"
        path.write_text(json.dumps(whole), encoding="utf-8")
        run_module(MODULE, [str(path)], lambda _: None)
        found: list[dict[str, Any]] = json.loads((self.folder / "answers.json").read_text())
        return found


def vllm_engine(
    checkpoint: Path,
    raw: dict[str, Any],
    target: LoadedTarget,
    layer_ids: tuple[int, ...],
    scratch: Path,
) -> tuple[VllmEngine | None, Check]:
    """vLLM for the live checks, or None with the reason why our own engine runs them.

    A GGUF target is written out into ``scratch``, unless a server has done so beside the draft.

    Raises:
        TargetError: a GGUF target that cannot be written out.
    """
    try:
        found = find_vllm(vllm_python())
    except ConfigError as error:
        return None, _ours(f"{error.found}. {error.fix}")
    if found.cpu and not (found.known and found.plugin):
        return None, _ours(f"dspark's plugin does not act in vLLM {found.version}")
    if is_slim(dict(provenance_of(raw))):
        return None, _ours("a slim draft: vLLM reads the embedding from the draft's own files")
    beside = checkpoint.resolve().parent / "vllm-target-float32"
    served = target.dtype == torch.float32 and beside.exists()
    model = safetensors_source(target.files, beside if served else scratch / "target", target.dtype)
    draft = Served(str(checkpoint.resolve()), raw)
    command = launch("vllm", draft, model, [], cpu=found.cpu).command
    spec = json.loads(command[command.index("--speculative-config") + 1])
    engine = VllmEngine(found, model, spec, target, layer_ids, scratch)
    where = "CPU" if found.cpu else "GPU"
    return engine, passed("live.engine", ENGINE, f"vLLM {found.version} on a {where}")


def _ours(why: str) -> Check:
    return skipped("live.engine", ENGINE, f"run by dspark's own engine: {why}")
