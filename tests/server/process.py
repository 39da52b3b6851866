"""The command ``dspark serve`` in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

import httpx2
from openai import OpenAI

from conftest import environment


class Process:
    """The command, running; ``told`` is its standard error until it listened."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "dspark", "serve", *arguments]
        self.child = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**environment(), "COLUMNS": "200", "DSPARK_API_KEY": "from-the-environment"},
        )  # fmt: skip
        assert self.child.stderr is not None
        self.told, self.base = "", ""
        for line in self.child.stderr:
            self.told += line
            if found := re.search(r"listening\s+(http://[0-9.:]+)", line):
                self.base = found[1]
                break
        assert self.base, self.told
        # The rest goes into the void, so that it never blocks.
        threading.Thread(target=self.child.stderr.read, daemon=True).start()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                httpx2.get(f"{self.base}/health")
                return
            except httpx2.TransportError:
                time.sleep(0.05)
        raise AssertionError("it listens and does not answer")

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.base}/v1", api_key="from-the-environment", max_retries=0)
