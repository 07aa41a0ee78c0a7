#!/usr/bin/env python3
"""Reads kernels' machine code for Hopper, and prints tables of what they promise: now, and before at an earlier commit.
Needs no GPU: NVRTC is that of toolchain.sh, and nvdisasm comes from PyPI (5 MB, once).

    tests/gpu/disassemble.py [--before COMMIT] [KERNEL ...]      without names: the kernels of the tables

A hot loop is the one with the most multiplications (FFMA, DFMA, HMMA) among those that contain no other loop; of two equal ones, the
shorter. Blocks are those that fit into a multiprocessor by registers, shared memory and threads. The expected shares are
bounds; docs/cuda.md, section 9, says what was slower than they.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WHEEL = "nvidia-cuda-nvdisasm==13.5.37"
BEFORE = "35bd367"
# The lists of dtypes with one dtype alone, as kernels/src/cuda/mod.rs has them. Earlier sources ignore all but their own lists.
LISTS = "#define FLOATS(X) X({0})\n#define UP_TO_F32(X)\n#define HALVES(X) {1}\n#define INTEGERS(X)\n#define SMALL_TYPES(X)\n"
# The bytes of the registers, of shared memory and the threads of a multiprocessor, and bandwidth times latency.
REGISTERS, SHARED, THREADS, IN_FLIGHT = 65536, 228 << 10, 2048, 25 << 10
# The clocks for which a warp's multiplication occupies a partition's unit, and those that a loop waits for shared memory.
CLOCKS, WAIT = {"FFMA": 1, "DFMA": 2, "HMMA": 4}, 30

tiles = lambda size, operands, pitch: size * (operands * 128 * (pitch + 16 // size) + 64 * (64 + 16 // size))
fast = lambda rows, cols, d: 2 * (rows + 4 * cols) * (d + 8)
attention = lambda header, call: f'#include "attention_{header}.cuh"\n{call}\n'
# Kernel, threads of a block, bytes of its shared memory (product.rs, exact.rs, fast.rs), source now, source before.
PRODUCTS = [
    ("matmul_large_f32", 128, (25 + 32) << 10, "matmul_f32", "matmul_f32"),
    ("matmul_large_f64", 128, (25 + 32) << 10, "matmul_f64", "matmul_f64"),
    ("matmul_large_bf16", 128, (50 + 32) << 10, "matmul_bf16", "matmul_bf16"),
    ("narrow_f32", 256, tiles(4, 1, 64) + 2048, attention("forward", "NARROW(f32, false, false)"), "attention_f32"),
    ("wide_f32", 256, tiles(4, 1, 128) + 2048, attention("forward", "WIDE(f32, false, false)"), "attention_f32"),
    ("narrow_dq_f32", 256, tiles(4, 2, 64), attention("backward", "NARROW(f32, false, false)"), "attention_grad_f32"),
    ("narrow_dkv_f32", 256, tiles(4, 2, 64), attention("backward", "NARROW(f32, false, false)"), "attention_grad_f32"),
    ("wide_dkv_f32", 256, tiles(4, 2, 128), attention("backward", "WIDE(f32, false, false)"), "attention_grad_f32"),
    ("fast64_bf16", 128, fast(128, 64, 64), attention("fast_forward", "FAST64(bf16, false)"), "attention_fast"),
    ("fast128_bf16", 128, fast(128, 32, 128), attention("fast_forward", "FAST128(bf16, false)"), "attention_fast"),
    ("fast64_dq_bf16", 128, fast(128, 64, 64), attention("fast_backward", "FAST64(bf16, false)"), "attention_grad_fast"),
    ("fast64_dkv_bf16", 128, fast(128, 64, 64), attention("fast_backward", "FAST64(bf16, false)"), "attention_grad_fast"),
    ("fast128_dkv_bf16", 128, fast(128, 32, 128), attention("fast_backward", "FAST128(bf16, false)"), "attention_grad_fast"),
]
# Kernel now and before, source, dtype, and the bytes that a lane loads before it waits, now and before: eight elements per operand
# that is held, and in sums 1 KiB per warp if elements have fewer than four bytes.
SIZE = {"f32": 4, "bf16": 2}
ROWS = [
    (f"{now}_{dtype}", f"{before}_{dtype}", source, dtype, bytes_now(SIZE[dtype]), bytes_before(SIZE[dtype]))
    for now, before, source, bytes_now, bytes_before in (
        ("softmax_packed", "softmax", "softmax", lambda s: 8 * s, lambda s: 8 * s),
        ("softmax_grad_packed", "softmax_grad", "softmax_grad", lambda s: 16 * s, lambda s: 16 * s),
        ("layer_norm_packed", "layer_norm", "layer_norm", lambda s: 8 * s, lambda s: 8 * s),
        ("layer_norm_grad_packed", "layer_norm_grad", "layer_norm_grad", lambda s: 16 * s, lambda s: 16 * s),
        ("rms_norm_packed", "rms_norm", "rms_norm", lambda s: 8 * s, lambda s: 8 * s),
        ("packed_rows", "rows", "sum", lambda s: 32, lambda s: 8 * s),
    )
    for dtype in ("f32", "bf16")
]


def tools():
    done = subprocess.run([os.path.join(ROOT, "tests/gpu/toolchain.sh")], check=True, capture_output=True, text=True)
    root = done.stdout.strip()
    program = os.path.join(root, "bin", "nvdisasm")
    if not os.path.exists(program):
        with tempfile.TemporaryDirectory() as work:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", work, WHEEL]
            subprocess.run(pip, check=True)
            subprocess.run([sys.executable, "-m", "zipfile", "-e", os.path.join(work, os.listdir(work)[0]), work], check=True)
            os.chmod(os.path.join(work, "nvidia/cu13/bin/nvdisasm"), 0o755)
            subprocess.run(["cp", os.path.join(work, "nvidia/cu13/bin/nvdisasm"), program], check=True)
    return root, program


def options():
    text = open(os.path.join(ROOT, "kernels/src/cuda/mod.rs"), encoding="utf-8").read()
    return re.findall(r'"(--[^"]+)"', text.split("OPTIONS")[1].split(";")[0])


def machine_code(root, folder, text):
    """The machine code of a source with the headers of a folder, and the registers of its kernels."""
    for builtins in ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13"):
        nvrtc = ctypes.CDLL(os.path.join(root, "lib", builtins))
    headers = sorted(h for h in os.listdir(folder) if h.endswith(".cuh"))
    of = lambda words: (ctypes.c_char_p * len(words))(*words)
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    texts = of([open(os.path.join(folder, h), "rb").read() for h in headers])
    nvrtc.nvrtcCreateProgram(ctypes.byref(made), text.encode(), b"kernel.cu", len(headers), texts, of([h.encode() for h in headers]))
    words = [o.encode() for o in [*options(), "--gpu-architecture=sm_90", "--ptxas-options=-v"]]
    failed = nvrtc.nvrtcCompileProgram(made, len(words), of(words))
    nvrtc.nvrtcGetProgramLogSize(made, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(made, log)
    assert not failed, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(made, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(made, image)
    found = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log.value.decode(), re.S)
    return image.raw, {kernel: int(registers) for kernel, registers in found}


def listing(program, image):
    """By kernel, the instructions as (name, the place that a branch goes to)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run([program, "-c", file.name], check=True, capture_output=True, text=True).stdout
    kernels, kernel, labels = {}, None, {}
    for line in text.splitlines():
        if begins := re.match(r"\.text\.(\w+):", line):
            kernel = kernels[begins[1]] = []
        elif label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = (id(kernel), len(kernel)) if kernel is not None else None
        elif code := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", line):
            target = re.search(r"`\((\.L_\w+)\)", code[3]) if code[2].startswith("BRA") else None
            kernel.append((code[2], target[1] if target else None))
    return {name: [(op, labels.get(to, (0, 0))[1] if to else None) for op, to in code] for name, code in kernels.items()}


class Commit:
    """The kernels of a commit, or those of the working tree."""

    def __init__(self, root, program, folder):
        self.root, self.program, self.folder, self.made = root, program, folder, {}

    def kernel(self, source, name, dtype=None):
        """(instructions, registers). The source is a file's name, or a text."""
        if (source, dtype) not in self.made:
            text = source if "\n" in source else open(os.path.join(self.folder, f"{source}.cu"), encoding="utf-8").read()
            halves = f"X({dtype})" if dtype in ("f16", "bf16") else ""
            image, registers = machine_code(self.root, self.folder, (LISTS.format(dtype, halves) if dtype else "") + text)
            self.made[source, dtype] = listing(self.program, image), registers
        codes, registers = self.made[source, dtype]
        return codes[name], registers[name]


def hot_loop(code):
    """(instructions, multiplications, the clocks of one)"""
    multiplies = lambda op: op.startswith(tuple(CLOCKS))
    loops = [(to, at) for at, (_, to) in enumerate(code) if to is not None and to <= at]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    count = lambda loop: sum(multiplies(op) for op, _ in code[loop[0] : loop[1] + 1])
    a, b = max(inner, key=lambda loop: (count(loop), loop[0] - loop[1]), default=(0, len(code) - 1))
    body = [op for op, _ in code[a : b + 1]]
    kinds = [op.split(".")[0] for op in body if multiplies(op)]
    kind = max(set(kinds), key=kinds.count)
    return len(body), kinds.count(kind), CLOCKS[kind]


def blocks_of(registers, threads, shared):
    warps = threads // 32 * -(-registers * 32 // 256) * 256
    return min(REGISTERS // warps, SHARED // (shared + 1024), THREADS // threads)


def of_product(commit, kernel, threads, shared, source):
    code, registers = commit.kernel(source, kernel)
    blocks, (total, products, clocks) = blocks_of(registers, threads, shared), hot_loop(code)
    # A partition has a quarter of the warps. A single one waits for its operands after each turn of the loop.
    own = blocks * threads / 128 * total
    share = min(1, clocks * products / total) * min(1, own / (total + WAIT))
    stores = [sum(op.startswith("STG.E") and op.endswith("128") == wide and not op.endswith(("64", "U16")) for op, _ in code) for wide in (True, False)]
    return registers, blocks, len(code), total, products, f"{products / total:.0%}", f"{share:.0%}", f"{stores[0]}, {stores[1]}"


def of_rows(commit, kernel, source, dtype, lane_bytes):
    code, registers = commit.kernel(source, kernel, dtype)
    blocks = blocks_of(registers, 256, 128)
    count = lambda stem: [sum(op.startswith(stem) and op.endswith("128") == wide for op, _ in code) for wide in (True, False)]
    (loads, single), shuffles = count("LDG"), sum(op.startswith("SHFL") for op, _ in code)
    in_flight = blocks * 256 * lane_bytes
    return registers, blocks, len(code), f"{loads}, {single}", shuffles, f"{in_flight / 1024:.0f} KiB", f"{min(1, in_flight / IN_FLIGHT):.0%}"


def row(name, before, now):
    cells = [str(n) if b is None or str(b) == str(n) else f"{b} → {n}" for b, n in zip(before or [None] * len(now), now)]
    return "| " + " | ".join([f"`{name}`", *cells]) + " |"


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--before", default=BEFORE)
    arguments.add_argument("kernels", nargs="*")
    arguments = arguments.parse_args()
    wanted = lambda kernel: not arguments.kernels or kernel in arguments.kernels
    root, program = tools()
    with tempfile.TemporaryDirectory() as work:
        archive = subprocess.run(["git", "archive", arguments.before, "kernels"], check=True, capture_output=True, cwd=ROOT).stdout
        subprocess.run(["tar", "-x", "-C", work], check=True, input=archive)
        # Sources lay in kernels/ itself until November 30, 2026.
        folders = [os.path.join(folder, "kernels") for folder in (work, ROOT)]
        inside = [os.path.join(folder, "cuda") for folder in folders]
        before, now = (Commit(root, program, new if os.path.isdir(new) else old) for old, new in zip(folders, inside))
        print("| kernel | registers | blocks per multiprocessor | instructions | hot loop: instructions | multiplications | their share | "
              "expected share of the peak | stores of 16 bytes, of 4 |\n|---|---|---|---|---|---|---|---|---|")
        for kernel, threads, shared, source, source_before in filter(lambda r: wanted(r[0]), PRODUCTS):
            print(row(kernel, of_product(before, kernel, threads, shared, source_before), of_product(now, kernel, threads, shared, source)))
        print("\n| kernel | registers | blocks per multiprocessor | instructions | loads of 16 bytes, of fewer | shuffles | bytes on their way | "
              "expected share of the peak |\n|---|---|---|---|---|---|---|---|")
        for kernel, kernel_before, source, dtype, lane, lane_before in filter(lambda r: wanted(r[0]), ROWS):
            print(row(kernel, of_rows(before, kernel_before, source, None, lane_before), of_rows(now, kernel, source, dtype, lane)))


if __name__ == "__main__":
    main()
