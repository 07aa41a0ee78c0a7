#!/usr/bin/env bash
# Runs the crate's unsafe code under Miri, AddressSanitizer and ThreadSanitizer. Needs a nightly toolchain, for Miri its component miri, and for
# Miri and ThreadSanitizer rust-src. Continuous integration has the stable toolchain alone, and no room for these minutes.
# A part whose toolchain or component is missing is skipped, with a message, and the script ends with 1.
#
#   tests/sanitize.sh [PART ...]      default: all parts but `suite`
#
#   miri      memory of tensors, views, parts, the threads of kernels, and ranks that share tensors, on the baseline's instructions
#   address   the library's tests with the widest instructions of this machine
#   suite     the suite of tests, under AddressSanitizer
#   thread    storage, the threads of kernels, the thread engine, the coordinator, layers and optimizers on ranks
#
# CONTRIBUTING.md ("Unsafe code") has the date, the machine, what was run and what came of it. TOOLCHAIN names another toolchain than
# `nightly`.
# Missing: Miri over products, which takes it longer than ten minutes, and with AVX2; the searches over all layouts, and measurements of
# speed, which tell nothing under a sanitizer; the longest tests of products under AddressSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
target=$(rustc -vV | sed -n 's/^host: //p')
built=${CARGO_TARGET_DIR:-target}/sanitize
skipped=0
# Without optimisation it compiles in a tenth of the time, and keeps every access.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
# The kernels' package has a level of its own.
unoptimised=(--config 'profile.dev.package.isoshard-kernels.opt-level = 0')
export PROPTEST_CASES=${PROPTEST_CASES:-4}
# A backtrace takes Miri half a minute, and some tests panic on purpose.
export RUST_BACKTRACE=0
# Kernels that are inlined into one function have large frames without optimisation: sums of rows overflowed the default stack.
export RUST_MIN_STACK=67108864
# Tests ask for more memory than any machine has, and expect an error.
export ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1

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
    cargo "+$toolchain" miri test --workspace --lib --target-dir "$built/miri" -- \
    memory::block memory::system_block memory::segments tensor::shape tensor::elements tensor::dense \
    loops::copy memory::kernel_list threads::team ranks_share_tensors \
    comm::transport::threads::engine
}

address() {
  has rustc || return 0
  RUSTFLAGS="-Zsanitizer=address" CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_TEST_OPT_LEVEL=0 \
    cargo "+$toolchain" "${unoptimised[@]}" test --target "$target" --target-dir "$built/address" "$@"
}

part_address() {
  address --workspace --lib -- --skip exhaustive --skip fuzz --skip measure --skip gemm::block_loops::blocking \
    --skip every_node_is_the_sum --skip bits_do_not_depend_on --skip a_rank_that_does_not_read
}

part_suite() {
  address --test suite -- --skip exhaustive --skip house --skip cuda --skip measure
}

# The standard library is built for it as well; otherwise its locks would look like races. Two tests of deadlines, which send or check
# more than its speed allows in their time, are left out.
part_thread() {
  has rust-src || return 0
  RUSTFLAGS="-Zsanitizer=thread" CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_TEST_OPT_LEVEL=0 \
    cargo "+$toolchain" "${unoptimised[@]}" -Zbuild-std test --workspace --lib --target "$target" --target-dir "$built/thread" -- \
    memory::block memory::segments tensor::mapped tensor::dense memory::kernel_list threads::team tensor::cpu::map \
    gemm::threads ops::attention comm:: data:: checkpoint:: fsdp:: nn:: optim:: rng:: dtensor::redistribute \
    --skip exhaustive --skip fuzz --skip a_rank_that_does_not_read --skip an_admitted_rank_that_breaks
}

[ $# -gt 0 ] || set -- miri address thread
for part; do
  if [ "$(type -t "part_$part")" != function ]; then
    sed -n '6,11s/^# \?//p' "$0" >&2
    exit 2
  fi
  printf '\n== %s (%(%H:%M:%S)T)\n' "$part" -1
  "part_$part"
done
exit "$skipped"
