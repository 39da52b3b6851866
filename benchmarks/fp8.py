"""What FP8 costs and saves: a trained draft against its quantized self.

    python benchmarks/fp8.py runs/quickstart --prompts 64 --out benchmarks/results/fp8.json

For phase 1 and phase 2: error per module, KL and cosine of logits on the run's stored states,
acceptance length on the run's own held-out prompts with the difference to the float draft and its
95 % interval over prompts, and how long one block takes in each form that runs here. Every arm
decodes the same prompts with the same seeds; at temperature 0 the texts must be the same.

    python benchmarks/fp8.py --convert CHECKPOINT --out benchmarks/results/fp8-convert.json

instead converts a checkpoint of any size in a process of its own and compares with `cp` of the same
files to the same disk, alternating three times. Both are followed by a flush, and the source is in
the page cache as far as memory reaches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.published import read_config
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.cli.origin import origin_of
from dspark.config.recipe import TargetSection
from dspark.data.chat import end_ids, prompt_ids
from dspark.data.shards import read_prompts
from dspark.decoding.acceptance import bootstrap_interval, difference_interval
from dspark.decoding.params import SamplingParams
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.hidden.disk import DiskStore
from dspark.model.draft import DSparkDraft
from dspark.model.fp8 import Fp8Form, serving_form
from dspark.model.spans import BlockContext
from dspark.quantize.compare import Sample, compare
from dspark.quantize.convert import quantize
from dspark.quantize.plan import make_plan

RECIPES = ("phase1", "phase2")
TEMPERATURES = (0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a finished run's folder")
    parser.add_argument("--convert", type=Path, help="a checkpoint whose conversion is timed")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if (options.run is None) == (options.convert is None):
        parser.error("name a run, or a checkpoint with --convert")
    found = time_conversion(options.convert) if options.convert else measure(options)
    result = {
        **origin_of(" ".join(["python", *sys.argv])).model_dump(),
        **found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every arm on one target, prompts interleaved so that a slow minute hits all alike."""
    source = options.run / "draft"
    config, provenance = read_config(source)
    target = load_target(
        TargetSection(
            source=provenance.get("target_path") or provenance["target"],
            dtype=provenance["target_dtype"],
            max_context=provenance["target_max_context"],
        )
    )
    model = target.build(config.target_layer_ids)
    head, embedding = model.head_weight(), model.embedding_weight()
    form = serving_form(target.device)
    with tempfile.TemporaryDirectory() as work:
        folders, sizes = {"float": source}, {"float": weight_bytes(source)}
        for recipe in RECIPES:
            folders[recipe] = Path(work) / recipe
            quantize(make_plan(source, recipe), folders[recipe])
            sizes[recipe] = weight_bytes(folders[recipe])

        def load(name: str, how: Fp8Form, dtype: torch.dtype) -> DSparkDraft:
            return load_draft(folders[name], dtype=dtype, device=target.device, head=head,
                              embedding=embedding, fp8=how)[0]  # fmt: skip

        samples = samples_of(options.run / "states", options.records, config.block_size)
        plain = load("float", "dequantized", torch.float32)
        costs = {
            f"{recipe}, {how}": asdict(
                compare(plain, load(recipe, how, torch.float32), head.float(), samples)
            )
            for recipe in RECIPES
            for how in ("dequantized", "reference")
        }
        # Packed as served here, and as a GPU computes it: activations quantized too.
        arms = {"float": (load("float", form, target.dtype), True)}
        for recipe in RECIPES:
            arms[f"{recipe}, {form}"] = (load(recipe, form, target.dtype), True)
            arms[f"{recipe}, reference"] = (load(recipe, "reference", target.dtype), True)
        drafters = {name: Drafter(draft, head, pack=pack) for name, (draft, pack) in arms.items()}
        rows = acceptance(target, model, drafters, options)
        speed = {name: block_milliseconds(d) for name, d in drafters.items()}
    return {
        "what": "a draft against its FP8 self",
        "draft": str(options.run),
        "weight_bytes": sizes,
        "costs": costs,
        "acceptance": rows,
        "milliseconds_per_block": speed,
    }


def samples_of(states: Path, count: int, width: int) -> list[Sample]:
    """A few blocks of each of ``count`` records, spread over the answer."""
    store = DiskStore(next(path for path in states.iterdir() if path.is_dir()))
    out = []
    for name in store.ids()[:count]:
        record = store.get(name)
        answer = record.loss_mask.nonzero().flatten().tolist()
        inside = [a for a in answer if a and a + width < len(record)]
        out.append(Sample(record.ids, record.taps, inside[:: max(1, len(inside) // 4)][:4]))
    return out


def acceptance(
    target: LoadedTarget, model: Any, drafters: dict[str, Drafter], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Acceptance per arm and temperature, and the paired difference to the float draft."""
    held_out = read_prompts(options.run / "prompts", "held_out")
    step = max(1, len(held_out) // options.prompts)  # spread over the categories
    prompts = held_out[::step][: options.prompts]
    ends = end_ids(target)
    decoders = {name: Decoder(model, drafter, ends) for name, drafter in drafters.items()}
    rows = []
    for temperature in TEMPERATURES:
        counts: dict[str, list[tuple[int, int]]] = {name: [] for name in decoders}
        texts: dict[str, list[list[int]]] = {name: [] for name in decoders}
        for prompt in prompts:
            ids = prompt_ids(target.tokenizer, prompt.messages, prompt.tools)
            params = SamplingParams(
                temperature=temperature,
                seed=zlib.crc32(prompt.id.encode()),
                max_new_tokens=options.max_new_tokens,
            )
            for name, decoder in decoders.items():
                done = decoder.generate(ids, params)
                assert done.counter is not None
                counts[name].append((done.counter.accepted, done.counter.steps))
                texts[name].append(done.ids)
        for name, own in counts.items():
            accepted, steps = (sum(column) for column in zip(*own, strict=True))
            change, low, high = difference_interval(counts["float"], own, seed=0)
            same = sum(a == b for a, b in zip(texts[name], texts["float"], strict=True))
            rows.append(
                {
                    "arm": name,
                    "temperature": temperature,
                    "prompts": len(own),
                    "acceptance_length": 1 + accepted / steps,
                    "ci95": bootstrap_interval(own, seed=0),
                    "difference": change,
                    "difference_ci95": [low, high],
                    "same_text": same if temperature == 0 else None,
                }
            )
            print(
                f"T={temperature:g} {name:<24} {rows[-1]['acceptance_length']:.3f} "
                f"({change:+.3f}, {low:+.3f} to {high:+.3f})",
                flush=True,
            )
    return rows


@torch.inference_mode()
def block_milliseconds(drafter: Drafter, context: int = 256, repeats: int = 20) -> float:
    """Median time of one block's backbone over ``context`` rows, batch 1."""
    draft = drafter.draft
    weight = draft.context_norm.weight
    width = draft.config.row_width
    rows = [torch.randn(1, context, width).to(weight) for _ in draft.draft_layers]
    anchors = torch.tensor([1], device=weight.device)
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        drafter.block_states(anchors, anchors * context, [BlockContext(rows)])
        if weight.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1000


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


CONVERT = """
import json, resource, sys, time
from pathlib import Path
from dspark.quantize.convert import quantize
from dspark.quantize.plan import make_plan
started = time.perf_counter()
manifest = quantize(make_plan(Path(sys.argv[1]), "phase1"), Path(sys.argv[2]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "seconds": time.perf_counter() - started, "cpu_seconds": used.ru_utime + used.ru_stime,
    "peak_memory_bytes": used.ru_maxrss * 1024, "totals": manifest.totals.model_dump(),
    "manifest_sha256": manifest.sha256}))
"""


def time_conversion(source: Path) -> dict[str, Any]:
    """Three times: read the source once, copy and flush, convert (which flushes itself)."""
    out = source.with_name(f"{source.name}.fp8")
    copies, conversions = [], []
    for threads in ("1", "2", "2"):
        for path in source.glob("*.safetensors"):
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass
        copy = source.with_name(f"{source.name}.copy")
        started = time.perf_counter()
        subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
        copied = time.perf_counter() - started
        for path in copy.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        flushed = time.perf_counter() - started
        shutil.rmtree(copy)
        copies.append({"seconds": copied, "seconds_with_flush": flushed})
        command = [sys.executable, "-c", CONVERT, str(source), str(out)]
        done = subprocess.run(command, check=True, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": threads})  # fmt: skip
        shutil.rmtree(out)
        conversions.append({"threads": int(threads), **json.loads(done.stdout)})
        print(copies[-1], conversions[-1]["seconds"], flush=True)
    ratio = statistics.median(c["seconds_with_flush"] for c in copies) / statistics.median(
        c["seconds"] for c in conversions
    )
    return {
        "what": "converting a checkpoint, beside cp of the same files on the same disk",
        "page_cache": "the source was read just before each copy",
        "source_bytes": weight_bytes(source),
        "copies": copies,
        "conversions": conversions,
        "throughput_over_cp": ratio,
    }


if __name__ == "__main__":
    main()
