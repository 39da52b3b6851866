"""Files that others run: what they name exists, and they say what the product says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from conftest import dspark
from server.serving import Served

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def steps(word: str) -> list[str]:
    """Arguments of all steps of one kind in the Containerfile."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{word} ")]


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Options of ``dspark serve``."""
    return set(re.findall(r"--[a-z-]+", dspark("serve", "--help").stdout))


def copied() -> list[str]:
    return [name for step in steps("COPY") for name in step.split()[:-1]]


def test_the_image_holds_what_the_package_is_built_from() -> None:
    project = PROJECT["project"]
    assert {
        "pyproject.toml",
        "constraints.txt",
        project["readme"],
        *project["license-files"],
    } <= set(copied())
    assert all((ROOT / name).exists() for name in copied())
    (found,) = PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    assert found in copied()
    install = next(step for step in steps("RUN") if "'.[" in step)
    extras = re.search(r"'\.\[(.*?)\]'", install)[1].split(",")
    assert {"server", "grammar", "gguf"} <= set(extras) <= set(project["optional-dependencies"])
    make = re.search(r"-e '\.\[(.*?)\]'", (ROOT / "Makefile").read_text(encoding="utf-8"))[1]
    assert set(extras) <= set(make.split(","))
    (base,) = steps("FROM")
    version = re.search(r"python:(\d+\.\d+)", base)[1]
    assert f"python{version}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_image_serves_on_the_port_it_opens(options: set[str]) -> None:
    (entry,) = (json.loads(step) for step in steps("ENTRYPOINT"))
    assert entry[:2] == ["dspark", "serve"]
    assert {word for word in entry if word.startswith("--")} <= options
    (port,) = steps("EXPOSE")
    assert entry[entry.index("--port") + 1] == port
    assert f"127.0.0.1:{port}/health" in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert steps("USER") == ["dspark"], "never root"


@pytest.mark.slow
def test_what_the_image_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    """The step of the image that needs no network."""
    for name in copied():
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    build = "from setuptools import build_meta as b; print(b.build_wheel('out'))"
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    listed = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(wheel)], check=True, capture_output=True, text=True).stdout  # fmt: skip
    for name in ("dspark/server/templates/playground.js", "dspark/server/app.py"):
        assert name in listed


def test_the_unit_gives_answers_time_to_end(options: set[str]) -> None:
    unit = (DEPLOY / "dspark.service").read_text(encoding="utf-8").replace("\\\n", "")
    fields = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    command = shlex.split(fields["ExecStart"])
    assert command[0].endswith("/dspark")
    assert command[1] == "serve"
    assert {word for word in command if word.startswith("--")} <= options
    assert int(fields["TimeoutStopSec"]) > int(command[command.index("--drain") + 1])
    assert fields["KillSignal"] == "SIGTERM"


def test_prometheus_scrapes_what_is_served(served: Served) -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ]
    with served.http() as http:
        assert http.get(job.get("metrics_path", "/metrics")).status_code == 200
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
