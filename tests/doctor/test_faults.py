"""Every fault of the field is caught AND named; the sound draft it was made from passes.

One checkpoint per fault, made from one small trained draft. What a fault must fail is written
beside it; the acceptance check may fail with it, nothing else may.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import faulty
import pytest
import torch
from faulty import Config, Weights, edit_config, edit_weights, set_everywhere
from rich.console import Console

from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.cli.console import Screen
from dspark.cli.doctor import examine
from dspark.cli.doctor_target import Request
from dspark.config.recipe import TargetSection
from dspark.doctor.findings import Examination
from dspark.doctor.rules import ENGINES

ALSO = {"live.acceptance"}
"""May fail beside the named check."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LoadedTarget:
    return load_target(TargetSection(source=str(tiny_target), max_context=256))


@pytest.fixture
def draft(tiny_run: Path, tmp_path: Path) -> Path:
    return faulty.copy_of(tiny_run / "draft", tmp_path / "draft")


@pytest.fixture
def doctor(tiny_run: Path, tiny_target: Path, tmp_path: Path) -> Callable[..., Examination]:
    """Examine a folder, beside the target on eight prompts of the workload if ``live``."""
    prompts = tmp_path / "eight.jsonl"
    lines = (tiny_run.parent / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[:8]))

    def run(folder: Path, *, live: bool) -> Examination:
        request = Request(folder, ENGINES, str(tiny_target) if live else None, prompts)
        return examine(request, Screen(Console(quiet=True)))

    return run


def failures(exam: Examination) -> set[str]:
    for check in exam.checks:
        if check.status == "fail":
            assert check.cause, check.id
            assert check.mend, check.id
    return set(exam.ids("fail"))


def test_the_sound_draft_passes_every_question(tiny_run: Path, draft: Path, doctor) -> None:
    for folder in (tiny_run / "draft", draft):
        exam = doctor(folder, live=True)
        assert exam.sound, failures(exam)
        assert not exam.ids("warn")
        asked = set(exam.ids("pass"))
        for family in ("states", "layers", "layout", "labels", "norm", "mask", "rope", "embedding"):
            assert f"live.{family}" in asked
        assert "live.acceptance" in asked


# --- faults of training, which only the draft's own behaviour shows ------------------------------


def test_1_trained_on_states_before_the_norm(draft, doctor, tiny_run, target) -> None:
    records = faulty.before_the_norm(faulty.records_of(tiny_run), target)
    faulty.train_wrongly(draft, records, target.build(()).head_weight(), steps=80)
    found = failures(doctor(draft, live=True))
    assert "live.norm" in found
    assert found <= {"live.norm"} | ALSO


def test_2_trained_in_the_fill_in_layout(draft, doctor, tiny_run, target) -> None:
    head = target.build(()).head_weight()
    faulty.train_wrongly(draft, faulty.records_of(tiny_run), head, fill_in=True)
    found = failures(doctor(draft, live=True))
    assert "live.layout" in found
    assert found <= {"live.layout"} | ALSO


def test_7_trained_with_labels_one_token_late(draft, doctor, tiny_run, target) -> None:
    head = target.build(()).head_weight()
    faulty.train_wrongly(draft, faulty.records_of(tiny_run), head, shift=1)
    found = failures(doctor(draft, live=True))
    assert "live.labels" in found
    assert found <= {"live.labels"} | ALSO


@pytest.mark.parametrize(("trained", "declared"), [([0], [1]), ([1], [2]), ([1, 2], [0, 1])])
def test_3_layers_off_by_one_in_either_direction(
    draft, doctor, tiny_run, target, trained, declared
) -> None:
    """The draft was trained on other layers than its config says, one lower or one higher."""
    faulty.keep_taps(draft, trained)
    records = faulty.of_layers(faulty.records_of(tiny_run), trained)
    faulty.train_wrongly(draft, records, target.build(()).head_weight(), steps=60)
    faulty.declare_layers(draft, declared)
    exam = doctor(draft, live=True)
    told = next(c for c in exam.checks if c.id == "live.layers")
    assert failures(exam) - ALSO == {"live.layers"}, told.found
    assert str(trained) in told.cause


# --- faults of the file, with the live examination ------------------------------------------------


def _random_embedding(weights: Weights) -> None:
    torch.manual_seed(0)
    weights["embed_tokens.weight"] = torch.randn_like(weights["embed_tokens.weight"])


def _half_split(folder: Path) -> None:
    """Rows of the rotated parts in the order of the other convention."""
    config = {"rope": 16, "nope": 16}
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])

    def permute(weights: Weights) -> None:
        for name, value in weights.items():
            if name.endswith("kv_a_proj_with_mqa.weight"):
                weights[name] = torch.cat([value[:-16], value[-16:][order]])
            if name.endswith("q_b_proj.weight"):
                heads = value.unflatten(0, (-1, config["nope"] + config["rope"]))
                turned = torch.cat([heads[:, :16], heads[:, 16:][:, order]], 1)
                weights[name] = turned.flatten(0, 1)

    edit_weights(folder, permute)


def test_8_a_random_embedding(draft, doctor) -> None:
    found = failures(doctor(edit_weights(draft, _random_embedding), live=True))
    assert "live.embedding" in found


def test_9_the_other_rotary_convention(draft, doctor) -> None:
    _half_split(draft)
    assert failures(doctor(draft, live=True)) - {"live.acceptance"} == {"live.rope"}


def test_9_yarn_declared_for_a_draft_trained_without(draft, doctor) -> None:
    def declare(raw: Config) -> None:
        raw["rope_parameters"] |= {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
        }  # fmt: skip

    exam = doctor(edit_config(draft, declare), live=True)
    assert failures(exam) - {"live.acceptance"} == {"live.rope"}


@pytest.mark.parametrize(
    ("mask", "name"), [(0, "<pad>"), (2, "<eos>"), (6, "<assistant>"), (9, "2")]
)
def test_5_mask_is_pad_eos_a_template_token_or_an_ordinary_one(draft, doctor, mask, name) -> None:
    edit_config(
        draft, lambda raw: set_everywhere(raw, "mask_token_id", "dspark_noise_token_id", mask)
    )
    exam = doctor(draft, live=False)
    assert failures(exam) == {"tokens.mask"}
    assert name in next(c for c in exam.checks if c.id == "tokens.mask").found


def test_5_a_mask_changed_after_training_is_found_by_its_effect(draft, doctor) -> None:
    edit_config(draft, lambda raw: set_everywhere(raw, "mask_token_id", "dspark_noise_token_id", 3))
    exam = doctor(draft, live=True)
    assert failures(exam) - ALSO == {"tokens.mask", "live.mask"}
    told = next(c for c in exam.checks if c.id == "live.mask")
    assert "MASK = 4 <mask>" in told.cause, "the id it was trained with is named"


# --- faults of the file that need no target -------------------------------------------------------


def _set(**values: object) -> Callable[[Config], object]:
    return lambda raw: raw.update(values)


def _drop(key: str) -> Callable[[Config], object]:
    return lambda raw: raw.pop(key)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0}
CONFIG_FAULTS: dict[str, tuple[Callable[[Config], object], set[str]]] = {
    "2 layout undeclared": (_drop("sample_from_anchor"), {"rules.sample_from_anchor"}),
    "2 layout declared as fill-in": (_set(sample_from_anchor=False), {"rules.sample_from_anchor"}),
    "2 another method's section": (
        _set(dflash_config={"mask_token_id": 4}), {"rules.dflash_config"},
    ),
    "3 aliases of layers disagree": (
        _set(dspark_target_layer_ids=[1, 2, 3]), {"rules.dspark_target_layer_ids"},
    ),
    "3 an engine's own ids": (
        _set(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), {"rules.eagle_aux_hidden_state_layer_ids"},
    ),
    "4 last layer tapped": (
        lambda raw: set_everywhere(raw, "target_layer_ids", "dspark_target_layer_ids", [0, 1, 3]),
        {"config.layers"},
    ),
    "4 duplicate layers": (
        lambda raw: set_everywhere(raw, "target_layer_ids", "dspark_target_layer_ids", [0, 1, 1]),
        {"config.layers"},
    ),
    "4 minus one": (
        lambda raw: set_everywhere(raw, "target_layer_ids", "dspark_target_layer_ids", [0, 1, -1]),
        {"config.layers"},
    ),
    "5 no mask": (_drop("mask_token_id"), {"config.mask_token", "tokens.mask"}),
    "5 alias of mask": (_set(dspark_noise_token_id=0), {"rules.dspark_noise_token_id"}),
    "9 interleave flag": (_set(rope_interleave=True), {"rules.rope_interleave"}),
    "9 old rope key": (
        lambda raw: raw.update(rope_scaling=raw.pop("rope_parameters")), {"rules.rope_parameters"},
    ),
    "9 attention factor": (
        lambda raw: raw["rope_parameters"].update(attention_factor=1.0),
        {"rules.rope_parameters.attention_factor"},
    ),
    "9 yarn without mscale_all_dim": (
        _set(rope_parameters={**YARN, "original_max_position_embeddings": 64}),
        {"rules.rope_parameters.mscale_all_dim"},
    ),
    "9 yarn without its length": (
        _set(rope_parameters={**YARN, "mscale_all_dim": 1.0}),
        {"rules.rope_parameters.original_max_position_embeddings"},
    ),
    "9 positions beyond the table": (
        _set(rope_parameters={**YARN, "mscale_all_dim": 1.0,
                              "original_max_position_embeddings": 16}),
        {"rules.max_position_embeddings"},
    ),
    "23 alias of gamma": (_set(dspark_block_size=4), {"rules.dspark_block_size"}),
    "23 gamma edited": (_set(block_size=4, dspark_block_size=4), {"trained.block_size"}),
    "23 no gamma": (_drop("block_size"), {"config.block_size", "trained.block_size"}),
    "depth for the number of taps": (_set(num_target_layers=4), {"rules.num_target_layers"}),
    "trained before the norm": (
        lambda raw: raw["dspark_provenance"].update(norm_state="pre"), {"config.norm_state"},
    ),
    "another template": (
        lambda raw: raw["dspark_provenance"].update(template_hash="0" * 64),
        {"target.template_hash"},
    ),
    "another tokenizer": (
        lambda raw: raw["dspark_provenance"].update(tokenizer_hash="0" * 64),
        {"target.tokenizer_hash"},
    ),
    "unknown architecture": (_set(architectures=["Qwen3DSparkForCausalLM"]), {"rules.architectures"}),
    "confidence head off by default": (
        _drop("confidence_head_with_markov"), {"rules.confidence_head_with_markov"},
    ),
    "a size left to the family's default": (_drop("kv_lora_rank"), {"rules.sizes"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_fault_of_the_config_is_named(draft, doctor, name: str) -> None:
    change, expected = CONFIG_FAULTS[name]
    found = failures(doctor(edit_config(draft, change), live=False))
    # A file that no longer parses says so too.
    assert (
        found - {"config.schema", "trained.mask_token_id", "trained.sample_from_anchor"} == expected
    )


def _codes(weights: Weights) -> None:
    name = "layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)


def _codes_with_scales(weights: Weights) -> None:
    for name in [n for n in weights if "mlp." in n]:
        scale = weights[name].abs().amax(1, keepdim=True) / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale


def _rounded_frequencies(weights: Weights) -> None:
    exact = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = exact.bfloat16().float()


WEIGHT_FAULTS: dict[str, tuple[Callable[[Weights], object], set[str]]] = {
    "9 frequencies rounded to bf16": (_rounded_frequencies, {"weights.rope_frequencies"}),
    "29 codes without scales": (_codes, {"weights.quantization"}),
    "29 codes and scales without a format": (_codes_with_scales, {"weights.quantization"}),
    "a missing tensor": (lambda w: w.pop("final_norm.weight"), {"weights.names"}),
    "a tensor of another tool": (
        lambda w: w.update({"model.norm.weight": torch.ones(96)}), {"weights.names"},
    ),
    "another shape": (
        lambda w: w.update({"final_norm.weight": torch.ones(95)}), {"weights.shapes"},
    ),
    "not a number": (lambda w: w["final_norm.weight"].fill_(float("nan")), {"weights.finite"}),
    "integers": (
        lambda w: w.update({"final_norm.weight": torch.ones(96, dtype=torch.int64)}),
        {"weights.dtypes"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
def test_a_fault_of_the_weights_is_named(draft, doctor, name: str) -> None:
    change, expected = WEIGHT_FAULTS[name]
    assert failures(doctor(edit_weights(draft, change), live=False)) == expected


PTPC = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "ignore": [r"re:.*context_proj$", r"re:.*self_attn\.fused_qkv_a_proj$", r"re:.*markov_head.*"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (PTPC, set()),
        ({**PTPC, "quant_method": "mxfp4"}, {"weights.quantization"}),
        ({**PTPC, "ignore": [r"re:.*q_a_proj$"]}, {"rules.quantization_config.ignore"}),
        ({**PTPC, "ignore": [r"re:.*layers\.0\..*"]}, {"rules.quantization_config.ignore"}),
    ],
)
def test_29_a_quantized_draft_needs_a_known_format_and_run_time_names(
    draft, doctor, section: Config, expected: set[str]
) -> None:
    edit_weights(draft, _codes_with_scales)
    edit_config(draft, _set(quantization_config=section))
    assert failures(doctor(draft, live=False)) == expected


def test_an_embedding_may_be_left_out_only_where_the_file_says_so(draft, doctor) -> None:
    edit_weights(draft, lambda weights: weights.pop("embed_tokens.weight"))
    assert failures(doctor(draft, live=False)) == {"weights.names"}
    note = {"included": False, "dtype": "F32", "sha256": "0" * 64}
    edit_config(draft, lambda raw: raw["dspark_provenance"].update(embedding=note))
    assert failures(doctor(draft, live=False)) == set()


def test_a_truncated_file_and_an_absent_folder_are_named(draft, doctor, tmp_path) -> None:
    assert failures(doctor(tmp_path / "nowhere", live=False)) == {"files.config"}
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert failures(doctor(draft, live=False)) == {"files.weights"}


def test_weights_exchanged_under_their_config_are_named(draft, doctor) -> None:
    files = json.loads((draft / "config.json").read_text())["dspark_provenance"]["files"]
    edit_weights(draft, lambda weights: weights["final_norm.weight"].mul_(1.01))
    edit_config(draft, lambda raw: raw["dspark_provenance"].update(files=files))
    assert failures(doctor(draft, live=False)) == {"files.recorded"}


def test_a_field_that_nobody_knows_stops_the_live_examination_by_name(draft, doctor) -> None:
    edit_config(draft, _set(secret_scale=2.0))
    assert failures(doctor(draft, live=False)) == set()
    exam = doctor(draft, live=True)
    assert failures(exam) == {"live.load"}
    assert "secret_scale" in next(c for c in exam.checks if c.id == "live.load").cause


def test_a_file_changed_after_its_run_is_named(tiny_run: Path, tmp_path: Path, doctor) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_run / "draft", folder)
    edit_config(folder, _set(rms_norm_eps=1e-3))
    assert failures(doctor(folder, live=False)) == {"files.sealed"}
