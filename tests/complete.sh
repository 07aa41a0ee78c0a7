#!/usr/bin/env bash
# The checks that take too long for `cargo test` and `.ci/run`: the judge over every combination of placements, the oracle of plans, all programs, also on the
# emulated device, shuttle's schedules, ten million fuzzed conversations and checkpoints, and whole default runs of train_gpt. For a new operator, a new row, a new message, or new defaults; takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

# Every source of kernels; `.ci/run` leaves out those that differ from another in a name alone.
tests/gpu/compile_kernels.py

# The listing of the public API, which needs a nightly toolchain's rustdoc.
tests/api/list.py --check

# Three random worlds per operator on each of seven meshes, all random programs, the longest rows of every dtype on the emulated
# device, all formulas in the interpreter of PTX, and 100 panics at random calls; `cargo test` takes one smaller world on four of the
# meshes, half of the programs, the longest rows of one dtype, every eighth formula, and 30 panics.
for module in equivalence programs reused_params cuda_rows cuda_ptx train; do
  ISOSHARD_TEST_COMPLETE=1 cargo test --test suite "$module::" "$@"
done

# Orders of the thread engine's threads that shuttle draws; `.ci/run` has loom, which tries all orders of smaller programs.
RUSTFLAGS="--cfg shuttle" cargo test --package isoshard --target-dir target/shuttle --lib comm::transport::threads::models

# For operators of more than three operands `cargo test` judges a sample.
ISOSHARD_TEST_COMPLETE=1 cargo test --test suite rules:: "$@"

# The plans of all operators' samples against all other plans; `cargo test` takes a part of the samples.
ISOSHARD_ORACLE_STEP=1 cargo test --lib exhaustive_rows

# On the emulated device `.ci/run` tries a third of the layouts and programs, and two of seven meshes.
ISOSHARD_TEST_COMPLETE=1 ISOSHARD_TEST_DEVICE=shim cargo test --test suite -- \
    equivalence:: exact:: programs:: redistribute:: --skip fast_ --skip rules_exact

# 2,000 ranks that stall on meshes while all others wait, with deadlines of 0.09 seconds; `cargo test` has 50.
ISOSHARD_STALLS=2000 cargo test --test suite faults::blame "$@"

# Ten million mutated conversations with all code that reads from a wire; sums that wrap are errors here.
ISOSHARD_FUZZ=${ISOSHARD_FUZZ:-10000000} RUSTFLAGS="-C overflow-checks=on" \
    cargo test --release --target-dir target/fuzz --lib coordinator::fuzz

# Ten million mutated checkpoints.
ISOSHARD_FUZZ=${ISOSHARD_FUZZ:-10000000} RUSTFLAGS="-C overflow-checks=on" \
    cargo test --release --target-dir target/fuzz --test alloc checkpoint

# A hundred thousand mutated folders of checkpoints; `cargo test` tries 300.
ISOSHARD_FUZZ=${ISOSHARD_FUZZ:-100000} cargo test --test suite checkpoint_damage::a_mutated "$@"

# A thousand kills at random moments of saves and of exports; `cargo test` has 200 and 12.
ISOSHARD_CRASH_KILLS=${ISOSHARD_CRASH_KILLS:-1000} cargo test --test crash

# The programs on the pages of a feature that `cargo test` does not build.
cargo test --features tokenizers --doc data::tokenizer

# The numbers that README and examples/train_gpt/main.rs show, which every mesh gives.
cargo build --release --example train_gpt
for mesh in fsdp=2 1 dp=2,tp=2; do
  said=$(target/release/examples/train_gpt --mesh "$mesh")
  shown=$(sed -nE 's#^//! (losses)  #\1  #p' examples/train_gpt/main.rs)
  digest=$(grep -o 'digest [0-9a-f]*' README.md)
  grep -qF -- "$shown" <<<"$said" && grep -qF -- "$digest" <<<"$said"
  echo "-- train_gpt on $mesh: ${shown#losses  }, $digest"
done
