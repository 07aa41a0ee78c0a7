"""The arithmetic of PTX on numpy arrays, where numpy has no function or another one."""

import ctypes
import ctypes.util

import numpy as np

LIBM = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
LIBM.fma.restype = ctypes.c_double
LIBM.fma.argtypes = [ctypes.c_double] * 3
BITS = {"u8": 8, "s8": 8, "b8": 8, "u16": 16, "s16": 16, "b16": 16, "u32": 32, "s32": 32, "b32": 32, "u64": 64, "s64": 64, "b64": 64}
DTYPES = {"pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
          "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
          "f16": np.float16, "f32": np.float32, "f64": np.float64}


def fma_f32(a, b, c):
    """One rounding: the product is exact in f64, and the sum is rounded to odd there, so that rounding it again does no harm."""
    p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    s = p + c
    t = s - p
    e = (p - (s - t)) + (c - t)
    bits = s.view(np.int64) if s.ndim else np.atleast_1d(s).view(np.int64)
    odd = np.isfinite(s) & (e != 0) & (bits & 1 == 0)
    # Towards the exact sum: to larger magnitudes if the error has the sum's sign.
    step = np.where((e > 0) == (s > 0), 1, -1)
    return np.where(odd, bits + step, bits).view(np.float64).astype(np.float32)


def fma_f64(a, b, c):
    a, b, c = np.broadcast_arrays(a, b, c)
    return np.array([LIBM.fma(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())], np.float64)


def shl(a, b, kind):
    return np.where(b < BITS[kind], a << np.minimum(b, BITS[kind] - 1).astype(a.dtype), 0).astype(a.dtype)


def shr(a, b, kind):
    shifted = a >> np.minimum(b, BITS[kind] - 1).astype(a.dtype)
    return shifted if kind[0] == "s" else np.where(b < BITS[kind], shifted, 0).astype(a.dtype)


def mul_hi(a, b, kind):
    if kind == "u64":
        half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
        a, b = np.broadcast_arrays(a, b)
        al, ah, bl, bh = a & low, a >> half, b & low, b >> half
        middle = ah * bl + (al * bl >> half)
        return ah * bh + (middle >> half) + (al * bh + (middle & low) >> half)
    wide = np.int64 if kind == "s32" else np.uint64
    return (np.multiply(a, b, dtype=wide) >> wide(32)).astype(a.dtype)


def divide(a, b):
    return np.where(b == 0, ~np.zeros_like(a), a // np.where(b == 0, 1, b).astype(a.dtype)).astype(a.dtype)


def remainder(a, b):
    return np.where(b == 0, a, a % np.where(b == 0, 1, b).astype(a.dtype)).astype(a.dtype)


def smaller(a, b):
    """NaN only if both are, and -0 below +0."""
    return np.where(np.isnan(a), b, np.where(np.isnan(b) | (a < b) | ((a == b) & np.signbit(a)), a, b))


def larger(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b) | (a > b) | ((a == b) & ~np.signbit(a)), a, b))


def convert(x, to, kind, words):
    """`cvt`: `words` has the rounding."""
    if kind[0] == "f" and to[0] != "f":
        x = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[next(w for w in words if w.endswith("i"))](x)
        info = np.iinfo(DTYPES[to])
        inside = np.where((x > info.min) & (x < float(info.max)), x, 0).astype(DTYPES[to])
        return np.where(x >= float(info.max), info.max, np.where(x <= info.min, info.min, inside)).astype(DTYPES[to])
    if kind == to and kind[0] == "f":
        return {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[next(w for w in words if w.endswith("i"))](x)
    return x.astype(DTYPES[to])


def exp2_fast(x):
    """The exact result, rounded; a device is allowed an error of 2 units in the last place. Subnormal numbers are 0."""
    x = np.where(np.abs(x) < 2.0**-126, 0, x)
    y = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(np.abs(y) < 2.0**-126, np.float32(0), y)


def divide_fast(a, b):
    """The quotient with an error that a device is allowed, of up to 2 units in the last place: another one for each pair of operands, so
    that results with the right bits do not depend on it. `fmod` is made of such divisions."""
    a, b = np.broadcast_arrays(a, b)
    exact = np.ascontiguousarray(a / b)
    bits = exact.view(np.int32)
    off = ((np.ascontiguousarray(a).view(np.uint32) ^ np.ascontiguousarray(b).view(np.uint32)) * np.uint32(0x9E3779B1) >> np.uint32(13)).astype(np.int32) % 5 - 2
    ordinary = np.isfinite(exact) & (np.abs(exact) > 2.0**-120) & (np.abs(exact) < 2.0**120)
    return np.where(ordinary, bits + off, bits).astype(np.int32).view(np.float32)


def prmt(a, b, select):
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(both)
    for i in range(4):
        pick = (select.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        byte = both >> (pick & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(128), 255, 0), byte).astype(np.uint64)
        out |= byte << np.uint64(8 * i)
    return out.astype(np.uint32)


def bfi(a, b, at, count, kind):
    bits = BITS[kind]
    at, count = int(at), int(count)
    mask = ((1 << min(count, bits - at)) - 1) << at
    one = DTYPES[kind]
    return (b & one(~mask & ((1 << bits) - 1))) | ((a << one(at)) & one(mask))


def reverse(x):
    out = np.zeros_like(x)
    for i in range(32):
        out |= (x >> np.uint32(i) & np.uint32(1)) << np.uint32(31 - i)
    return out


def leading_zeros(x, kind):
    n, left = np.full(x.shape, BITS[kind], np.uint32), x.copy()
    for i in range(BITS[kind]):
        n -= (left != 0).astype(np.uint32)
        left >>= x.dtype.type(1)
    return n


def to_bf16(x):
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint32)


def from_bf16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack_halves(high, low, kind):
    """`cvt.rn.f16x2.f32` and `cvt.rn.bf16x2.f32`."""
    half = to_bf16 if kind == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32)
    return half(high) << np.uint32(16) | half(low)
