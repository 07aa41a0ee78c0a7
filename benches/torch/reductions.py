#!/usr/bin/env python3
"""Times PyTorch's reductions in one thread: the cases of `cargo bench --bench kernels`, with the same names and units.

    python3 benches/torch/reductions.py
"""

import time

import torch

torch.set_num_threads(1)

ALL = {
    "logsumexp": lambda x, d: torch.logsumexp(x, d),
    "var": lambda x, d: torch.var(x, d, correction=1),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "argmin": lambda x, d: torch.argmin(x, d),
}


def best(f):
    """The least of the times of at least 20 calls and 0.5 seconds."""
    times, end = [], time.perf_counter() + 0.5
    while len(times) < 20 or time.perf_counter() < end:
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


for rows in (1024, 4096):
    x = torch.randn(rows, 1024)
    for name, f in ALL.items():
        for dim in (1, 0):
            seconds = best(lambda: f(x, dim))
            print(f"{name} dim {dim} {rows} x 1024: {rows * 4096 / seconds / 1e9:.2f} GB/s")
