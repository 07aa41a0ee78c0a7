#!/usr/bin/env python3
"""Collectives of PyTorch's gloo and redistributions of its DTensor on 2 ranks, beside those of benches/collectives.rs, in
one run: the two take turns.

    python3 benches/torch/collectives.py [--rounds 3] [--markdown FILE] [--only-torch]

Sizes are of the whole: all_reduce and all_to_all take so many bytes a rank, reduce_scatter takes and all_gather makes so many
a rank, and so large is the global tensor that is redistributed. gloo's calls write into outputs made beforehand; DTensor's
include cached planning, wrapping and the result's memory. `copy` is both ranks copying the bytes at once, for scale.
Numbers are microseconds on rank 0: the median over the rounds of a round's median call, and the fastest call of all.
A ratio compares gloo's call with ours that ends in the same state: with one tensor, where gloo makes one.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time

SIZES = ((4 << 10, 32), (1 << 20, 512), (64 << 20, 4096))
# What is at least as many times faster, at which sizes.
TARGETS = {
    (4 << 10, "collective"): 10,
    (64 << 20, "collective"): 4,
    (4 << 10, "move"): 5,
    (64 << 20, "move"): 5,
}


def worker(rank, world, port):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))

    def bench(case, size, call):
        reps = 400 if size <= 1 << 14 else 100 if size <= 1 << 20 else 15
        for _ in range(3):
            call()
        dist.barrier()
        times = []
        for _ in range(reps):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        if rank == 0:
            line = {"bench": "collectives", "side": "torch", "case": case, "bytes": size, "ranks": world}
            print(json.dumps(line | {"value": statistics.median(times), "best": min(times), "unit": "us"}), flush=True)

    for size, side in SIZES:
        n = size // 4
        full, other, part = torch.ones(n), torch.empty(n), torch.ones(n // world)
        if size == SIZES[0][0]:
            bench("barrier", size, dist.barrier)
        bench("copy", size, lambda: other.copy_(full))
        bench("all_gather", size, lambda: dist.all_gather_into_tensor(other, part))
        bench("reduce_scatter", size, lambda: dist.reduce_scatter_tensor(part, full))
        bench("all_to_all", size, lambda: dist.all_to_all_single(other, full))
        bench("all_reduce", size, lambda: dist.all_reduce(full))
        half, square = torch.ones(side // world, side), torch.ones(side, side)
        s0 = DTensor.from_local(half, mesh, [Shard(0)], run_check=False)
        s1 = DTensor.from_local(half.t().contiguous(), mesh, [Shard(1)], run_check=False)
        p = DTensor.from_local(square, mesh, [Partial()], run_check=False)
        moves = (s0, "S0", Shard(1), "S1"), (s0, "S0", Replicate(), "R"), (s1, "S1", Replicate(), "R")
        moves += (p, "P", Shard(0), "S0"), (p, "P", Shard(1), "S1"), (p, "P", Replicate(), "R")
        for x, source, target, name in moves:
            bench(f"{source} -> {name}", size, lambda x=x, target=target: x.redistribute(mesh, [target]))
    dist.destroy_process_group()


def torch_round():
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (2, port), nprocs=2)


def lines(command):
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def table(found):
    """Rows of case, bytes, both sides' median and best, the ratio of medians and whether the target is met."""
    ours, theirs = found["isoshard"], found["torch"]
    for case, size in ours:
        # What gloo's call leaves is one tensor: so is what ours is compared by.
        plain = case.removesuffix(" joined")
        is_view = f"{case} joined" in {c for c, _ in ours}
        other = None if is_view or case == "reduce_scatter to one" else theirs.get((plain, size))
        mine = ours[case, size]
        ratio = other[0] / mine[0] if other else None
        kind = "move" if "->" in case else "collective"
        goal = TARGETS.get((size, kind)) if other and case != "copy" else None
        yield case, size, mine, other or theirs.get((plain, size)), ratio, goal


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--markdown")
    args.add_argument("--only-torch", action="store_true")
    args = args.parse_args()
    if args.only_torch:
        return torch_round()
    rounds = {"isoshard": {}, "torch": {}}
    commands = (["cargo", "bench", "--quiet", "--bench", "collectives", "--", "--json"], [sys.executable, __file__, "--only-torch"])
    for _ in range(args.rounds):
        for line in (line for command in commands for line in lines(command)):
            rounds[line["side"]].setdefault((line["case"], line["bytes"]), []).append((line["value"], line["best"]))
    middle = {
        side: {key: (statistics.median(v for v, _ in all), min(b for _, b in all)) for key, all in cases.items()}
        for side, cases in rounds.items()
    }
    import torch

    show = lambda pair: "" if pair is None else f"{pair[0]:,.1f} ({pair[1]:,.1f})"
    text = [
        f"2 ranks, {args.rounds} rounds in turn; {platform.machine()}, {os.cpu_count()} cores; PyTorch {torch.__version__}, gloo, one thread a rank.",
        f"`{' '.join(['python3', *sys.argv])}`, {time.strftime('%Y-%m-%d %H:%M')} UTC. Microseconds: median (fastest).",
        "",
        "| case | bytes | isoshard | PyTorch | times faster | target |",
        "|---|---|---|---|---|---|",
    ]
    for case, size, mine, other, ratio, goal in table(middle):
        met = "" if goal is None else f"{goal}: {'met' if ratio >= goal else 'MISSED'}"
        times = "" if ratio is None else f"{ratio:,.1f}"
        text.append(f"| {case} | {size:,} | {show(mine)} | {show(other)} | {times} | {met} |")
    print("\n".join(text))
    if args.markdown:
        with open(args.markdown, "w", encoding="utf-8") as out:
            out.write("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
