#!/usr/bin/env python3
"""Counts the instructions of kernels' hot loops in the machine code for Hopper, and writes a table for docs/cuda.md, section 9.
Needs no GPU: NVRTC is that of toolchain.sh, and nvdisasm comes from PyPI (5 MB, once).

    tests/gpu/disassemble.py [KERNEL ...]      without arguments: the kernels of the table

A hot loop is the one with the most multiplications (FFMA, DFMA, HMMA) among those that contain no other loop. A share is that
of multiplications among its instructions: a partition of a multiprocessor starts one instruction of a warp per clock, so it bounds
the share of FFMA's and DFMA's peak. Blocks are those that fit into a multiprocessor by registers and shared memory.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KERNELS = os.path.join(ROOT, "kernels")
WHEEL = "nvidia-cuda-nvdisasm==13.5.37"
# Source, kernel, threads of a block, bytes of its shared memory (product.rs, fast.rs).
TABLE = [
    ("matmul_f32", "matmul_large_f32", 128, (25 + 32) << 10),
    ("matmul_f64", "matmul_large_f64", 128, (25 + 32) << 10),
    ("matmul_bf16", "matmul_large_bf16", 128, (25 + 32) << 10),
    ("attention_fast_bf16", "fast64_bf16", 128, 2 * (128 + 4 * 64) * 72),
    ("attention_fast_bf16", "fast128_bf16", 128, 2 * (128 + 4 * 32) * 136),
    ("attention_grad_fast_bf16", "fast64_dq_bf16", 128, 2 * (2 * 64 + 4 * 64) * 72),
    ("attention_grad_fast_bf16", "fast64_dkv_bf16", 128, 2 * (2 * 64 + 4 * 64) * 72),
    ("attention_grad_fast_bf16", "fast128_dkv_bf16", 128, 2 * (2 * 64 + 4 * 32) * 136),
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
    text = open(os.path.join(ROOT, "src/tensor/cuda/sources.rs"), encoding="utf-8").read()
    return re.findall(r'"(--[^"]+)"', text.split("OPTIONS")[1].split(";")[0])


def machine_code(root, name):
    """The machine code of a file of kernels/, and the registers of its kernels."""
    for builtins in ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13"):
        nvrtc = ctypes.CDLL(os.path.join(root, "lib", builtins))
    read = lambda file: open(os.path.join(KERNELS, file), "rb").read()
    headers = sorted(h for h in os.listdir(KERNELS) if h.endswith(".cuh"))
    of = lambda words: (ctypes.c_char_p * len(words))(*words)
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    texts, names = of([read(h) for h in headers]), of([h.encode() for h in headers])
    nvrtc.nvrtcCreateProgram(ctypes.byref(made), read(f"{name}.cu"), f"{name}.cu".encode(), len(headers), texts, names)
    words = [o.encode() for o in [*options(), "--gpu-architecture=sm_90", "--ptxas-options=-v"]]
    assert nvrtc.nvrtcCompileProgram(made, len(words), of(words)) == 0, name
    nvrtc.nvrtcGetProgramLogSize(made, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(made, log)
    nvrtc.nvrtcGetCUBINSize(made, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(made, image)
    found = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log.value.decode(), re.S)
    return image.raw, {kernel: int(registers) for kernel, registers in found}


def listing(program, image):
    """By kernel, the instructions as (address, name, target of a branch)."""
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


def hot_loop(code):
    multiplies = lambda op: op.startswith(("FFMA", "DFMA", "HMMA"))
    loops = [(to, at) for at, (_, to) in enumerate(code) if to is not None and to <= at]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    count = lambda loop: sum(multiplies(op) for op, _ in code[loop[0] : loop[1] + 1])
    loop = max(inner, key=count, default=(0, len(code) - 1))
    body = [op for op, _ in code[loop[0] : loop[1] + 1]]
    return len(body), sum(map(multiplies, body)), body


def main():
    root, program = tools()
    chosen = [row for row in TABLE if not sys.argv[1:] or row[1] in sys.argv[1:]]
    print("| kernel | registers | blocks per multiprocessor | hot loop: instructions | multiplications | share | stores of 16 bytes, of 4 |")
    print("|---|---|---|---|---|---|---|")
    made = {}
    for source, kernel, threads, shared in chosen:
        if source not in made:
            image, registers = machine_code(root, source)
            made[source] = listing(program, image), registers
        code, registers = made[source][0][kernel], made[source][1][kernel]
        warps = threads // 32 * -(-registers * 32 // 256) * 256
        blocks = min(65536 // warps, (228 << 10) // (shared + 1024))
        total, products, _ = hot_loop(code)
        wide, single = (sum(op.startswith("STG.E") and op.endswith("128") == w and not op.endswith(("64", "U16")) for op, _ in code) for w in (True, False))
        print(f"| `{kernel}` | {registers} | {blocks} | {total} | {products} | {products / total:.0%} | {wide}, {single} |")


if __name__ == "__main__":
    main()
