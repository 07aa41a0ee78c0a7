#!/usr/bin/env bash
# Downloads NVIDIA's compilers, nvcc and NVRTC, from PyPI's wheels (about 200 MB, once), and prints the folder that
# has bin/ and lib/. Needs no GPU, driver or CUDA installation, so kernels can be compiled on any machine.
#
#   tests/gpu/toolchain.sh            prints e.g. ~/.cache/isoshard/cuda-13.0/nvidia/cu13
#   ISOSHARD_TOOLCHAIN=/elsewhere     keeps the files there instead
set -euo pipefail

# One fixed release: the register counts in spills.txt are those of this compiler.
wheels=(
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
)
home=${ISOSHARD_TOOLCHAIN:-${XDG_CACHE_HOME:-$HOME/.cache}/isoshard/cuda-13.0}
root=$home/nvidia/cu13

complete() { [ -x "$root/bin/nvcc" ] && [ -e "$root/lib/libnvrtc.so" ] && [ -e "$home/complete" ]; }

# Downloads to a temporary folder, then renames it, so that an interrupted or a second download does no harm.
fetch() {
  local work
  work=$(mktemp -d "$home.XXXXXX")
  trap 'rm -rf "$work"' RETURN
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$work/wheels" "${wheels[@]}" >&2
  for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/tree"; done
  chmod +x "$work"/tree/nvidia/cu13/bin/* "$work"/tree/nvidia/cu13/nvvm/bin/*
  # Programs that load NVRTC at run time look for the name without a version, too.
  ln -s libnvrtc.so.13 "$work/tree/nvidia/cu13/lib/libnvrtc.so"
  touch "$work/tree/complete"
  rm -rf "$home"
  mv -T "$work/tree" "$home" 2>/dev/null || complete
}

if ! complete; then
  mkdir -p "$(dirname "$home")"
  fetch
fi
echo "$root"
