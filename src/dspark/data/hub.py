"""Rows of a data set on the Hugging Face hub, as a stream at one pinned commit.

Only ``datasets`` talks to the hub, and only when a recipe names a hub source. Everything that can
go wrong there (no network, offline mode, a gated or missing set, another split) becomes one error
that names the data set and says how to go on without a network.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dspark.config.prompts import FILL_IN, HubSource
from dspark.data.records import Record
from dspark.errors import ConfigError, DataError, optional_module


def read_hub(source: HubSource, count: int | None) -> Iterator[Record]:
    """Yield ``(place, row)`` of the first ``count`` rows (None: all).

    Raises:
        ConfigError: fields the user has to fill in are not filled in.
        MissingDependencyError: ``datasets`` is not installed.
        DataError: the hub does not give the data set.
    """
    where = f"hub data set {source.dataset}"
    if FILL_IN in {source.dataset, source.revision}:
        raise ConfigError(
            expected="a data set and the full commit (40 hex digits) of the version to read",
            found=f"dataset {source.dataset}, revision {source.revision}",
            where=f"prompts.sources ({source.category}): {where}",
            fix="Copy both from the data set's page (Files, History), or remove the source.",
        )
    library = optional_module(
        "datasets",
        expected="the package datasets, to read from the hub",
        where=where,
        fix="pip install 'dspark[data]', or download the files and use kind: file.",
    )
    library.disable_progress_bars()
    notice_no_network()
    try:
        rows = library.load_dataset(
            source.dataset,
            source.config,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        for number, row in enumerate(islice(iter(rows), count), start=1):
            yield f"{source.dataset}@{source.revision[:8]}, row {number}", row
    # Network libraries below `datasets` raise dozens of types; all mean "the hub did not give it".
    except Exception as error:
        raise _refused(source, where, error) from error


def notice_no_network() -> None:
    """Without a way to the hub, say so to its libraries: they read what is cached, or refuse.

    Otherwise every data set is tried five times with growing pauses, which takes a suite of 14
    benchmarks five minutes to find nothing.
    """
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or place.hostname is None or getproxies().get(place.scheme):
        return
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname, port), timeout=10).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
        if importlib.util.find_spec("datasets") is not None:
            config: Any = importlib.import_module("datasets.config")
            config.HF_HUB_OFFLINE = True


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or os.environ.get("HF_HUB_OFFLINE") == "1"


def _refused(source: HubSource, where: str, error: Exception) -> DataError:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = (str(error).splitlines() or [""])[0][:200]
    found = f"{type(error).__name__}: {text}"
    if "GatedRepoError" in names or "gated" in text.lower():
        fix = "Accept its terms on its page and log in (hf auth login)."
    elif _offline():
        found += " (offline mode is on, or there is no network)"
        fix = "Unset HF_HUB_OFFLINE, or check the network."
    else:
        fix = "Check the network, the name, config, split and revision."
    return DataError(
        expected=f"rows of split {source.split} at revision {source.revision[:8]}",
        found=found,
        where=where,
        fix=f"{fix} Without a network: copy the files here and use "
        f"{{kind: file, path: FOLDER, category: {source.category}}}.",
    )
