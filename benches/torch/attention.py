#!/usr/bin/env python3
"""PyTorch's attention on one thread, for the cases of `cargo bench --bench kernels attention`: one JSON object per line.

    OMP_NUM_THREADS=1 python3 benches/torch/attention.py
"""

import json
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)


def best(f):
    start, times = time.perf_counter(), []
    while len(times) < 5 or time.perf_counter() - start < 0.33:
        begin = time.perf_counter()
        f()
        times.append(time.perf_counter() - begin)
    return min(times)


for b, h, t, d in [(12, 4, 64, 32), (4, 6, 256, 64), (1, 8, 1024, 64), (1, 2, 4096, 64)]:
    q, k, v = (torch.randn(b, t, h, d).transpose(1, 2).requires_grad_() for _ in range(3))
    i, j = torch.arange(t)[:, None], torch.arange(t)
    padding = ((j < t - t // 8) | (j % 3 > 0)).expand(b, 1, 1, t)
    cases = {
        "": (dict(is_causal=True), t * t / 2),
        " all": ({}, t * t),
        " mask": (dict(attn_mask=padding), t * t),
        " bias": (dict(attn_mask=torch.randn(1, h, t, t)), t * t),
        " window": (dict(attn_mask=(j <= i) & (j > i - t // 8)), t * t / 8),
    }
    for name, (options, pairs) in cases.items():
        flops = 4 * b * h * d * pairs
        case = f"attention {b}x{h}x{t}x{d}{name}"
        with torch.no_grad():
            forward = best(lambda: F.scaled_dot_product_attention(q, k, v, **options))
        print(json.dumps({"bench": "kernels", "case": case, "value": round(flops / forward / 1e9, 3), "unit": "GFLOP/s"}), flush=True)
        o = F.scaled_dot_product_attention(q, k, v, **options)
        grad = o.detach().clone()
        back = best(lambda: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True))
        print(json.dumps({"bench": "kernels", "case": case + " back", "value": round(2.5 * flops / back / 1e9, 3), "unit": "GFLOP/s"}), flush=True)
