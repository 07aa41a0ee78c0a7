"""Reads PTX text: entries, their parameters, shared and global variables, and instructions in basic blocks. Functions that an entry
calls become blocks at its end; a lane goes back to the block after its call. Their parameters and results are registers."""

import re
from dataclasses import dataclass, field

SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "b64": 8, "u64": 8, "s64": 8, "f64": 8}
# Instructions that lanes of a warp, or threads of a block, execute together. Each is a basic block of its own.
TOGETHER = ("bar.", "shfl.", "vote.", "ldmatrix.", "mma.", "bar.warp")
# Instructions that end a basic block.
JUMPS = ("bra", "ret", "exit", "call", "return")
PASSES = re.compile(r"(?:ld|st)\.param\.(\w+)\s+(.*)$")


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
    local: dict = field(default_factory=dict)  # the same, of each lane
    blocks: list = field(default_factory=list)  # lists of instructions
    labels: dict = field(default_factory=dict)  # label or function to the number of a block
    functions: list = field(default_factory=list)  # names of the functions that it calls
    passed: set = field(default_factory=set)  # registers that stand for parameters and results of functions


@dataclass
class Program:
    entries: dict
    shared: dict  # static variables outside of entries
    dynamic: list  # names of the dynamic shared memory
    constants: dict  # global variables: name to bytes
    functions: dict = field(default_factory=dict)  # name to (parameters and result, body)


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
    match = re.match(r"(?:\.visible |\.extern )?\.(?:shared|global|const|local)(?: \.align (\d+))? \.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?: = (.*?))?;?$", line)
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
    function = re.compile(r"^\.func\s+(?:\((.*?)\)\s*)?([\w$]+)\s*\(([^)]*)\)[^;{]*^\{\n(.*?)^\}$", re.S | re.M)
    for result, name, given, body in function.findall(text):
        program.functions[name] = (re.findall(r"\.param \.(\w+) ([\w$]+)", f"{given} {result}"), body)
    for header, body in entry.findall(text):
        read(begin(header), body, program)
    for line in function.sub("", entry.sub("", text)).splitlines():
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
    """Adds an entry's statements, and then those of the functions that it calls."""
    read_body(entry, body, program, "ret")
    entry.blocks.append([instruction("ret")])
    begun = 0
    while begun < len(entry.functions):
        name, begun = entry.functions[begun], begun + 1
        variables, body = program.functions[name]
        for kind, variable in variables:
            entry.registers[inside(name, variable)] = kind
            entry.passed.add(inside(name, variable))
        # Registers of a function are no entry's: they get its name.
        body = re.sub(r"%([a-z]+\d+|[a-z]+(?=<)|SPL?\b)", lambda m: inside(name, m[1]), body)
        for _, variable in variables:
            body = re.sub(rf"\b{re.escape(variable)}\b", inside(name, variable), body)
        entry.labels[name] = len(entry.blocks)
        entry.blocks.append([])
        read_body(entry, body, program, f"return {name}")
        entry.blocks.append([instruction(f"return {name}")])
    program.entries[entry.name] = entry


def inside(function, name):
    """The register of an entry that stands for a register, a parameter or the result of a function."""
    return f"%{re.sub(r'[^a-zA-Z0-9]', '_', function)}__{name.strip('%')}"


def call(entry, text, program):
    """Adds a call: the arguments' registers are copied, and the result's."""
    result, name, given = re.match(r"call\.uni\s*(?:\(\s*([^)]*?)\s*\)\s*,)?\s*([\w$]+)\s*,?\s*(?:\(\s*([^)]*?)\s*\))?$", text, re.S).groups()
    variables = [(kind, inside(name, variable)) for kind, variable in program.functions[name][0]]
    given = [g.strip() for g in (given or "").split(",") if g.strip()]
    assert len(variables) == len(given) + bool(result), text
    for (kind, variable), argument in zip(variables, given):
        add(entry, f"mov.{kind} {variable}, {argument}")
    if name not in entry.functions:
        entry.functions.append(name)
    add(entry, f"call {name}")
    if result:
        kind, variable = variables[-1]
        add(entry, f"mov.{kind} {result}, {variable}")


def read_body(entry, body, program, end):
    """Adds a body's statements to its entry. Registers that are declared in inner braces get names of their own, as have the parameters
    and results of calls. `end` is the instruction that leaves the body."""
    scopes = [{}]
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
                    names = [f"%inner{len(entry.registers)}"]
                    scopes[-1][name] = names[0]
                entry.registers.update(dict.fromkeys(names, kind))
        elif statement.startswith(".param"):
            kind, name = re.match(r"\.param \.(\w+) (\w+)$", statement).groups()
            scopes[-1][name] = f"%inner{len(entry.registers)}"
            entry.registers[scopes[-1][name]] = kind
            entry.passed.add(scopes[-1][name])
        elif statement.startswith(".shared"):
            name, align, size, _ = variable(statement)
            entry.shared[name] = (align, size)
        elif statement.startswith(".local"):
            name, align, size, _ = variable(statement)
            entry.local[name] = (align, size)
        elif statement and not statement.startswith("."):
            for scope in scopes[1:]:
                for name, inner in scope.items():
                    statement = re.sub(rf"(?<![%\w]){re.escape(name)}(?!\w)", inner, statement)
            if statement.startswith("call"):
                call(entry, statement, program)
            elif (moved := PASSES.match(statement)) and (passed := re.search(r"\[(%\w+)(?:\+0)?\]", moved[2])) and passed[1] in entry.passed:
                add(entry, f"mov.b{8 * SIZES[moved[1]]} {moved[2].replace(passed[0], passed[1])}")
            else:
                add(entry, end if statement == "ret" else statement)


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
    if together or found.op[0] in JUMPS:
        entry.blocks.append([])

