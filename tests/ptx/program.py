"""Reads PTX text: entries, their parameters, shared and global variables, and instructions in basic blocks."""

import re
from dataclasses import dataclass, field

SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "b64": 8, "u64": 8, "s64": 8, "f64": 8}
# Instructions that lanes of a warp, or threads of a block, execute together. Each is a basic block of its own.
TOGETHER = ("bar.", "shfl.", "vote.", "ldmatrix.", "mma.", "bar.warp")


@dataclass
class Instruction:
    text: str
    guard: str  # a predicate register, or ""
    negated: bool
    op: list  # the words of the operation, e.g. ["add", "s32"]
    args: list  # operands as text; vectors are lists


@dataclass
class Entry:
    name: str
    parameters: list = field(default_factory=list)  # (name, offset, bytes)
    registers: dict = field(default_factory=dict)  # name to type
    shared: dict = field(default_factory=dict)  # name to (align, bytes)
    blocks: list = field(default_factory=list)  # lists of instructions
    labels: dict = field(default_factory=dict)  # label to the number of a block


@dataclass
class Program:
    entries: dict
    shared: dict  # static variables outside of entries
    dynamic: list  # names of the dynamic shared memory
    constants: dict  # global variables: name to bytes


def split(text):
    """Operands at commas outside of braces and brackets."""
    parts, depth, word = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(word.strip())
            word = ""
        else:
            word += c
    parts += [word.strip()] if word.strip() else []
    return [[w.strip() for w in p[1:-1].split(",")] if p.startswith("{") else p for p in parts]


def instruction(text):
    match = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", text, re.S)
    assert match, f"unreadable: {text}"
    return Instruction(" ".join(text.split()), match[2] or "", match[1] == "!", match[3].split("."), split(match[4]))


def variable(line):
    """(name, align, bytes, initial bytes) of a declaration in shared or global memory."""
    match = re.match(r"(?:\.visible |\.extern )?\.(?:shared|global|const)(?: \.align (\d+))? \.(\w+) ([\w$]+)(?:\[(\d*)\])?(?: = (.*?))?;?$", line)
    assert match, f"unreadable: {line}"
    size = SIZES[match[2]]
    count = int(match[4]) if match[4] else 1
    values = [v.strip() for v in match[5].strip("{}").split(",")] if match[5] else []
    data = b"".join((number(v, match[2]) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for v in values)
    bytes_len = size * count if match[4] != "" else 0
    return match[3], int(match[1] or size), bytes_len, data.ljust(bytes_len, b"\0")


def number(text, kind="b64"):
    """The bits of an immediate."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        bits = int(text[2:], 16)
        if text[1] in "dD" and kind == "f32":
            raise ValueError(text)
        return bits
    return int(text.rstrip("U"), 0)


def parse(text):
    text = re.sub(r"//.*", "", text)
    program = Program({}, {}, [], {})
    entry = re.compile(r"^(?:\.visible )?\.entry (.*?)^\{\n(.*?)^\}$", re.S | re.M)
    for header, body in entry.findall(text):
        read(begin(header), body, program)
    for line in entry.sub("", text).splitlines():
        line = line.strip()
        if line.startswith((".shared", ".extern .shared", ".global", ".visible .global", ".const")):
            name, align, size, data = variable(line)
            if line.startswith(".extern"):
                program.dynamic.append(name)
            elif line.startswith(".shared"):
                program.shared[name] = (align, size)
            else:
                program.constants[name] = data
    return program


def read(entry, body, program):
    """Adds a body's statements to its entry. Registers that are declared in inner braces get names of their own."""
    scopes, made = [{}], 0
    for brace, label, statement in re.findall(r"\s*(?:([{}])|([\w$]+):(?!:)|([^;]*?);)", body):
        statement = statement.strip()
        if brace == "{":
            scopes.append({})
        elif brace == "}":
            scopes.pop()
        elif label:
            entry.labels[label] = len(entry.blocks)
            entry.blocks.append([])
        elif statement.startswith(".reg"):
            kind, names = re.match(r"\.reg \.(\w+)\s+(.*)", statement).groups()
            for name in names.split(","):
                name, count = re.match(r"([%\w]+)(?:<(\d+)>)?", name.strip()).groups()
                names = [f"{name}{i}" for i in range(int(count))] if count else [name]
                if len(scopes) > 1:
                    made += 1
                    scopes[-1][name] = f"%inner{made}"
                    names = [f"%inner{made}"]
                entry.registers.update(dict.fromkeys(names, kind))
        elif statement.startswith(".shared"):
            name, align, size, _ = variable(statement)
            entry.shared[name] = (align, size)
        elif statement and not statement.startswith("."):
            for scope in scopes[1:]:
                for name, inner in scope.items():
                    statement = re.sub(rf"(?<![%\w]){re.escape(name)}(?!\w)", inner, statement)
            add(entry, statement)
    entry.blocks.append([instruction("ret")])
    program.entries[entry.name] = entry


def begin(header):
    entry = Entry(re.match(r"[\w$]+", header)[0], blocks=[[]])
    at = 0
    for align, kind, name, count in re.findall(r"\.param(?: \.align (\d+))? \.(\w+) ([\w$]+)(?:\[(\d+)\])?", header):
        size = SIZES[kind] * int(count or 1)
        align = int(align or SIZES[kind])
        at = -(-at // align) * align
        entry.parameters.append((name, at, size))
        at += size
    return entry


def add(entry, text):
    found = instruction(text)
    together = text.startswith(TOGETHER)
    if together and entry.blocks[-1]:
        entry.blocks.append([])
    entry.blocks[-1].append(found)
    if together or found.op[0] in ("bra", "ret", "exit"):
        entry.blocks.append([])

