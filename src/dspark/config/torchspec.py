"""A TorchSpec YAML as a recipe of ours, and a list of what has no counterpart.

Nothing is dropped in silence: every key of the file is either written into the recipe, or named
with the reason why it is not. What a recipe needs and the file does not say is left ``null``, which
loading refuses until somebody fills it in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config.load import parse_yaml
from dspark.config.prompts import FILL_IN
from dspark.errors import ConfigError

UNSET = "???"  # a mandatory value that its file leaves to the user

# Reasons by key or section, the longest match counts.
REASONS = {
    "mooncake": "set by Mooncake's own environment variables (docs/training.md)",
    "inference": "a teacher is started by `dspark teach`; its engine's options are its own",
    "inference.last_hidden_states_prenorm": "every record says it, and the trainer norms once",
    "inference.store_last_hidden_states": "always, and only where it is supervised",
    "training.max_concurrent_batches": "the pool (train.stream.pool_gb) bounds what is ahead",
    "training.prefetch_depth": "the pool (train.stream.pool_gb) bounds what is ahead",
    "training.attention_backend": "chosen by device, from one mask",
    "training.fsdp_strategy": "always fully sharded",
    "training.fsdp_reduce_dtype": "always float32",
    "training.load_path": "a cut run resumes by itself; train.init_from starts from weights",
    "training.min_lr": "schedules end at 0",
    "training.ttt_length": "of another method; a draft has draft.block_size slots",
    "training.save_per_epoch": "by steps only (train.checkpoint_every)",
    "dataset.chat_template": "the target's own template",
    "dataset.renderer": "the target's own template",
    "dataset.last_turn_loss_only": "prompts are answered by the target; only its answer counts",
    "dataset.min_loss_tokens": "answers of two tokens are enough for an anchor",
    "model.embedding_key": "found by the target's family",
    "model.lm_head_key": "found by the target's family",
    "model.norm_key": "found by the target's family",
    "debug": "no counterpart",
    "logging": "the logger's own environment variables",
}


@dataclass
class Imported:
    """``recipe`` as plain data; ``left`` are (key, value, reason), ``missing`` keys to fill in."""

    recipe: dict[str, Any]
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_torchspec(path: Path) -> Imported:
    """Read and convert; the draft's own config is read when the file names one that is there.

    Raises:
        ConfigError: unreadable, or not a TorchSpec file.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(str(error), path) from error
    if not isinstance(data, dict) or not {"model", "training"} <= set(data):
        raise _refused("no sections model and training", path)
    return _Importer(data, path).run()


def _refused(found: str, path: Path) -> ConfigError:
    return ConfigError(
        expected="a TorchSpec YAML (sections model, dataset, training, inference, mooncake)",
        found=found,
        where=str(path),
        fix="Name the file that TorchSpec's --config takes.",
    )


def leaves(data: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{at}.{key}" if at else str(key))
    else:
        yield at, data


class _Importer:
    def __init__(self, data: dict[str, Any], path: Path) -> None:
        self.path = path
        self.values = {k: v for k, v in leaves(data) if v is not None and v != UNSET}
        self.used: set[str] = set()
        self.out = Imported({})

    def take(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that the file has; all of them count as used."""
        found = [self.values[n] for n in names if n in self.values]
        self.used.update(n for n in names if n in self.values)
        return found[0] if found else default

    def copy(
        self, to: str, *names: str, convert: Callable[[Any], Any] = lambda value: value
    ) -> None:
        value = self.take(*names)
        if value is not None:
            self.put(to, convert(value))

    def put(self, to: str, value: Any) -> None:
        node = self.out.recipe
        *sections, last = to.split(".")
        for key in sections:
            node = node.setdefault(key, {})
        node[last] = value

    def need(self, to: str, value: Any) -> None:
        """A key that a recipe must have: null until somebody fills it in."""
        self.put(to, value)
        if value is None:
            self.out.missing.append(to)

    def run(self) -> Imported:
        self.need("name", self.path.stem)
        self.put("output", self.take("output_dir", default=f"runs/{self.path.stem}"))
        self.need("target.source", self.take("model.target_model_path"))
        self._lengths()
        self._data()
        self._draft()
        self._training()
        self._stream()
        for key, value in self.values.items():
            if key not in self.used:
                self.out.left.append((key, value, _reason(key)))
        return self.out

    def _lengths(self) -> None:
        longest = self.take("training.max_seq_length", default=8192)
        answer = min(self.take("decode.max_new_tokens", default=longest // 2), longest // 2)
        self.put("target.max_context", longest)
        self.put("target.dtype", "bfloat16")
        self.put("prompts.max_prompt_tokens", longest - answer)
        self.put("regenerate.max_new_tokens", answer)
        warm = self.take("decode.temperature", default=1.0)
        self.put("regenerate.temperatures", [0.0, warm] if warm else [0.0])
        for section in ("regenerate", "capture"):
            self.put(f"{section}.precision", "bfloat16")
        self.put("bench.max_new_tokens", max(8, min(answer, 1024)))

    def _data(self) -> None:
        self.put("prompts.workload", ["general"])
        source = self.take("dataset.train_data_path")
        rows = _count_lines(self.path.parent / source) if source else None
        local = source is None or str(source).endswith((".jsonl", ".json", ".csv", ".parquet"))
        kind = {"kind": "file", "path": source}
        if not local:
            kind = {"kind": "hub", "dataset": source, "revision": FILL_IN}
            self.out.missing.append("prompts.sources.0.revision")
        self.put(
            "prompts.sources",
            [{**kind, "category": "general", "train": rows, "held_out": 64}],
        )
        if source is None:
            self.out.missing.append("prompts.sources.0.path")
        if rows is None:
            self.out.missing.append("prompts.sources.0.train")
        self.copy("train.eval_every", "dataset.eval_interval")
        self.out.notes.append(
            "assistant turns of the data are not used: the target answers every prompt itself"
        )

    def _draft(self) -> None:
        config = self.take("model.draft_model_config")
        raw = _draft_json(self.path, config) if config else None
        if config and raw is None:
            self.out.left.append(("model.draft_model_config", config, "not here, or not JSON"))
        raw = raw or {}
        latent = "kv_lora_rank" in raw
        self.put("draft.flavour", "k3" if latent or not raw else "qwen3")
        names = ["num_hidden_layers", "intermediate_size", "num_attention_heads", "markov_rank"]
        names += ["markov_head_type"]
        k3 = ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        names += k3 if latent else ["head_dim", "num_key_value_heads"] if raw else []
        for name in names:
            if raw.get(name) is not None:
                self.put(f"draft.{name}", raw[name])
        mask = raw.get("mask_token_id") or raw.get("dflash_config", {}).get("mask_token_id")
        self.need("draft.mask_token_id", mask)
        ids = self.take("inference.aux_hidden_states_layers") or raw.get("target_layer_ids")
        if ids:
            self.put("draft.target_layer_ids", list(ids))
        self.used.update(k for k in self.values if k.endswith("num_target_layers"))
        self.copy("draft.block_size", "training.dspark_block_size", "training.dflash_block_size")
        self.copy("train.init_from", "model.initial_draft_model_path")

    def _training(self) -> None:
        for to, *names in (
            ("train.seed", "training.seed"),
            ("train.epochs", "training.num_epochs"),
            ("train.batch_size", "training.micro_batch_size"),
            ("train.learning_rate", "training.learning_rate"),
            ("train.weight_decay", "training.weight_decay"),
            ("train.warmup_ratio", "training.warmup_ratio"),
            ("train.max_grad_norm", "training.max_grad_norm"),
            ("train.decay_ratio", "training.lr_wsd_decay_ratio", "training.wsd_decay_ratio"),
            ("train.checkpoint_every", "training.save_interval"),
            ("train.checkpoint_activations", "training.gradient_checkpointing"),
            ("train.compile", "training.compile_model"),
            ("train.num_anchors", *_both("num_anchors")),
            ("train.loss.decay", *_both("loss_decay_gamma")),
            ("train.loss.ce", *_both("ce_loss_alpha"), "training.dflash_dspark_ce_alpha"),
            ("train.loss.l1", *_both("l1_loss_alpha"), "training.dflash_dspark_l1_alpha"),
            (
                "train.loss.confidence",
                "training.dspark_confidence_head_alpha",
                "training.dflash_dspark_confidence_alpha",
            ),
        ):
            self.copy(to, *names)
        self.take("training.dflash_loss_objective")
        self.copy("train.schedule", "training.lr_decay_style", convert=lambda v: str(v).lower())
        ranks = self.take("training.training_num_nodes", default=1)
        ranks *= self.take("training.training_num_gpus_per_node", default=1)
        # Micro-batches of all ranks together are one step here.
        self.put(
            "train.accumulate", ranks * self.take("training.draft_accumulation_steps", default=1)
        )
        self.put("cluster.trainer_ranks", ranks)
        sinks = {self.take("logging.report_to", default="none"), "jsonl"} - {"none"}
        for name in ("tensorboard", "wandb"):
            if self.take(f"logging.use_{name}"):
                sinks.add(name)
        self.put("train.log", sorted(sinks))

    def _stream(self) -> None:
        engine = self.take("inference.inference_engine_type", "model.target_model_backend")
        if engine == "offline":
            mode = "offline"
        else:
            mode = "online" if self.take("training.train_with_decode") else "replay"
        self.put("train.mode", mode)
        if mode == "online":
            self.put("train.order", "shuffled")
        each = self.take("inference.inference_num_gpus_per_engine", default=1)
        self.put(
            "cluster.teachers", max(1, self.take("inference.inference_num_gpus", default=1) // each)
        )
        samples = self.take("inference.max_sample_pool_size")
        hidden = self.take("mooncake.hidden_dim")
        if samples and hidden and mode != "offline":
            longest = self.out.recipe["target"]["max_context"]
            self.put("train.stream.pool_gb", round(samples * longest * 6 * hidden * 2 / 1e9, 3))
        if mode != "offline":
            tcp = self.take("mooncake.protocol", default="tcp") == "tcp"
            self.put("train.stream.transport", "tcp" if tcp else "mooncake")
            self.put("train.stream.teachers", 0)
            self.put("train.stream.endpoint", "tcp://0.0.0.0:5600")


def _both(name: str) -> tuple[str, str]:
    return f"training.dspark_{name}", f"training.dflash_{name}"


def _reason(key: str) -> str:
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        found = REASONS.get(".".join(parts[:size]))
        if found is not None:
            return found
    return "no counterpart"


def _count_lines(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip()) if path.suffix == ".jsonl" else None
    except OSError:
        return None


def _draft_json(path: Path, name: str) -> dict[str, Any] | None:
    for folder in (Path(), path.parent, path.parent.parent):
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
            return raw if isinstance(raw, dict) else None
        except (OSError, ValueError):
            continue
    return None
