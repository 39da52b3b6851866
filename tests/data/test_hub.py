"""A hub source that cannot be read says which data set, why, and what to do instead."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from dspark.config.prompts import HubSource
from dspark.data.hub import _refused, read_hub
from dspark.errors import ConfigError, MissingDependencyError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HAS_DATASETS = importlib.util.find_spec("datasets") is not None


def source(**fields):
    known = {"kind": "hub", "dataset": "someone/something", "revision": COMMIT, "category": "chat"}
    return HubSource(**(known | fields))


def test_a_branch_name_is_no_revision():
    for revision in ("main", "abc123", None):
        with pytest.raises(ValidationError):
            source(revision=revision)


def test_fields_that_are_not_filled_in_are_refused_before_anything():
    for field in ("dataset", "revision"):
        with pytest.raises(ConfigError, match="FILL-IN"):
            next(read_hub(source(**{field: "FILL-IN"}), None))


@pytest.mark.skipif(HAS_DATASETS, reason="datasets is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(MissingDependencyError, match=r"dspark\[data\].*kind: file"):
        next(read_hub(source(), None))


@pytest.mark.skipif(not HAS_DATASETS, reason="datasets is not installed")
def test_offline_the_data_set_and_the_local_way_are_named():
    code = (
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "from dspark.config.prompts import HubSource\n"
        "from dspark.data.hub import read_hub\n"
        "from dspark.errors import DataError\n"
        "try:\n"
        f"    next(read_hub(HubSource(kind='hub', dataset='someone/something', revision='{COMMIT}',"
        " category='chat'), None))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "hub data set someone/something" in done.stdout
    assert "offline mode is on" in done.stdout
    assert "kind: file" in done.stdout


@pytest.mark.skipif(not HAS_DATASETS, reason="datasets is not installed")
def test_without_a_network_many_sets_are_refused_in_seconds():
    """The hub's library tries each one five times, with growing pauses."""
    code = (
        "import time\n"
        "from dspark.config.prompts import HubSource\n"
        "from dspark.data.hub import read_hub\n"
        "from dspark.errors import DataError\n"
        "start = time.monotonic()\n"
        "for name in 'abcdef':\n"
        "    try:\n"
        f"        next(read_hub(HubSource(kind='hub', dataset='someone/' + name, revision='{COMMIT}',"
        " category='chat'), None))\n"
        "    except DataError as error:\n"
        "        print(error)\n"
        "print('seconds', time.monotonic() - start)\n"
    )
    closed = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True,
        env=closed,
    )  # fmt: skip
    assert done.stdout.count("there is no network") == 6
    assert float(done.stdout.split("seconds")[-1]) < 30


def test_a_gated_set_says_to_accept_its_terms():
    class GatedRepoError(OSError):
        pass

    error = _refused(source(), "hub data set someone/something", GatedRepoError("403"))
    assert "Accept its terms" in error.fix
    assert "someone/something" in error.where
