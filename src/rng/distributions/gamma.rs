//! Gamma numbers, by rejection.

use super::continuous::{expect_all, expect_len, unit_exponential_f32, unit_exponential_f64, wide};
use super::fill::RandomFloat;
use super::rejection::{ElementLanes, LANES, LaneSetups, PerElement, RejectionMethod, SharedSetup, run};
use super::sample::{Gammas, PIECE, box_muller_f32, box_muller_f64, in_compute_type, in_pieces};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, Indices};
use crate::tensor::cpu::{Isa, widest_of};
use crate::tensor::math::exp::{exp_f32, exp_f64};
use crate::tensor::math::log::{ln_1p_rest_f32, ln_1p_rest_f64};
use crate::tensor::{DType, Element};

/// Writes gamma numbers of mean shape · scale and variance shape · scale².
///
/// The method of G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", 2000, in f32 (f64 for f64; f16 and
/// bf16: the f32 number rounded). With d = shape - 1/3 (shape + 2/3 below 1) and c = 1 / sqrt(9 d), attempt k of element e
/// takes a normal number z (the cosine of Box and Muller) and an exponential number E, sets y = c z, and gives
/// d scale (1 + y)³ if 1 + y > 0 and -E < z² / 2 + 3 d (ln(1 + y) - y - y² - y³ / 3). A shape below 1 multiplies by
/// exp(-B / shape), with B exponential, which may underflow to 0.
///
/// f32 reads block e of attempt k: words 0 and 1 for z, 2 for E, and 3, of attempt 0, for B. f64 reads block e of
/// attempts 2k and 2k + 1: pairs 0 and 1 of the former for z, pair 0 of the latter for E, and pair 1, of attempt 1, for
/// B.
///
/// ```
/// use isoshard::rng::{Generator, gamma};
/// let mut x = [0.0f64; 1000];
/// gamma(Generator::new(7).next_draw(), 0, 3.0, 0.5, &mut x)?;
/// assert!((x.iter().sum::<f64>() / 1000.0 - 1.5).abs() < 0.2);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a shape and a scale that are not positive and finite, in the type computed in.
pub fn gamma<T: RandomFloat>(
    draw: Draw,
    at: impl Indices,
    shape: f64,
    scale: f64,
    out: &mut [T],
) -> Result<()> {
    check(shape, scale, T::DTYPE)?;
    let wide = <T::Wide as Element>::from_f64;
    let (shape, scale) = (wide(shape), wide(scale));
    in_compute_type(at.ranges(), out, false, &mut |at, _, wide| T::Wide::gamma(draw, at, shape, scale, wide));
    Ok(())
}

/// Writes gamma numbers of scale 1 with one shape per element. Equal shapes give the numbers of [`gamma`].
///
/// ```
/// use isoshard::rng::{Generator, gamma, gamma_each};
/// let draw = Generator::new(7).next_draw();
/// let (mut one, mut each) = ([0.0f32; 2], [0.0f32; 2]);
/// gamma(draw, 0, 3.0, 1.0, &mut one)?;
/// gamma_each(draw, 0, &[0.5, 3.0], &mut each)?;
/// assert_eq!(one[1], each[1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses slices of different lengths, and a shape that is not positive and finite.
pub fn gamma_each<T: RandomFloat>(draw: Draw, at: impl Indices, shape: &[T], out: &mut [T]) -> Result<()> {
    let at = at.ranges();
    expect_len("gamma", shape, out)?;
    expect_all("gamma", "a shape is positive and finite", at, shape, is_sound)?;
    let mut shapes = [T::Wide::default(); PIECE];
    in_pieces(at, out, &mut |at, here, wide| {
        T::Wide::gamma_each(draw, at, T::load(&shape[here], &mut shapes), wide);
    });
    Ok(())
}

/// Returns the error of [`gamma`] for these parameters and floating dtype, if any.
pub(in crate::rng) fn check(shape: f64, scale: f64, dtype: DType) -> Result<()> {
    if is_sound(wide(shape, dtype)) && is_sound(wide(scale, dtype)) {
        return Ok(());
    }
    let given = format!("shape {shape}, scale {scale} for {dtype}");
    Err(Error::invalid("gamma", "shape and scale are positive and finite", given, ""))
}

fn is_sound(x: f64) -> bool {
    x > 0.0 && x < f64::INFINITY
}

/// Marsaglia and Tsang's method.
#[derive(Clone, Copy)]
struct MarsagliaTsang<A> {
    scale: A,
}

#[derive(Clone, Copy)]
struct GammaSetup<A> {
    d: A,
    c: A,
    /// d times the scale.
    factor: A,
    /// 1 / shape if the shape is below 1, else 0.
    boost: A,
}

macro_rules! gammas {
    ($t:ident, $rest:path, $exp:path, $tries:expr, $words:path, $boosts:path) => {
        impl Gammas for $t {
            fn gamma(draw: Draw, at: IndexRanges<'_>, shape: $t, scale: $t, out: &mut [$t]) {
                let method = MarsagliaTsang { scale };
                run(method, SharedSetup(method.setup(shape)), draw, at, out);
            }
            fn gamma_each(draw: Draw, at: IndexRanges<'_>, shape: &[$t], out: &mut [$t]) {
                run(MarsagliaTsang::<$t> { scale: 1.0 }, PerElement(shape), draw, at, out);
            }
        }

        impl RejectionMethod for MarsagliaTsang<$t> {
            type Wide = $t;
            type Setup = GammaSetup<$t>;
            const ATTEMPTS: u16 = $tries;
            const WIDEST: Isa = widest_of::<$t>();

            #[inline(always)]
            fn setup(self, shape: $t) -> GammaSetup<$t> {
                let small = shape < 1.0;
                let d = if small { shape + 2.0 / 3.0 } else { shape - 1.0 / 3.0 };
                let boost = if small { 1.0 / shape } else { 0.0 };
                GammaSetup { d, c: 1.0 / (9.0 * d).sqrt(), factor: d * self.scale, boost }
            }

            #[inline(always)]
            fn attempt(
                self,
                k: u16,
                setups: &impl LaneSetups<GammaSetup<$t>>,
                place: &ElementLanes,
                out: &mut [$t; LANES],
                accepted: &mut [bool; LANES],
            ) {
                let (mut z, mut e) = ([0.0; LANES], [0.0; LANES]);
                $words(place, k, &mut z, &mut e);
                for i in 0..LANES {
                    let (z, s) = (z[i], setups.at(i));
                    let y = s.c * z;
                    let v = 1.0 + y;
                    let bend = y * y * y.mul_add(1.0 / 3.0, 1.0);
                    let bound = (3.0 * s.d).mul_add($rest(v, y) - bend, 0.5 * z * z);
                    out[i] = s.factor * (v * v * v);
                    accepted[i] = (v > 0.0) & (-e[i] < bound);
                }
            }

            #[inline(always)]
            fn finish(
                self,
                setups: &impl LaneSetups<GammaSetup<$t>>,
                place: &ElementLanes,
                out: &mut [$t; LANES],
            ) {
                if (0..LANES).fold(true, |none, i| none & (setups.at(i).boost == 0.0)) {
                    return;
                }
                let mut boosts = [0.0; LANES];
                $boosts(place, &mut boosts);
                for i in 0..LANES {
                    out[i] *= $exp(-boosts[i] * setups.at(i).boost);
                }
            }
        }
    };
}

gammas!(f32, ln_1p_rest_f32, exp_f32, u16::MAX, words_f32, boosts_f32);
gammas!(f64, ln_1p_rest_f64, exp_f64, u16::MAX / 2, words_f64, boosts_f64);

/// Computes the normal and exponential numbers of attempt `k`.
#[inline(always)]
fn words_f32(place: &ElementLanes, k: u16, z: &mut [f32; LANES], e: &mut [f32; LANES]) {
    let [a, b, c, _] = words(place, k);
    for i in 0..LANES {
        z[i] = box_muller_f32(a[i], b[i])[0];
    }
    for i in 0..LANES {
        e[i] = unit_exponential_f32(c[i]);
    }
}

/// Computes the same numbers in f64.
#[inline(always)]
fn words_f64(place: &ElementLanes, k: u16, z: &mut [f64; LANES], e: &mut [f64; LANES]) {
    let ([a, b], [c, _]) = (pairs(place, 2 * k), pairs(place, 2 * k + 1));
    for i in 0..LANES {
        z[i] = box_muller_f64(a[i], b[i])[0];
    }
    for i in 0..LANES {
        e[i] = unit_exponential_f64(c[i]);
    }
}

/// Computes the exponential numbers for shapes below 1.
#[inline(always)]
fn boosts_f32(place: &ElementLanes, out: &mut [f32; LANES]) {
    let [_, _, _, d] = words(place, 0);
    for i in 0..LANES {
        out[i] = unit_exponential_f32(d[i]);
    }
}

/// Computes the same numbers in f64.
#[inline(always)]
fn boosts_f64(place: &ElementLanes, out: &mut [f64; LANES]) {
    let [_, d] = pairs(place, 1);
    for i in 0..LANES {
        out[i] = unit_exponential_f64(d[i]);
    }
}

/// Returns the words of one block per element, one array per word. (Loops with strided reads do not vectorise fully.)
#[inline(always)]
fn words(place: &ElementLanes, attempt: u16) -> [[u32; LANES]; 4] {
    let mut out = [[0; LANES]; 4];
    for (i, &[low, high]) in place.blocks(attempt).0.iter().enumerate() {
        (out[0][i], out[1][i]) = (low as u32, (low >> 32) as u32);
        (out[2][i], out[3][i]) = (high as u32, (high >> 32) as u32);
    }
    out
}

/// The pairs of one block per element, one array per pair.
#[inline(always)]
fn pairs(place: &ElementLanes, attempt: u16) -> [[u64; LANES]; 2] {
    let mut out = [[0; LANES]; 2];
    for (i, &[low, high]) in place.blocks(attempt).0.iter().enumerate() {
        (out[0][i], out[1][i]) = (low, high);
    }
    out
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::rng::counter::philox;

    const DRAW: Draw = Draw { seed: 51, number: 52 };

    /// The definition, in f64.
    fn definition(shape: f64, index: u64) -> (f64, u16) {
        let d = if shape < 1.0 { shape + 2.0 / 3.0 } else { shape - 1.0 / 3.0 };
        let unit = |w: u32| (f64::from(w) + 0.5) / 4_294_967_296.0;
        for k in 0.. {
            let w = philox::block(DRAW.key(), DRAW.counter(index, k));
            let angle = std::f64::consts::TAU * f64::from(w[1] >> 8) / 16_777_216.0;
            let z = (-2.0 * unit(w[0]).ln()).sqrt() * angle.cos();
            let v = (1.0 + z / (9.0 * d).sqrt()).powi(3);
            if v > 0.0 && unit(w[2]).ln() < 0.5 * z * z + d - d * v + d * v.ln() {
                let last = philox::block(DRAW.key(), DRAW.counter(index, 0))[3];
                let boost = if shape < 1.0 { unit(last).powf(1.0 / shape) } else { 1.0 };
                return (d * v * boost, k);
            }
        }
        unreachable!("some try is accepted")
    }

    #[test]
    fn numbers_are_their_definition() {
        for shape in [0.05, 0.6, 1.0, 1.7, 30.0, 1e6] {
            let (mut got, mut again) = ([0f32; 1500], 0);
            gamma(DRAW, 11, shape, 1.0, &mut got).unwrap();
            for (i, &x) in got.iter().enumerate() {
                let (want, k) = definition(shape, 11 + i as u64);
                assert!((f64::from(x) - want).abs() < 1e-5 * want + 1e-38, "{shape}, {i}: {x} for {want}");
                again += u32::from(k > 0);
            }
            let rejects = if shape < 3.0 { 20..120 } else { 0..12 };
            assert!(rejects.contains(&again), "shape {shape}: {again} of 1500");
        }
    }

    #[test]
    fn equal_shapes_give_the_scalars_numbers() {
        let shapes: Vec<f16> = (0..203).map(|i| f16::from_f32([0.25, 1.5, 40.0][i % 3])).collect();
        let (mut each, mut one) = (vec![f16::ZERO; 203], vec![f16::ZERO; 203]);
        gamma_each(DRAW, 9, &shapes, &mut each).unwrap();
        for (k, shape) in [0.25, 1.5, 40.0].into_iter().enumerate() {
            gamma(DRAW, 9, shape, 1.0, &mut one).unwrap();
            assert!((k..203).step_by(3).all(|i| one[i] == each[i]), "{shape}");
        }
    }

    #[test]
    fn refusals() {
        let mut out = [0f64; 2];
        for (shape, scale) in [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 1.0), (1.0, 0.0), (f64::INFINITY, 1.0)] {
            gamma(DRAW, 0, shape, scale, &mut out).unwrap_err();
        }
        let refused = gamma_each(DRAW, 0, &[1.0, 0.0], &mut out).unwrap_err().to_string();
        assert_eq!(refused, "gamma: a shape is positive and finite; got 0 for element 1");
    }
}
