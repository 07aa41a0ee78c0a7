"""The memory of a launch, with checks: every access is aligned and inside a block of memory, what is read was written, and two
threads of a block that touch the same shared memory, one of them writing, have a barrier between them."""

import numpy as np

WINDOW = 1 << 60  # generic addresses of shared memory begin here
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Refused(Exception):
    """What a kernel did and must not do."""


def refuse(what, instruction, lanes=None):
    raise Refused(f"{what}: {instruction.text}" + (f" (lane {lanes[0]} and {len(lanes) - 1} more)" if lanes is not None and len(lanes) else ""))


class Global:
    """Blocks of device memory. Bytes that nothing has written are 0xff; in the ranges `uploads` these are integers such as -1, which the
    host has written."""

    def __init__(self, blocks, uploads=()):
        blocks = sorted(blocks)
        self.starts = np.array([at for at, _ in blocks], np.uint64)
        self.sizes = np.array([len(data) for _, data in blocks], np.uint64)
        places = np.cumsum([0] + [-(-len(data) // 256) * 256 for _, data in blocks])
        self.places = places[:-1].astype(np.uint64)
        self.bytes = np.full(int(places[-1]), 0xFF, np.uint8)
        for place, (_, data) in zip(places, blocks):
            self.bytes[place : place + len(data)] = np.frombuffer(data, np.uint8)
        self.written = self.bytes != 0xFF
        for at, size in uploads:
            block = int(np.searchsorted(self.starts, np.uint64(at), "right")) - 1
            offset = at - int(self.starts[block])
            if block >= 0 and offset < self.sizes[block]:
                place = int(self.places[block]) + offset
                self.written[place : place + min(size, int(self.sizes[block]) - offset)] = True

    def find(self, address, size, instruction, lanes):
        """The places of `size` bytes at these addresses."""
        if (address % np.uint64(size)).any():
            refuse(f"an address is not aligned to {size} bytes", instruction, lanes[address % np.uint64(size) != 0])
        block = np.searchsorted(self.starts, address, "right").astype(np.int64) - 1
        inside = block >= 0
        block = np.maximum(block, 0)
        offset = address - self.starts[block]
        inside &= (offset < self.sizes[block]) & (offset + np.uint64(size) <= self.sizes[block])
        if not inside.all():
            refuse("an address is in no block of memory", instruction, lanes[~inside])
        return (self.places[block] + offset).astype(np.int64)

    def load(self, address, size, count, instruction, lanes):
        at = self.find(address, size * count, instruction, lanes) // size
        memory = self.bytes.view(UNSIGNED[size])
        values = [memory[at + k] for k in range(count)]
        if size > 1:
            for k, value in enumerate(values):
                empty = value == np.iinfo(value.dtype).max
                if empty.any() and not self.written[(at[empty] + k) * size].all():
                    refuse("memory is read that nothing has written", instruction, lanes[empty])
        return values

    def store(self, address, size, values, instruction, lanes):
        at = self.find(address, size * len(values), instruction, lanes) // size
        for k, value in enumerate(values):
            self.bytes.view(UNSIGNED[size])[at + k] = value
            for byte in range(size):
                self.written[(at + k) * size + byte] = True


class Local:
    """The memory of each lane."""

    def __init__(self, lanes, size):
        self.size = -(-size // 16) * 16
        self.bytes, self.written = np.full(lanes * self.size, 0xFF, np.uint8), np.zeros(lanes * self.size, bool)

    def find(self, address, size, lanes, instruction):
        """The places of `size` bytes at these addresses, one per lane."""
        if (address % np.uint64(size)).any():
            refuse(f"an address is not aligned to {size} bytes", instruction, lanes[address % np.uint64(size) != 0])
        if (address + np.uint64(size) > np.uint64(self.size)).any():
            refuse("an address is beyond the lane's local memory", instruction, lanes[address + np.uint64(size) > np.uint64(self.size)])
        return (lanes * self.size + address.astype(np.int64)) // size

    def load(self, address, size, lanes, instruction):
        at = self.find(address, size, lanes, instruction)
        if not self.written[at * size].all():
            refuse("local memory is read that nothing has written", instruction, lanes[~self.written[at * size]])
        return self.bytes.view(UNSIGNED[size])[at]

    def store(self, address, size, value, lanes, instruction):
        at = self.find(address, size, lanes, instruction)
        self.bytes.view(UNSIGNED[size])[at] = value
        self.written[(at[:, None] * size + np.arange(size)).ravel()] = True


class Shared:
    """The shared memory of several blocks of threads, each with `size` bytes."""

    def __init__(self, blocks, size, grain):
        self.size, self.grain = -(-max(size, 1) // 16) * 16, grain
        self.bytes = np.full(blocks * self.size, 0xFF, np.uint8)
        cells = len(self.bytes) // grain
        # Per cell: the last writer and its times, the last reader (-1: several warps, -2 - w: several lanes of warp w), and the
        # lane whose copy is on its way.
        self.writer, self.reader, self.copier = (np.full(cells, -1, np.int32) for _ in range(3))
        self.reader[:] = -1
        self.write_time, self.read_time = np.full((2, cells), -1, np.int32), np.full((2, cells), -1, np.int32)

    def find(self, address, size, block, instruction, lanes):
        address = address.astype(np.int64)
        if (address % size).any():
            refuse(f"an address is not aligned to {size} bytes", instruction, lanes[address % size != 0])
        if ((address < 0) | (address + size > self.size)).any():
            refuse("an address is beyond the block's shared memory", instruction, lanes[(address < 0) | (address + size > self.size)])
        return address + block * self.size

    def cells(self, place, size, lanes):
        count = max(size // self.grain, 1)
        cells = (place[:, None] // self.grain + np.arange(count)).ravel()
        return cells, np.repeat(lanes, count)

    def note(self, place, size, lanes, times, writes, instruction):
        """Records an access, and refuses a race. `times` are the numbers of the block's and the warp's barriers so far."""
        cells, lane = self.cells(place, size, lanes)
        block_time, warp_time = times[0][lane], times[1][lane]
        warp = lane // 32
        if (self.copier[cells] >= 0).any():
            refuse("shared memory is used before an asynchronous copy into it has landed", instruction, lane[self.copier[cells] >= 0])
        writer = self.writer[cells]
        clash = (self.write_time[0][cells] == block_time) & (writer != lane)
        clash &= ~((writer // 32 == warp) & (self.write_time[1][cells] < warp_time))
        if clash.any():
            refuse("a race: another thread has written this, and there is no barrier", instruction, lane[clash])
        reader, old = self.reader[cells], self.read_time[0][cells] == block_time
        if writes:
            of = np.where(reader <= -2, -2 - reader, reader // 32)
            ordered = (reader != -1) & (of == warp) & (self.read_time[1][cells] < warp_time)
            clash = old & (reader != lane) & ~ordered
            if clash.any():
                refuse("a race: another thread has read this, and there is no barrier", instruction, lane[clash])
            self.writer[cells] = lane
            if (self.writer[cells] != lane).any():
                refuse("a race: two threads write this at once", instruction, lane[self.writer[cells] != lane])
            self.write_time[0][cells], self.write_time[1][cells] = block_time, warp_time
            return
        # Keep earlier readers of this time: several of one warp, or of several warps.
        self.reader[cells] = lane
        won = self.reader[cells]
        several = won != lane
        mixed = np.where(won // 32 == warp, -2 - warp, -1)
        before = np.where(reader == -1, -1, np.where(np.where(reader <= -2, -2 - reader, reader // 32) == warp, -2 - warp, -1))
        before = np.where(old & (reader != lane), before, 0)
        self.reader[cells[several & (mixed < -1)]] = mixed[several & (mixed < -1)]
        self.reader[cells[before < -1]] = before[before < -1]
        self.reader[cells[(several & (mixed == -1)) | (before == -1)]] = -1
        self.read_time[0][cells], self.read_time[1][cells] = block_time, warp_time

    def load(self, address, size, count, block, lanes, times, instruction):
        place = self.find(address, size * count, block, instruction, lanes)
        self.note(place, size * count, lanes, times, False, instruction)
        return [self.bytes.view(UNSIGNED[size])[place // size + k] for k in range(count)]

    def store(self, address, size, values, block, lanes, times, instruction):
        place = self.find(address, size * len(values), block, instruction, lanes)
        self.note(place, size * len(values), lanes, times, True, instruction)
        for k, value in enumerate(values):
            self.bytes.view(UNSIGNED[size])[place // size + k] = value
