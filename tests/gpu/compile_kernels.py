#!/usr/bin/env python3
"""Compiles every CUDA source of the crate for Hopper, and for Ampere those that use matrix units and every eighth of the others,
as the crate does: by NVRTC with the crate's options, and warnings are errors. Needs no GPU. The sources are those of kernels/
and those that formulas generate; examples/kernel_sources.rs writes both.

    tests/gpu/compile_kernels.py [NAME.cu ...]      all sources without arguments; named ones for both architectures
    tests/gpu/compile_kernels.py --sample           leaves out those that differ from another in a name alone: f16 beside
                                                    bf16, i32 and u8 beside i64; and dropout on Ampere

Writes every kernel's registers, stack, spills and static shared memory to target/gpu/kernels.tsv, and the largest ones
and the longest compilations to standard output. A kernel that spills or has a stack frame (which is in slow local memory) fails, unless spills.txt in
this folder allows that much. The compiler's words on a source are kept in the compiler's folder (toolchain.sh) under a hash of
everything that they depend on, so an unchanged source is compiled once per machine, also for a new clone. Words that were
not used for 30 days are removed.
"""

import ctypes
import fnmatch
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import time

ARCHITECTURES = ("sm_80", "sm_90")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OUT = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "gpu")
SOURCES = os.path.join(OUT, "sources")
KEPT_SECONDS = 30 * 24 * 3600
ALLOWED = os.path.join(ROOT, "tests", "gpu", "spills.txt")
PTXAS = re.compile(r"^(ptxas info|ptxas +\.)")


def read(name):
    with open(os.path.join(SOURCES, name), encoding="utf-8") as file:
        return file.read()


def included(source, headers):
    """The headers that a source includes, directly or not."""
    found, texts = {}, [source]
    while texts:
        for name in re.findall(r'#include "([^"]+)"', texts.pop()):
            if name in headers and name not in found:
                found[name] = headers[name]
                texts.append(headers[name])
    return found


def compile_one(task):
    """Compiles a source for an architecture, and returns (source, architecture, what is wrong, the compiler's log, seconds)."""
    name, architecture, library, logs, options = task
    source = read(name)
    headers = included(source, {h: read(h) for h in os.listdir(SOURCES) if h.endswith(".cuh")})
    nvrtc = ctypes.CDLL(library)
    version = (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    options = [*options, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    key = hashlib.sha256(repr((list(version), options, source, sorted(headers.items()))).encode()).hexdigest()
    kept = os.path.join(logs, f"{name}.{architecture}.{key[:24]}")
    if os.path.exists(kept):
        os.utime(kept)
        with open(kept, encoding="utf-8") as file:
            return name, architecture, "", file.read(), 0.0

    start = time.process_time()
    texts = (ctypes.c_char_p * len(headers))(*[t.encode() for t in headers.values()])
    names = (ctypes.c_char_p * len(headers))(*[h.encode() for h in headers])
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
    words = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    failed = made or nvrtc.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    log = buffer.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    seconds = time.process_time() - start
    wrong = "\n".join(line for line in log.splitlines() if line.strip() and not PTXAS.match(line))
    if failed or wrong or not size.value:
        return name, architecture, wrong or f"NVRTC's error {failed}, {size.value} bytes of machine code", log, seconds
    with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write(log)
    os.replace(f"{kept}.{os.getpid()}", kept)
    return name, architecture, "", log, seconds


def kernels(name, architecture, log):
    """The kernels of a log: (source, architecture, kernel, registers, stack, spilled, shared)."""
    found, kernel, of, stack, spilled = [], None, None, 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '([^']+)'", line):
            kernel = entry[1]
        elif entry := re.search(r"Function properties for (\S+)", line):
            of = entry[1]
        elif (entry := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)) and of == kernel:
            stack, spilled = int(entry[1]), int(entry[2]) + int(entry[3])
        elif entry := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((name[:-3], architecture, kernel, int(entry[1]), stack, spilled, int(shared[1]) if shared else 0))
    return found


def allowed():
    """The lines of spills.txt: a kernel's name, or FILE/NAME (* matches any text), bytes of stack, and bytes of spills."""
    for line in open(ALLOWED, encoding="utf-8"):
        words = line.split("#")[0].split()
        if len(words) >= 3:
            yield words[0], int(words[1]), int(words[2])


def main():
    toolchain = subprocess.run([os.path.join(ROOT, "tests/gpu/toolchain.sh")], check=True, capture_output=True, text=True)
    folder = os.path.join(toolchain.stdout.strip(), "lib")
    if os.environ.get("LD_LIBRARY_PATH", "").split(":")[0] != folder:
        # NVRTC looks for its own parts there; a process reads the variable when it starts.
        path = ":".join(p for p in (folder, os.environ.get("LD_LIBRARY_PATH")) if p)
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_LIBRARY_PATH": path})
    for name in os.listdir(SOURCES) if os.path.isdir(SOURCES) else []:
        os.remove(os.path.join(SOURCES, name))
    logs = os.path.join(toolchain.stdout.strip(), "kernel-logs")
    os.makedirs(logs, exist_ok=True)
    subprocess.run(["cargo", "run", "--quiet", "--example", "kernel_sources", "--", SOURCES], check=True, cwd=ROOT)
    sample = sys.argv[1:] == ["--sample"]
    named = [] if sample else sys.argv[1:]
    names = named or sorted(n for n in os.listdir(SOURCES) if n.endswith(".cu"))
    if sample:
        alike = {"f16": "bf16", "i32": "i64", "u8": "i64"}
        twin = lambda n: re.sub(r"_(f16|i32|u8)\.cu$", lambda m: f"_{alike[m[1]]}.cu", n)
        names = [n for n in names if twin(n) == n or twin(n) not in names]
    assert names, "no sources to compile"
    options = read("options.txt").split()
    library = os.path.join(folder, "libnvrtc.so.13")
    # The slowest first.
    order = [n for pattern in ("attention|.*norm_grad|random", "matmul|.*norm|max|min|compare|create", "")
             for n in names if re.match(pattern, n)]
    # Only matrix units have instructions of an architecture; other sources also share most of their code.
    headers = {h: read(h) for h in os.listdir(SOURCES) if h.endswith(".cuh")}
    others = [n for n in sorted(names) if "mma.cuh" not in included(read(n), headers)]
    left_out = set(others) - set(others[::8]) - set(named)
    left_out |= {n for n in names if sample and "_dropout_" in n}
    tasks = [(n, a, library, logs, options) for n in dict.fromkeys(order) for a in ARCHITECTURES
             if a != "sm_80" or n not in left_out]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        done = pool.map(compile_one, tasks, chunksize=1)
    for log in os.scandir(logs):
        if time.time() - log.stat().st_mtime > KEPT_SECONDS:
            os.remove(log)

    table = sorted(row for name, architecture, _, log, _ in done for row in kernels(name, architecture, log))
    with open(os.path.join(OUT, "kernels.tsv"), "w", encoding="utf-8") as file:
        for row in [("file", "arch", "kernel", "registers", "stack", "spilled", "shared"), *table]:
            file.write("\t".join(map(str, row)) + "\n")
    print(f"{len(names)} files, {len(table)} kernels over {' and '.join(ARCHITECTURES)}; the most registers:")
    for name, architecture, kernel, registers, _, _, shared in sorted(table, key=lambda r: (-r[3], r[2]))[:8]:
        print(f"  {registers:4} registers {shared:6} bytes shared  {architecture} {kernel}")
    longest = sorted(((seconds, name) for name, _, _, _, seconds in done if seconds), reverse=True)
    listed = ", ".join(f"{name} {seconds:.1f}" for seconds, name in longest[:8])
    print(f"{sum(s for s, _ in longest):.0f} CPU-seconds in {len(longest)} of {len(done)} compilations: {listed}")
    bad = [f"FAILED: {name} for {architecture}\n{wrong}" for name, architecture, wrong, _, _ in done if wrong]
    rules = list(allowed())
    for name, architecture, kernel, _, stack, spilled, _ in table:
        within = any(fnmatch.fnmatchcase(f"{name}/{kernel}" if "/" in k else kernel, k) and stack <= s and spilled <= b for k, s, b in rules)
        if (stack or spilled) and not within:
            bad.append(f"{kernel} ({name}.cu, {architecture}): {stack} bytes of stack, {spilled} bytes spilled, beyond spills.txt")
    without = [n for n, _, wrong, log, _ in done if not wrong and "Compiling entry function" not in log]
    bad += [f"{name}: the compiler names no kernel" for name in without]
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
