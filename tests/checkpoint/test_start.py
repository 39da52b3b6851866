"""`dspark init`: the draft that training would start from, of any size, in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import dspark, dspark_each, environment
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.published import read_config
from dspark.checkpoint.start import write_start
from dspark.config.architecture import DraftConfig
from dspark.errors import ForeignArtifactError, StorageError
from dspark.model.draft import DSparkDraft
from dspark.model.init import PIECE, initialise, start_pieces
from made_drafts import tiny_config, tiny_qwen3

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "kimi-k3.yaml"


@pytest.mark.parametrize("config", [tiny_config(), tiny_qwen3(markov_head_type="gated")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_holds_what_training_would_start_from(
    tmp_path: Path, config: DraftConfig, dtype: torch.dtype
) -> None:
    write_start(tmp_path / "draft", config, {}, dtype=dtype, seed=3)
    loaded, provenance = load_draft(tmp_path / "draft", dtype=dtype)
    memory = initialise(DSparkDraft(config), None, seed=3).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.equal(memory[name].to(dtype)), name
    assert provenance["start"] == {"seed": 3, "embedding": "random"}
    assert "target_embedding_sha256" not in provenance


def test_numbers_depend_on_seed_and_name_and_join_over_pieces() -> None:
    shape = (2, PIECE // 2 + 3)
    pieces = list(start_pieces("layers.0.mlp.up_proj.weight", shape, 1, 7))
    assert [len(p) for p in pieces] == [PIECE, 6]
    whole = torch.cat(pieces)
    assert abs(float(whole.std()) * shape[1] ** 0.5 - 1) < 0.01
    again = torch.cat(list(start_pieces("layers.0.mlp.up_proj.weight", shape, 1, 7)))
    assert whole.equal(again)
    for name, seed in (("layers.0.mlp.up_proj.weight", 8), ("layers.1.mlp.up_proj.weight", 7)):
        other = next(iter(start_pieces(name, shape, 1, seed)))
        assert not other.equal(pieces[0])


def test_nothing_is_overwritten_and_a_full_disk_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(ForeignArtifactError):
        write_start(folder, tiny_config(), {}, dtype=torch.float32, seed=0)
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match="of free disk"):
        write_start(tmp_path / "new" / "deep", tiny_config(), {}, dtype=torch.float32, seed=0)
    assert not (tmp_path / "new").exists()


def test_a_failure_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_start(tmp_path / "d", tiny_config(), {}, dtype=torch.float32, seed=0, on_bytes=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_takes_the_targets_own_embedding(
    tiny_recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    done = dspark("init", str(tiny_recipe), str(out), "--seed", "5", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "the target's" in done.stdout
    own = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
    draft, provenance = load_draft(out, embedding=own)
    assert draft.embed_tokens.weight.equal(own)
    assert provenance["embedding"]["sha256"] == provenance["target_embedding_sha256"]
    assert provenance["start"] == {"seed": 5, "embedding": "target"}
    seen = dspark("inspect", str(out), "--deep", "--json")
    assert seen.returncode == 0, seen.stdout
    assert json.loads(seen.stdout)["faults"] == []
    again = dspark("init", str(tiny_recipe), str(out))
    assert again.returncode == 1
    assert "there already" in again.stderr


def test_the_command_says_when_the_embedding_is_random(tiny_recipe: Path, tmp_path: Path) -> None:
    sizes = ("target.sizes={hidden_size: 96, intermediate_size: 192, num_hidden_layers: 4, "
             "num_attention_heads: 4, vocab_size: 50, max_position_embeddings: 256, "
             "rms_norm_eps: 1e-6}")  # fmt: skip
    away = ("target.source=nobody/away", sizes)
    planned, done, wrong = dspark_each(
        ["init", str(tiny_recipe), str(tmp_path / "planned"), *away, "--plan"],
        ["init", str(tiny_recipe), str(tmp_path / "a"), *away],
        ["init", str(tiny_recipe), str(tmp_path / "b"),
         sizes.replace("vocab_size: 50", "vocab_size: 60")],
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert not (tmp_path / "planned").exists()
    assert done.returncode == 0, done.stderr
    assert "random" in done.stdout
    assert read_config(tmp_path / "a")[1]["start"]["embedding"] == "random"
    assert wrong.returncode == 2
    assert "target.sizes.vocab_size" in wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_whole_kimi_k3_draft_is_written_and_read_in_little_memory(tmp_path: Path) -> None:
    """7.1 GB; each command in a process of its own, whose peak memory the system reports."""
    if shutil.disk_usage(tmp_path).free < 10e9:
        pytest.skip("less than 10 GB of free disk")
    out = tmp_path / "draft"
    try:
        for arguments in (
            ["init", str(RECIPE), str(out)],
            ["inspect", str(out), "--deep", "--json"],
        ):
            code = (
                "import resource, subprocess, sys\n"
                "done = subprocess.run([sys.executable, '-m', 'dspark', *sys.argv[1:]])\n"
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
                "sys.exit(done.returncode)\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, *arguments],
                capture_output=True,
                text=True,
                timeout=1400,
                env=environment(),
            )
            assert done.returncode == 0, done.stderr
            peak = int(done.stderr.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
            assert peak < 1.5e9, f"{arguments[0]} used {peak / 1e9:.2f} GB"
        found = json.loads(done.stdout)
        assert found["faults"] == []
        assert found["tensors"] == 68
        assert found["parameters"] == 3_562_312_961
        assert found["bytes"] == {"BF16": 7_124_625_922}
        assert (out / "model.safetensors").stat().st_size < 7_124_625_922 + 16_384
    finally:
        shutil.rmtree(out, ignore_errors=True)
