#!/usr/bin/env bash
# The judge over every combination of placements, also for operators of more than three operands, of which `cargo test` judges a
# sample; and all of the fuzzing of which `cargo test` does a hundredth. For a new operator, a new row, or a new message; takes
# minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
ISOSHARD_TEST_COMPLETE=1 cargo test --test suite rules:: "$@"

# Ten million mutated conversations with everybody who reads from a wire; sums that wrap are errors here.
ISOSHARD_FUZZ=${ISOSHARD_FUZZ:-10000000} RUSTFLAGS="-C overflow-checks=on" \
    cargo test --release --target-dir target/fuzz --lib coordinator::fuzz
