#!/usr/bin/env python3
"""Repeats launches that the shim has recorded, on PTX in the interpreter (machine.py), and compares the memory afterwards.

    tests/ptx/run FOLDER [--plant barrier|wait|load|store] [--only TEXT] [--jobs N] [--most N]
    tests/ptx/run --self-test

Every byte that the launch leaves behind has to be the shim's, which the tests compare with the CPU's; NaNs may have other payloads, but
integers that look like NaNs and memory that was not written may not differ (`--self-test`).
Fast attention is compared by a bound instead: matrix units add in an order of their own. `--plant` damages the code in one place after
the other: `barrier` removes a barrier, `wait` weakens a wait for asynchronous copies. Some do no harm in a small launch; one has to be
refused at least.
"""

import argparse
import contextlib
import ctypes
import glob
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time

import numpy as np

import machine
from program import parse
from spaces import Refused

ARCHITECTURE = "compute_90"
# The most files of PTX that are kept; the ones that were not used for the longest time go first.
KEPT = 400


def nvrtc():
    folder = os.environ["ISOSHARD_NVRTC"]
    for builtins in glob.glob(os.path.join(folder, "libnvrtc-builtins.so.*")):
        ctypes.CDLL(builtins)
    return ctypes.CDLL(os.path.join(folder, "libnvrtc.so.13"))


def ptx(folder, name):
    """The PTX of a source, kept in the compiler's folder under a hash of everything that it depends on."""
    def read(file):
        with open(os.path.join(folder, file), encoding="utf-8") as text:
            return text.read()

    source, headers, texts = read(f"{name}.cu"), {}, []
    texts.append(source)
    while texts:
        for header in re.findall(r'#include "([^"]+)"', texts.pop()):
            if header not in headers:
                headers[header] = read(header)
                texts.append(headers[header])
    options = [*read("options.txt").split(), f"--gpu-architecture={ARCHITECTURE}"]
    library = nvrtc()
    version = (ctypes.c_int * 2)()
    library.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    key = hashlib.sha256(repr((list(version), options, source, sorted(headers.items()))).encode()).hexdigest()[:24]
    kept = os.path.join(os.environ["ISOSHARD_NVRTC"], "..", "ptx", f"{name}.{key}")
    if os.path.exists(kept):
        os.utime(kept)
        with open(kept, encoding="utf-8") as text:
            return text.read()
    of = lambda words: (ctypes.c_char_p * len(words))(*[w.encode() for w in words])
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(made), source.encode(), f"{name}.cu".encode(), len(headers), of(list(headers.values())), of(list(headers)))
    if library.nvrtcCompileProgram(made, len(options), of(options)):
        library.nvrtcGetProgramLogSize(made, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(made, log)
        sys.exit(f"{name}.cu does not compile:\n{log.value.decode()}")
    library.nvrtcGetPTXSize(made, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(made, text)
    library.nvrtcDestroyProgram(ctypes.byref(made))
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write(text.value.decode())
    os.replace(f"{kept}.{os.getpid()}", kept)
    forget(os.path.dirname(kept), KEPT)
    return text.value.decode()


def forget(folder, most):
    """Removes all but the files that were used last. Another process may have removed some meanwhile."""
    used = {}
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            used[file.path] = file.stat().st_mtime
    for path in sorted(used, key=used.get)[: max(len(used) - most, 0)]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


# Loads and stores of four registers at once, whose first two are swapped.
SWAPPED = {
    "load": r"(ld\.global(?:\.nc)?\.v4\.\w+\s*\{)([^,}]+),\s*([^,}]+)",
    "store": r"(st\.global\.v4\.\w+\s*\[[^\]]*\],\s*\{)([^,}]+),\s*([^,}]+)",
}


def damaged(text, entry, plant):
    """The PTX with a mistake in one entry, once for each place; one with all mistakes if vectors are swapped."""
    begin = re.search(rf"\.entry {re.escape(entry)}\(", text).start()
    end = re.search(r"^\}$", text[begin:], re.M).start() + begin
    if plant in SWAPPED:
        # At all places at once: which of them runs depends on the operands.
        body, places = re.subn(SWAPPED[plant], r"\1\3, \2", text[begin:end])
        if places:
            yield text[:begin] + body + text[end:]
        return
    old, new = {"barrier": (r"bar\.sync\s+0;", ""), "wait": (r"cp\.async\.wait_group 0;", "cp.async.wait_group 1;")}[plant]
    for place in re.finditer(old, text[begin:end]):
        yield text[: begin + place.start()] + new + text[begin + place.end() :]


class Record:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.__dict__.update(json.loads(file.readline()))
            # A little more than what was written: the rest of a segment is poison, and no kernel has business there.
            used = {at: max(before, after) + 4096 for (at, _, before), (_, _, after) in zip(self.before, self.after)}
            block = lambda at, size, given: (at, file.read(given).ljust(min(size, -(-used[at] // 256) * 256), b"\xff"))
            self.before, self.after = ([block(*b) for b in blocks] for blocks in (self.before, self.after))
        self.arguments = [bytes.fromhex(a) for a in self.arguments]


def programs(folder, name, entry, plant, kept={}):
    """The program, or with a plant the damaged ones. Those of the last entry are kept."""
    if (folder, name, entry, plant) not in kept:
        text = ptx(folder, name)
        kept.clear()
        kept[folder, name, entry, plant] = [parse(t) for t in (damaged(text, entry, plant) if plant else [text])]
    return kept[folder, name, entry, plant]


def floats(data, kind):
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view({"f16": np.float16, "f64": np.float64}.get(kind, np.float32))


# Entries of a floating-point dtype whose results are integers.
INTEGERS = ("argmax", "first_index", "multinomial", "sort")
# NaNs as processors make them: the device, and the CPU in its two forms.
FRESH_NANS = np.array([0x7FFFFFFF, 0x7FC00000, 0xFFC00000], np.uint32)


def equal_nans(program, kind, mine, want):
    """The bytes of NaNs in both. Poison, which is all ones, is memory that was not written, and equals nothing else."""
    equal = np.zeros(len(mine), bool)
    sizes = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
    if kind not in sizes or program in INTEGERS:
        return equal
    size = sizes[kind]
    poison = lambda data, size: (data.reshape(-1, size) == 0xFF).all(axis=1)
    written = ~poison(mine, size) & ~poison(want, size)
    equal |= np.repeat(np.isnan(floats(mine, kind)) & np.isnan(floats(want, kind)) & written, size)
    if size == 2:
        # Statistics and parts of sums in f32. A pair of narrow elements may look like any other NaN.
        fresh = [np.isin(data.view(np.uint32), FRESH_NANS) for data in (mine, want)]
        equal |= np.repeat(fresh[0] & fresh[1], 4)
    return equal


def self_test():
    """Shows what counts as equal."""
    def equal(program, kind, type, mine, want):
        as_bytes = lambda words: np.array(words, type).view(np.uint8)
        return equal_nans(program, kind, as_bytes(mine), as_bytes(want)).all()

    cases = [
        (True, "add", "f32", np.uint32, [0x7FFFFFFF, 0x7FC00001], [0xFFC00000, 0x7FC12345]),
        (True, "add", "f64", np.uint64, [0x7FF8000000000000], [0xFFF8000000000000]),
        (True, "add", "bf16", np.uint16, [0x7FFF, 0x7FC1], [0xFFC0, 0x7FC0]),
        (True, "layer_norm", "bf16", np.uint32, [0x7FFFFFFF], [0xFFC00000]),
        # Integers that look like NaNs.
        (False, "gather", "i32", np.uint32, [0x7FC00001], [0x7FC00002]),
        (False, "expert_slots", "i64", np.uint64, [0x7FC00001], [0x7FC00002]),
        (False, "sort", "f32", np.uint32, [0x7FC00001], [0x7FC00002]),
        # Numbers of another width that look like them: the halves of an f64, two elements of bf16.
        (False, "add", "f64", np.uint64, [0x3FF000007FC00001], [0x3FF000007FC00002]),
        (False, "add", "bf16", np.uint16, [0x3F80, 0x7FC1], [0x3F00, 0x7FC1]),
        # What nothing has written.
        (False, "add", "f32", np.uint32, [0xFFFFFFFF], [0x7FC00000]),
        (False, "add", "bf16", np.uint16, [0xFFFF, 0xFFFF], [0x7FC0, 0x7FC0]),
        (False, "add", "f64", np.uint64, [0xFFFFFFFFFFFFFFFF], [0x7FF8000000000000]),
    ]
    for case in cases:
        assert equal(*case[1:]) == case[0], case
    with tempfile.TemporaryDirectory() as folder:
        for k in range(5):
            path = os.path.join(folder, str(k))
            open(path, "w", encoding="utf-8").close()
            os.utime(path, (k ^ 1, k ^ 1))
        forget(folder, 3)
        assert sorted(os.listdir(folder)) == ["2", "3", "4"], os.listdir(folder)
    print(f"{len(cases)} cases")


def difference(record, got):
    """What is wrong with the memory afterwards, or None."""
    kind = record.entry.rsplit("_", 1)[-1]
    size = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}.get(kind, 4)
    fast = record.program.startswith("attention_fast") or record.program.startswith("attention_grad_fast")
    for at, want in record.after:
        mine = np.frombuffer(got[at], np.uint8)
        want = np.frombuffer(want, np.uint8)
        differ = mine != want
        if not differ.any():
            continue
        with np.errstate(all="ignore"):
            differ &= ~equal_nans(record.program, kind, mine, want)
            if fast and differ.any():
                differ &= ~near(record, at, mine, want, kind)
        if differ.any():
            first = int(np.flatnonzero(differ)[0]) // size * size
            return (f"{np.count_nonzero(differ)} bytes differ, first at {at + first:#x}: {floats(mine[first : first + size], kind)[0]!r} instead of "
                    f"{floats(want[first : first + size], kind)[0]!r}, bits {mine[first : first + size].tobytes()[::-1].hex()} instead of {want[first : first + size].tobytes()[::-1].hex()}")
    return None


def near(record, at, mine, want, kind):
    """Bytes of results of matrix units that are within a few roundings. The forward pass has statistics in f32 behind its last pointer."""
    allowed = np.zeros(len(mine), bool)
    pointers = sorted({int.from_bytes(a, "little") - at for a in record.arguments if len(a) == 8})
    pointers = [p for p in pointers if 0 <= p < len(mine)] + [len(mine)]
    for begin, end in zip(pointers, pointers[1:]):
        end = begin + (end - begin) // 4 * 4
        for k, size in ((kind, 2), ("f32", 4)):
            x, y = (floats(np.ascontiguousarray(v[begin:end]), k).astype(np.float64) for v in (mine, want))
            known = np.isfinite(y)
            y, x = np.where(known, y, 0), np.where(np.isfinite(x), x, np.inf)
            if k == "f32" and begin != int.from_bytes(record.arguments[-1], "little") - at:
                continue
            bound = np.abs(y) * (2.0**-6 if size == 2 else 1e-4) + (2.0**-7 if size == 2 else 1e-4)
            allowed[begin:end] |= np.repeat(known & (np.abs(x - y) <= bound), size)
    return allowed


def repeat(task):
    """(entry, seconds, blocks of code, programs, what is wrong)"""
    folder, path, plant = task
    began = time.time()
    record, steps, refused = Record(path), 0, []
    made = programs(folder, record.program, record.entry, plant)
    for program in made:
        try:
            got, ran = machine.run(program, record.entry, record.blocks, record.threads, record.shared, record.arguments, record.before, record.uploads)
            steps, wrong = steps + ran, difference(record, got)
        except Refused as reason:
            wrong = str(reason)
        except Exception as error:
            error.add_note(f"in {path}, {record.entry}")
            raise
        if wrong:
            refused.append(f"{os.path.basename(path)} <<<{record.blocks}, {record.threads}>>>: {wrong}")
    return record.entry, time.time() - began, steps, len(made), refused


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    options = argparse.ArgumentParser()
    options.add_argument("folder")
    options.add_argument("--plant", choices=("barrier", "wait", "load", "store"))
    options.add_argument("--only", default="")
    options.add_argument("--jobs", type=int, default=min(2, os.cpu_count()))
    options.add_argument("--most", type=int, default=1 << 30, help="at most so many launches of an entry with one grid")
    options = options.parse_args()
    paths, seen = [], {}
    for path in sorted(glob.glob(os.path.join(options.folder, "*.launch"))):
        with open(path, "rb") as file:
            head = json.loads(file.readline())
        key = (head["entry"], *head["blocks"], *head["threads"], head["shared"])
        seen[key] = seen.get(key, 0) + 1
        if options.only in os.path.basename(path) and seen[key] <= options.most:
            paths.append((head["program"], path))
    if not paths:
        sys.exit(f"no launches in {options.folder}")
    # Launches of one program follow one another, so that a process reads the program once.
    tasks = [(options.folder, path, options.plant) for _, path in sorted(paths)]
    if options.jobs == 1:
        done = [repeat(task) for task in tasks]
    else:
        with multiprocessing.Pool(options.jobs) as pool:
            done = pool.map(repeat, tasks, chunksize=-(-len(tasks) // (4 * options.jobs)))
    wrong = [what for d in done for what in d[4]]
    slowest = sorted(done, key=lambda d: -d[1])[:3]
    print(f"{len(done)} launches of {len({d[0] for d in done})} entries, {sum(d[2] for d in done)} blocks of code; {len(wrong)} of "
          f"{sum(d[3] for d in done)} runs refused; the slowest: " + ", ".join(f"{d[0]} {d[1]:.1f} s" for d in slowest))
    if options.plant:
        if not wrong:
            sys.exit(f"a planted mistake ({options.plant}) is not noticed")
        print("noticed: " + wrong[0])
    elif wrong:
        sys.exit("\n".join(wrong[:20]))


if __name__ == "__main__":
    main()
