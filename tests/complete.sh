#!/usr/bin/env bash
# The judge over every combination of placements, also for operators of more than three operands, of which `cargo test` judges a
# sample. For a new operator, or a new row; takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
ISOSHARD_TEST_COMPLETE=1 cargo test --test suite rules:: "$@"
