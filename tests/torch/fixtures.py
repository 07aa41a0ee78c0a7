#!/usr/bin/env python3
"""Writes fixtures.jsonl: results and gradients of PyTorch that tests/suite/torch_fixtures.rs compares with ours.

    python3 tests/torch/fixtures.py        # PyTorch 2.15 on a CPU; the file's first line has the exact version

A line is a version, a tensor or a case. A tensor has a dtype `d`, a shape `s` and its elements' bits in hexadecimal `x`,
little-endian; cases name tensors by their number, so equal tensors are stored once. A case has an operator `op`, its
attributes `a`, operands `i`, results `o`, and, if there is a derivative, the gradients `dy` of the results and `dx` of
the operands (null where there is none). If PyTorch raises an error, `raises` has its text and there are no results. An operand may be a view of a stored tensor: `t` swaps its last two dims, `e`
expands it to a shape.

A new operator is a line below, among its family, and a line in tests/suite/torch_fixtures/operators.rs. The script
refuses cases of operators that that file does not name. New cases come after the old ones of their family, or in a
family of their own, so that the random numbers of old cases stay.
"""

import itertools
import json
import math
import os
import re
import sys

import torch
import torch.nn.functional as F

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
FLOATS = (F32, F64, F16, BF16)
NAMES = {F16: "f16", BF16: "bf16", F32: "f32", F64: "f64", I64: "i64", I32: "i32", U8: "u8", BOOL: "bool"}
INT_OF = {F16: torch.int16, BF16: torch.int16, F32: torch.int32, F64: torch.int64}

HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(HERE, "..", "suite", "torch_fixtures", "operators.rs"), encoding="utf-8") as file:
    NAMED = set(re.findall(r"^ {4}(\w+) \|", file.read(), re.MULTILINE))
lines, numbers = [json.dumps({"torch": torch.__version__})], {}


def stored(x):
    """The number of a tensor, which is added if it is new."""
    x = x.detach().contiguous()
    bits = x.reshape(-1).view(torch.uint8) if x.dtype != BOOL else x.reshape(-1).to(U8)
    line = {"d": NAMES[x.dtype], "s": list(x.shape), "x": bytes(bits.tolist()).hex()}
    key = json.dumps(line, separators=(",", ":"))
    if key not in numbers:
        numbers[key] = len(numbers)
        lines.append(key)
    return numbers[key]


class Turned:
    """An operand with its last two dims swapped in memory."""

    def __init__(self, x):
        self.base, self.extra = x, {"t": 1}
        self.x = x.transpose(-1, -2)


class Spread:
    """An operand that is expanded, with strides of 0."""

    def __init__(self, x, *shape):
        self.base, self.extra = x, {"e": list(shape)}
        self.x = x.expand(shape)


def case(op, f, ins, a=(), grad=True, only=None):
    """Adds a call of `f`; `grad` asks for gradients, of all floating-point operands or of those whose numbers `only` has."""
    assert op in NAMED, f"{op}: tests/suite/torch_fixtures/operators.rs does not name it"
    views = [i if isinstance(i, (Turned, Spread)) else None for i in ins]
    given = [{"n": stored(v.base), **v.extra} if v else {"n": stored(i)} for i, v in zip(ins, views)]
    xs = [(v.x if v else i).detach() for i, v in zip(ins, views)]
    leaves = [grad and x.is_floating_point() and (only is None or k in only) for k, x in enumerate(xs)]
    xs = [x.clone(memory_format=torch.preserve_format).requires_grad_() if leaf else x for x, leaf in zip(xs, leaves)]
    try:
        out = f(*xs)
    except RuntimeError as error:
        line = {"op": op, "a": list(a), "i": given, "o": [], "raises": str(error)}
        lines.append(json.dumps(line, separators=(",", ":")))
        return
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    line = {"op": op, "a": list(a), "i": given, "o": [stored(o) for o in outs]}
    tracked = [o for o in outs if o.requires_grad]
    if any(leaves) and tracked:
        dys = [seed(o) for o in tracked]
        dxs = torch.autograd.grad(tracked, [x for x, l in zip(xs, leaves) if l], dys, allow_unused=True)
        dxs = iter(dxs)
        line["dy"] = [stored(dys.pop(0)) if o.requires_grad else None for o in outs]
        line["dx"] = [stored(g) if l and (g := next(dxs)) is not None else None for l in leaves]
    lines.append(json.dumps(line, separators=(",", ":")))


def seed(y):
    """A gradient for a result: 1, -2, 0.5, 1, -2, ..."""
    pattern = torch.tensor([1.0, -2.0, 0.5], dtype=y.dtype)
    return pattern.repeat(y.numel() // 3 + 1)[: y.numel()].reshape(y.shape)


generator = torch.Generator().manual_seed(14)


def normal(*shape, dtype=F32):
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def positive(*shape, dtype=F32):
    return (torch.rand(shape, generator=generator, dtype=F64) * 4 + 0.01).to(dtype)


def unit(*shape, dtype=F32):
    return torch.rand(shape, generator=generator, dtype=F64).to(dtype)


def ints(*shape, low=-4, high=5, dtype=I64):
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def bools(*shape):
    return torch.randint(0, 2, shape, generator=generator).to(BOOL)


def specials(dtype):
    """Zeros, ordinary numbers, the limits of the dtype, infinities and NaN."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    numbers = [0.0, 1.0, 0.5, 2.0, 3.0, 1.5, 2.5, 0.1, 0.75, 7.0, 20.0, 90.0, 1e4, math.pi, 1e-3, tiny, info.max, info.eps]
    values = [s * v for v in numbers for s in (1, -1)] + [math.inf, -math.inf, math.nan]
    x = torch.tensor(values, dtype=F64).to(dtype)
    smallest = torch.tensor([1, 3], dtype=INT_OF[dtype]).view(dtype)
    return torch.cat([x, smallest, -smallest, x[30:31] / 3])


def few(dtype):
    """The specials that matter in pairs."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 0.5, info.smallest_normal / 4, info.max, -info.max, math.inf, -math.inf, math.nan]
    return torch.tensor(values, dtype=F64).to(dtype)


def unary(op, f, a=(), grad=True, dtypes=FLOATS, draw=normal, special=specials, only_special=False):
    """An operator of one operand, element by element: specials, ordinary values, strided, empty and scalar operands."""
    for d in dtypes:
        case(op, f, [special(d) if d.is_floating_point else ints(7, low=0, dtype=d)], a, grad)
        if not only_special:
            case(op, f, [(draw if d.is_floating_point else ints)(5, 7, dtype=d)], a, grad)
    if not only_special and F32 in dtypes:
        case(op, f, [Turned(draw(3, 5))], a, grad)
        case(op, f, [draw(0, 3)], a, grad)
        case(op, f, [draw()], a, grad)


def binary(op, f, a=(), grad=True, dtypes=FLOATS, integers=(), draw=normal):
    """An operator of two operands: pairs of specials, broadcast, strided, expanded, empty and scalar operands."""
    for d in dtypes:
        pairs = list(itertools.product(few(d).tolist(), repeat=2))
        case(op, f, [torch.tensor([p[k] for p in pairs], dtype=F64).to(d) for k in (0, 1)], a, grad)
        case(op, f, [draw(5, 7, dtype=d), draw(5, 7, dtype=d)], a, grad)
    if F32 in dtypes:
        case(op, f, [draw(5, 1), draw(7)], a, grad)
        case(op, f, [Turned(draw(3, 5)), draw(5, 3)], a, grad)
        case(op, f, [draw(2, 5, 3), Spread(draw(5, 1), 5, 3)], a, grad)
        case(op, f, [draw(0, 3), draw(3)], a, grad)
        case(op, f, [draw(), draw(3)], a, grad)
    for d in integers:
        case(op, f, [ints(5, 3, low=0, dtype=d), ints(5, 3, low=1, dtype=d)], a)
        if d != U8:
            case(op, f, [ints(11, dtype=d), ints(11, low=1, dtype=d)], a)
            case(op, f, [ints(11, dtype=d), -ints(11, low=1, dtype=d)], a)


def along(op, f, shapes=((5, 7), (2, 3, 5)), dims=(0, 1), dtypes=FLOATS, draw=normal, grad=True, extra=(), rows=True):
    """An operator along one dim: `f(x, dim)`."""
    for d in dtypes:
        for shape in shapes if d == F32 else shapes[:1]:
            for dim in dims:
                case(op, lambda x: f(x, dim), [draw(*shape, dtype=d)], [dim, *extra], grad)
        if rows and d.is_floating_point:
            case(op, lambda x: f(x, 1), [special_rows(d)], [1, *extra], grad)
    if F32 in dtypes:
        case(op, lambda x: f(x, 1), [Turned(draw(7, 5))], [1, *extra], grad)
        case(op, lambda x: f(x, 0), [Spread(draw(1, 3), 5, 3)], [0, *extra], grad)
        case(op, lambda x: f(x, 1), [draw(3, 1)], [1, *extra], grad)


def special_rows(dtype):
    """Rows of three: equal numbers, zeros of both signs, infinities, NaN, the largest numbers."""
    m, inf, nan = torch.finfo(dtype).max, math.inf, math.nan
    rows = [[1, 1, 1], [0.0, -0.0, 0.0], [-0.0, -0.0, -0.0], [2, inf, 1], [1, -inf, 2], [inf, inf, 0], [-inf, -inf, -inf],
            [1, nan, 2], [nan, inf, 0], [m, 1, 0], [m, m, -m], [1e-3, 2e-3, -3e-3], [90, -90, 89], [5, 5, 1]]
    return torch.tensor(rows, dtype=F64).to(dtype)


def pointwise():
    numbers = (I64, I32, U8)
    binary("add", torch.add, integers=numbers)
    binary("sub", torch.sub, integers=numbers)
    binary("mul", torch.mul, integers=numbers)
    binary("div", torch.div)
    binary("maximum", torch.maximum, integers=numbers)
    binary("minimum", torch.minimum, integers=numbers)
    binary("pow", torch.pow, draw=positive)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        binary(name, getattr(torch, name), grad=False, dtypes=(F32, BF16), integers=(I64, U8))
    unary("neg", torch.neg)
    unary("neg", torch.neg, dtypes=(I64, I32))
    unary("abs", torch.abs)
    unary("sign", torch.sign)
    unary("exp", torch.exp)
    unary("log", torch.log, draw=positive)
    unary("sqrt", torch.sqrt, draw=positive)
    unary("rsqrt", torch.rsqrt, draw=positive)
    unary("tanh", torch.tanh)
    unary("sigmoid", torch.sigmoid)
    unary("relu", torch.relu)
    unary("gelu", F.gelu)
    unary("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
    unary("silu", F.silu)
    for c in (2.5, -3.0, 0.1):
        unary("mul_scalar", lambda x: x * c, [c])
        unary("add_scalar", lambda x: x + c, [c])
    for c in (2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 0.0, 7.0, -2.5, 1 / 3):
        unary("pow_scalar", lambda x: x**c, [c], draw=positive)
    for d in FLOATS:
        case("select", torch.where, [bools(5, 7), normal(5, 7, dtype=d), normal(7, dtype=d)])
        for to in (*FLOATS, I64, I32, BOOL):
            fits = to.is_floating_point or to == BOOL
            x = specials(d) if fits else normal(5, 7, dtype=d) * 100
            case("cast", lambda x: x.to(to), [x], [NAMES[to]])
    for d in (I64, I32, U8, BOOL):
        for to in (*FLOATS, I64, I32, U8, BOOL):
            x = bools(7) if d == BOOL else ints(7, low=0, high=200, dtype=d)
            case("cast", lambda x: x.to(to), [x], [NAMES[to]])


    unary("reciprocal", torch.reciprocal)
    unary("square", torch.square)
    unary("relu6", F.relu6)
    unary("softsign", F.softsign)
    unary("hardsigmoid", F.hardsigmoid)
    unary("hardswish", F.hardswish)
    for name in ("floor", "ceil", "trunc", "round", "frac"):
        unary(name, getattr(torch, name))
    for name in ("isnan", "isinf", "isfinite"):
        unary(name, getattr(torch, name), grad=False)
    unary("leaky_relu", lambda x: F.leaky_relu(x, 0.1), [0.1])
    unary("hardtanh", lambda x: F.hardtanh(x, -0.5, 1.5), [-0.5, 1.5])
    unary("threshold", lambda x: F.threshold(x, 0.5, 9.0), [0.5, 9.0])
    unary("clamp", lambda x: x.clamp(-0.5, 2), [-0.5, 2.0])
    unary("clamp_min", lambda x: x.clamp_min(-0.5), [-0.5])
    unary("clamp_max", lambda x: x.clamp_max(0.5), [0.5])
    unary("div_scalar", lambda x: x / 3.0, [3.0])
    unary("nan_to_num", lambda x: x.nan_to_num(2.0, 5.0, -7.0), [2.0, 5.0, -7.0])
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        unary(f"{name}_scalar", lambda x: getattr(torch, name)(x, 0.5), [0.5], grad=False, dtypes=(F32, BF16))
    binary("hypot", torch.hypot, dtypes=(F32, F64))
    binary("copysign", torch.copysign)
    binary("heaviside", torch.heaviside, grad=False, dtypes=(F32, F64, BF16))
    binary("fmod", torch.fmod, integers=(I64, I32))
    binary("remainder", torch.remainder, integers=(I64, I32, U8))
    binary("floor_div", torch.floor_divide, grad=False, integers=(I64, I32, U8))
    binary("atan2", torch.atan2, dtypes=(F32, F64))
    binary("prelu", lambda x, w: torch._prelu_kernel(*torch.broadcast_tensors(x, w)), dtypes=(F32,))
    binary("lerp_scalar", lambda x, y: torch.lerp(x, y, 0.3), [0.3])
    for name in ("logical_and", "logical_or", "logical_xor"):
        case(name, getattr(torch, name), [bools(5, 3), bools(3)])
        case(name, getattr(torch, name), [few(F32), few(F32).flip(0)])
    case("logical_not", torch.logical_not, [bools(5, 3)])
    for d in (I64, I32, U8):
        a, b = ints(5, 7, low=0, high=100, dtype=d), ints(7, low=0, high=100, dtype=d)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
            case(name, getattr(torch, name), [a, b])
        case("bitwise_not", torch.bitwise_not, [a])
        case("shift_left", torch.bitwise_left_shift, [a, b % 5])
        case("shift_right", torch.bitwise_right_shift, [a, b % 5])
    for d in FLOATS:
        x, y, z = (normal(5, 7, dtype=d) for _ in range(3))
        case("lerp", torch.lerp, [x, y, unit(5, 7, dtype=d)])
        case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [x, y, z], [0.5])
        case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), [x, y, z.abs() + 0.5], [0.5])
        case("masked_fill", lambda x, m: x.masked_fill(m, 2.5), [x, bools(7)], [2.5])
        case("glu", lambda x: F.glu(x, 1), [normal(5, 6, dtype=d)], [1])
        case("geglu", lambda x: torch.mul(*(f(p) for f, p in zip((F.gelu, lambda p: p), x.chunk(2, 1)))), [normal(5, 6, dtype=d)], [1])
        case("swiglu", lambda x: torch.mul(*(f(p) for f, p in zip((F.silu, lambda p: p), x.chunk(2, 1)))), [normal(5, 6, dtype=d)], [1])


def functions():
    for name in ("sin", "cos", "tan", "sinh", "cosh", "asinh", "atan", "erf", "erfc", "expm1", "exp2"):
        unary(name, getattr(torch, name))
    for name in ("lgamma", "digamma", "log1p", "log2", "log10", "acosh"):
        unary(name, getattr(torch, name), draw=positive)
    for name in ("asin", "acos", "atanh", "erfinv"):
        unary(name, getattr(torch, name), draw=unit)
    unary("softplus", F.softplus)
    unary("mish", F.mish)
    unary("log_sigmoid", F.logsigmoid)
    unary("selu", F.selu)
    unary("tanhshrink", F.tanhshrink)
    unary("elu", lambda x: F.elu(x, 0.7), [0.7])
    unary("celu", lambda x: F.celu(x, 0.7), [0.7])
    unary("hardshrink", lambda x: F.hardshrink(x, 0.5), [0.5])
    unary("softshrink", lambda x: F.softshrink(x, 0.5), [0.5])
    unary("logit", torch.logit, draw=unit)
    unary("sinc", torch.sinc)


def reductions():
    along("prod", lambda x, dim: x.prod(dim))
    along("prod", lambda x, dim: x.prod(dim), dtypes=(I64,), draw=ints)
    along("argmin", lambda x, dim: x.argmin(dim), grad=False)
    along("logsumexp", lambda x, dim: torch.logsumexp(x, dim))
    along("any", lambda x, dim: x.any(dim), grad=False, dtypes=(F32,))
    along("all", lambda x, dim: x.all(dim), grad=False, dtypes=(F32,))
    along("count_nonzero", lambda x, dim: torch.count_nonzero(x, dim), grad=False, dtypes=(F32,))
    for correction in (0, 1):
        along("var", lambda x, dim: x.var(dim, correction=correction), extra=[correction])
        along("std", lambda x, dim: x.std(dim, correction=correction), extra=[correction])
    for order in (0.0, 1.0, 2.0, 3.5, math.inf, -math.inf):
        name = order if math.isfinite(order) else str(order)
        along("norm", lambda x, dim: torch.linalg.vector_norm(x, order, dim), extra=[name], shapes=((5, 7),))
    case("norm", lambda x: torch.linalg.vector_norm(x, 2.0, 1), [torch.zeros(3, 5)], [1, 2.0])
    # Integers and bools are summed in i64 by PyTorch.
    along("sum", lambda x, dim: x.sum(dim))
    along("sum", lambda x, dim: x.sum(dim), dtypes=(I64,), draw=ints)
    along("mean", lambda x, dim: x.mean(dim))
    along("max", lambda x, dim: x.amax(dim))
    along("max", lambda x, dim: x.amax(dim), dtypes=(I64, I32), draw=ints)
    along("min", lambda x, dim: x.amin(dim))
    along("argmax", lambda x, dim: x.argmax(dim), grad=False)
    along("softmax", torch.softmax)
    along("log_softmax", torch.log_softmax)
    case("sum_all", torch.sum, [normal(3, 5, 7)])
    case("sum_all", torch.sum, [normal(0, 3)])
    case("mean_all", torch.mean, [normal(3, 5, 7)])
    case("mean_all", torch.mean, [torch.full((700,), 100.0, dtype=F16)])
    for d in FLOATS:
        # The last rows overflow or vanish if they are squared first.
        x = torch.cat([normal(5, 7, dtype=d), torch.zeros(1, 7, dtype=d), torch.full((1, 7), 3.0, dtype=d)])
        w, b = normal(7, dtype=d), normal(7, dtype=d)
        case("layer_norm", lambda x, w, b: F.layer_norm(x, (7,), w, b, 1e-5), [x, w, b], [1e-5])
        case("rms_norm", lambda x, w: F.rms_norm(x, (7,), w, 1e-5), [x, w], [1e-5])


    for d in FLOATS:
        x, w, b = normal(3, 6, 5, dtype=d), normal(6, dtype=d), normal(6, dtype=d)
        case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5), [x, w, b], [3, 1e-5])
        case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=1e-5), [x, w, b], [1e-5])
        case("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5), [x, w, b], [1e-5])
        case("layer_norm_plain", lambda x: F.layer_norm(x, (5,), eps=1e-5), [x], [1e-5])
    case("weight_norm", lambda v, g: torch._weight_norm(v, g[:, None], 0), [normal(5, 7), normal(5)], [0])


def shapes():
    for d in (F32, F16, I64):
        x = ints(2, 3, 5, dtype=d)
        case("reshape", lambda x: x.reshape(5, 6), [x], [[5, 6]])
        case("reshape", lambda x: x.reshape(30), [Turned(x)], [[30]])
        case("permute", lambda x: x.permute(2, 0, 1), [x], [[2, 0, 1]])
        case("transpose", lambda x: x.transpose(0, -1), [x], [0, -1])
        case("expand", lambda x: x.expand(4, 2, 3, 5), [x], [[4, 2, 3, 5]])
        case("unsqueeze", lambda x: x.unsqueeze(1), [x], [1])
        case("squeeze", lambda x: x.squeeze(1), [ints(3, 1, 5, dtype=d)], [1])
        case("slice", lambda x: x.narrow(1, 1, 2), [x], [1, 1, 2])
        case("slice", lambda x: x.narrow(-1, 2, 0), [x], [-1, 2, 0])
        case("split", lambda x: torch.split(x, [1, 0, 4], -1), [x], [-1, [1, 0, 4]])
        case("cat", lambda *xs: torch.cat(xs, 1), [x, Turned(ints(2, 5, 4, dtype=d)), ints(2, 0, 5, dtype=d)], [1])


def indices():
    for d in FLOATS:
        case("embedding", lambda w, i: F.embedding(i, w), [normal(7, 3, dtype=d), ints(2, 5, low=0, high=7)])
    for d in (F32, BF16, I64):
        x, i = ints(5, 7, dtype=d), ints(3, 7, low=0, high=5)
        case("gather", lambda x, i: x.gather(0, i), [x, i], [0])
        case("scatter_add", lambda x, i: torch.zeros(5, 7, dtype=d).scatter_add(0, i, x), [ints(3, 7, dtype=d), i], [0, 5])


    x = normal(5, 7)
    case("index_select", lambda x, i: x.index_select(1, i), [x, ints(9, low=0, high=7)], [1])
    case("index_add", lambda x, i, s: x.index_add(0, i, s), [x, ints(3, low=0, high=5), normal(3, 7)], [0])
    case("index_copy", lambda x, i, s: x.index_copy(0, i, s), [x, torch.tensor([4, 0, 2]), normal(3, 7)], [0])
    case("scatter", lambda x, i, s: x.scatter(0, i, s), [x, torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(7)], 1), normal(3, 7)], [0])
    case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), [x, ints(5, 3, low=0, high=7)], [1])
    case("take", torch.take, [x, ints(4, 3, low=0, high=35)])
    case("bincount", lambda i: torch.bincount(i, minlength=9), [ints(40, low=0, high=9)], [9])
    for how in ("sum", "amax", "amin"):
        case("scatter_reduce", lambda x, i, s: x.scatter_reduce(0, i, s, how), [x, ints(4, 7, low=0, high=5), normal(4, 7)], [0, how], grad=how == "sum")
    for d in (F32, F16, I64):
        x = ints(3, 5, 2, low=-99, high=99, dtype=d)
        case("flip", lambda x: x.flip(0, 2), [x], [[0, 2]])
        case("roll", lambda x: x.roll(3, 1), [x], [3, 1])
        case("roll", lambda x: x.roll(-1, 0), [x], [-1, 0])
        case("repeat", lambda x: x.repeat(2, 1, 1, 3), [x], [[2, 1, 1, 3]])
        case("repeat_interleave", lambda x: x.repeat_interleave(2, 1), [x], [2, 1])
        case("stack", lambda *xs: torch.stack(xs, 1), [x, x + 1, x], [1])
        case("unbind", lambda x: x.unbind(1), [x], [1])
        case("chunk", lambda x: x.chunk(3, 1), [x], [3, 1])
        case("flatten", lambda x: x.flatten(0, 1), [x], [0, 1])
        case("unflatten", lambda x: x.flatten().unflatten(0, (2, 15)), [x.flatten()], [0, [2, 15]])
        case("movedim", lambda x: x.movedim(0, -1), [x], [0, -1])
        case("diagonal", lambda x: x.diagonal(1, 0, 1), [x], [1, 0, 1])
        case("diag_embed", lambda x: torch.diag_embed(x, -1), [x[0]], [-1])
        case("tril", lambda x: x.tril(-1), [x], [-1])
        case("triu", lambda x: x.triu(1), [x], [1])
        case("sort", lambda x: torch.sort(x, dim=1, descending=False, stable=True), [x], [1, 0])
        case("topk", lambda x: torch.topk(x, 3, 1), [x], [3, 1, 1])
    for d in FLOATS:
        x = special_rows(d)
        case("sort", lambda x: torch.sort(x, dim=1, descending=True, stable=True), [x], [1, 1], grad=False)
        case("sort", lambda x: torch.sort(x, dim=0, descending=False, stable=True), [x], [0, 0], grad=False)
        case("argsort", lambda x: torch.argsort(x, dim=1, stable=True), [x], [1, 0], grad=False)
    case("kthvalue", lambda x: torch.kthvalue(x, 2, 1), [normal(5, 7)], [2, 1])
    case("one_hot", lambda i: F.one_hot(i, 7), [ints(2, 5, low=0, high=7)], [7])


def products():
    for d in FLOATS:
        case("matmul", torch.matmul, [normal(5, 7, dtype=d), normal(7, 3, dtype=d)])
    case("matmul", torch.matmul, [Turned(normal(7, 5)), Turned(normal(3, 7))])
    case("matmul", torch.matmul, [normal(5, 70), normal(70, 3)])
    case("matmul", torch.matmul, [normal(2, 5, 0), normal(0, 3)])
    case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), [normal(2, 3, 5), normal(2, 5, 7)], ["b i j, b j k -> b i k"])
    case("einsum", lambda x, y: torch.einsum("bsk,bsn->kn", x, y), [normal(2, 3, 5), normal(2, 3, 7)], ["b s k, b s n -> k n"])


def attention():
    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)

    for d in FLOATS:
        case("attention", causal, [normal(2, 3, 5, 4, dtype=d) for _ in range(3)], [0.4])
    case("attention", causal, [normal(1, 4, 37, 3), normal(1, 2, 37, 3), normal(1, 2, 37, 3)], [0.4])
    case("attention", causal, [normal(1, 1, 1, 3) for _ in range(3)], [0.4])


    q, k, v = (normal(2, 3, 7, 4) for _ in range(3))
    mask = bools(7, 7)
    mask[:, 0] = True
    sdpa = F.scaled_dot_product_attention
    case("attention_bidirectional", lambda q, k, v: sdpa(q, k, v, scale=0.5), [q, normal(2, 3, 5, 4), normal(2, 3, 5, 4)], [0.5])
    case("attention_mask", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, scale=0.5), [q, k, v, mask[None, None]], [0.5])
    case("attention_bias", lambda q, k, v, b: sdpa(q, k, v, attn_mask=b, scale=0.5), [q, k, v, normal(2, 3, 7, 7)], [0.5])
    row = torch.arange(7)
    near = (row[:, None] - row[None, :]).clamp(0, 2) == row[:, None] - row[None, :]
    case("attention_window", lambda q, k, v: sdpa(q, k, v, attn_mask=near, scale=0.5), [q, k, v], [0.5, 2, 0])


REDUCTIONS = ("none", "mean", "sum")


def losses():
    for d in FLOATS:
        x, y = normal(5, 7, dtype=d), normal(5, 7, dtype=d)
        for how in REDUCTIONS:
            case("mse_loss", lambda x, y: F.mse_loss(x, y, reduction=how), [x, y], [how])
            case("l1_loss", lambda x, y: F.l1_loss(x, y, reduction=how), [x, y], [how])
            case("huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.7, reduction=how), [x, y], [0.7, how])
            case("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.7, reduction=how), [x, y], [0.7, how])
            p, q = unit(5, 7, dtype=d), unit(5, 7, dtype=d)
            case("bce_loss", lambda x, y: F.binary_cross_entropy(x, y, reduction=how), [p, q], [how], only=(0,))
            case("bce_with_logits_loss", lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction=how), [x, q], [how])
            case("kl_div_loss", lambda x, y: F.kl_div(x, y, reduction=how), [x, q], [how])
        case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, 1, 1e-8), [x, y], [1, 1e-8])
        sign = torch.tensor([1, -1, 1, -1, -1])
        case("cosine_embedding_loss", lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.1), [x, y, sign], [0.1])
    x, target, weight = normal(6, 7), torch.tensor([0, 3, -100, 6, 2, -100]), positive(7)
    for how in REDUCTIONS:
        case("cross_entropy_with", lambda x, t, w: F.cross_entropy(x, t, w, reduction=how, label_smoothing=0.1), [x, target, weight], [how, 0.1], only=(0,))
        case("nll_loss", lambda x, t: F.nll_loss(x, t, reduction=how), [x.log_softmax(1), target], [how])
    for d in FLOATS:
        target = ints(5, low=0, high=7)
        case("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="none"), [normal(5, 7, dtype=d), target])
    rows = torch.tensor([[50.0, 36.0], [1e6, 1e6], [0.0, -math.inf], [88.0, -88.0], [1e-3, -1e-3]])
    case("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="none"), [rows, torch.zeros(5, dtype=I64)])


def created():
    """Tensors made from numbers. The operand says on which mesh, and is not read."""
    def made(op, y, *a):
        case(op, lambda x: y, [torch.zeros(1)], a, grad=False)

    steps = [(F32, 0, 7, 1), (F32, -1, 2, 0.3), (F64, 1, -2, -0.7), (F16, 0, 5, 0.5), (BF16, 10, 4, -1.5), (F32, 3, 3, 1),
             (I64, -3, 11, 4), (I32, 5, -6, -3), (U8, 2, 9, 3)]
    for d, start, end, step in steps:
        made("arange", torch.arange(start, end, step, dtype=d), NAMES[d], start, end, step)
    for d in FLOATS:
        for start, end, n in ((-1.0, 2.0, 7), (5.0, -5.0, 4), (0.3, 0.9, 1), (0.3, 0.9, 2), (1.0, 2.0, 0)):
            made("linspace", torch.linspace(start, end, n, dtype=d), NAMES[d], start, end, n)
        made("logspace", torch.logspace(-2, 3, 6, base=2.0, dtype=d), NAMES[d], -2.0, 3.0, 6, 2.0)
        made("logspace", torch.logspace(-1, 2, 5, dtype=d), NAMES[d], -1.0, 2.0, 5, 10.0)
    for d in (F32, BF16, I64, BOOL):
        made("ones", torch.ones(3, 0, 2, dtype=d), NAMES[d], [3, 0, 2])
        made("ones", torch.ones(3, 2, dtype=d), NAMES[d], [3, 2])
        for rows, columns in ((3, 5), (5, 3), (1, 1), (0, 3)):
            made("eye", torch.eye(rows, columns, dtype=d), NAMES[d], rows, columns)
        x = ints(3, 5, low=0, dtype=d)
        case("zeros_like", torch.zeros_like, [x], grad=False)
        case("ones_like", torch.ones_like, [Turned(x)], grad=False)
        case("full_like", lambda x: torch.full_like(x, 2.5), [x], [2.5], grad=False)
    for low, high in ((-1, 2), (0, 0), (2, -2), (-9, 9)):
        made("band_mask", torch.ones(5, 7, dtype=BOOL).triu(low).tril(high), [5, 7], low, high)
    for queries, keys, offset in ((5, 5, 0), (3, 7, 4), (3, 7, 1)):
        made("causal_mask", torch.ones(queries, keys, dtype=BOOL).tril(offset), queries, keys, offset)


def more_pointwise():
    binary("logaddexp", torch.logaddexp)
    binary("xlogy", torch.xlogy, draw=positive)
    binary("xlog1py", torch.special.xlog1py, draw=positive)
    for beta, threshold in ((2.0, 20.0), (0.5, 3.0)):
        unary("softplus_with", lambda x: F.softplus(x, beta, threshold), [beta, threshold])
    unary("trigamma", lambda x: torch.special.polygamma(1, x), grad=False, draw=positive)
    unary("clamp", lambda x: x.clamp(-2, 3), [-2.0, 3.0], dtypes=(I64, I32))
    unary("clamp", lambda x: x.clamp(2, -2), [2.0, -2.0], dtypes=(F32,), only_special=True)
    for d in (I64, I32, U8):
        x, y = torch.tensor([7, 0, 3], dtype=d), torch.tensor([0, 0, 2], dtype=d)
        for name, f in (("fmod", torch.fmod), ("remainder", torch.remainder), ("floor_div", torch.floor_divide)):
            case(name, f, [x, y])
    for d in FLOATS:
        unary("nan_to_num", lambda x: x.nan_to_num(), [0.0, None, None], dtypes=(d,), only_special=True)
        case("bce_loss", lambda p, t: F.binary_cross_entropy(p, t, reduction="none"),
             [torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5], dtype=d), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.25], dtype=d)], ["none"], only=(0,))
        x = torch.tensor([0.0, 100.0, -100.0, math.inf, -math.inf, math.nan, 40.0, -40.0], dtype=d)
        case("bce_with_logits_loss", lambda p, t: F.binary_cross_entropy_with_logits(p, t, reduction="none"),
             [x, torch.tensor([0.0, 1, 1, 1, 0, 1, 0, 0.5], dtype=d)], ["none"])
    x, y, z = ([normal(3, 5), normal(7)] for _ in range(3))
    positives = [positive(3, 5), positive(7)]
    half = lambda f, *a: lambda *ts: getattr(torch, f)(*(list(ts[k : k + 2]) for k in range(0, len(ts), 2)), *a)
    for name in ("add", "sub", "mul"):
        case(f"foreach_{name}", half(f"_foreach_{name}"), x + y)
    case("foreach_div", half("_foreach_div"), x + positives)
    case("foreach_add_scalar", half("_foreach_add", 2.5), x, [2.5])
    case("foreach_mul_scalar", half("_foreach_mul", -1.5), x, [-1.5])
    case("foreach_lerp", half("_foreach_lerp", 0.3), x + y, [0.3])
    case("foreach_addcmul", half("_foreach_addcmul", 0.5), x + y + z, [0.5])
    case("foreach_addcdiv", half("_foreach_addcdiv", 0.5), x + y + positives, [0.5])


def more_reductions():
    along("max_with_index", lambda x, dim: tuple(x.max(dim)))
    along("max_with_index", lambda x, dim: tuple(x.max(dim)), dtypes=(I64, I32, U8), draw=lambda *s, dtype: ints(*s, low=0, dtype=dtype))
    along("min_with_index", lambda x, dim: tuple(x.min(dim)))
    along("sum", lambda x, dim: x.sum(dim), dtypes=(I32, U8), draw=lambda *s, dtype: ints(*s, low=0, high=200, dtype=dtype))
    along("any", lambda x, dim: x.any(dim), grad=False, dtypes=(F16, I64), draw=lambda *s, dtype: ints(*s, low=-1, high=2, dtype=dtype))
    along("all", lambda x, dim: x.all(dim), grad=False, dtypes=(F16, I64), draw=lambda *s, dtype: ints(*s, low=-1, high=2, dtype=dtype))
    for d in FLOATS:
        x, w, b = normal(3, 6, 5, dtype=d), normal(6, dtype=d), normal(6, dtype=d)
        mean, variance = normal(6, dtype=d), positive(6, dtype=d)
        case("normalise_channels", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False, 0.1, 1e-5), [x, mean, variance, w, b], [1e-5],
             only=(0, 3, 4))
        w, b = normal(6, 5, dtype=d), normal(6, 5, dtype=d)
        case("layer_norm_over", lambda x, w, b: F.layer_norm(x, (6, 5), w, b, 1e-5), [x, w, b], [2, 1e-5])


def more_indices():
    for d in (F32, BF16, I64):
        x, i, j = ints(5, 7, 3, low=-99, high=99, dtype=d), ints(4, 1, low=0, high=5), ints(3, low=0, high=7)
        case("index", lambda x, i, j: x[i, j], [x, i, j])
        case("index", lambda x, i: x[i], [Turned(x), ints(2, 3, low=0, high=5)])
        i, j = torch.tensor([4, 0, 2]), torch.tensor([6, 1, 1])
        case("index_put", lambda x, v, i, j: x.index_put((i, j), v), [x, ints(3, 3, dtype=d), i, j], [0])
        case("index_put", lambda x, v, i: x.index_put((i,), v), [x, ints(7, 3, dtype=d), i], [0])
        case("pad", lambda x: F.pad(x, (0, 0, 1, 2)), [x], [1, 1, 2])
    i, j = torch.tensor([4, 0, 4, 0]), torch.tensor([6, 1, 6, 2])
    case("index_put", lambda x, v, i, j: x.index_put((i, j), v, accumulate=True), [normal(5, 7), normal(4), i, j], [1])
    case("index_put", lambda x, v, i, j: x.index_put((i, j), v), [normal(5, 7), normal(), i, j], [0])
    for d in (F16, I64):
        case("topk", lambda x: torch.topk(x, 2, 0, largest=False), [ints(5, 3, low=-99, high=99, dtype=d)], [2, 0, 0])


def experts():
    """Operators of mixtures of experts, which PyTorch has as compositions."""
    for d in FLOATS:
        def route(x):
            chosen, expert = torch.topk(x, 2, -1)
            return expert, chosen.softmax(-1)

        case("route_top_k", route, [normal(5, 7, dtype=d)], [2])
    case("router_z_loss", lambda x: torch.logsumexp(x, -1).square().mean(), [normal(5, 7)])
    case("router_z_loss", lambda x: torch.logsumexp(x, -1).square().mean(), [normal(2, 3, 7, dtype=F64) * 3])
    p, counts = normal(11, 5).softmax(-1), torch.tensor([4, 0, 9, 7, 2])
    case("load_balancing_loss", lambda p, c: 5 * (p.mean(0) * c / c.sum()).sum(), [p, counts])
    expert = torch.tensor([[2, 0], [1, 2], [2, 1], [0, 2], [1, 0]])

    def slots(e):
        order = torch.argsort(e.flatten(), stable=True)
        return torch.empty(10, dtype=I64).index_put((order,), torch.arange(10)).reshape(5, 2), torch.bincount(e.flatten(), minlength=4)

    case("expert_slots", slots, [expert], [4])
    slot, _ = slots(expert)
    for d in (F32, BF16):
        # Slots without a token are -0 here, which changes no sum.
        empty = torch.full((12, 3), -0.0, dtype=d)
        case("permute_tokens", lambda x, s: empty.index_copy(0, s.flatten(), x.repeat_interleave(2, 0)), [normal(5, 3, dtype=d), slot], [12])
        case("unpermute_tokens", lambda x, s: x[s], [normal(12, 3, dtype=d), slot])
    offsets = torch.tensor([2, 2, 7, 11], dtype=I32)
    for d in (F32, BF16):
        case("grouped_matmul", lambda x, w: F.grouped_mm(x, w, offs=offsets), [normal(11, 8, dtype=d), normal(4, 8, 16, dtype=d)], [[2, 0, 5, 4]])


def more_attention():
    sdpa = F.scaled_dot_product_attention
    q, k, v = normal(2, 4, 3, 5), normal(2, 2, 8, 5), normal(2, 2, 8, 5)
    later = torch.ones(3, 8, dtype=BOOL).tril(5)
    case("attention_at", lambda q, k, v: sdpa(q, k, v, attn_mask=later, scale=0.5, enable_gqa=True), [q, k, v], [0.5, 5])
    q, k, v = (normal(2, 3, 7, 4) for _ in range(3))

    def capped(q, k, v):
        scores = 3.0 * torch.tanh(q @ k.mT * 0.5 / 3.0)
        return scores.masked_fill(torch.ones(7, 7, dtype=BOOL).triu(1), -math.inf).softmax(-1) @ v

    for d in (F32, F64):
        case("attention_soft_cap", capped, [x.to(d) for x in (q, k, v)], [0.5, 3.0])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])

    def packed(q, k, v, documents):
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return sdpa(q, k, v, attn_mask=same & torch.ones(7, 7, dtype=BOOL).tril(), scale=0.5)

    case("attention_documents", packed, [q, k, v, documents], [0.5])


def rotated():
    positions, width = torch.tensor([0, 1, 2, 17, 4000]), 6
    angles = positions[:, None].double() * 1e4 ** (-torch.arange(0, width, 2, dtype=F64) / width)
    case("rotary_tables", lambda p: (torch.cos(angles), torch.sin(angles)), [positions], [width, 1e4])

    def halves(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def interleaved(x, cos, sin):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)

    for d in (F32, F64):
        tables = [torch.cos(angles).to(d), torch.sin(angles).to(d)]
        case("rotary_with", halves, [normal(2, 5, width, dtype=d), *tables], ["halves"])
        case("rotary_with", interleaved, [normal(2, 5, width, dtype=d), *tables], ["interleaved"])
    angles = torch.arange(3, 8)[:, None].double() * 1e4 ** (-torch.arange(0, width, 2, dtype=F64) / width)
    case("rotary", lambda x: halves(x, torch.cos(angles), torch.sin(angles)), [normal(1, 2, 5, width, dtype=F64)], [1e4, 3])


def more_losses():
    x, w, p = normal(6, 7), positive(7), normal(6, 7).softmax(1)
    target = torch.tensor([0, 3, -100, 6, 2, -100])
    for how in REDUCTIONS:
        case("cross_entropy_probabilities", lambda x, p, w: F.cross_entropy(x, p, w, reduction=how, label_smoothing=0.1), [x, p, w], [how, 0.1],
             only=(0, 1))
        case("nll_loss_weighted", lambda x, t, w: F.nll_loss(x, t, w, reduction=how), [x.log_softmax(1), target, w], [how], only=(0,))
        case("cross_entropy_dim", lambda x, t: F.cross_entropy(x, t, reduction=how), [normal(2, 7, 5), ints(2, 5, low=0, high=7)], [1, how])
        case("bce_weighted", lambda x, t, w, pos: F.binary_cross_entropy_with_logits(x, t, w, reduction=how, pos_weight=pos),
             [x, unit(6, 7), positive(6, 7), positive(7)], [how], only=(0,))
        case("kl_div_log", lambda x, t: F.kl_div(x, t, reduction=how, log_target=True), [x, p.log()], [how])
    case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, 0, 1e-8), [torch.zeros(3, 2), normal(3, 2)], [0, 1e-8])


def steps():
    """Steps of optimizers: the parameter and the states after them."""
    for d in (F32, F64):
        p, g, m, v, one = normal(5, 3, dtype=d), normal(5, 3, dtype=d), normal(5, 3, dtype=d), positive(5, 3, dtype=d), torch.ones((), dtype=d)

        def adamw(p, g, m, v, one):
            p, m, v = p.clone(), m.clone(), v.clone()
            optimizer = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, foreach=False)
            optimizer.state[p] = {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v}
            p.grad = g
            optimizer.step()
            return p, m, v

        case("adamw", adamw, [p, g, m, v, one], [3, 0.01, 0.9, 0.99, 1e-8, 0.1], grad=False)
        for nesterov in (False, True):
            def sgd(p, g, b, one):
                p, b = p.clone(), b.clone()
                optimizer = torch.optim.SGD([p], lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=nesterov, foreach=False)
                optimizer.state[p] = {"momentum_buffer": b}
                p.grad = g
                optimizer.step()
                return p, b

            case("sgd", sgd, [p, g, m, one], [0.01, 0.9, 0.1, int(nesterov)], grad=False)


def fused():
    """Operators that compute in one pass what PyTorch's functions do one after the other, in dtypes that round alike."""
    functions = {"none": lambda x: x, "gelu": F.gelu, "silu": F.silu, "relu": F.relu}
    for d in (F32, F64):
        for name, f in functions.items():
            case("linear", lambda x, w, b: f(F.linear(x, w, b)), [normal(2, 3, 5, dtype=d), normal(7, 5, dtype=d), normal(7, dtype=d)], [name])
        x, r, w, b = normal(5, 7, dtype=d), normal(5, 7, dtype=d), normal(7, dtype=d), normal(7, dtype=d)
        case("add_layer_norm", lambda x, r, w, b: (F.layer_norm(x + r, (7,), w, b, 1e-5), x + r), [x, r, w, b], [1e-5])
        case("add_rms_norm", lambda x, r, w: (F.rms_norm(x + r, (7,), w, 1e-5), x + r), [x, r, w], [1e-5])


if __name__ == "__main__":
    torch.set_num_threads(1)
    old = (pointwise, functions, reductions, shapes, indices, products, attention, losses)
    more = (created, more_pointwise, more_reductions, more_indices, experts, more_attention, rotated, more_losses, steps, fused)
    for family in (*old, *more):
        family()
    path = os.path.join(HERE, "fixtures.jsonl")
    text = "\n".join(lines) + "\n"
    assert len(text) < 3_000_000, f"{len(text):,} bytes: the limit is 3 MB"
    open(path, "w", encoding="ascii").write(text)
    print(f"{len(lines):,} lines, {len(text):,} bytes with PyTorch {torch.__version__}", file=sys.stderr)
