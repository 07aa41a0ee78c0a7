"""Writes functions.bin: exact values of mathematical functions, computed with mpmath, for tests/suite/functions.rs.

Run: python3 tests/reference/functions.py (needs mpmath). A record per function: its name in 12 bytes, the number of
operands and the number of points as u32; then per point the operands and the nearest result as f64, and as i8 the
exact result minus the nearest one in 1/250 ulp. Little endian.
"""

import math
import os
import random
import struct

import mpmath as m
from mpmath import mpf

m.mp.prec = 200
rng = random.Random(14)


def tail(q):
    """The inverse of erfc."""
    y = m.sqrt(-m.log(q)) if q < 0.3 else mpf(0.5)
    for _ in range(80):
        d = (m.erfc(y) - q) * m.exp(y * y) * m.sqrt(m.pi) / 2
        y, last = y + d / (1 - y * d), y
        if abs(y - last) < mpf(2) ** -150 * abs(y):
            return y
    raise ValueError(q)


def erfinv(x):
    if abs(x) == 1:
        return m.sign(x) * m.inf
    return m.erfinv(x) if abs(x) < 0.5 else m.sign(x) * tail(1 - abs(x))


def lgamma(x):
    return m.inf if x <= 0 and x == m.floor(x) else m.re(m.loggamma(x))


def digamma(x):
    return m.digamma(x)


def circular(f):
    def at(x):
        with m.workprec(1300):
            return +f(x)

    return at


def cbrt(x):
    return m.sign(x) * m.cbrt(abs(x))


def power(x, y):
    return m.power(x, y)


def sigmoid(x):
    return 1 / (1 + m.exp(-x))


def softplus(x):
    return m.log1p(m.exp(x))


def sinc(x):
    with m.workprec(1300):
        return m.sinpi(x) / (m.pi * x) if x else mpf(1)


def tanhshrink(x):
    with m.workprec(2400):
        return x - m.tanh(x)


def logaddexp(x, y):
    return max(x, y) + m.log1p(m.exp(-abs(x - y)))


def spread(low, high, n, signed=True):
    """Numbers whose exponents are spread from 2^low to 2^high."""
    return [
        math.ldexp(rng.uniform(1, 2), math.floor(rng.uniform(low, high))) * (rng.choice([-1, 1]) if signed else 1)
        for _ in range(n)
    ]


def between(a, b, n):
    return [rng.uniform(a, b) for _ in range(n)]


def around(*points, n=16):
    """Neighbours of points, some near and some a few ulp away."""
    found = []
    for p in points:
        for k in range(n):
            found.append(p + rng.uniform(-1, 1) * 2.0 ** -(2 + 3 * k) * max(abs(p), 0.1))
        found += [p, math.nextafter(p, math.inf), math.nextafter(p, -math.inf)]
    return found


HARD = [6381956970095103.0 * 2.0**797, 1e22, 2.0**30, 2.0**31, 2.0**120, 1.7e308, 5.0e9, 3.3e38, 1e300, 11.0, 22.0, 355.0]
ANGLES = spread(-40, 4, 150) + between(-100, 100, 150) + spread(0, 1023, 150) + HARD + around(
    *[k * math.pi / 2 for k in [1, 2, 3, 4, 5, 100, 1001]], *[k * math.pi / 4 for k in [1, 3, 5]], n=10)
SMALL = [5e-324, -5e-324, 2.2250738585072014e-308, 1e-310, 1e-300, -1e-200, 1e-20, -1e-10]
UNIT = SMALL + spread(-30, -1, 100) + between(-1, 1, 250) + [x for x in around(0.5, -0.5, 0.75, -0.75, n=8) if abs(x) < 1] + [
    s * (1 - 2.0**-k) for k in range(1, 54) for s in (1, -1)]
EXPONENTS = SMALL + spread(-40, 9, 150) + between(-3, 3, 150) + around(0.34657359, -0.34657359, 1.0, -1.0, n=8)
POSITIVE = spread(-1074, 1023, 150, False) + between(0.01, 3, 150) + around(1.0, math.sqrt(2), math.sqrt(0.5), 2.0) + [
    5e-324, 1e-310, 1.7e308, 1000.0, 1e22, 1e15, 8.0]

FUNCTIONS = {
    "sin": (circular(m.sin), SMALL + ANGLES),
    "cos": (circular(m.cos), SMALL + ANGLES),
    "tan": (circular(m.tan), SMALL + ANGLES),
    "asin": (m.asin, UNIT),
    "acos": (m.acos, UNIT),
    "atan": (m.atan, SMALL + spread(-60, 60, 200) + between(-4, 4, 250) + around(0.4375, 0.6875, 1.0)),
    "sinh": (m.sinh, EXPONENTS + between(-710.4, 710.4, 100) + [710.4758600739438]),
    "cosh": (m.cosh, EXPONENTS + between(-710.4, 710.4, 100) + [710.4758600739438]),
    "tanh": (m.tanh, EXPONENTS),
    "asinh": (m.asinh, SMALL + spread(-60, 1023, 150) + between(-5, 5, 250) + around(0.5, 2.0**28)),
    "acosh": (m.acosh, [1 + abs(x) for x in spread(-52, 40, 200) + between(0, 5, 200)] + [1e300, 1.7e308, 2.0**28]),
    "atanh": (m.atanh, UNIT),
    "exp": (m.exp, EXPONENTS + between(-745, 709.7, 150)),
    "exp2": (lambda x: m.power(2, x), EXPONENTS + between(-1074, 1023.9, 150) + [-1074.0, 1023.0]),
    "expm1": (m.expm1, EXPONENTS + between(-60, 709.7, 150)),
    "ln": (m.log, POSITIVE),
    "ln_1p": (m.log1p, SMALL + spread(-60, 1023, 150, False) + between(-1, 3, 200) + around(0.4142, -0.2929) + [
        -1 + 2.0**-k for k in range(1, 53)]),
    "log2": (lambda x: m.log(x, 2), POSITIVE),
    "log10": (m.log10, POSITIVE),
    "sigmoid": (sigmoid, EXPONENTS + between(-709, 50, 100)),
    "erf": (m.erf, SMALL + spread(-60, 3, 150) + between(-6, 6, 300) + around(0.92, 1.0, n=8)),
    "erfc": (m.erfc, SMALL + spread(-60, 4, 100) + between(-6, 27.2, 400) + around(0.5, -0.5, 4.0, n=8)),
    "erfinv": (erfinv, UNIT),
    "lgamma": (lgamma, spread(-1000, 1000, 100, False) + between(0.001, 10, 300) + around(1.5, 2.5, 3.5, 4.0, n=8) + between(
        -20, 0, 80) + spread(-300, -10, 20) + [-1e10 - 0.5, 171.5, 1e5, 1e17]),
    "digamma": (digamma, spread(-300, 300, 100, False) + between(0.001, 10, 300) + around(1.0, 2.5, 3.5, 4.0, n=8) + between(
        -20, 0, 80) + spread(-300, -10, 20) + [171.5, 1e5, 1e17]),
    "cbrt": (cbrt, spread(-1074, 1023, 250) + between(-10, 10, 150) + [27.0, 8.0, -1000.0, 5e-324]),
    "atan2": (lambda y, x: m.atan2(y, x), list(zip(spread(-20, 20, 250), spread(-20, 20, 250))) + list(
        zip(between(-2, 2, 150), between(-2, 2, 150))) + [(1e-300, 1e300), (1e308, 1e308), (-1e308, 1.7e308), (5e-324, 5e-324)]),
    "pow": (power, [(x, 7.0) for x in between(0.1, 50, 60)] + [(x, 2.5) for x in spread(-300, 300, 60, False)] + [
        (x, y) for x, y in zip(between(0.01, 20, 300), between(-200, 200, 300)) if abs(y * math.log(x)) < 740] + [
        (1 + x, 2.0**y) for x, y in zip(spread(-40, -20, 100), between(20, 29, 100))] + [
        (-3.5, 33.0), (1e-310, 0.9), (5e-324, -0.5), (10.0, -320.0), (0.999999999999, 1e14)]),
    "trigamma": (lambda x: m.psi(1, x), spread(-300, 300, 60, False) + between(0.001, 12, 120) + around(1.0, 8.0, n=8) + between(
        -20, 0, 60) + [-1e6 - 0.25, 171.5, 1e17]),
    "sinc": (sinc, SMALL + spread(-40, 40, 60) + between(-6, 6, 120) + around(0.1, -0.1, 1.0, 2.0, 7.0, n=8) + [0.0, 1e300]),
    "rsqrt": (lambda x: 1 / m.sqrt(x), spread(-1074, 1023, 100, False) + between(0.1, 10, 60)),
    "softplus": (softplus, EXPONENTS[:120] + between(-740, 740, 100) + between(-40, 40, 60)),
    "log_sigmoid": (lambda x: -softplus(-x), EXPONENTS[:120] + between(-740, 740, 100) + between(-40, 40, 60)),
    "logit": (lambda x: m.log(x / (1 - x)), [abs(x) for x in UNIT[8:208]] + [0.5 + x / 4 for x in spread(-52, 0, 60)] + [
        0.25, 0.75, math.nextafter(0.25, 0), 5e-324]),
    "mish": (lambda x: x * m.tanh(softplus(x)), EXPONENTS[:120] + between(-740, 50, 120) + around(40.0, -800.0, n=4)),
    "elu": (lambda x: x if x > 0 else m.expm1(x), EXPONENTS[:120] + between(-40, 0, 60)),
    "tanhshrink": (tanhshrink, spread(-300, 9, 100) + between(-2, 2, 100) + around(1.0, -1.0, n=8)),
    "silu": (lambda x: x * sigmoid(x), EXPONENTS[:120] + between(-700, 50, 100)),
    "hypot": (lambda x, y: m.sqrt(x * x + y * y), list(zip(spread(-500, 500, 60), spread(-500, 500, 60))) + list(
        zip(between(-3, 3, 120), between(-3, 3, 120))) + [(1e308, 1e308), (1e-310, 1e-310), (3.0, 4.0)]),
    "logaddexp": (logaddexp, [(x, y) for x, y in zip(between(-50, 50, 150), between(-50, 50, 150)) if abs(max(x, y)) > 1] + [
        (x, x + y) for x, y in zip(between(1, 700, 60), spread(-30, 4, 60))]),
    "xlogy": (lambda x, y: x * m.log(y), list(zip(between(-9, 9, 100), between(0.001, 9, 100))) + list(
        zip(spread(-300, 300, 60), spread(-300, 300, 60, False)))),
    "xlog1py": (lambda x, y: x * m.log1p(y), list(zip(between(-9, 9, 100), between(-0.99, 9, 100))) + list(
        zip(spread(-300, 300, 60), spread(-300, 300, 60, False)))),
}


def nearest(exact):
    """The nearest f64, and the rest in 1/250 ulp."""
    if m.isinf(exact):
        return float(exact), 0
    y = float(m.mpf(exact)) if abs(exact) >= mpf(2) ** -1022 else float(m.nint(exact * mpf(2) ** 1074)) * 5e-324
    if math.isinf(y):
        return y, 0
    return y, int(m.nint((exact - mpf(y)) / mpf(math.ulp(y)) * 250))


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "functions.bin")
    with open(path, "wb") as out:
        for name, (f, points) in FUNCTIONS.items():
            points = [p if isinstance(p, tuple) else (p,) for p in points]
            rows = []
            for p in points:
                y, rest = nearest(f(*[mpf(x) for x in p]))
                rows.append(struct.pack(f"<{len(p)}ddb", *p, y, max(-127, min(127, rest))))
            out.write(struct.pack("<12sII", name.encode(), len(points[0]), len(rows)) + b"".join(rows))
            print(name, len(rows))
    print(os.path.getsize(path), "bytes")


if __name__ == "__main__":
    main()
