#!/usr/bin/env bash
# Compiles every CUDA source of the crate with nvcc, for Ampere and Hopper, with warnings as errors, on a machine
# without a GPU. The sources are those of kernels/ and those that formulas generate; examples/kernel_sources.rs writes
# both.
#
#   tests/gpu/compile_kernels.sh [NAME.cu ...]      all sources without arguments
#
# Writes every kernel's registers, stack, spills and static shared memory to target/gpu/kernels.tsv, and the largest
# ones to standard output. A kernel that spills or has a stack frame (which is in slow local memory) fails, unless
# spills.txt in this folder allows that much.
set -euo pipefail
cd "$(dirname "$0")/../.."

architectures=(80 90)
out=${CARGO_TARGET_DIR:-target}/gpu/nvcc
sources=${CARGO_TARGET_DIR:-target}/gpu/sources
allowed=tests/gpu/spills.txt

compile() {
  local file=$1 arch=$2 stem log
  stem=$out/${file%.cu}.sm_$arch
  log=$stem.log
  # As the crate compiles them: no contraction, IEEE division and root, subnormals kept, no header but ours.
  if ! "$NVCC" -cubin -arch="sm_$arch" -std=c++17 --fmad=false --ftz=false --prec-div=true --prec-sqrt=true \
    -Werror all-warnings -Xptxas -v -I "$sources" "$sources/$file" -o "$stem.cubin" >"$log" 2>&1; then
    echo "FAILED: $file for sm_$arch"
    grep -v '^ptxas info' "$log" || true
    return 1
  fi
}

# One line per kernel: file, architecture, name, registers, stack bytes, spilled bytes (stores + loads), shared bytes.
table() {
  for log in "$out"/*.log; do
    local name
    name=$(basename "$log" .log)
    awk -v file="${name%.sm_*}" -v arch="${name##*.}" '
      /Compiling entry function/ { split($0, q, "\x27"); kernel = q[2] }
      /Function properties for/ { of = $NF }
      /bytes stack frame/ && of == kernel { stack = $1; spill = $5 + $9 }
      /Used [0-9]+ registers/ {
        shared = 0
        for (i = 1; i < NF; i++) {
          if ($(i + 1) ~ /^registers/) registers = $i
          if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
        }
        print file "\t" arch "\t" kernel "\t" registers "\t" stack "\t" spill "\t" shared
      }' "$log"
  done
}

# Kernels beyond spills.txt, whose lines have a kernel's name (* matches any text), bytes of stack, and bytes of
# spills.
over() {
  awk -F '\t' '
    NR == FNR {
      sub(/#.*/, "")
      if (split($0, w, " ") < 3) next
      gsub(/\*/, ".*", w[1])
      rule[++rules] = "^" w[1] "$"; stack[rules] = w[2]; spill[rules] = w[3]
      next
    }
    FNR > 1 && ($5 > 0 || $6 > 0) {
      for (i = 1; i <= rules; i++) if ($3 ~ rule[i] && $5 <= stack[i] && $6 <= spill[i]) next
      printf "%s (%s.cu, %s): %d bytes of stack, %d bytes spilled\n", $3, $1, $2, $5, $6
    }' "$allowed" "$out/../kernels.tsv"
}

NVCC=${NVCC:-$(tests/gpu/toolchain.sh)/bin/nvcc}
export NVCC out sources
export -f compile
rm -rf "$out" "$sources"
mkdir -p "$out"
cargo run --quiet --example kernel_sources -- "$sources"
files=("$@")
[ $# -gt 0 ] || mapfile -t files < <(cd "$sources" && ls -- *.cu)
[ ${#files[@]} -gt 0 ] || { echo "no sources to compile"; exit 1; }
for arch in "${architectures[@]}"; do
  for file in "${files[@]}"; do printf '%s %s\n' "$file" "$arch"; done
done | xargs -P "$(nproc)" -n 2 bash -c 'compile "$@"' compile

{
  printf 'file\tarch\tkernel\tregisters\tstack\tspilled\tshared\n'
  table
} >"$out/../kernels.tsv"
echo "${#files[@]} files, $(($(wc -l <"$out/../kernels.tsv") - 1)) kernels over sm_80 and sm_90; the most registers:"
tail -n +2 "$out/../kernels.tsv" | sort -t "$(printf '\t')" -k4,4nr -k3,3 | awk -F '\t' 'NR <= 8 {
  printf "  %4d registers %6d bytes shared  %s %s\n", $4, $7, $3, $2 }'
bad=$(over)
if [ -n "$bad" ]; then
  echo "$bad"
  echo "kernels spill or use local memory beyond what $allowed allows"
  exit 1
fi
