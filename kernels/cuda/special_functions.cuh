// Powers, the error functions and the gamma functions in f64: the second part of functions.cuh.
#pragma once
#include "functions.cuh"

// ---- power.rs -------------------------------------------------------------------------------------------------------

DEVICE Pair precise_ln(f64 a) {
  bool tiny = a < 2.2250738585072014e-308;
  auto [e, f] = split_f64(select_(tiny, a * 18014398509481984.0, a));
  auto n = e + select_(tiny, -54.0, 0.0);
  // s = f / (2 + f) as a sum of two numbers; ln(1 + f) = 2s + 2/3 s^3 + s^5 (2/5 + ...).
  auto [d, d_rest] = fast_two_sum(2.0, f);
  auto inverse = 1.0 / d;
  auto s = f * inverse;
  auto s_rest = (fma_(-s, d, f) - s * d_rest) * inverse;
  auto [z, z_low] = two_product(s, s);
  auto z_rest = fma_(2.0 * s, s_rest, z_low);
  // s^3
  auto [c, c_low] = two_product(s, z);
  auto c_rest = c_low + fma_(s, z_rest, s_rest * z);
  auto [t, t_low] = two_product(c, 6.666666666666666e-1);
  auto t_rest = t_low + fma_(c_rest, 6.666666666666666e-1, c * 3.700743415417188e-17);
  auto tail = fma_(c * z, horner(z, 0.10762867423643212, 0.10456278375778207, 0.11766815303406082,
      0.13333296483973292, 0.1538461576181261, 0.18181818179652515, 0.22222222222228444, 0.28571428571428564, 0.4),
      t_rest);
  auto [u, u_rest] = fast_two_sum(2.0 * s, t);
  auto rest = u_rest + (2.0 * s_rest + tail);
  auto [v, v_rest] = two_sum(n * 6.931471803691238e-1, u);
  auto [w, w_rest] = two_product(n, 1.9082149292705877e-10);
  auto [x, x_rest] = two_sum(v, w);
  auto small = (v_rest + x_rest) + (fma_(n, 1.1612227229362532e-26, w_rest) + rest);
  auto [high, low] = fast_two_sum(x, small);
  auto positive = select_(a > 0.0, high, nan_f64());
  auto real = select_(a == inf_f64(), a, select_(a == 0.0, -inf_f64(), positive));
  return Pair{real, low};
}
CALLED f64 pow_abs_f64(f64 a, f64 y) {
  auto [h, l] = precise_ln(a);
  auto [p, p_rest] = two_product(y, h);
  auto rest = fma_(y, l, p_rest);
  // Products beyond the range of results, infinities included, need no rest.
  bool inside = abs_(p) < 800.0;
  auto low = select_(p < -800.0, -800.0, p);
  auto b = select_(low > 800.0, 800.0, low);
  auto z = scaled(exp_parts(b, select_(inside, rest, 0.0)));
  return select_(y == 0.0, 1.0, z);
}
CALLED f64 cbrt_f64(f64 x) {
  auto a = abs_(x);
  bool tiny = a < 2.2250738585072014e-308;
  auto b = select_(tiny, a * 18014398509481984.0, a);
  // A third of the exponent, by integer arithmetic on the upper word.
  u64 word = bits_of(b) >> 32;
  u64 third = ((word * 2863311531ull) >> 33) + 715094163;
  auto guess = f64_of(third << 32);
  auto r = (guess * guess) * (guess / b);
  auto high = fma_(r, fma_(r, 1.6214297201053545, -1.8849797954337717), 1.87595182427177);
  auto t = guess * fma_((r * r) * r, fma_(r, 0.14599619288661245, -0.758397934778766), high);
  // 20 bits, so that the square is exact.
  auto u = f64_of((bits_of(t) + 0x80000000ull) & 0xffffffffc0000000ull);
  auto q = b / (u * u);
  auto y = fma_(u, (q - u) / (u + u + q), u);
  auto unscaled = select_(tiny, y * 3.814697265625e-6, y);
  bool finite = a > 0.0 && a < inf_f64();
  return copysign_(select_(finite, unscaled, a), x);
}

// ---- erfc.rs --------------------------------------------------------------------------------------------------------

CALLED f64 erfc_f64(f64 x) {
  auto whole = abs_(x);
  auto a = select_(whole > 28.0, 28.0, whole);
  // e^(a^2) erfc(a) = m + m_rest.
  auto q = (a - 4.0) / (a + 4.0);
  auto p = horner(q, -1.8206098680308682e-09, -1.3670989863347383e-08, -7.71541861441783e-09, 1.1534943745754157e-07,
      6.270727157198311e-08, -8.351619688696847e-07, 3.0135049944875397e-07, 5.7178872846321855e-06,
      -1.1224789135154701e-05, -2.4403169244974074e-05, 0.000150622243948303, -0.00019925550755614952,
      -0.00075777334141333, 0.005031969755895426, -0.016197734059115006, 0.03716751556249286, -0.06633036581152939,
      0.09373283499679412, -0.10103906603635213, 0.06809705425473732, 0.01537965210262074, -0.1396211168405629,
      0.2329951186255525);
  auto [n, n_rest] = fast_two_sum(1.0, p);
  auto [d, d_rest] = two_sum(1.0, 2.0 * a);
  auto inverse = 1.0 / d;
  auto m = n * inverse;
  auto m_rest = (fma_(-m, d, n) + (n_rest - m * d_rest)) * inverse;
  auto [square, square_rest] = two_product(a, a);
  auto e = exp_parts(-square, -square_rest);
  auto [h, l] = two_product(m, e.high);
  auto tail = scaled(ScaledExp{e.n, h, l + fma_(m, e.low, m_rest * e.high)});
  auto far = select_(x < 0.0, 2.0 - tail, tail);
  auto z = a * a;
  auto erf_rest = x * horner(z, -7.779438207878924e-10, 1.3710963588728289e-08, -1.620630972606518e-07,
      1.644713102415044e-06, -1.4924712255869537e-05, 0.00012055293574398284, -0.0008548325929227225,
      0.005223977606116573, -0.026866170643111226, 0.11283791670944184, -0.3761263890318352, 0.12837916709551256);
  auto [sum, sum_rest] = fast_two_sum(1.0, -x);
  return select_(whole < 0.5, sum + (sum_rest - erf_rest), far);
}
CALLED f64 erfinv_f64(f64 x) {
  auto a = abs_(x);
  auto z = a * a;
  auto small = fma_(a, 0.886226925452758, a * fma_(z, horner(z, 46.99679785688953, -268.74085639688184,
      726.5134363596638, -1228.849885745721, 1454.4331360753606, -1277.2891473252416, 861.850779262836,
      -456.57248617444935, 192.53725465585705, -65.10552515424527, 17.751101803613814, -3.8682822882760393,
      0.7040570654284835, -0.07310267830734617, 0.03558384835479228, 0.02707630686689879, 0.03174783488054089,
      0.03646310441143824, 0.04283681683674863, 0.05173127979243833, 0.06495961777602516, 0.08655212924132058,
      0.12755617530559862, 0.2320136665346545), -3.8332932499128993e-17));
  auto w = sqrt_(-ln_f64(1.0 - a));
  auto u = w - 1.9;
  auto middle = fma_(w, 0.8227629772386569, w * (u * horner(u, 1.6413925745565862e-09, 1.614147048533897e-09,
      -1.956336556024075e-08, 4.410417735795889e-08, -7.580780445963546e-08, 1.298826052469577e-07,
      -1.6133562354267293e-07, -1.4691647079109964e-08, 8.649412906258411e-07, -3.4622065950279533e-06,
      9.906631489133832e-06, -2.3385681885425593e-05, 4.6262148068460615e-05, -7.135068778294847e-05,
      5.3968867986823464e-05, 0.0001636410306923071, -0.001033605757941409, 0.0036915682122522927,
      -0.010686219230644833, 0.02705639337755246, -0.06092870506180565, 0.11914444170841726)));
  auto v = w - 4.4;
  auto large = fma_(w, 0.946237660728811, w * (v * horner(v, -8.835022715327505e-17, 4.0736396684759354e-16,
      -9.320024653036092e-17, -1.9455958880134045e-16, -1.0735231915219125e-14, 3.569300456975042e-14,
      -1.9678160278353254e-14, -2.8628900840602927e-13, 2.9175864348955995e-12, -2.199840435220698e-11,
      1.411728763959146e-10, -8.266753724944293e-10, 4.573121347000605e-09, -2.4270181115629516e-08,
      1.2457889813077622e-07, -6.213433155752751e-07, 3.018108446855656e-06, -1.4284250601484204e-05,
      6.577938523420334e-05, -0.0002935817187831852, 0.0012595054244266158, -0.005104437535298453,
      0.018730632992378763)));
  auto tail = select_(a == 1.0, inf_f64(), select_(w < 2.6, middle, large));
  return copysign_(select_(a < 0.75, small, tail), x);
}

// ---- gamma.rs -------------------------------------------------------------------------------------------------------

DEVICE f64 lgamma_near_f64(f64 x) {
  bool big = x >= 4.0;
  bool small = x < 1.5;
  // Between 2.5 and 4, one or two factors are split off.
  bool first = x > 2.5 && x < 4.0;
  auto y = select_(first, x - 1.0, x);
  bool second = y > 2.5 && x < 4.0;
  // Below 1/2, the factors x and x + 1 are divided off, and below 3/2 the factor x.
  bool least = x < 0.5;
  auto below = select_(least, x, x - 1.0);
  auto t = select_(small, below, select_(second, y - 1.0, y) - 2.0);
  auto middle = t * horner(t, 6.379047507619774e-08, -1.3412819758517287e-07, 2.0304806751615227e-07,
      -4.303558760359961e-07, 9.578663334114758e-07, -2.0449201467015115e-06, 4.374374916915131e-06,
      -9.438458716242811e-06, 2.050726741605779e-05, -4.4926351103833334e-05, 9.945750909889392e-05,
      -0.00022315475074520367, 0.0005096695248853096, -0.0011927539120010226, 0.002890510330738737,
      -0.0073855510286681535, 0.02058080842778457, -0.06735230105319814, 0.3224670334241132, 0.42278433509846713);
  auto [g, g_rest] = two_sum(1.0, x);
  auto product = x * g;
  auto product_rest = fma_(x, g, -product) + x * g_rest;
  auto factors = select_(least, product, select_(first, y, 1.0) * select_(second, y - 1.0, 1.0));
  auto [h, l] = ln_pair(select_(big || (small && !least), x, factors));
  auto sign = select_(small, -1.0, 1.0);
  auto rest = l + select_(least && x > 1e-290, product_rest / product, 0.0);
  auto [sum, sum_rest] = two_sum(sign * h, middle);
  auto shifted = sum + fma_(sign, rest, sum_rest);
  auto r = 1.0 / x;
  auto series = fma_(r, horner(r * r, -0.17390223978422367, 0.08600886915362022, -0.02431970081518216,
      0.006210992276421007, -0.0019125368108574897, 0.0008416721483780579, -0.0005952373672607474,
      0.0007936507901805894, -0.002777777777771288, 0.08333333333333333), 0.9189385332046728);
  auto half = x - 0.5;
  auto [p, p_rest] = two_product(half, h);
  auto [s, s_rest] = two_sum(p, -x);
  auto stirling = s + (s_rest + (p_rest + fma_(half, l, series)));
  auto limited = select_(x > 2.5e305, inf_f64(), stirling);
  auto positive = select_(big, limited, shifted);
  return select_(x > 0.0, positive, select_(x == 0.0, inf_f64(), nan_f64()));
}
DEVICE Pair reciprocal_pair(f64 x) {
  auto r = 1.0 / x;
  return Pair{r, fma_(-r, x, 1.0) * r};
}
DEVICE f64 digamma_near_f64(f64 x) {
  bool big = x >= 4.0;
  bool small = x < 1.0;
  bool first = x > 2.5 && x < 4.0;
  auto y = select_(first, x - 1.0, x);
  bool second = y > 2.5 && x < 4.0;
  auto at = select_(small, x + 1.0, select_(second, y - 1.0, y));
  // Digamma is (at - zero) times a polynomial; the zero is a sum of two numbers.
  auto zero_distance = select_(small, x - 0.46163214496836225, at - 1.4616321449683622) - 9.549995429965697e-17;
  auto middle = zero_distance * horner(at - 1.75, 2.569465264632448e-07, -4.4965654989855573e-07,
      -2.60960737276259e-07, 4.5668084207111167e-07, 1.1164289188137404e-06, -1.953754956956086e-06,
      1.3468989498120084e-06, -2.357105031640297e-06, 5.5995100437823286e-06, -9.799384565630145e-06,
      1.642386413910749e-05, -2.8743595297838726e-05, 5.055925908072352e-05, -8.849261403357272e-05,
      0.00015483761490061934, -0.00027107171427653837, 0.0004746792569978286, -0.0008314994896380173,
      0.001457374860679761, -0.002556686334307968, 0.004491813698189461, -0.007910468783898505, 0.01398578618401325,
      -0.024890048488846822, 0.04479965445278702, -0.08228558635577937, 0.15712011335204246, -0.3262546278681057,
      0.8581832171262995);
  auto [r, r_rest] = reciprocal_pair(select_(first, y, x));
  auto [s, s_rest] = reciprocal_pair(select_(second, y - 1.0, 1.0));
  auto one = select_(small, -r, select_(first, r, 0.0));
  auto one_rest = select_(small, -r_rest, select_(first, r_rest, 0.0));
  auto other = select_(second, s, 0.0);
  auto [sum, sum_rest] = two_sum(one, middle);
  auto [total, total_rest] = two_sum(sum, other);
  auto shifted = total + (total_rest + (sum_rest + (one_rest + select_(second, s_rest, 0.0))));
  auto [h, l] = ln_pair(x);
  auto z = r * r;
  auto series = fma_(z, horner(z, -16.272492444252475, 7.874672567242462, -2.0004758503978333, 0.3992958066655563,
      -0.08204835156459736, 0.021067490343790643, -0.007575437694477858, 0.004166664261695412, -0.003968253958849537,
      0.008333333333318827, -0.08333333333333333), l);
  auto stirling = h + fma_(-0.5, r, series);
  auto positive = select_(big, select_(x == inf_f64(), x, stirling), shifted);
  // 1/x overflows for the smallest numbers.
  auto finite = select_(x < 1e-300, -r, positive);
  return select_(x > 0.0, finite, select_(x == 0.0, -1.0 / x, nan_f64()));
}
// sin(pi a).
DEVICE f64 sin_pi(f64 a) {
  f64 fraction = a - floor_(a), near = fraction > 0.5 ? 1.0 - fraction : fraction, sin, cos;
  sin_cos_2pi_f64(0.5 * near, sin, cos);
  return sin;
}
CALLED f64 lgamma_f64(f64 x) {
  if (x >= 0.0 || x != x) return lgamma_near_f64(x);
  f64 a = -x;
  if (a < 1e-17) return -ln_f64(a);
  f64 sine = sin_pi(a);
  if (sine == 0.0 || a == inf_f64()) return inf_f64();
  return 1.1447298858494002 - ln_f64(a * abs_(sine)) - lgamma_near_f64(a);
}
DEVICE f64 trigamma_term(f64 x, f64 k) {
  auto r = 1.0 / (x + k);
  return r * r;
}
DEVICE f64 trigamma_near_f64(f64 x) {
  auto upper = ((trigamma_term(x, 7.0) + trigamma_term(x, 6.0)) + trigamma_term(x, 5.0)) + trigamma_term(x, 4.0);
  auto sum = (((upper + trigamma_term(x, 3.0)) + trigamma_term(x, 2.0)) + trigamma_term(x, 1.0)) + trigamma_term(x, 0.0);
  bool big = x >= 8.0;
  auto r = 1.0 / select_(big, x, x + 8.0);
  auto z = r * r;
  auto series = horner(z, 6192.123188405797, -529.1242424242424, 54.971177944862156, -7.092156862745098,
      1.1666666666666667, -0.2531135531135531, 0.07575757575757576, -0.03333333333333333, 0.023809523809523808,
      -0.03333333333333333, 0.16666666666666666);
  auto stirling = fma_(0.5 * r, r, r) + r * (z * series);
  auto positive = select_(big, 0.0, sum) + stirling;
  return select_(x >= 0.0, positive, nan_f64());
}
CALLED f64 trigamma_f64(f64 x) {
  if (x >= 0.0 || x != x) return trigamma_near_f64(x);
  f64 ratio = 3.141592653589793 / sin_pi(-x);
  return ratio * ratio - trigamma_near_f64(1.0 - x);
}
CALLED f64 digamma_f64(f64 x) {
  if (x >= 0.0 || x != x) return digamma_near_f64(x);
  f64 fraction = -x - floor_(-x);
  if (fraction == 0.0) return nan_f64();
  f64 angle = fraction > 0.5 ? 1.0 - fraction : -fraction;
  return digamma_near_f64(1.0 - x) - 3.141592653589793 / tan_f64(3.141592653589793 * angle);
}
