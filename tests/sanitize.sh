#!/usr/bin/env bash
# Runs the crate's unsafe code under Miri and AddressSanitizer. Needs a nightly toolchain with miri and rust-src.
#
#   tests/sanitize.sh miri       storage, views, and products on the baseline's instructions: the library's own tests
#   tests/sanitize.sh address    the library's own tests, with every instruction set, and tensors across threads
#
# Miri has no vector instructions of x86, so it takes the baseline, which is the same code by another type of vector. Threads are
# those of the standard library: Miri reports data races among them too.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
target=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')

case ${1:-} in
  miri)
    # Tests read folders for caches and files; proptest has no room for failures in isolation.
    export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" PROPTEST_CASES=2
    cargo "+$toolchain" miri test --lib --target-dir target/miri -- \
      tensor::storage tensor::shape tensor::views gemm::contraction gemm::matrix gemm::scratch gemm::pack product::tests::runs_that
    ;;
  address)
    RUSTFLAGS="-Zsanitizer=address" cargo "+$toolchain" test --lib --target "$target" --target-dir target/address -- tensor:: comm::transport::threads
    ;;
  *)
    echo "usage: tests/sanitize.sh miri | address" >&2
    exit 2
    ;;
esac
