#!/usr/bin/env python3
"""Builds the library in release mode, as a user's first build does, and compares its size and the compiler's work with a budget.

    tests/budget/check.py            fails if a package has more functions or text than budget.txt says, or took more of the
                                     compiler's time in proportion to the dependencies; prints the rooms that grew
    tests/budget/check.py --write    writes budget.txt from this build

Functions and bytes of text are those of the packages' rlibs, so they are the same on every machine with one compiler; with another one
than the budget's they are printed and not compared. CPU-seconds differ from machine to machine: the budget has them in proportion to
those of all dependencies, which are compiled in the same build.
"""

import os
import re
import resource
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUDGET = os.path.join(ROOT, "tests", "budget", "budget.txt")
TARGET = os.path.join(ROOT, "target", "budget")
SECONDS = os.path.join(TARGET, "seconds.tsv")
PACKAGES = ["isoshard_kernels", "isoshard"]
# What compilers may differ in without a change of the sources: the folder's path is in some texts.
SLACK = 1.01
# Dependencies take a minute in all, and a busy machine serves some processes better than others.
SLACK_OF_SECONDS = 1.5


def compile_one(command):
    """Stands between Cargo and the compiler: runs it, and notes its CPU-seconds and its largest memory in MiB."""
    # Cargo's jobserver is open for compilers.
    code = subprocess.run(command, close_fds=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "--crate-name" in command:
        name = command[command.index("--crate-name") + 1]
        with open(SECONDS, "a", encoding="utf-8") as file:
            file.write(f"{name}\t{used.ru_utime + used.ru_stime:.2f}\t{used.ru_maxrss // 1024}\n")
    sys.exit(code)


def build():
    """Returns each crate's CPU-seconds and memory in MiB."""
    subprocess.run(["rm", "-rf", TARGET], check=True)
    os.makedirs(TARGET)
    env = {k: v for k, v in os.environ.items() if not k.startswith("CARGO_PROFILE") and k not in ("RUSTFLAGS", "CARGO_INCREMENTAL")}
    env["RUSTC_WRAPPER"] = os.path.abspath(__file__)
    command = ["cargo", "build", "--release", "--lib", "--quiet", "--package", "isoshard", "--target-dir", TARGET]
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    seconds = {}
    with open(SECONDS, encoding="utf-8") as file:
        for line in file:
            name, time, memory = line.rstrip("\n").split("\t")
            before = seconds.get(name, (0.0, 0))
            seconds[name] = (before[0] + float(time), max(before[1], int(memory)))
    return seconds


def room(symbol):
    """The room of a function: the first name after the package's in its path, or `std and others`."""
    found = re.search(r"(?:8isoshard|16isoshard_kernels)(\d+)", symbol)
    if found:
        start = found.end()
        return symbol[start : start + int(found[1])]
    found = re.search(r"isoshard(?:_kernels)?\.\.(\w+?)(?:\.\.|\$|E)", symbol)
    return found[1] if found else "std and others"


def sizes(package):
    """The functions and bytes of text of a package by room."""
    folder = os.path.join(TARGET, "release", "deps")
    rlib = [name for name in os.listdir(folder) if re.fullmatch(rf"lib{package}-[0-9a-f]+\.rlib", name)]
    nm = subprocess.run(["nm", "--defined-only", "-S", os.path.join(folder, rlib[0])], capture_output=True, text=True, check=True)
    rooms = {}
    for line in nm.stdout.splitlines():
        parts = line.split()
        if len(parts) == 4 and parts[2] in "tTwW":
            functions, text = rooms.get(room(parts[3]), (0, 0))
            rooms[room(parts[3])] = (functions + 1, text + int(parts[1], 16))
    return rooms


def total(rooms):
    return tuple(map(sum, zip(*rooms.values())))


def read():
    """The budget: the compiler's version, each package's seconds in proportion, and its rooms."""
    compiler, proportions, rooms = "", {}, {}
    with open(BUDGET, encoding="utf-8") as file:
        for line in file:
            words = line.rstrip("\n").split("\t")
            if words[0] == "compiler":
                compiler = words[1]
            elif words[0] == "seconds":
                proportions[words[1]] = float(words[2])
            elif words[0] in PACKAGES:
                rooms.setdefault(words[0], {})[words[1]] = (int(words[2]), int(words[3]))
    return compiler, proportions, rooms


def main():
    seconds = build()
    compiler = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    dependencies = sum(time for name, (time, _) in seconds.items() if name not in PACKAGES)
    now = {package: sizes(package) for package in PACKAGES}
    proportions = {package: seconds[package][0] / dependencies for package in PACKAGES}
    print(f"{dependencies:.0f} CPU-seconds of dependencies; {compiler}")
    for package in PACKAGES:
        (functions, text), (time, memory) = total(now[package]), seconds[package]
        print(f"{package}: {functions} functions, {text / 1e6:.2f} MB of text, {time:.0f} CPU-seconds, compiler {memory} MiB")
    if "--write" in sys.argv:
        with open(BUDGET, "w", encoding="utf-8") as file:
            file.write("# Written by tests/budget/check.py --write: a package's room, its functions and its bytes of text in a release build;\n")
            file.write("# the compiler's seconds are in proportion to those of all dependencies.\n")
            file.write(f"compiler\t{compiler}\n")
            for package in PACKAGES:
                file.write(f"seconds\t{package}\t{proportions[package]:.2f}\n")
            for package in PACKAGES:
                for name, (functions, text) in sorted(now[package].items()):
                    file.write(f"{package}\t{name}\t{functions}\t{text}\n")
        return
    known, allowed, rooms = read()
    above = []
    for package in PACKAGES:
        if proportions[package] > allowed[package] * SLACK_OF_SECONDS:
            above.append(f"{package} took {proportions[package]:.2f} times the dependencies' CPU-seconds, not {allowed[package]:.2f}")
        if compiler != known:
            print(f"SKIPPED: sizes of {package} are compared with {known}")
            continue
        for what, size, most in zip(("functions", "bytes of text"), total(now[package]), total(rooms[package])):
            if size > most * SLACK:
                above.append(f"{package} has {size} {what}, not {most}")
    if above:
        print("\n".join(above))
        print("\nroom                              functions            bytes of text")
        for package in PACKAGES:
            grown = {name: (sizes, rooms[package].get(name, (0, 0))) for name, sizes in now[package].items()}
            for name, (new, old) in sorted(grown.items(), key=lambda row: row[1][1][1] - row[1][0][1]):
                if new[1] > old[1]:
                    print(f"{package + ' ' + name:32} {new[0]:7} {new[0] - old[0]:+6}  {new[1]:12} {new[1] - old[1]:+8}")
        sys.exit("\nMake less, or change the budget in a commit that says why (tests/budget/check.py --write).")


if __name__ == "__main__":
    if len(sys.argv) > 2 and os.path.basename(sys.argv[1]).startswith("rustc"):
        compile_one(sys.argv[1:])
    main()
