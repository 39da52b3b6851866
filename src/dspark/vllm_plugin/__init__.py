"""What of dspark runs inside vLLM's process: loaded by vLLM itself, never by the rest of dspark.

* :func:`register` is the entry point of the group ``vllm.general_plugins``. vLLM calls it in every
  process it starts. On a GPU it does nothing: vLLM has DSpark there. On a CPU, whose V1 runner
  refuses ``method: dspark``, it lets ``--speculative-config '{"method": "dspark", ...}'`` run
  unchanged.
* ``dspark.vllm_plugin.connector`` hands out the hidden states that vLLM's own
  ``extract_hidden_states`` method collects, ``dspark.vllm_plugin.teacher`` makes records of them.

``dspark.vllm_plugin.patch`` is the only file that changes anything of vLLM.
"""

from __future__ import annotations

KNOWN_VERSIONS = ("0.32.0",)
"""Versions of vLLM whose internals these files were written against and tested on."""


def register() -> None:
    """Called by vLLM, possibly more than once in a process. Never raises: a plugin that fails would
    take every vLLM of this environment with it, also those that do not draft."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    logger = init_logger("vllm.dspark_plugin")
    if not known_version():
        logger.warning(
            "dspark's plugin knows vLLM %s and leaves %s as it is: method dspark stays refused "
            "on this CPU.",
            ", ".join(KNOWN_VERSIONS),
            vllm_version(),
        )
        return
    from dspark.vllm_plugin.patch import apply

    apply()


def vllm_version() -> str:
    """Release of the vLLM in this process, without a build label such as ``+cpu``."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def known_version() -> bool:
    return vllm_version() in KNOWN_VERSIONS
