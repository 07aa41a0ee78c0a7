#!/usr/bin/env bash
# Tests and times this crate on a machine with an NVIDIA GPU, in under ten minutes. Needs the driver, NVRTC and
# cuBLASLt (those of a PyTorch installation suffice), and the files that pack.sh packed.
#
#   OUT=/some/folder bash .gpu/run.sh [PART ...]      PART: tests, train, bench, sanitizer; default: all
#
# First a smoke test says which libraries were loaded; if it fails, nothing else runs. Writes a log and a row per part to
# $OUT/logs as they end (default: ./out), then summary.md, summary.json, bench.md, bench.json, ours.jsonl and torch.jsonl;
# prints the table, and exits with 1 if anything failed. Skipped parts are counted, and never count as passed. A test that
# fails runs again, alone and under compute-sanitizer. Compiled kernels are kept in the user's cache folder for the next
# call; pack.sh may have packed some.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-./out}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
limit_s=${LIMIT_S:-570}
parts=" ${*:-tests train bench sanitizer} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
logs=$OUT/logs
rm -rf "$logs"
mkdir -p "$logs"
tar -C "$work" -xJf "$here/pack.tar.xz" 2>/dev/null || python3 -m tarfile -e "$here/pack.tar.xz" "$work" || exit 1
cd "$work/bin" || exit 1
# A test that finds no device fails, in every part: the emulated one is no substitute here.
export ISOSHARD_REQUIRE_DEVICE=1
left() { echo $((limit_s - SECONDS)); }

# Prints a log's end without the tests that passed and the calls that led to a panic.
end_of() { grep -vE '^test .* \.\.\. ok$|^ +([0-9]+: |at )' "$1" | tail -25; }

# Libraries are also looked up without a version: a folder of links to the installed files.
link_libraries() {
  mkdir -p "$work/lib"
  local site
  site=$(python3 -c 'import site, sysconfig; print(*site.getsitepackages(), sysconfig.get_path("purelib"))' 2>/dev/null)
  # shellcheck disable=SC2086
  find $site /usr/local/cuda*/ /usr/local/nvidia /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib/wsl/lib \
    /opt/cuda -follow \
    -regextype posix-extended -regex '.*/lib(cuda|nvrtc|nvrtc-builtins|cublas|cublasLt|nccl)\.so[.0-9]*' 2>/dev/null |
    grep -vE '/(stubs|compat)/' >"$work/found.txt"
  while read -r path; do
    local name=${path##*/}
    [ -e "$work/lib/$name" ] || ln -s "$path" "$work/lib/$name"
    [ -e "$work/lib/${name%%.so*}.so" ] || ln -s "$path" "$work/lib/${name%%.so*}.so"
  done <"$work/found.txt"
  export LD_LIBRARY_PATH=$work/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# part NAME SECONDS COMMAND...: runs a command with a timeout, its output in logs/NAME, and records the result.
part() {
  local name=$1 seconds=$2 began=$SECONDS code=0 ended skipped passed failed
  shift 2
  [ "$seconds" -lt "$(left)" ] || seconds=$(left)
  if [ "$seconds" -lt 5 ]; then
    echo "$name|NOT RUN (out of time)|0|0|0|0" >"$logs/$name.row"
    return
  fi
  timeout --kill-after=5 "$seconds" "$@" >"$logs/$name.log" 2>&1 || code=$?
  case $code in
    0) ended=ok ;;
    124 | 137) ended="TIMED OUT after $seconds s" ;;
    *) ended="FAILED ($code)" ;;
  esac
  skipped=$(grep -c 'SKIPPED (' "$logs/$name.log")
  passed=$(sum_of passed "$logs/$name.log")
  failed=$(sum_of failed "$logs/$name.log")
  if [ "$code" = 0 ] && [ "$skipped" -gt 0 ]; then ended="SKIPPED in part"; fi
  # A test program that was asked for a name that it does not have is content.
  if [ "$code" = 0 ] && [ "$((passed + skipped))" = 0 ] && [[ $* == *--nocapture* || $* == *--test-threads* ]]; then
    ended="FAILED (no test ran)" code=1
  fi
  echo "$name|$ended|$passed|$failed|$skipped|$((SECONDS - began))" >"$logs/$name.row"
  echo "$name: $ended, $((SECONDS - began)) s"
  return "$code"
}

# suite NAME SECONDS PROGRAM [ARGUMENT ...]: a part that is a test program, with few threads beside the one other suite. The
# first three tests that fail run again alone, because an error that stays in the process fails all tests after it; then
# under compute-sanitizer. A program that ends without saying which test failed runs again, one test after the other: its
# last line names the test.
suite() {
  local name=$1 seconds=$2 test check
  shift 2
  part "$name" "$seconds" "$@" --test-threads=4 && return
  check=$(sanitizer_program)
  sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$logs/$name.log" | head -3 >"$logs/$name.failed"
  if [ ! -s "$logs/$name.failed" ] && grep -qE '\|FAILED \([0-9]+\)' "$logs/$name.row"; then
    part "$name, one by one" "$seconds" "$@" --test-threads=1
    grep '^test .* \.\.\. ' "$logs/$name, one by one.log" | tail -1 | grep -v ' ok$' | sed 's/^test \([^ ]*\) .*/\1/' >"$logs/$name.failed"
  fi
  while read -r test; do
    part "$name, alone ${test//[^a-z0-9_]/-}" 60 "$1" --exact "$test" --nocapture --test-threads=1
    [ -z "$check" ] || part "$name, memcheck ${test//[^a-z0-9_]/-}" 90 "$check" "${check_options[@]}" --tool memcheck \
      "$1" --exact "$test" --nocapture --test-threads=1
  done <"$logs/$name.failed"
}

# beside COMMAND...: runs a command in the background, at most two at once.
beside() {
  while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
  "$@" &
}

# A kernel's parameters are counted by asking for the next one until there is none, which is no error.
check_options=(--error-exitcode 9 --report-api-errors no)
sanitizer_program() { command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1; }

sum_of() { grep -oE "[0-9]+ $1" "$2" | awk '{ n += $1 } END { print n + 0 }'; }
wants() { [[ $parts == *" $1 "* ]]; }
has() { [ -x "./$1" ]; }

# The suite's modules that test kernels; those that take the shim alone need no device, and would count as passed.
kernel_suites() {
  has suite && ./suite --list 2>/dev/null | sed -n 's/^\(cuda_[a-z_]*\)::.*/\1/p' | sort -u | grep -vE '^cuda_(shim|ptx|streams)$'
}

# Programs that measure time run one after the other, tests two at once.
tests() {
  has unit && suite unit 30 ./unit cuda::
  has gpu && suite gpu 60 ./gpu
  for name in $(kernel_suites); do beside suite "$name" 140 ./suite "$name::"; done
  wait
  export ISOSHARD_TEST_DEVICE=cuda
  for name in equivalence programs redistribute exact train rng_layouts regressions; do
    # The name of another module, whose tests are for the CPU, ends alike.
    has suite && beside suite "$name on cuda" 140 ./suite "$name::" --skip rules_exact
  done
  wait
  unset ISOSHARD_TEST_DEVICE
  has nccl && suite nccl 30 ./nccl
}

# Says which libraries were loaded. Without a device that works, the rest would cost time and say nothing.
smoke() {
  part smoke 180 ./gpu --exact smoke --nocapture
  local code=$?
  grep -oE '(libcuda|NVRTC|cuBLASLt|NCCL): .*' "$logs/smoke.log" || true
  [ "$code" = 0 ] || end_of "$logs/smoke.log"
  return "$code"
}

# The bits are equal on every mesh, and in f32 equal to the CPU's.
training() {
  local dtype model mesh device bits expected
  for model in gpt llama; do
    for dtype in f32 bf16; do
      expected=""
      for where in "cpu 1" "cuda 1" "cuda fsdp=2" "cuda fsdp=2,tp=2"; do
        read -r device mesh <<<"$where"
        bits=$(./train_gpt --json --steps 10 --dropout 0.1 --eval-every 10 --eval-batches 2 --model "$model" --dtype "$dtype" \
          --device "$device" --mesh "$mesh" 2>"$work/train.err" | grep -oE '"(loss_bits|parameters_digest)":"[0-9a-f]*"' |
          tr '\n' ' ')
        if [ -z "$bits" ]; then
          echo "$model $dtype on $where: 1 failed: $(cat "$work/train.err")"
        elif [ "${expected:=$bits}" = "$bits" ]; then
          echo "$model $dtype on $where: 1 passed: ${bits##*:}"
        else
          echo "$model $dtype on $where: 1 failed: ${bits##*:} instead of ${expected##*:}"
        fi
      done
    done
  done | tee "$work/training.txt"
  ! grep -q '1 failed' "$work/training.txt"
}

bench() {
  # A part of a benchmark that fails says so in a line, and the others go on.
  part "bench isoshard" 110 bash -o pipefail -c \
    './bench_gpu --json | tee "$0/ours.jsonl" && ! grep "\"failed\"" "$0/ours.jsonl"' "$OUT"
  if python3 -c 'import torch' 2>/dev/null; then
    part "bench torch" 110 bash -o pipefail -c \
      'python3 gpu.py | tee "$0/torch.jsonl" && ! grep "\"failed\"" "$0/torch.jsonl"' "$OUT"
  else
    echo "SKIPPED (no PyTorch): bench torch" | tee "$logs/bench torch.log"
    echo "bench torch|SKIPPED (no PyTorch)|0|0|1|0" >"$logs/bench torch.row"
    : >"$OUT/torch.jsonl"
  fi
  part "bench table" 20 python3 compare.py "$OUT/ours.jsonl" "$OUT/torch.jsonl" --markdown "$OUT/bench.md" --json "$OUT/bench.json"
  cat "$logs/bench table.log" 2>/dev/null
}

# A suite takes much longer under the sanitizer: if its time ends without a finding, it says so and has not failed.
sanitizer() {
  local tool check row
  check=$(sanitizer_program)
  if [ -z "$check" ]; then
    echo "SKIPPED (no compute-sanitizer): memcheck, racecheck"
    for tool in memcheck racecheck; do
      echo "SKIPPED (no compute-sanitizer)" >"$logs/$tool.log"
      echo "$tool|SKIPPED (no compute-sanitizer)|0|0|1|0" >"$logs/$tool.row"
    done
    return
  fi
  for tool in memcheck racecheck; do
    for name in $(kernel_suites); do
      beside part "$tool $name" $(($(left) / 4)) "$check" "${check_options[@]}" --tool "$tool" ./suite "$name::" --test-threads=1
    done
    wait
    for row in "$logs/$tool "*.row; do
      if grep -q '|TIMED OUT' "$row" && ! grep -qE '^=+ .*(Invalid|[Hh]azard|Error|error)' "${row%.row}.log"; then
        sed -i 's/|TIMED OUT after/|nothing found, cut short after/' "$row"
      fi
    done
  done
}

link_libraries
{
  cat packed.txt
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  sort -u "$work/found.txt" | sed 's/^/found /'
} | tee "$logs/facts.log"
export RUST_BACKTRACE=1 ISOSHARD_CACHE=${ISOSHARD_CACHE:-${XDG_CACHE_HOME:-${HOME:-$here}/.cache}/isoshard}
mkdir -p "$ISOSHARD_CACHE" 2>/dev/null || export ISOSHARD_CACHE=$OUT/kernels
export ISOSHARD_IMAGES=$work/bin/images
ready=1
smoke || ready=
if [ -n "$ready" ] && wants tests; then tests; fi
if [ -n "$ready" ] && wants train; then
  # shellcheck disable=SC2016
  export -f training
  export work
  part "train_gpt" 70 bash -c training
fi
if [ -n "$ready" ] && wants bench; then bench; fi
if [ -n "$ready" ] && wants sanitizer; then sanitizer; fi

{
  echo "# $(head -1 packed.txt) on $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1), $(date -u +%F)"
  echo
  echo "| part | outcome | passed | failed | skipped | seconds |"
  echo "|---|---|---|---|---|---|"
  cat "$logs"/*.row | sed 's/|/ | /g; s/^/| /; s/$/ |/'
  echo
  echo "$(cat "$logs"/*.log | grep -c 'SKIPPED (') skipped in all; $SECONDS s"
} | tee "$OUT/summary.md"
awk -F '|' 'BEGIN { print "[" }
  { printf("%s{\"part\":\"%s\",\"outcome\":\"%s\",\"passed\":%d,\"failed\":%d,\"skipped\":%d,\"seconds\":%d}",
      (NR > 1 ? ",\n" : ""), $1, $2, $3, $4, $5, $6) }
  END { print "\n]" }' "$logs"/*.row >"$OUT/summary.json"
# Shows failures next to the table.
for row in "$logs"/*.row; do
  if grep -qE '\|(FAILED|TIMED OUT)' "$row"; then
    echo "--- ${row##*/}"
    end_of "${row%.row}.log"
  fi
done
# No pipe: with pipefail the end of its reader would be the status.
! grep -qE '\|(FAILED|TIMED OUT|NOT RUN)' "$logs"/*.row
