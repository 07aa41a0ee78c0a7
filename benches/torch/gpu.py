#!/usr/bin/env python3
"""PyTorch's side of benches/gpu.rs: the same cases by the same names, one JSON object a line.

    python3 benches/torch/gpu.py [PART ...]

PART is one of kernels, random, attention, matmul, host, steps; all without. A case that PyTorch has no operator for is
written as its users write it. Times are of batches of calls between two synchronisations, the best of several; a step's
is the median. Rates count what must be read and written once, as in benches/gpu.rs, whatever the implementation moves.
"""

import json
import math
import statistics
import sys
import time

PARTS = ("kernels", "random", "attention", "matmul", "host", "steps")

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print(json.dumps({"bench": "gpu", "side": "torch", "skipped": "no PyTorch"}))
    sys.exit(0)

ROWS, COLS = 16384, 4096
DTYPES = (("f32", torch.float32), ("bf16", torch.bfloat16))
# name: layers, heads, width, block, batch, vocabulary; as in benches/gpu.rs.
SIZES = {
    "nano": (4, 4, 128, 64, 12, 65),
    "baby": (6, 6, 384, 256, 64, 65),
    "gpt2": (12, 12, 768, 1024, 16, 50304),
}


def report(case, value, unit):
    print(json.dumps({"bench": "gpu", "side": "torch", "case": case, "value": round(value, 4), "unit": unit}), flush=True)


def seconds(call, budget=0.15):
    """The shortest time of a call, over batches that are synchronised once each."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - began
    calls = max(1, min(50, int(budget / 5 / max(once, 1e-6))))
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def gigabytes(case, moved, call):
    report(case, moved / seconds(call) / 1e9, "GB/s")


def teraflops(case, flops, call):
    report(case, flops / seconds(call) / 1e12, "TFLOP/s")


def noise(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(grad)


def kernels():
    out = torch.empty(ROWS, COLS, device="cuda")
    x = noise(ROWS, COLS)
    n = x.numel()
    gigabytes("copy f32", 8 * n, lambda: out.copy_(x))
    for name, dtype in DTYPES:
        x, y = noise(ROWS, COLS, dtype=dtype), noise(ROWS, COLS, dtype=dtype)
        w = noise(COLS, dtype=dtype)
        size = x.element_size() * n
        gigabytes(f"add {name}", 3 * size, lambda: x + y)
        gigabytes(f"add row {name}", 2 * size, lambda: x + w)
        gigabytes(f"gelu {name}", 2 * size, lambda: F.gelu(x))
        gigabytes(f"gelu_tanh {name}", 2 * size, lambda: F.gelu(x, approximate="tanh"))
        gigabytes(f"transpose {name}", 2 * size, lambda: x.t().contiguous())
        gigabytes(f"softmax {name}", 2 * size, lambda: torch.softmax(x, -1))
        s = torch.softmax(x, -1)
        gigabytes(f"softmax backward {name}", 3 * size, lambda: torch.ops.aten._softmax_backward_data(y, s, -1, dtype))
        gigabytes(f"layer_norm {name}", 2 * size, lambda: F.layer_norm(x, (COLS,), w, None, 1e-5))
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, [COLS], w, None, 1e-5)
        gigabytes(
            f"layer_norm backward {name}",
            3 * size,
            lambda: torch.ops.aten.native_layer_norm_backward(y, x, [COLS], mean, rstd, w, None, [True, True, False]),
        )
        gigabytes(f"rms_norm {name}", 2 * size, lambda: F.rms_norm(x, (COLS,), w, 1e-6))
        gigabytes(f"sum all {name}", size, lambda: x.sum())
        gigabytes(f"sum dim 0 {name}", size, lambda: x.sum(0))
        gigabytes(f"sum dim 1 {name}", size, lambda: x.sum(1))
        losses(name, dtype)
        turn(name, dtype)
    adamw()


def losses(name, dtype):
    rows, classes = 8192, 50304
    logits = noise(rows, classes, dtype=dtype)
    target = torch.randint(classes, (rows,), device="cuda")
    size = logits.element_size() * logits.numel()
    gigabytes(f"cross_entropy {name}", size, lambda: F.cross_entropy(logits, target, reduction="none"))
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, target, reduction="none")
    ones = torch.ones_like(loss)
    backward = lambda: torch.autograd.grad(loss, leaf, ones, retain_graph=True)
    gigabytes(f"cross_entropy backward {name}", 2 * size, backward)


def turn(name, dtype):
    """Rotary embedding as Llama's users write it, with the angles at hand."""
    x = noise(8, 32, 2048, 128, dtype=dtype)
    angle = torch.outer(torch.arange(2048.0), 1e4 ** -(torch.arange(0, 128, 2.0) / 128)).cuda()
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))

    def rotary():
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    gigabytes(f"rotary {name}", 2 * x.element_size() * x.numel(), rotary)


def adamw():
    params = list(Gpt(*SIZES["gpt2"]).cuda().parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    moved = 28 * sum(p.numel() for p in params)
    fused = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    gigabytes("adamw 124M f32", moved, fused.step)


def random():
    n = ROWS * COLS
    for name, dtype in DTYPES:
        x = torch.empty(ROWS, COLS, device="cuda", dtype=dtype)
        size = x.element_size() * n
        # A rank of PyTorch's draws its part as if it were a whole tensor: the rate does not depend on the layout.
        for where in ("whole", "rows of 4 ranks", "columns of 4 ranks"):
            gigabytes(f"uniform {where} {name}", size, lambda: x.uniform_())
            gigabytes(f"normal {where} {name}", size, lambda: x.normal_())
            gigabytes(f"dropout {where} {name}", 2 * size, lambda: F.dropout(x, 0.1))


def attention():
    cases = [("16x12x1024x64 bf16", (16, 12, 1024, 64), torch.bfloat16, SDPBackend.FLASH_ATTENTION),
             ("4x16x4096x128 bf16", (4, 16, 4096, 128), torch.bfloat16, SDPBackend.FLASH_ATTENTION),
             ("16x12x1024x64 f32", (16, 12, 1024, 64), torch.float32, SDPBackend.EFFICIENT_ATTENTION)]
    for name, (b, h, t, d), dtype, kind in cases:
        q, k, v = (noise(b, t, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
        # Half of two products of t x t x d.
        flops = 2.0 * b * h * t * t * d
        with sdpa_kernel(kind):
            call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with torch.no_grad():
                teraflops(f"attention {name}", flops, call)
            y = call()
            dy = torch.randn_like(y)
            backward = lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
            teraflops(f"attention backward {name}", 2.5 * flops, backward)


def matmul():
    shapes = ((4096, 4096, 4096), (16384, 768, 3072), (16384, 768, 50304))
    for m, k, n in shapes:
        for name, dtype, tf32 in (("f32", torch.float32, False), ("tf32", torch.float32, True),
                                  ("bf16", torch.bfloat16, False)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            a, b = noise(m, k, dtype=dtype), noise(n, k, dtype=dtype)
            teraflops(f"matmul {m}x{k}x{n} {name}", 2.0 * m * k * n, lambda: a @ b.t())
    torch.backends.cuda.matmul.allow_tf32 = False


def host():
    """Microseconds of host time an operator takes, on tensors whose kernels take none to speak of."""
    x, y = noise(64), noise(64)
    gx = noise(64, grad=True)
    a, b = noise(8, 8), noise(8, 8)

    def each(case, call):
        times = []
        for _ in range(25):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                call()
            times.append((time.perf_counter() - began) / 200)
        report(f"host {case}", statistics.median(times[5:]) * 1e6, "us/op")

    each("add", lambda: x + y)
    each("gelu", lambda: F.gelu(x))
    each("matmul", lambda: a @ b)
    each("sum", lambda: x.sum())
    each("add with gradient", lambda: gx + y)


class Block(torch.nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(torch.nn.Module):
    """The model of isoshard's nn::Gpt: learned positions, no biases, a head tied to the token table."""

    def __init__(self, layers, heads, width, block, _, vocabulary):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(block, width)
        self.blocks = torch.nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(name, kind, steps):
    """Steps of `kind`: f32, tf32, bf16 (parameters and all), or mixed (f32 parameters under autocast)."""
    layers, heads, width, block, batch, vocabulary = SIZES[name]
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    torch.manual_seed(1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = Gpt(*SIZES[name]).cuda()
    if kind == "bf16":
        model = model.bfloat16()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    text = (torch.arange(batch * block + 1) ** 2 % min(vocabulary, 65)).cuda()
    tokens, targets = text[:-1].view(batch, block), text[1:].view(batch, block)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "mixed"):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / steps)
    report(f"step {name} {kind}", batch * block / statistics.median(times), "tokens/s")
    report(f"step {name} {kind} memory", torch.cuda.max_memory_allocated() / 2**20, "MiB")
    torch.backends.cuda.matmul.allow_tf32 = False


def steps():
    for name, count, kinds in (("nano", 20, ("f32", "tf32", "bf16", "mixed")), ("baby", 5, ("f32", "tf32", "bf16", "mixed")),
                               ("gpt2", 3, ("bf16", "mixed"))):
        for kind in kinds:
            train(name, kind, count)


def main():
    unknown = [a for a in sys.argv[1:] if a not in PARTS]
    if unknown:
        sys.exit(f"unknown argument(s) {' '.join(unknown)}; the parts are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("SKIPPED (no CUDA device): benches/torch/gpu.py", file=sys.stderr)
        return
    for part in sys.argv[1:] or PARTS:
        try:
            globals()[part]()
        except Exception as error:  # one part that fails must not take the others' numbers with it
            print(json.dumps({"bench": "gpu", "side": "torch", "failed": part, "why": str(error)[:400]}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
