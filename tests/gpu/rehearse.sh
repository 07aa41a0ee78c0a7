#!/usr/bin/env bash
# Rehearses pack.sh and run.sh on a machine without a GPU, in under a minute: the real test program `gpu`, which finds no
# device, and then stand-ins for all programs, which take part in what run.sh has to do: two suites at once, tests that fail
# again alone and under compute-sanitizer, rows as parts end, libraries that are no stubs, and an exit code that says so.
#
#   tests/gpu/rehearse.sh GPU_PROGRAM      the test program `gpu`, built with the feature cuda
set -euo pipefail
cd "$(dirname "$0")/../.."
gpu=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=$(tests/gpu/toolchain.sh)
mkdir -p "$work/programs" "$work/path" "$work/site/cuda/lib/stubs" "$work/site/cuda/compat" "$work/home"
fail() { echo "FAILED: $1"; exit 1; }
has() { grep -qE "$2" "$1" || { cat "$1"; fail "$1 has no $2"; }; }
program() { { echo '#!/usr/bin/env bash'; cat; } >"$1"; chmod +x "$1"; }

# Cargo, strip and Python as pack.sh and run.sh call them.
program "$work/path/cargo" <<'END'
for name in $NAMES; do
  kind=test target=$name
  case $name in lib) kind=lib ;; bench) kind=bench target=gpu ;; esac
  echo '{"reason":"compiler-artifact","executable":"'"$PROGRAMS/$name"'","target":{"kind":["'$kind'"],"name":"'"$target"'"}}'
done
END
program "$work/path/strip" <<<'exit 0'
program "$work/path/python3" <<'END'
case "$*" in
  *getsitepackages*) echo "$SITE" ;;
  *"import torch"*) exit 1 ;;
  *compare.py*) echo "a table" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
END
REAL_PYTHON=$(python3 -c 'import sys; print(sys.executable)')
export REAL_PYTHON SITE=$work/site PROGRAMS=$work/programs
touch "$work"/site/cuda/lib/stubs/libcuda.so "$work"/site/cuda/compat/libcuda.so.1 "$work"/site/cuda/lib/libcuda.so.1
# The device tests run in turn: what is counted is the most at once, and the threads they were given.
program "$work/programs/suite" <<'END'
[ "$ISOSHARD_REQUIRE_DEVICE" = 1 ] || { echo "no device is required"; exit 3; }
if [ "$1" = --list ]; then
  printf 'cuda_%s::a: test\n' one two three shim ptx streams
  exit
fi
echo "$*" >>"$STATE/calls"
mkdir "$STATE/running.$$"
ls -d "$STATE"/running.* | wc -l >>"$STATE/at_once"
sleep 0.3
rmdir "$STATE/running.$$"
case "$FAIL $*" in
  *--exact*) echo "test cuda_two::b ... FAILED"; echo "test result: FAILED. 0 passed; 1 failed"; exit 101 ;;
  crash*cuda_two::*--test-threads=1*) printf 'test cuda_two::a ... ok\ntest cuda_two::c ... gone'; kill -SEGV $$ ;;
  crash*cuda_two::*) kill -SEGV $$ ;;
  fail*cuda_two::*) echo "test cuda_two::b ... FAILED"; echo "test result: FAILED. 1 passed; 1 failed"; exit 101 ;;
esac
echo "test result: ok. 2 passed; 0 failed"
END
program "$work/programs/lib" <<<'echo "test result: ok. 1 passed; 0 failed"'
cp "$work/programs/lib" "$work/programs/nccl"
program "$work/programs/train_gpt" <<<'echo "{\"loss_bits\":\"0a\"}"'
program "$work/programs/bench" <<<'echo "{\"case\":1}"'
program "$work/path/compute-sanitizer" <<'END'
echo "sanitizer $*" >>"$STATE/calls"
while [ "${1#./}" = "$1" ]; do shift; done
"$@" || true
echo "========= ERROR SUMMARY: 1 error"
[[ $* == *--exact* ]] && exit 9 || exit 0
END
real_path=$PATH
export PATH=$work/path:$PATH

echo "-- pack.sh packs the images of two sources with the real program"
export NAMES="lib suite gpu nccl train_gpt bench" ISOSHARD_GPU_PACK=$work/pack
cp "$gpu" "$work/programs/gpu"
PATH=$work/path:$real_path ISOSHARD_SOURCES="fill.cu copy.cu" tests/gpu/pack.sh 80 90 >"$work/packed.txt"
has "$work/packed.txt" '^4 images$'
[ "$(python3 -m tarfile -l "$ISOSHARD_GPU_PACK/pack.tar.xz" | grep -c '^bin/images/\(fill\|copy\)-[0-9a-f]* *$')" = 4 ] || fail "the pack has other images"

run() { # NAME EXIT_CODE [PART ...]
  local name=$1 want=$2 code=0
  shift 2
  export STATE=$work/state.$name OUT=$work/out.$name
  mkdir -p "$STATE"
  touch "$STATE/calls"
  HOME=$work/home XDG_CACHE_HOME="" bash "$ISOSHARD_GPU_PACK/run.sh" "$@" >"$work/$name.txt" 2>&1 || code=$?
  [ "$code" = "$want" ] || { cat "$work/$name.txt"; fail "$name: exit code $code"; }
}

echo "-- without a device the smoke test fails, and nothing else runs"
ISO_SHIM=1 run no-device 1
has "$OUT/summary.md" '^\| smoke \| FAILED \(101\) '
has "$work/no-device.txt" 'ISOSHARD_REQUIRE_DEVICE=1, and there is no CUDA device: '
[ ! -s "$STATE/calls" ] && [ "$(ls "$OUT"/logs/*.row)" = "$OUT/logs/smoke.row" ] || fail "more than the smoke test ran"

echo "-- with a device"
program "$work/programs/gpu" <<'END'
case "$*" in
  *smoke*)
    [ "$(basename "$(dirname "$(readlink "${LD_LIBRARY_PATH%%:*}/libcuda.so.1")")")" = lib ] || { echo "a stub is found first"; exit 5; }
    ls "$ISOSHARD_IMAGES" >/dev/null 2>&1 || true
    touch "$ISOSHARD_CACHE/kept"
    [ -z "${NO_TEST:-}" ] || { echo "test result: ok. 0 passed; 0 failed"; exit; }
    echo "test smoke ... libcuda:  /somewhere/libcuda.so.1" ;;
esac
echo "test result: ok. 1 passed; 0 failed"
END
tests/gpu/pack.sh >"$work/packed.txt"
FAIL="" run well 0
has "$work/well.txt" '^libcuda:  /somewhere'
has "$OUT/summary.md" '^\| cuda_three \| ok \| 2 '
for part in unit gpu nccl "bench isoshard" train_gpt "memcheck cuda_one"; do has "$OUT/summary.md" "^\\| $part \\| ok "; done
[ "$(sort -n "$STATE/at_once" | tail -1)" = 2 ] || fail "$(sort -n "$STATE/at_once" | tail -1) suites at once"
if grep -v -- '--test-threads=[14]$' "$STATE/calls" || ! grep -q -- 'cuda_one:: --test-threads=4' "$STATE/calls"; then fail "other numbers of threads"; fi
if grep 'cuda_\(shim\|ptx\|streams\)' "$STATE/calls"; then fail "tests of the shim ran"; fi
[ -e "$work/home/.cache/isoshard/kept" ] || fail "the cache of kernels is elsewhere"

echo "-- a test that fails runs again, alone and under the sanitizer"
FAIL=fail run one-fails 1 tests
has "$OUT/summary.md" '^\| cuda_two, alone cuda_two--b \| FAILED \(101\) '
has "$OUT/summary.md" '^\| cuda_two, memcheck cuda_two--b \| FAILED \(9\) '
has "$STATE/calls" 'sanitizer .*--tool memcheck .* --exact cuda_two::b --nocapture --test-threads=1'
has "$OUT/summary.md" '^\| cuda_three \| ok '

echo "-- a suite that dies runs again, one test after the other, and the one that kills it is named"
FAIL=crash run one-crashes 1 tests
has "$OUT/summary.md" '^\| cuda_two, one by one \| FAILED '
has "$OUT/summary.md" '^\| cuda_two, alone cuda_two--c \| '

echo "-- a smoke test that is not there is no success, nor is a pack without it"
NO_TEST=1 FAIL="" run no-test 1
has "$OUT/summary.md" '^\| smoke \| FAILED \(no test ran\) '
NAMES="lib suite" tests/gpu/pack.sh >"$work/packed.txt"
FAIL="" run no-program 1
has "$OUT/summary.md" '^\| smoke \| FAILED '
echo "rehearsed"
