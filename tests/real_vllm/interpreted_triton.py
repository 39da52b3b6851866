"""Imported before vLLM: its V2 runner, and Triton's interpreter in place of triton-cpu."""

from __future__ import annotations

import os
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends

# What vLLM looks at to decide whether there is a Triton at all; the interpreter needs no driver.
backends["cpu"] = types.SimpleNamespace(
    driver=types.SimpleNamespace(is_active=lambda: True), compiler=None
)
