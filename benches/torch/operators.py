#!/usr/bin/env python3
"""PyTorch's numbers for the cases of benches/operators.rs, under the same names, as JSON lines, on one thread.

    python3 benches/torch/operators.py [PART OF A NAME]
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

# Functions of elements that `torch` names as the crate does.
SAME = """abs acos asin atan atanh asinh cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac isfinite lgamma log log10
    log1p log2 logit neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc""".split()
POINTWISE = {
    "add_scalar": lambda x: x + 0.5,
    "clamp": lambda x: x.clamp(0.25, 0.75),
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gt_scalar": lambda x: x > 0.5,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "pow_scalar": lambda x: x**1.7,
    "relu6": F.relu6,
    "selu": F.selu,
    "silu": F.silu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    **{name: getattr(torch, name) for name in SAME},
}
# Their operands have both signs, since some take less work for one of them.
ACTIVATIONS = set("""elu gelu gelu_tanh hardsigmoid hardswish leaky_relu log_sigmoid mish relu relu6 selu sigmoid silu softplus
    softsign tanh""".split())
BINARY = "add atan2 copysign div fmod hypot logaddexp maximum mul pow remainder sub xlogy".split()
TERNARY = {
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, x),
}
ALONG = {
    "all": lambda x: (x > -1.0).all(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
    "argsort": lambda x: torch.argsort(x, dim=1, stable=True),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp dim 0": lambda x: x.logsumexp(0),
    "max": lambda x: x.amax(1),
    "max dim 0": lambda x: x.amax(0),
    "mean": lambda x: x.mean(1),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, 1),
    "norm 2": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "norm 2 dim 0": lambda x: torch.linalg.vector_norm(x, 2, 0),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "prod": lambda x: x.prod(1),
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: torch.sort(x, dim=1, stable=True),
    "sum": lambda x: x.sum(1),
    "sum dim 0": lambda x: x.sum(0),
    "topk 8": lambda x: x.topk(8, 1),
    "topk 50": lambda x: x.topk(50, 1),
    "var": lambda x: x.var(1),
    "var dim 0": lambda x: x.var(0),
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


def entries(count, n):
    return (torch.arange(count) * 2654435761 >> 7) % n


def pointwise():
    x, y = noise(4096, 1024), noise(4096, 1024)
    size = 4 * x.numel()
    signed = (x - 0.5) * 8
    for name, f in sorted(POINTWISE.items()):
        operand = signed if name in ACTIVATIONS else x
        case(name, "GB/s", 2 * size, lambda: f(operand))
    for name in BINARY:
        case(name, "GB/s", 3 * size, lambda: getattr(torch, name)(x, y))
    for name, f in TERNARY.items():
        case(name, "GB/s", 4 * size, lambda: f(x, y))
    ints, other = (x * 1e6).int(), (y * 1e3).int()
    case("bitwise_xor i32", "GB/s", 3 * size, lambda: ints ^ other)
    case("floor_div i32", "GB/s", 3 * size, lambda: ints // (other + 1))
    mask, half = x > 0.5, x.bfloat16()
    case("select", "GB/s", 3.25 * size, lambda: torch.where(mask, x, y))
    case("masked_fill", "GB/s", 2.25 * size, lambda: x.masked_fill(mask, -1.0))
    case("logical_not", "GB/s", 0.5 * size, lambda: mask.logical_not())
    for name in ("erfc", "exp", "gelu", "relu", "sin"):
        case(f"{name} bf16", "GB/s", size, lambda: POINTWISE[name](half))
    some = [noise(4096) for _ in range(64)]
    case("foreach_add", "GB/s", 3 * 64 * 4 * 4096, lambda: torch._foreach_add(some, some))
    for name, f in ALONG.items():
        case(name, "GB/s", size, lambda: f(x))
    case("sum all", "GB/s", size, lambda: x.sum())
    odd = noise(16777, 1000)
    for name in ("argmax", "max", "mean", "norm 2", "prod", "sum"):
        case(f"{name} 16777x1000", "GB/s", 4 * odd.numel(), lambda: ALONG[name](odd))
    case("cast bf16", "GB/s", 1.5 * size, lambda: x.bfloat16())


def ordering():
    for rows, n in [(64, 4096), (1, 1 << 20)]:
        x = noise(rows, n)
        case(f"sort {rows}x{n}", "Gelem/s", rows * n, lambda: torch.sort(x, stable=True))
    x = noise(512, 32000)
    for k in (8, 50):
        case(f"topk {k} of 512x32000", "Gelem/s", 512 * 32000, lambda: torch.topk(x, k))


def by_index():
    for rows in (1000, 32000):
        table, src, count, zeros = noise(rows, 768), noise(8192, 768), 8192 * 768, torch.zeros(rows, 768)
        row = entries(8192, rows)
        index = row[:, None].expand(8192, 768)
        case(f"gather of {rows} rows", "Gelem/s", count, lambda: table.gather(0, index))
        case(f"index_select of {rows} rows", "Gelem/s", count, lambda: table.index_select(0, row))
        case(f"index_add to {rows} rows", "Gelem/s", count, lambda: zeros.index_add(0, row, src))
        case(f"scatter_add to {rows} rows", "Gelem/s", count, lambda: torch.zeros(rows, 768).scatter_add_(0, index, src))
    x, count = noise(512, 4096), 512 * 4096
    index = entries(count, 4096).reshape(512, 4096)
    case("gather elements", "Gelem/s", count, lambda: x.gather(1, index))
    case("scatter elements", "Gelem/s", count, lambda: x.scatter(1, index, x))
    case("scatter_add elements", "Gelem/s", count, lambda: torch.zeros(512, 4096).scatter_add_(1, index, x))


def attention():
    for keys in (64, 256, 1024, 4096):
        q, k, v = (noise(1, 4, keys, 64) for _ in range(3))
        attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
        case(f"attention {keys}", "GFLOP/s", 2 * 4 * keys * keys * 64, attend)


# As PRODUCTS in benches/operators.rs.
PRODUCTS = {
    "nn": """512x512x512 1024x1024x1024 2048x2048x2048 768x128x384 768x128x512 768x512x128 768x128x65 1024x384x1152
        1024x384x1536 1024x1536x384 1024x384x65 1x2048x2048 8x1024x1024 2048x2048x1 2048x2048x4
        2048x2048x8""",
    "tn": "128x768x512 512x768x128 384x1024x1536 1536x1024x384",
    "nt": """768x512x128 768x128x512 1024x1536x384 1024x384x1536 1x2048x2048 2x2048x2048 4x2048x2048 8x2048x2048
        1x1000x3000""",
    "nn bf16": "512x512x512 1x2048x2048 8x2048x2048 2048x2048x1",
    "nt bf16": "512x512x512 1x2048x2048 4x2048x2048 8x2048x2048",
}


def products():
    for kind, shapes in PRODUCTS.items():
        for shape in shapes.split():
            m, k, n = map(int, shape.split("x"))
            dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
            a = noise(k, m).to(dtype).t() if kind.startswith("tn") else noise(m, k).to(dtype)
            b = noise(n, k).to(dtype).t() if kind.startswith("nt") else noise(k, n).to(dtype)
            case(f"matmul {shape} {kind}", "GFLOP/s", 2 * m * k * n, lambda: a @ b)


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for part in (pointwise, ordering, by_index, attention, products):
        part()
    print(json.dumps({"bench": "operators", "side": "torch", "torch": torch.__version__, "threads": 1}))


if __name__ == "__main__":
    main()
