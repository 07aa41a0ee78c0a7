#!/usr/bin/env python3
"""Trains one GPT with isoshard and with PyTorch, in turns, and prints tokens per second side by side.

    python3 benches/torch/train.py [--rounds 5] [--sizes nano,baby] [--rows single,fsdp,dp,threads] [--seconds 900]
                                   [--json] [--markdown FILE]

A row may have a number: `threads=8` is one rank with eight threads, `fsdp=8` and `dp=8` are eight ranks with one each. A size may
have a batch: `baby*16`.

Needs torch, and builds `examples/train_gpt`. Each round runs ours and PyTorch's, one after the other, so that a noisy machine
disturbs both alike. A figure is the median of a run's steps; the table has the median and the best of the rounds, with the
machine. Both train the same model: no biases, a head tied to the token table, AdamW, gradients clipped by their norm, f32, no
dropout. A text of 65 characters is made for it. After `--seconds` no further round begins.

On AMD's CPUs PyTorch's MKL takes AVX2 code. A preloaded library (`LD_PRELOAD`) with `int mkl_serv_intel_cpu_true(void) { return 1; }`
gives it the AVX-512 code that it has on Intel's, and twice the speed on a Zen 5.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

# Layers, heads, width, context, batch, and steps of a run.
SIZES = {"nano": (4, 4, 128, 64, 12, 40), "baby": (6, 6, 384, 256, 4, 8), "gpt2": (12, 12, 768, 1024, 4, 5)}
VOCABULARY = 65
ROWS = ("single", "fsdp", "dp", "threads")


def row_of(name):
    """Returns a row's words, the mesh and threads of ours, and the mode, ranks and threads of PyTorch's."""
    kind, equals, given = name.partition("=")
    n = number(given, name) if equals else 2
    if name == "single":
        return "one rank, one thread", ("1", 1), ("single", 1, 1)
    if kind == "fsdp":
        return f"{n} ranks, FSDP / FSDP2", (f"fsdp={n}", 1), ("fsdp", n, 1)
    if kind == "dp":
        return f"{n} ranks, data parallel / DDP", (f"dp={n}", 1), ("ddp", n, 1)
    if kind == "threads":
        return f"one rank, {n} threads", ("1", n), ("single", 1, n)
    raise SystemExit(f"no row {name!r}: there are {', '.join(ROWS)}, and numbers for all but the first")


def number(given, name):
    if not given.isdecimal() or not 1 <= int(given) <= 1024:
        raise SystemExit(f"{name!r}: {given!r} is no number from 1 to 1024")
    return int(given)


def shape_of(size):
    """Returns the numbers of `SIZES`; a size may have a batch of its own, as in `baby*16`."""
    name, star, batch = size.partition("*")
    if name not in SIZES:
        raise SystemExit(f"no size {name!r}: there are {', '.join(SIZES)}")
    layers, heads, width, block, own, steps = SIZES[name]
    return layers, heads, width, block, number(batch, size) if star else own, steps


def made_text(path):
    """Writes 200,000 characters, each a noisy function of the one before it."""
    letters = [chr(c) for c in range(ord("0"), ord("0") + VOCABULARY)]
    state, at, out = 42, 0, []
    for _ in range(200_000):
        out.append(letters[at])
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        at = (5 * at + 3 + (state >> 33) % 4) % VOCABULARY
    with open(path, "w") as file:
        file.write("".join(out))


def ours(binary, text, size, mesh, threads):
    layers, heads, width, block, batch, steps = shape_of(size)
    command = [binary, "--json", "--data", text, "--mesh", mesh, "--steps", steps, "--layers", layers, "--heads", heads]
    command += ["--width", width, "--block", block, "--batch", batch, "--eval-batches", 1]
    env = dict(os.environ, ISOSHARD_THREADS=str(threads))
    out = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, check=True).stdout
    steps = [json.loads(line) for line in out.splitlines()]
    rates = [step["tokens_per_s"] for step in steps if step["event"] == "step"]
    end = next(step for step in steps if step["event"] == "end")
    # The first steps fill caches and pools.
    return {"tokens_per_s": statistics.median(rates[len(rates) // 4 :]), "peak_rss_bytes": end["peak_rss_bytes"]}


def torchs(text, size, mode, ranks, threads):
    job = json.dumps([text, size, mode, ranks, threads])
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    out = subprocess.run([sys.executable, __file__, "--job", job], env=env, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"PyTorch's run failed:\n{out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])


def torch_rank(rank, job, port):
    """Trains on one rank of PyTorch's, and prints the result on rank 0."""
    import resource

    import numpy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    text, size, mode, ranks, threads = job
    layers, heads, width, block, batch, steps = shape_of(size)
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
            linear = lambda a, b: nn.Linear(a, b, bias=False)
            self.qkv, self.out = linear(width, 3 * width), linear(width, width)
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

        def forward(self, x):
            rows, time_len, _ = x.shape
            parts = self.qkv(self.norms[0](x)).view(rows, time_len, 3, heads, -1)
            q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, time_len, width))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(block, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width, bias=False)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, 0.0, 0.02)

        def forward(self, tokens, targets):
            x = self.tokens(tokens) + self.positions(torch.arange(block))
            for one in self.blocks:
                x = one(x)
            scores = F.linear(self.norm(x), self.tokens.weight)
            return F.cross_entropy(scores.view(-1, VOCABULARY), targets.view(-1))

    torch.manual_seed(7)
    model = Gpt()
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (ranks,))
        for one in model.blocks:
            fully_shard(one, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    with open(text) as file:
        data = torch.from_numpy(numpy.array([ord(c) - ord("0") for c in file.read()], dtype=numpy.int64))
    own, rates = batch // ranks, []
    for step in range(steps):
        starts = [((step * batch + rank * own + row) * 997) % (len(data) - block - 1) for row in range(own)]
        began = time.perf_counter()
        tokens = torch.stack([data[s : s + block] for s in starts])
        targets = torch.stack([data[s + 1 : s + 1 + block] for s in starts])
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        rates.append(batch * block / (time.perf_counter() - began))
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
    if ranks > 1:
        all_peaks = [None] * ranks
        dist.all_gather_object(all_peaks, peaks[0])
        peaks = all_peaks
    if rank == 0:
        rate = statistics.median(rates[len(rates) // 4 :])
        print(json.dumps({"tokens_per_s": rate, "peak_rss_bytes": sum(peaks)}), flush=True)
    if ranks > 1:
        # Gloo's threads abort some processes that end in order.
        dist.barrier()
        os._exit(0)


def torch_job(job):
    import socket

    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if job[3] == 1:
        torch_rank(0, job, port)
    else:
        torch.multiprocessing.spawn(torch_rank, (job, port), nprocs=job[3])


def machine():
    """The CPU, its caches and the widest instructions that matter here."""
    told = subprocess.run(["lscpu"], env=dict(os.environ, LC_ALL="C"), capture_output=True, text=True).stdout
    found = dict(re.findall(r"^\s*([^:\n]+):\s+(.*)$", told, re.M))
    flags = found.get("Flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "neon", "asimd") if name in flags), "no vectors known")
    caches = ", ".join(f"{name} {found[name]}" for name in ("L1d cache", "L2 cache", "L3 cache") if name in found)
    return f"{found.get('Model name', 'unknown CPU')}, {os.cpu_count()} cores, {caches}, {widest}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="nano,baby")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--binary", help="a built train_gpt")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", help="a file for the table")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return torch_job(json.loads(args.job))
    cases = [(size, row) for size in args.sizes.split(",") for row in args.rows.split(",")]
    for size, row in cases:
        batch, ranks = shape_of(size)[4], row_of(row)[2][1]
        if batch % ranks:
            raise SystemExit(f"{size} has {batch} rows of text, which {ranks} ranks do not share evenly")
    import torch

    binary = args.binary
    if not binary:
        subprocess.run(["cargo", "build", "--release", "--quiet", "--example", "train_gpt"], check=True)
        binary = "target/release/examples/train_gpt"
    began = time.monotonic()
    found = {case: ([], []) for case in cases}
    rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        made_text(text)
        while rounds < args.rounds and (rounds == 0 or time.monotonic() - began < args.seconds):
            for size, row in cases:
                _, own, theirs = row_of(row)
                sides = found[size, row]
                sides[0].append(ours(binary, text, size, *own))
                sides[1].append(torchs(text, size, *theirs))
                if args.json:
                    for name, side in zip(("isoshard", "torch"), sides):
                        print(json.dumps({"size": size, "row": row, "side": name, "round": rounds, **side[-1]}), flush=True)
            rounds += 1
    load = os.getloadavg()[2]
    lines = [f"{machine()}; PyTorch {torch.__version__}; {rounds} rounds, load {load:.1f} over 15 minutes.", ""]
    lines += ["| | isoshard | PyTorch | ratio | best / best | MiB | PyTorch's MiB |", "|---|--:|--:|--:|--:|--:|--:|"]
    for size, row in cases:
        rates = [[run["tokens_per_s"] for run in side] for side in found[size, row]]
        (a, b), best = map(statistics.median, rates), max(rates[0]) / max(rates[1])
        memory = [max(run["peak_rss_bytes"] for run in side) >> 20 for side in found[size, row]]
        cells = [f"{size}, {row_of(row)[0]}", f"{a:,.0f}", f"{b:,.0f}", f"{a / b:.2f}", f"{best:.2f}", *map(str, memory)]
        lines.append("| " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    print(table if not args.json else json.dumps({"table": table}))
    if args.markdown:
        with open(args.markdown, "w") as file:
            file.write(table + "\n")


if __name__ == "__main__":
    main()
