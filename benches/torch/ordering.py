#!/usr/bin/env python3
"""Times sorting and indexing in PyTorch on one CPU thread: the cases of benches/kernels.rs, one JSON object per line.

    cargo bench --bench kernels -- --json > RESULTS.jsonl; python3 benches/torch/ordering.py --json >> RESULTS.jsonl
    python3 benches/torch/ordering.py --beside RESULTS.jsonl

With --beside it prints both numbers and their ratio. Each value is the best of several runs, in billions of elements
per second.
"""

import json
import sys
import time

import torch


def best_s(f):
    start, best, runs = time.perf_counter(), float("inf"), 0
    while runs < 5 or time.perf_counter() - start < 0.33:
        run = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - run)
        runs += 1
    return best


def cases():
    for rows, n in [(64, 4096), (1, 1 << 20)]:
        x = torch.randn(rows, n)
        yield f"sort {rows}x{n}", rows * n, lambda: torch.sort(x, stable=True)
    x = torch.randn(512, 32000)
    for k in (8, 50):
        yield f"topk {k} of 512x32000", x.numel(), lambda: torch.topk(x, k)
    for rows in (1000, 32000):
        table, src = torch.randn(rows, 768), torch.randn(8192, 768)
        index = torch.randint(0, rows, (8192, 1)).expand(8192, 768)
        yield f"gather 8192x768 of {rows}", src.numel(), lambda: torch.gather(table, 0, index)
        yield f"scatter_add 8192x768 of {rows}", src.numel(), lambda: torch.zeros(rows, 768).scatter_add_(0, index, src)
    x, index = torch.randn(512, 4096), torch.randint(0, 4096, (512, 4096))
    yield "gather elements 512x4096", x.numel(), lambda: torch.gather(x, 1, index)
    yield "scatter_add elements 512x4096", x.numel(), lambda: torch.zeros(512, 4096).scatter_add_(1, index, x)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = {}
    if "--beside" in sys.argv:
        with open(sys.argv[sys.argv.index("--beside") + 1], encoding="utf-8") as lines:
            items = [json.loads(line) for line in lines if line.startswith("{")]
        ours = {item["case"]: item["value"] for item in items if item.get("bench") == "kernels"}
    for case, elements, f in cases():
        value = elements / best_s(f) / 1e9
        if "--json" in sys.argv:
            print(json.dumps({"bench": "ordering", "side": "torch", "case": case, "value": value, "unit": "Gelem/s"}))
        elif case in ours:
            print(f"{case:<32} isoshard {ours[case]:8.3f}  torch {value:8.3f}  ratio {ours[case] / value:6.2f}")
        else:
            print(f"{case:<32} torch {value:8.3f} Gelem/s")


if __name__ == "__main__":
    main()
