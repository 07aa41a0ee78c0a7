#!/usr/bin/env python3
"""PyTorch's numbers for the cases of benches/operators.rs, under the same names, as JSON lines, on one thread.

    python3 benches/torch/operators.py [PART OF A NAME]
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

POINTWISE = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "pow_scalar": lambda x: x**1.7,
    "silu": F.silu,
    **{name: getattr(torch, name) for name in ("abs", "exp", "log", "neg", "relu", "rsqrt", "sigmoid", "sqrt", "tanh")},
}
ALONG = {
    "argmax": lambda x: x.argmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "max": lambda x: x.amax(1),
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: torch.sort(x, dim=1, stable=True),
    "sum": lambda x: x.sum(1),
    "topk 8": lambda x: x.topk(8, 1),
}


def case(name, unit, work, f):
    if len(sys.argv) > 1 and sys.argv[1] not in name:
        return
    start, best, runs = time.perf_counter(), float("inf"), 0
    while runs < 5 or time.perf_counter() - start < 0.33:
        run = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - run)
        runs += 1
    print(json.dumps({"bench": "operators", "side": "torch", "case": name, "value": round(work / best / 1e9, 3), "unit": unit}), flush=True)


def noise(*shape):
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((i * 2654435761 >> 7 & 0xFFFF).float() + 0.5) / 65536).reshape(shape)


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x, y = noise(4096, 1024), noise(4096, 1024)
    size = 4 * x.numel()
    for name, f in sorted(POINTWISE.items()):
        case(name, "GB/s", 2 * size, lambda: f(x))
    case("add", "GB/s", 3 * size, lambda: x + y)
    case("mul", "GB/s", 3 * size, lambda: x * y)
    for name, f in ALONG.items():
        case(name, "GB/s", size, lambda: f(x))
    index = (torch.arange(4096 * 256) * 2654435761 >> 7 & 1023).reshape(4096, 256)
    source = noise(4096, 256)
    case("gather", "GB/s", 2 * 4 * source.numel(), lambda: x.gather(1, index))
    case("scatter_add", "GB/s", 2 * 4 * source.numel(), lambda: torch.zeros(4096, 1024).scatter_add_(1, index, source))
    for keys in (64, 256, 1024, 4096):
        q, k, v = (noise(1, 4, keys, 64) for _ in range(3))
        attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
        case(f"attention {keys}", "GFLOP/s", 2 * 4 * keys * keys * 64, attend)
    case("cast bf16", "GB/s", 1.5 * size, lambda: x.bfloat16())
    print(json.dumps({"bench": "operators", "side": "torch", "torch": torch.__version__, "threads": 1}))


if __name__ == "__main__":
    main()
