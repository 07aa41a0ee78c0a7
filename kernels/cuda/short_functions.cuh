// Functions in f64 for operands and results of f32 and narrower types: the third part of functions.cuh.
#pragma once
#include "special_functions.cuh"

// ---- short.rs -------------------------------------------------------------------------------------------------------

// A polynomial by Estrin's scheme, lowest coefficient first.
template <int N>
DEVICE f64 estrin(f64 power, const f64 (&c)[N]) {
  if constexpr (N == 1) {
    return c[0];
  } else {
    f64 joined[(N + 1) / 2];
    UNROLL for (int i = 0; i < N / 2; i++) joined[i] = fma_(c[2 * i + 1], power, c[2 * i]);
    if constexpr (N % 2 == 1) joined[N / 2] = c[N - 1];
    return estrin(power * power, joined);
  }
}
DEVICE f64 exp_short(f64 x) {
  auto above = select_(x > 700.0, 700.0, x);
  auto b = select_(above < -700.0, -700.0, above);
  auto shifted = fma_(b, 1.4426950408889634, ROUND);
  auto r = fma_(ROUND - shifted, 0.6931471805599453, b);
  auto p = estrin(r, {
      0.9999999999997624, 0.9999999999806045, 0.5000000000618444, 0.1666666688559877, 0.04166666421931963,
      0.008333267002093938, 0.0013889178684137564, 0.00019915438416343785, 2.4727228643167725e-05});
  return p * power_of_two(bits_of(shifted) - bits_of(ROUND));
}
DEVICE f64 ln_short(f64 x) {
  auto above = bits_of(x) - 0x3fe6a09e667f3bcdull;
  auto biased = (above + 0x3ff0000000000000ull) >> 52;
  auto e = f64_of(biased | 0x4330000000000000ull) - 4503599627371519.0;
  auto f = f64_of((above & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull) - 1.0;
  auto s = f / (2.0 + f);
  auto p = estrin(s * s, {
      1.9999999999999467, 0.6666666667965764, 0.39999994870129724, 0.28572168242980206, 0.22174167300301972,
      0.19609233892601297});
  return with_limits_f64(x, fma_(e, 0.6931471805599453, s * p));
}
DEVICE f64 ln_1p_unit_short(f64 x) {
  auto s = x / (2.0 + x);
  auto p = estrin(s * s, {
      2.0000000000000036, 0.6666666666616917, 0.4000000011835777, 0.2857141775104243, 0.22222716267702897,
      0.1816920866051592, 0.15572042837647235, 0.11737568143958714, 0.18774715615113188});
  return s * p;
}
CALLED f64 pow_abs_short(f64 a, f64 y) {
  auto p = y * ln_short(a);
  auto above = select_(p < -700.0, 0.0, exp_short(p));
  return select_(y == 0.0, 1.0, select_(p > 700.0, inf_f64(), above));
}
DEVICE f64 asin_half(f64 a) {
  bool big = a > 0.5;
  auto z = select_(big, (1.0 - a) * 0.5, a * a);
  auto s = select_(big, sqrt_(z), a);
  auto p = estrin(z, {
      1.0000000000009146, 0.1666666660864254, 0.07500006048460492, 0.044640438212341274, 0.03043011738584333,
      0.02183861240546532, 0.020762617881472264, 0.0017148503179789214, 0.03315893104434849});
  return s * p;
}
CALLED f64 asin_short(f64 x) {
  auto a = abs_(x);
  auto y = asin_half(a);
  return copysign_(select_(a > 0.5, fma_(-2.0, y, HALF_PI_0), y), x);
}
CALLED f64 acos_short(f64 x) {
  auto a = abs_(x);
  auto y = asin_half(a);
  auto outer = select_(x < 0.0, fma_(-2.0, y, 2.0 * HALF_PI_0), 2.0 * y);
  return select_(a > 0.5, outer, HALF_PI_0 - copysign_(y, x));
}
DEVICE f64 atan_unit(f64 n, f64 d) {
  auto t = n / d;
  auto p = estrin(t * t, {
      0.9999999999985061, -0.3333333327266748, 0.19999995898736023, -0.14285604456982054, 0.11109564105153105,
      -0.09077709646221062, 0.07618178283338699, -0.06377456586681526, 0.05068079142447753,
      -0.03557431265907632, 0.02021935287064939, -0.008409190318331946, 0.0022206290153261366,
      -0.0002754501820328926});
  return t * p;
}
CALLED f64 atan_short(f64 x) {
  auto a = abs_(x);
  bool steep = a > 1.0;
  auto y = atan_unit(select_(steep, 1.0, a), select_(steep, a, 1.0));
  return copysign_(select_(steep, HALF_PI_0 - y, y), x);
}
CALLED f64 atan2_short(f64 y, f64 x) {
  auto a = abs_(y);
  auto b = abs_(x);
  bool steep = a > b;
  auto low = select_(steep, b, a);
  auto high = select_(steep, a, b);
  // 1 for two infinities, 0 for two zeros.
  bool infinite = a == b && high == inf_f64();
  bool whole = infinite || high == 0.0;
  auto angle = atan_unit(select_(infinite, 1.0, low), select_(whole, 1.0, high));
  auto acute = select_(steep, HALF_PI_0 - angle, angle);
  bool left = (bits_of(x) >> 63) == 1;
  return copysign_(select_(left, 2.0 * HALF_PI_0 - acute, acute), y);
}
CALLED f64 erfc_short(f64 x) {
  auto whole = abs_(x);
  auto a = select_(whole > 11.0, 11.0, whole);
  auto b = a + 3.0;
  auto c = fma_(2.0, a, 1.0);
  auto inverse = 1.0 / (b * c);
  auto p = estrin((a - 3.0) * (inverse * c), {
      1.2530080582847056, -0.13562110640077948, -0.047562296952501276, 0.1296451736573331, -0.11927358412871393,
      0.06830781988786953, -0.023771461823099214, 0.0025303567766928586, 0.0018940336921175933,
      -0.0007801855209231763, -0.00011936936296324804, 0.00011722812094431406, 1.9057203996604698e-05,
      -4.849624400463327e-06});
  auto tail = p * (inverse * b) * exp_short(-(a * a));
  return select_(x < 0.0, 2.0 - tail, tail);
}
CALLED f64 erfinv_short(f64 x) {
  auto w = -ln_short(fma_(-x, x, 1.0));
  auto near = estrin(w, {
      0.8862269254399953, 0.23201366762171352, 0.011549326879258, -0.002335019238657313,
      -0.00012827479753833238, 4.6997115035435134e-05, 1.6087646351701218e-06, -7.199010866423899e-07,
      -1.7861658637954752e-07, 6.85933836624375e-08, -8.631000790499066e-09, 4.510320742591049e-10,
      -4.2879858528266547e-13, -6.207697532001388e-13});
  auto far = estrin(sqrt_(w) - 3.0, {
      2.832976798570173, 1.0016752766209231, 0.009445540211105614, -0.007643801706222384, 0.005684840273924027,
      -0.0035588032732701176, 0.0014861415102701485, -0.00014924626858063192, -0.00029105615907511586,
      0.00020794104180535993, -3.353048443688845e-05, -2.8804038471854416e-05, 1.2501681321967285e-05});
  return select_(abs_(x) == 1.0, copysign_(inf_f64(), x), x * select_(w < 5.0, near, far));
}
