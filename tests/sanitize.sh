#!/usr/bin/env bash
# Runs the crate's unsafe code under Miri, AddressSanitizer and ThreadSanitizer. Needs a nightly toolchain, for Miri its component miri, and for
# Miri and ThreadSanitizer rust-src.
# A part whose toolchain or component is missing is skipped, with a message, and the script ends with 1.
#
#   tests/sanitize.sh [PART ...]      default: all parts
#
#   miri      memory of tensors, views and parts, and ranks that share tensors, on the baseline's instructions: 3 minutes
#   address   tensors, their kernels with the widest instructions of this machine, collectives, files: 10 minutes
#   thread    storage, the threads of kernels, the thread engine: not timed
#
# The times are those of a core of an AMD EPYC (Zen 3), half of them for compiling. TOOLCHAIN names another toolchain than `nightly`.
# Missing: Miri over products, which takes it longer than ten minutes, and with AVX2; the longest tests of products under AddressSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
target=$(rustc -vV | sed -n 's/^host: //p')
built=${CARGO_TARGET_DIR:-target}/sanitize
skipped=0

has() {
  rustup component list --toolchain "$toolchain" --installed 2>/dev/null | grep -q "^$1" && return
  echo "SKIPPED ($part): the toolchain $toolchain has no $1"
  skipped=1
  return 1
}

# Ranks have deadlines and Caches::detect reads files, so Miri lets programs see the machine.
part_miri() {
  has miri && has rust-src || return 0
  MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" PROPTEST_CASES=2 \
    cargo "+$toolchain" miri test --lib --target-dir "$built/miri" -- \
    tensor::storage tensor::system_block tensor::cut tensor::shape tensor::views tensor::elements tensor::dense tensor::interop \
    tensor::cpu::copy tensor::kernel_list ranks_share_tensors
}

# Without optimisation it compiles in a tenth of the time, and keeps every access.
part_address() {
  has rustc || return 0
  RUSTFLAGS="-Zsanitizer=address" CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_TEST_OPT_LEVEL=0 \
    cargo "+$toolchain" test --lib --target "$target" --target-dir "$built/address" -- \
    tensor:: comm::transport comm::api comm::calls comm::diagnostics checkpoint:: data:: placement:: \
    --skip dtensor --skip gemm::blocking --skip product::tests::every --skip product::tests::bits
}

# The standard library is built for it as well; otherwise its locks would look like races.
part_thread() {
  has rust-src || return 0
  RUSTFLAGS="-Zsanitizer=thread" CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_TEST_OPT_LEVEL=0 \
    cargo "+$toolchain" -Zbuild-std test --lib --target "$target" --target-dir "$built/thread" -- \
    tensor::storage tensor::cut tensor::kernel_list tensor::cpu::threads comm::transport::threads comm::api
}

[ $# -gt 0 ] || set -- miri address thread
for part; do
  if [ "$(type -t "part_$part")" != function ]; then
    sed -n '6,10s/^# \?//p' "$0" >&2
    exit 2
  fi
  printf '\n== %s (%(%H:%M:%S)T)\n' "$part" -1
  "part_$part"
done
exit "$skipped"
