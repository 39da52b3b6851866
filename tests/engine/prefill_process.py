"""A prefill node as a process of its own: ``python prefill_process.py KIND ENDPOINT TRANSPORT``.

KIND names the pair, or is ``stranger``: the same shapes under another identity. It prints ``ready``
and works until it is killed. ``DSPARK_TEST_SLOW`` is a pause in seconds before every page.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from dspark.engine.handover import PrefillNode
from dspark.hidden.transport import open_transport
from engine.hybrid_pairs import HybridPair


def main(kind: str, endpoint: str, transport: str) -> None:
    torch.set_num_threads(1)
    pair = HybridPair.latent() if kind == "latent" else HybridPair.of()
    core = pair.engine(
        offload_host_gib=0.1, state_snapshots=8,
        identity="other" if kind == "stranger" else "pair",
    )  # fmt: skip
    node = PrefillNode(core, endpoint, open_transport(transport, "handover"))
    pause = float(os.environ.get("DSPARK_TEST_SLOW", "0"))
    if pause:
        export = node.offload.export

        def slowly(tokens):
            for page in export(tokens):
                time.sleep(pause)
                yield page

        node.offload.export = slowly
    print("ready", flush=True)
    while True:
        if not node.work():
            time.sleep(0.002)


if __name__ == "__main__":
    main(*sys.argv[1:4])
