#!/usr/bin/env bash
# Packs the files that a machine with a GPU, but without Rust, needs to test and time this crate: stripped test and
# benchmark programs, train_gpt, and the Python benchmark. Writes run.sh and pack.tar.xz to .gpu/, which git ignores.
#
#   tests/gpu/pack.sh [ARCHITECTURE ...]      then, there:    OUT=/some/folder bash .gpu/run.sh
#
# With architectures, e.g. 80 90 100 120, the pack has all kernels compiled for them (images/), so that nothing is compiled
# there, and any version of NVRTC does.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Programs that run on the device (tests/gpu/run.sh says how).
wanted=(--test suite --test gpu --test nccl)
limit_bytes=$((60 << 20))
pack=${ISOSHARD_GPU_PACK:-.gpu}
features=cuda
grep -q '^nccl *=' Cargo.toml && features=cuda,nccl

rm -rf "$pack"
mkdir -p "$pack/bin"
# All executables that cargo reports, by the names of their targets; the unit tests are called unit.
collect() {
  python3 -c '
import json, shutil, sys
for line in sys.stdin:
    item = json.loads(line)
    if item.get("reason") != "compiler-artifact" or not item.get("executable"):
        continue
    kind, name = item["target"]["kind"][0], item["target"]["name"]
    name = {"lib": "unit", "bench": "bench_" + name}.get(kind, name)
    shutil.copy(item["executable"], sys.argv[1] + "/bin/" + name)
    print(name)
' "$pack"
}
cargo test --release --features $features --no-run --lib "${wanted[@]}" --message-format=json-render-diagnostics | collect
cargo build --release --features $features --example train_gpt --message-format=json-render-diagnostics | collect
cargo bench --features $features --no-run --bench gpu --message-format=json-render-diagnostics | collect
strip "$pack"/bin/*
if [ $# -gt 0 ]; then
  tools=$(tests/gpu/toolchain.sh)
  mkdir "$pack/bin/images"
  images=$(realpath "$pack/bin/images")
  LD_LIBRARY_PATH=$tools/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ISOSHARD_PACK=$images ISOSHARD_ARCHITECTURES="$*" \
    "$pack/bin/gpu" --exact nvrtc::images_for_machines_with_a_gpu --nocapture | tee "$pack/images.txt"
  made=$(grep -oE '[0-9]+ images' "$pack/images.txt" || true)
  [ "$made" != "0 images" ] && [ "$made" = "$(ls "$images" | wc -l) images" ] || { echo "$(ls "$images" | wc -l) images in the pack of ${made:-none}"; exit 1; }
  echo "$made"
  rm "$pack/images.txt"
fi

cp benches/torch/*.py "$pack/bin/"
{
  echo "commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ' with changes')"
  echo "$(rustc --version), features $features"
} >"$pack/bin/packed.txt"
# The programs share most of their code: xz finds it at a distance of up to 64 MiB, in a minute.
tar -C "$pack" -cf - bin | python3 -c '
import lzma, shutil, sys
with lzma.open(sys.argv[1], "w", preset=9) as packed:
    shutil.copyfileobj(sys.stdin.buffer, packed, 1 << 20)
' "$pack/pack.tar.xz"
rm -r "$pack/bin"
cp tests/gpu/run.sh "$pack/run.sh"
bytes=$(wc -c <"$pack/pack.tar.xz")
echo "$pack: $((bytes >> 10)) KiB"
if [ "$bytes" -gt "$limit_bytes" ]; then
  echo "more than $((limit_bytes >> 20)) MiB"
  exit 1
fi
