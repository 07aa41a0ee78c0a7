"""Runs an entry of a PTX program as a device would: all threads of several blocks at once, one basic block of code at a time, those
threads that are furthest behind first. Lanes of a warp need not go together, except where an instruction says so."""

import re

import numpy as np

import arithmetic
from arithmetic import BITS, DTYPES
from program import JUMPS, SIZES, TOGETHER, number
from spaces import WINDOW, Global, Local, Refused, Shared, refuse

LANES = 2048  # about as many threads at once
RUNS, AT_WARP, AT_BARRIER, ENDED = range(4)
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


class Machine:
    """The state of several blocks of threads. Registers are arrays with an element per lane, under the names `r7_u32`, `r7_s32`..."""

    def __init__(self, program, entry, memory, parameters, blocks, threads, dynamic, first, count):
        self.entry, self.memory, self.parameters = entry, memory, np.frombuffer(parameters.ljust(64, b"\0"), np.uint8)
        self.warps = -(-int(np.prod(threads)) // 32)
        self.per_block, self.lanes_len = self.warps * 32, count * self.warps * 32
        lane = np.arange(self.lanes_len)
        self.block_of, thread = lane // self.per_block, lane % self.per_block
        self.exists = thread < np.prod(threads)
        place, at = {}, 0
        for name, (align, size) in {**program.shared, **entry.shared}.items():
            at = -(-at // align) * align
            place[name] = at
            at += size
        at = -(-at // 16) * 16
        place.update(dict.fromkeys(program.dynamic, at))
        place.update({name: offset for name, offset, _ in entry.parameters})
        place.update(program.places)
        local = 0
        for name, (align, size) in entry.local.items():
            local = -(-local // align) * align
            place[name] = local
            local += size
        self.local = Local(self.lanes_len, local)
        self.symbols = place
        sizes = [SIZES[i.op[-1]] for b in entry.blocks for i in b if "shared" in i.op and i.op[-1] in SIZES]
        self.shared = Shared(count, at + dynamic, min(sizes + [4]))
        self.times = np.zeros((2, self.lanes_len), np.int32)  # of the block's barriers and the warp's
        self.pending = []  # (group, lane, place, bytes) of copies on their way
        self.groups = np.zeros(self.lanes_len, np.int64)  # groups that the lane has ended
        self.space = {"np": np, "A": arithmetic, "M": self, "copy": np.copyto, "where": np.where}
        special = {}
        block = first + self.block_of
        for axis, extent in zip("xyz", range(3)):
            special[f"%tid.{axis}"] = thread // int(np.prod(threads[:extent])) % threads[extent]
            special[f"%ntid.{axis}"] = np.full(self.lanes_len, threads[extent])
            special[f"%ctaid.{axis}"] = block // int(np.prod(blocks[:extent])) % blocks[extent]
            special[f"%nctaid.{axis}"] = np.full(self.lanes_len, blocks[extent])
        special["%laneid"] = thread % 32
        self.special = {name: value.astype(np.uint32) for name, value in special.items()}
        self.made = {}
        self.pc = np.where(self.exists, 0, 1 << 30)
        self.state = np.where(self.exists, RUNS, ENDED)
        self.back = {}  # function to the block after each lane's call
        self.code = compiled(program, entry)
        self.steps = 0

    # ---- registers ----

    def array(self, name, kind):
        """A register's array, seen as this kind."""
        key = re.sub(r"\W", "_", name)
        if key not in self.made:
            size = SIZES[self.entry.registers[name]]
            dtype = np.bool_ if self.entry.registers[name] == "pred" else {2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
            self.made[key] = np.zeros(self.lanes_len, dtype)
        return self.made[key].view(DTYPES[kind])

    # ---- running ----

    def run(self):
        functions = {}
        while True:
            runs = self.state == RUNS
            if not runs.any():
                if (self.state == ENDED).all():
                    break
                lanes = np.flatnonzero(self.state != ENDED)
                waits = self.entry.blocks[self.pc[lanes[0]]][0]
                refuse("threads wait for others that never come", waits, lanes)
            at = int(self.pc[runs].min())
            mask = runs & (self.pc == at)
            if at not in functions:
                functions[at] = self.link(at)
            self.steps += 1
            functions[at](mask)
        if self.pending:
            lanes = np.unique(np.concatenate([p[1] for p in self.pending]))
            refuse("threads end while their asynchronous copies are on their way", self.entry.blocks[-1][-1], lanes)

    def link(self, at):
        """The function that runs a basic block for the lanes of a mask."""
        block, following = self.entry.blocks[at], at + 1
        if block and block[0].text.startswith(TOGETHER):
            return lambda mask: self.together(block[0], mask, at)
        last = block[-1] if block and block[-1].op[0] in JUMPS else None
        code, names, constants = self.code(at)
        space = dict(self.space, **constants)
        for name, kind in names:
            space[f"{re.sub(r'[^0-9a-zA-Z]', '_', name)}_{kind}"] = self.special[name] if name in self.special else self.array(name, kind)
        exec(code, space)
        body = space["body"]
        guard = self.array(last.guard, "pred") if last is not None and last.guard else None
        target = self.entry.labels[last.args[0]] if last is not None and last.op[0] in ("bra", "call") else None
        # Where the lanes that are in a function go on.
        back = self.back.setdefault(last.args[0], np.zeros(self.lanes_len, np.int64)) if last is not None and last.op[0] in ("call", "return") else None

        def run(mask):
            body(mask, True if mask.all() else mask)
            taken = mask
            if guard is not None:
                taken = mask & (~guard if last.negated else guard)
                self.pc[mask & ~taken] = following
            if last is None:
                self.pc[mask] = following
            elif target is not None:
                if back is not None:
                    back[taken] = following
                self.pc[taken] = target
            elif back is not None:
                self.pc[taken] = back[taken]
            else:
                self.end(taken, last)

        return run

    def end(self, lanes, instruction):
        self.state[lanes] = ENDED
        at_barrier = np.isin(self.block_of, self.block_of[lanes]) & (self.state == AT_BARRIER)
        if at_barrier.any():
            refuse("threads end while others of their block wait", self.entry.blocks[self.pc[np.flatnonzero(at_barrier)[0]]][0], np.flatnonzero(lanes))

    # ---- instructions that threads execute together ----

    def together(self, instruction, mask, at):
        assert not instruction.guard, instruction.text
        if instruction.op[0] == "bar" and instruction.op[1] != "warp":
            self.state[mask] = AT_BARRIER
            for block in np.unique(self.block_of[mask]):
                here = self.exists & (self.block_of == block)
                if ((self.state == ENDED) & here).any():
                    refuse("a barrier is not met by threads that have ended", instruction, np.flatnonzero((self.state == ENDED) & here))
                if (self.state[here] == AT_BARRIER).all():
                    if (self.pc[here] != at).any():
                        refuse("the threads of a block are at different barriers", instruction, np.flatnonzero(here & (self.pc != at)))
                    if instruction.op[1] == "red":
                        given = self.array(instruction.args[2], "pred")[here]
                        self.array(instruction.args[0], "pred")[here] = {"or": given.any(), "and": given.all()}[instruction.op[2]]
                    self.state[here], self.pc[here] = RUNS, at + 1
                    self.times[0][here] += 1
            return
        # All lanes that are named wait for each other.
        here = mask | ((self.state == AT_WARP) & (self.pc == at))
        named = self.named(instruction, here)
        missing = (named & self.exists & ~here).reshape(-1, 32).any(1)
        whole = np.repeat(here.reshape(-1, 32).any(1) & ~missing, 32) & here
        late = named & here.reshape(-1, 32).any(1).repeat(32) & self.exists & (self.state == ENDED)
        if late.any():
            refuse("an instruction names lanes that have ended", instruction, np.flatnonzero(late))
        self.state[here] = AT_WARP
        if whole.any():
            getattr(self, instruction.op[0])(instruction, whole)
            self.state[whole], self.pc[whole] = RUNS, at + 1

    def named(self, instruction, here):
        """The lanes that must take part."""
        if instruction.op[0] in ("mma", "ldmatrix"):
            return here.reshape(-1, 32).any(1).repeat(32)
        masks = self.value(instruction.args[-1], "u32")
        first = np.where(here.reshape(-1, 32), masks.reshape(-1, 32), 0).max(1).astype(np.uint32).repeat(32)
        return (first >> (np.arange(self.lanes_len) % 32).astype(np.uint32) & np.uint32(1)).astype(bool)

    def value(self, operand, kind):
        if operand.startswith("%"):
            return self.array(operand, kind)
        return np.full(self.lanes_len, number(operand, kind) & ((1 << BITS[kind]) - 1), np.uint32)

    def bar(self, instruction, lanes):
        self.times[1][lanes] += 1

    def vote(self, instruction, lanes):
        given = self.array(instruction.args[1].lstrip("!"), "pred") ^ instruction.args[1].startswith("!")
        bits = np.where(lanes & given, np.uint32(1) << (np.arange(self.lanes_len) % 32).astype(np.uint32), 0)
        ballot = bits.reshape(-1, 32).sum(1).astype(np.uint32).repeat(32)
        assert instruction.op[2] == "ballot", instruction.text
        np.copyto(self.array(instruction.args[0], "u32"), ballot, where=lanes)

    def shfl(self, instruction, lanes):
        out, given = instruction.args[0].split("|"), self.value(instruction.args[1], "u32")
        by, c = (self.value(x, "u32").astype(np.int64) for x in instruction.args[2:4])
        lane = np.arange(self.lanes_len) % 32
        segment, clamp = c >> 8 & 31, c & 31
        most, least = (lane & segment) | (clamp & ~segment), lane & segment
        mode = instruction.op[2]
        source = {"bfly": lane ^ by, "idx": least | (by & ~segment & 31), "up": lane - by, "down": lane + by}[mode]
        inside = source >= most if mode == "up" else source <= most
        at = np.where(inside, source, lane) + np.arange(self.lanes_len) // 32 * 32
        if not lanes[at[lanes]].all():
            refuse("a value is read from a lane that takes no part", instruction, np.flatnonzero(lanes)[~lanes[at[lanes]]])
        np.copyto(self.array(out[0], "u32"), given[at], where=lanes)
        if len(out) > 1:
            np.copyto(self.array(out[1], "pred"), inside, where=lanes)

    def ldmatrix(self, instruction, lanes):
        assert instruction.op[4] == "x4", instruction.text
        address = self.address(instruction.args[1], np.ones(self.lanes_len, bool))
        rows = np.zeros((4, self.lanes_len), np.uint32)
        at = np.flatnonzero(lanes)
        rows[:, at] = self.shared.load(address[at], 4, 4, self.block_of[at], at, self.times, instruction)
        # (warps, matrix, row, column) in halves.
        halves = np.ascontiguousarray(rows.T).reshape(-1, 4, 8, 4).view(np.uint16)
        if "trans" in instruction.op:
            halves = np.ascontiguousarray(halves.swapaxes(2, 3))
        words = halves.view(np.uint32).reshape(-1, 4, 32)
        for i, out in enumerate(instruction.args[0]):
            np.copyto(self.array(out, "u32"), words[:, i].ravel(), where=lanes)

    def mma(self, instruction, lanes):
        assert instruction.op[3] == "m16n8k16", instruction.text
        wide = arithmetic.from_bf16 if instruction.op[7] == "bf16" else lambda x: x.view(np.float16).astype(np.float32)

        def halves(name):
            words = self.array(name, "u32").reshape(-1, 8, 4)  # (warps, group, lane)
            return np.stack([wide((words >> np.uint32(s)).astype(np.uint16)) for s in (0, 16)], -1).reshape(-1, 8, 8).astype(np.float64)

        out, (a0, a1, a2, a3), (b0, b1), given = (instruction.args[0], *([halves(x) for x in v] for v in instruction.args[1:3]), instruction.args[3])
        a = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)  # 16 rows of 16
        b = np.concatenate([b0, b1], 2)  # 8 columns of 16
        product = np.matmul(a, b.swapaxes(1, 2)).reshape(-1, 2, 8, 4, 2)
        for i in range(4):
            c = self.array(given[i], "f32").reshape(-1, 8, 4)
            sums = (product[:, i // 2, :, :, i % 2] + c).astype(np.float32).ravel()
            np.copyto(self.array(out[i], "f32"), sums, where=lanes)

    # ---- memory ----

    def address(self, operand, lanes):
        match = re.match(r"\[([%\w$.]+)(?:\+(-?\d+))?\]$", operand)
        name, offset = match[1], int(match[2] or 0)
        if name.startswith("%"):
            kind = {4: "u32", 8: "u64"}[SIZES[self.entry.registers[name]]]
            return self.array(name, kind)[lanes].astype(np.uint64) + np.uint64(offset & ((1 << 64) - 1))
        return np.full(np.count_nonzero(lanes), self.symbols[name] + offset, np.uint64)

    def access(self, mask, instruction, load):
        """`ld` and `st`."""
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return
        op, kind = instruction.op, instruction.op[-1]
        operand, registers = (instruction.args[1], instruction.args[0]) if load else (instruction.args[0], instruction.args[1])
        registers, size = registers if isinstance(registers, list) else [registers], SIZES[kind]
        address = self.address(operand, mask)
        values = None if load else [self.stored(r, kind, mask) for r in registers]
        space = next((s for s in ("param", "global", "shared", "local") if s in op), "")
        if space == "param":
            at = address.astype(np.int64)[:, None] + np.arange(size)
            loaded = [np.ascontiguousarray(self.parameters[at + k * size]).view(f"u{size}").ravel() for k in range(len(registers))]
        elif space in ("global", ""):
            window = address >= WINDOW if space == "" else np.zeros(len(lanes), bool)
            parts = []
            for part in (window, ~window):
                if not part.any():
                    parts.append(None)
                elif part is window:
                    parts.append(self.of_shared(address[part] - np.uint64(WINDOW), size, registers, values, part, lanes, instruction))
                elif load:
                    parts.append(self.memory.load(address[part], size, len(registers), instruction, lanes[part]))
                else:
                    self.memory.store(address[part], size, [v[part] for v in values], instruction, lanes[part])
                    parts.append(None)
            if load:
                loaded = [np.zeros(len(lanes), f"u{size}") for _ in registers]
                for part, got in zip((window, ~window), parts):
                    for k in range(len(registers)):
                        if got is not None:
                            loaded[k][part] = got[k]
        elif space == "shared":
            loaded = self.of_shared(address, size, registers, values, slice(None), lanes, instruction)
        elif space == "local" and load:
            loaded = [self.local.load(address + np.uint64(k * size), size, lanes, instruction) for k in range(len(registers))]
        elif space == "local":
            loaded = [self.local.store(address + np.uint64(k * size), size, value, lanes, instruction) for k, value in enumerate(values)]
        else:
            raise NotImplementedError(instruction.text)
        for register, value in zip(registers, loaded if load else []):
            to = self.array(register, "u" + str(8 * SIZES[self.entry.registers[register]]))
            to[lanes] = value.view(f"i{size}").astype(to.dtype) if kind[0] == "s" else value

    def of_shared(self, address, size, registers, values, part, lanes, instruction):
        block, lanes = self.block_of[lanes[part]], lanes[part]
        if values is None:
            return self.shared.load(address, size, len(registers), block, lanes, self.times, instruction)
        self.shared.store(address, size, [v[part] for v in values], block, lanes, self.times, instruction)
        return None

    def stored(self, operand, kind, mask):
        size = SIZES[kind]
        if not operand.startswith("%"):
            return np.full(np.count_nonzero(mask), number(operand, kind) & ((1 << 8 * size) - 1), f"u{size}")
        return self.array(operand, "u" + str(8 * SIZES[self.entry.registers[operand]]))[mask].astype(f"u{size}")

    def atom(self, mask, instruction):
        lanes, kind = np.flatnonzero(mask), instruction.op[-1]
        if not len(lanes):
            return
        size, what, signed = SIZES[kind], instruction.op[-2], kind[0] == "s"
        assert not signed, instruction.text
        address = self.address(instruction.args[1], mask)
        if "shared" in instruction.op:
            at = self.shared.find(address, size, self.block_of[lanes], instruction, lanes) // size
            memory = self.shared.bytes.view(f"u{size}")
        else:
            at = self.memory.find(address, size, instruction, lanes) // size
            memory = self.memory.bytes.view(f"u{size}")
            self.memory.written[(at[:, None] * size + np.arange(size)).ravel()] = True
        given = [self.stored(x, kind, mask) for x in instruction.args[2:]]
        out = self.array(instruction.args[0], kind.replace("b", "u"))
        for k, (lane, i) in enumerate(zip(lanes, at)):
            old, x = int(memory[i]), int(given[0][k])
            out[lane] = old
            memory[i] = {"cas": lambda: int(given[1][k]) if old == x else old, "max": lambda: max(old, x), "min": lambda: min(old, x),
                         "add": lambda: (old + x) & ((1 << 8 * size) - 1), "exch": lambda: x, "or": lambda: old | x}[what]()

    def copy_async(self, mask, instruction):
        """`cp.async`: the bytes land when the lane waits for their group."""
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return
        assert instruction.args[2] == "16", instruction.text
        count = self.value(instruction.args[3], "u32")[lanes] if len(instruction.args) > 3 else np.full(len(lanes), 16)
        to, source = self.address(instruction.args[0], mask), self.address(instruction.args[1], mask)
        data = np.zeros((len(lanes), 2), np.uint64)
        some = count > 0
        assert np.isin(count, (0, 16)).all(), instruction.text
        if (source % np.uint64(16)).any():
            refuse("an address is not aligned to 16 bytes", instruction, lanes)
        if some.any():
            data[some] = np.stack(self.memory.load(source[some], 8, 2, instruction, lanes[some]), 1)
        place = self.shared.find(to, 16, self.block_of[lanes], instruction, lanes)
        self.shared.note(place, 16, lanes, self.times, True, instruction)
        cells, owner = self.shared.cells(place, 16, lanes)
        self.shared.copier[cells] = owner
        self.pending.append((self.groups[lanes], lanes, place, data, instruction))

    def copies_end(self, mask, instruction):
        self.groups[mask] += 1

    def copies_wait(self, mask, instruction):
        """All groups of a lane land, except the last ones."""
        rest = []
        for group, lanes, place, data, issued in self.pending:
            lands = mask[lanes] & (group < self.groups[lanes] - int(instruction.args[0]))
            if lands.any():
                cells, _ = self.shared.cells(place[lands], 16, lanes[lands])
                self.shared.copier[cells] = -1
                self.shared.note(place[lands], 16, lanes[lands], self.times, True, issued)
                self.shared.bytes.view(np.uint64).reshape(-1, 2)[place[lands] // 16] = data[lands]
            if not lands.all():
                rest.append((group[~lands], lanes[~lands], place[~lands], data[~lands], issued))
        self.pending = rest


# ---- from instructions to Python ----


def compiled(program, entry):
    """A function that gives the code of a basic block, with the registers and constants that it names."""
    made = program.__dict__.setdefault("made", {}).setdefault(entry.name, {})

    def code(at):
        if at not in made:
            writer = Writer(program, entry)
            lines = ["def body(mask, all_of):", "  pass"]
            for i in entry.blocks[at]:
                if i.op[0] not in JUMPS:
                    lines += ["  " + line for line in writer.lines(i)]
            made[at] = (compile("\n".join(lines), f"{entry.name} block {at}", "exec"), writer.names, writer.constants)
        return made[at]

    return code


class Writer:
    def __init__(self, program, entry):
        self.program, self.entry, self.names, self.constants = program, entry, set(), {}

    def operand(self, text, kind):
        """An expression for an operand, seen as this kind."""
        if text.startswith("!"):
            return f"~{self.operand(text[1:], kind)}"
        if text.startswith("%"):
            size = 4 if text not in self.entry.registers else SIZES[self.entry.registers[text]]
            if kind == "pred" or size == SIZES[kind]:
                return self.name(text, kind)
            whole = self.name(text, f"u{8 * size}")
            if size < SIZES[kind]:
                return f"{whole}.astype(np.{np.dtype(DTYPES[kind]).name})"
            return f"{whole}.astype(np.uint{8 * SIZES[kind]}).view(np.{np.dtype(DTYPES[kind]).name})"
        if kind == "pred":
            return str(number(text) != 0)
        bits = number(text, kind) & ((1 << 8 * SIZES[kind]) - 1) if text[0] in "0123456789-" else None
        assert bits is not None, text
        name = f"c{bits:x}_{kind}"
        self.constants[name] = np.array(bits, f"u{SIZES[kind]}").view(DTYPES[kind])[()]
        return name

    def name(self, register, kind):
        self.names.add((register, kind))
        return f"{re.sub(r'[^0-9a-zA-Z]', '_', register)}_{kind}"

    def lines(self, i):
        guard = f"mask & {'~' if i.negated else ''}{self.name(i.guard, 'pred')}" if i.guard else ""
        op, kind = i.op[0], i.op[-1]
        special = {"ld": "access({}, {}, True)", "st": "access({}, {}, False)", "atom": "atom({}, {})"}
        if op == "cp":
            special["cp"] = {"cg": "copy_async({}, {})", "ca": "copy_async({}, {})", "commit_group": "copies_end({}, {})",
                             "wait_group": "copies_wait({}, {})"}[i.op[2]]
        if op in special:
            key = f"i{len(self.constants)}"
            self.constants[key] = i
            return [f"M.{special[op].format(guard or 'mask', key)}"]
        where = guard or "all_of"
        if op == "mov" and isinstance(i.args[0], list):
            each = BITS[kind] // len(i.args[0])
            given = self.operand(i.args[1], f"u{BITS[kind]}")
            lines = [f"t = {given}.copy()"]
            for k, part in enumerate(i.args[0]):
                if part != "_":
                    lines.append(f"copy({self.operand(part, f'u{each}')}, (t >> np.uint{BITS[kind]}({k * each})).astype(np.uint{each}), where={where})")
            return lines
        if op == "setp":
            outs = i.args[0].split("|")
            lines = [f"t = {self.compare(i)}", f"copy({self.name(outs[0], 'pred')}, t, where={where})"]
            return lines + ([f"copy({self.name(outs[1], 'pred')}, ~t, where={where})"] if len(outs) > 1 else [])
        result, to = self.result(i)
        return [f"copy({self.operand(i.args[0], to)}, {result}, where={where})"]

    def compare(self, i):
        a, b = (self.operand(x, i.op[-1]) for x in i.args[1:3])
        word = i.op[1]
        assert len(i.op) == 3, i.text
        if word in ("num", "nan"):
            both = f"(np.isnan({a}) | np.isnan({b}))"
            return both if word == "nan" else f"~{both}"
        if i.op[-1][0] == "f" and word not in COMPARE:
            return f"(({a} {COMPARE[word[:-1]]} {b}) | np.isnan({a}) | np.isnan({b}))"
        if i.op[-1][0] == "f" and word == "ne":
            return f"(({a} != {b}) & ~np.isnan({a}) & ~np.isnan({b}))"
        return f"({a} {COMPARE[word]} {b})"

    def result(self, i):
        """An expression for the result of an instruction, and its kind."""
        op, kind = i.op[0], i.op[-1]
        args = i.args[1:]
        if op == "mov":
            if isinstance(args[0], list):
                each = BITS[kind] // len(args[0])
                parts = (f"({self.operand(p, f'u{each}')}.astype(np.uint{BITS[kind]}) << np.uint{BITS[kind]}({k * each}))" for k, p in enumerate(args[0]))
                return " | ".join(parts), f"u{BITS[kind]}"
            if args[0][0] not in "%0123456789-!":
                return f"np.uint64(M.symbols[{args[0]!r}])", "u64" if BITS[kind] == 64 else "u32"
            kind = "u" + kind[1:] if kind[0] in "bfs" and kind != "pred" and args[0].startswith("%") else kind
            return self.operand(args[0], kind), kind
        if op == "cvta":
            sign = "" if "shared" not in i.op else "-" if "to" in i.op else "+"
            given = self.operand(args[0], "u64")
            return (f"{given} {sign} np.uint64({WINDOW})" if sign else given), "u64"
        if op == "cvt":
            if kind == "f32" and i.op[2] in ("f16x2", "bf16x2"):
                return f"A.pack_halves({self.operand(args[0], 'f32')}, {self.operand(args[1], 'f32')}, {i.op[2]!r})", "u32"
            kinds = [w for w in i.op if w in DTYPES]
            given = self.operand(args[0], kinds[1])
            to = kinds[0]
            size = SIZES[self.entry.registers[i.args[0]]]
            wide = to if SIZES[to] == size else to[0] + str(8 * size)
            return f"A.convert({given}, {to!r}, {kinds[1]!r}, {i.op[1:]!r}).astype(np.{np.dtype(DTYPES[wide]).name})", wide
        if op == "selp":
            kind = kind.replace("b", "u")
            return f"where({self.operand(args[2], 'pred')}, {self.operand(args[0], kind)}, {self.operand(args[1], kind)})", kind
        if op in ("shl", "shr"):
            kind = kind.replace("b", "u")
            return f"A.{op}({self.operand(args[0], kind)}, {self.operand(args[1], 'u32')}, {kind!r})", kind
        if op == "bfi":
            kind = kind.replace("b", "u")
            return f"A.bfi({self.operand(args[0], kind)}, {self.operand(args[1], kind)}, {args[2]}, {args[3]}, {kind!r})", kind
        if op == "popc":
            return f"np.bitwise_count({self.operand(args[0], kind.replace('b', 'u'))})", "u32"
        if op == "clz":
            return f"A.leading_zeros({self.operand(args[0], kind.replace('b', 'u'))}, {kind!r})", "u32"
        if op == "mul" and i.op[1] == "wide":
            wide = kind[0] + str(2 * BITS[kind])
            a, b = (self.operand(x, kind) for x in args)
            return f"np.multiply({a}, {b}, dtype=np.{np.dtype(DTYPES[wide]).name})", wide
        if kind == "pred":
            a = [self.operand(x, kind) for x in args]
            return {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}"}[op].format(*a), kind
        if kind[0] == "f" and op in ("add", "sub", "mul", "fma", "div", "sqrt", "rcp") and i.op[1] != "rn":
            if i.op[:2] != ["div", "approx"]:
                raise Refused(f"no rounding is named, so a compiler may contract it: {i.text}")
            op = "div.approx"
        if kind[0] == "b":
            kind = kind.replace("b", "u")
        a = [self.operand(x, kind) for x in args]
        real = kind[0] == "f"
        one = f"np.{np.dtype(DTYPES[kind]).name}(1)"
        patterns = {
            "add": "{0} + {1}", "sub": "{0} - {1}", "mul": f"A.mul_hi({{0}}, {{1}}, {kind!r})" if "hi" in i.op else "{0} * {1}",
            "mad": "{0} * {1} + {2}", "fma": f"A.fma_{kind}({{0}}, {{1}}, {{2}})", "div": "{0} / {1}" if real else "A.divide({0}, {1})",
            "rem": "A.remainder({0}, {1})", "neg": "-{0}", "abs": "np.abs({0})", "not": "~{0}", "and": "{0} & {1}", "or": "{0} | {1}",
            "xor": "{0} ^ {1}", "min": "A.smaller({0}, {1})" if real else "np.minimum({0}, {1})",
            "max": "A.larger({0}, {1})" if real else "np.maximum({0}, {1})", "sqrt": "np.sqrt({0})", "rcp": f"{one} / {{0}}",
            "ex2": "A.exp2_fast({0})", "div.approx": "A.divide_fast({0}, {1})", "copysign": "np.copysign({1}, {0})", "prmt": "A.prmt({0}, {1}, {2})", "brev": "A.reverse({0})",
        }
        if op not in patterns or (op == "mad" and i.op[1] != "lo") or (op == "brev" and BITS[kind] != 32):
            raise NotImplementedError(i.text)
        return patterns[op].format(*a), kind


def run(program, name, blocks, threads, dynamic, parameters, memory, uploads=()):
    """Runs a launch, and returns the memory afterwards with the number of basic blocks that ran. `memory` is a list of (address, bytes);
    `uploads` are the ranges of (address, size) in it that the host has written."""
    entry = program.entries[name]
    given, at = b"", 0
    for (_, offset, size), value in zip(entry.parameters, parameters, strict=True):
        assert size == len(value), f"{name}: a parameter of {size} bytes gets {len(value)}"
        given = given.ljust(offset, b"\0") + value
    # Constants are in device memory, far from blocks.
    program.places, constants = {}, []
    for k, (symbol, data) in enumerate(program.constants.items()):
        program.places[symbol] = (1 << 56) + (k << 20)
        constants.append(((1 << 56) + (k << 20), data))
    space = Global(list(memory) + constants, uploads)
    total, steps = int(np.prod(blocks)), 0
    lanes = -(-int(np.prod(threads)) // 32) * 32
    each = max(LANES // lanes, 1)
    with np.errstate(all="ignore"):
        for first in range(0, total, each):
            machine = Machine(program, entry, space, given, blocks, threads, dynamic, first, min(each, total - first))
            machine.run()
            steps += machine.steps
    after = {}
    for at, data in memory:
        place = int(space.places[np.searchsorted(space.starts, np.uint64(at))])
        after[at] = space.bytes[place : place + len(data)].tobytes()
    return after, steps
