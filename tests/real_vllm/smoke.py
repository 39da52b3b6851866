"""Inside the vLLM environment: is everything there that dspark counts on? Seconds, no model."""

from __future__ import annotations

from importlib.metadata import entry_points, version

from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.transformers_utils.configs import K3DSparkConfig
from vllm.v1.worker import gpu_model_runner

from dspark.vllm_plugin import known_version, vllm_version


def main() -> None:
    assert current_platform.is_cpu(), type(current_platform)
    assert version("vllm"), "no metadata under the name vllm: `vllm serve` would not start"
    assert known_version(), f"dspark's plugin does not know vLLM {vllm_version()}"
    assert K3DSparkConfig.model_type == "k3_dspark"
    found = {e.name for e in entry_points(group="vllm.general_plugins")}
    assert "dspark" in found, f"dspark's plugin is not installed, only {found}"
    load_general_plugins()
    assert gpu_model_runner.EagleProposer.__name__ == "EagleOrDSpark", "the plugin did not act"


if __name__ == "__main__":
    main()
