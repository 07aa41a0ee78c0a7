#!/usr/bin/env bash
# Tests and times this crate on a machine with an NVIDIA GPU, in under ten minutes. Needs the driver, NVRTC and
# cuBLASLt (those of a PyTorch installation suffice), and the files that pack.sh packed.
#
#   OUT=/some/folder bash .gpu/run.sh [PART ...]      PART: tests, train, bench, sanitizer; default: all
#
# Writes summary.md, summary.json, bench.md, bench.json, ours.jsonl, torch.jsonl and logs.tar.gz to $OUT (default:
# ./out), prints the table, and exits with 1 if anything failed. Skipped parts are counted, and never count as passed.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-./out}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
limit_s=${LIMIT_S:-570}
parts=" ${*:-tests train bench sanitizer} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/logs"
tar -C "$work" -xzf "$here/pack.tar.gz"
cd "$work/bin" || exit 1
left() { echo $((limit_s - SECONDS)); }

# Libraries are also looked up without a version: a folder of links to the installed files.
link_libraries() {
  mkdir -p "$work/lib"
  local site
  site=$(python3 -c 'import site, sysconfig; print(*site.getsitepackages(), sysconfig.get_path("purelib"))' 2>/dev/null)
  # shellcheck disable=SC2086
  find $site /usr/local/cuda*/ /usr/local/nvidia /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /opt/cuda -follow \
    -regextype posix-extended -regex '.*/lib(cuda|nvrtc|nvrtc-builtins|cublas|cublasLt|nccl)\.so[.0-9]*' 2>/dev/null |
    grep -v /stubs/ >"$work/found.txt"
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
    echo "$name|NOT RUN (out of time)|0|0|0|0" >"$work/logs/$name.row"
    return
  fi
  timeout --kill-after=5 "$seconds" "$@" >"$work/logs/$name.log" 2>&1 || code=$?
  case $code in
    0) ended=ok ;;
    124 | 137) ended="TIMED OUT after $seconds s" ;;
    *) ended="FAILED ($code)" ;;
  esac
  skipped=$(grep -c 'SKIPPED (' "$work/logs/$name.log")
  passed=$(sum_of passed "$work/logs/$name.log")
  failed=$(sum_of failed "$work/logs/$name.log")
  if [ "$code" = 0 ] && [ "$skipped" -gt 0 ]; then ended="SKIPPED in part"; fi
  echo "$name|$ended|$passed|$failed|$skipped|$((SECONDS - began))" >"$work/logs/$name.row"
  echo "$name: $ended, $((SECONDS - began)) s"
}

sum_of() { grep -oE "[0-9]+ $1" "$2" | awk '{ n += $1 } END { print n + 0 }'; }
wants() { [[ $parts == *" $1 "* ]]; }
has() { [ -x "./$1" ]; }

# The suite's modules that test kernels; those of the shim itself need no device.
kernel_suites() {
  has suite && ./suite --list 2>/dev/null | sed -n 's/^\(cuda_[a-z_]*\)::.*/\1/p' | sort -u | grep -v '^cuda_shim$'
}

# Programs that measure time run one after the other, tests run in parallel.
tests() {
  has unit && part unit 30 ./unit cuda::
  has gpu && part gpu 60 ./gpu
  for suite in $(kernel_suites); do part "$suite" 140 ./suite "$suite::" & done
  export ISOSHARD_TEST_DEVICE=cuda
  for suite in equivalence programs redistribute exact train rng_layouts regressions; do
    has suite && part "$suite on cuda" 140 ./suite "$suite::" &
  done
  wait
  unset ISOSHARD_TEST_DEVICE
  has nccl && part nccl 30 ./nccl
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
    echo "SKIPPED (no PyTorch): bench torch" | tee "$work/logs/bench torch.log"
    echo "bench torch|SKIPPED (no PyTorch)|0|0|1|0" >"$work/logs/bench torch.row"
    : >"$OUT/torch.jsonl"
  fi
  part "bench table" 20 python3 compare.py "$OUT/ours.jsonl" "$OUT/torch.jsonl" --markdown "$OUT/bench.md" --json "$OUT/bench.json"
  cat "$work/logs/bench table.log" 2>/dev/null
}

# A suite takes much longer under the sanitizer: if its time ends without a finding, it says so and has not failed.
sanitizer() {
  local tool check row
  check=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  if [ -z "$check" ]; then
    echo "SKIPPED (no compute-sanitizer): memcheck, racecheck"
    for tool in memcheck racecheck; do
      echo "SKIPPED (no compute-sanitizer)" >"$work/logs/$tool.log"
      echo "$tool|SKIPPED (no compute-sanitizer)|0|0|1|0" >"$work/logs/$tool.row"
    done
    return
  fi
  for tool in memcheck racecheck; do
    for suite in $(kernel_suites); do
      part "$tool $suite" $(($(left) / 2)) "$check" --tool "$tool" --error-exitcode 9 ./suite "$suite::" --test-threads=1 &
    done
    wait
    for row in "$work/logs/$tool "*.row; do
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
} | tee "$work/logs/facts.log"
export RUST_BACKTRACE=1 ISOSHARD_CACHE=${ISOSHARD_CACHE:-$work/cache}
if wants tests; then tests; fi
if wants train; then
  # shellcheck disable=SC2016
  export -f training
  export work
  part "train_gpt" 70 bash -c training
fi
if wants bench; then bench; fi
if wants sanitizer; then sanitizer; fi

{
  echo "# $(head -1 packed.txt) on $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1), $(date -u +%F)"
  echo
  echo "| part | outcome | passed | failed | skipped | seconds |"
  echo "|---|---|---|---|---|---|"
  cat "$work"/logs/*.row | sed 's/|/ | /g; s/^/| /; s/$/ |/'
  echo
  echo "$(cat "$work"/logs/*.log | grep -c 'SKIPPED (') skipped in all; $SECONDS s"
} | tee "$OUT/summary.md"
awk -F '|' 'BEGIN { print "[" }
  { printf("%s{\"part\":\"%s\",\"outcome\":\"%s\",\"passed\":%d,\"failed\":%d,\"skipped\":%d,\"seconds\":%d}",
      (NR > 1 ? ",\n" : ""), $1, $2, $3, $4, $5, $6) }
  END { print "\n]" }' "$work"/logs/*.row >"$OUT/summary.json"
tar -C "$work" -czf "$OUT/logs.tar.gz" logs
# Shows failures next to the table.
for row in "$work"/logs/*.row; do
  if grep -qE '\|(FAILED|TIMED OUT)' "$row"; then
    echo "--- ${row##*/}"
    grep -vE '^test .* \.\.\. ok$' "${row%.row}.log" | tail -25
  fi
done
! cat "$work"/logs/*.row | grep -qE '\|(FAILED|TIMED OUT|NOT RUN)'
