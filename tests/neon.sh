#!/usr/bin/env bash
# Compares the bits of an ARM CPU (NEON, in an emulator) with this machine's: two steps of `train_gpt`, f32 and bf16, and the tests of the
# product kernels and of the functions. Says nothing about speed.
#
#   tests/neon.sh [--train]        --train: the two steps alone
#
# Needs qemu-user and gcc-aarch64-linux-gnu (Debian packages), and `rustup target add aarch64-unknown-linux-gnu`. Not part of `.ci/run`:
# it compiles the library anew, and the emulator takes ten times as long.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
built=${CARGO_TARGET_DIR:-target}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
for tool in qemu-aarch64 aarch64-linux-gnu-gcc; do
  command -v $tool >/dev/null || { echo "SKIPPED: there is no $tool" && exit 1; }
done

cargo build --quiet --release --example train_gpt
cargo build --quiet --release --example train_gpt --target $target
bits() { grep -o '"\(loss_bits\|parameters_digest\)":"[0-9a-f]*"' | tr '\n' ' '; }
for dtype in f32 bf16; do
  job=(--json --mesh 1 --threads 1 --steps 2 --eval-batches 1 --dropout 0.1 --dtype $dtype)
  here=$("$built/release/examples/train_gpt" "${job[@]}" | bits)
  there=$($CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER "$built/$target/release/examples/train_gpt" "${job[@]}" | bits)
  echo "-- $dtype here:  $here"
  echo "-- $dtype there: $there"
  [ -n "$here" ] && [ "$here" = "$there" ]
done
[ "${1-}" = --train ] || CARGO_PROFILE_DEV_DEBUG=0 cargo test --workspace --lib --target $target -- \
  gemm:: sums::tree math:: tensor::cpu::gemm ops::attention::cpu --skip bits_do_not_depend_on_the_caches
