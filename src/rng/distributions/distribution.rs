//! Distributions as values.

use super::continuous::{check_exponential, check_log_normal, wide};
use super::truncated::Truncated;
use super::{gamma, integers, poisson};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The distribution of a random tensor's elements.
///
/// ```
/// use isoshard::rng::{Distribution, Generator};
/// let draw = Generator::new(0).next_draw();
/// let mut mask = [false; 8]; // elements 100..108 of a mask
/// Distribution::Bernoulli { p: 0.25 }.fill(draw, 100, &mut mask)?;
/// assert!(Distribution::Bernoulli { p: 1.5 }.fill(draw, 100, &mut mask).is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Uniform between `low` and `high`: fma(u, high - low, low), with both rounded to f32 (f64 for f64). Floating.
    Uniform {
        /// The lowest value.
        low: f64,
        /// The upper end, which occurs only by rounding.
        high: f64,
    },
    /// Normal: fma(z, std, mean), with both rounded to f32 (f64 for f64). Floating.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Normal, conditioned on [`low`, `high`], and one bound may be infinite; by rejection per element. Tails and narrow
    /// intervals use Robert's method (1995). Floating.
    TruncatedNormal {
        /// The mean before truncation.
        mean: f64,
        /// The standard deviation before truncation.
        std: f64,
        /// The lowest value.
        low: f64,
        /// The highest value.
        high: f64,
    },
    /// e to the power of normal numbers of this mean and standard deviation: [`log_normal`](crate::rng::log_normal). Floating.
    LogNormal {
        /// The mean of the logarithm.
        mean: f64,
        /// The standard deviation of the logarithm.
        std: f64,
    },
    /// Exponential, of mean 1 / `rate`: [`exponential`](crate::rng::exponential). Floating.
    Exponential {
        /// The rate.
        rate: f64,
    },
    /// Gamma, of mean `shape` · `scale`: [`gamma`](crate::rng::gamma()), by rejection. Floating.
    Gamma {
        /// The shape.
        shape: f64,
        /// The scale.
        scale: f64,
    },
    /// Poisson: [`poisson`](crate::rng::poisson()), by rejection from a rate of 10 on. Floating, i64 and i32, with the same counts.
    Poisson {
        /// The rate, which is mean and variance.
        rate: f64,
    },
    /// Uniform integers from `low` to below `high`, without bias: [`uniform_int`](crate::rng::uniform_int). Integers, with the same
    /// numbers.
    UniformInt {
        /// The lowest number.
        low: i128,
        /// The first number above, at most 2^63.
        high: i128,
    },
    /// True, or 1, with probability `p` (to 2^-32); else false, or 0. Any dtype, with the same elements.
    Bernoulli {
        /// The probability.
        p: f64,
    },
    /// All bits random: the 64-bit draw for i64, the 32-bit draw for i32, its upper 8 bits for u8. Integers.
    Bits,
}

impl Distribution {
    /// Uniform in [0, 1) for f32 and f64. f16 and bf16 are the f32 numbers rounded to nearest, so that their mean is right:
    /// 1 occurs, with probability 2^-12 (f16) and 2^-9 (bf16).
    pub const UNIT: Distribution = Distribution::Uniform { low: 0.0, high: 1.0 };
    /// Normal with mean 0 and standard deviation 1.
    pub const STANDARD: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

    /// Returns the name, as errors print it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Distribution::Uniform { .. } => "uniform",
            Distribution::Normal { .. } => "normal",
            Distribution::TruncatedNormal { .. } => "truncated_normal",
            Distribution::LogNormal { .. } => "log_normal",
            Distribution::Exponential { .. } => "exponential",
            Distribution::Gamma { .. } => "gamma",
            Distribution::Poisson { .. } => "poisson",
            Distribution::UniformInt { .. } => "uniform_int",
            Distribution::Bernoulli { .. } => "bernoulli",
            Distribution::Bits => "bits",
        }
    }

    /// Checks that elements of this dtype can be drawn from the distribution.
    ///
    /// ```
    /// use isoshard::{rng::Distribution, tensor::DType};
    /// assert!(Distribution::STANDARD.check(DType::BF16).is_ok());
    /// let refused = Distribution::STANDARD.check(DType::I64).unwrap_err();
    /// assert_eq!(refused.to_string(), "normal: this dtype has no such numbers; got i64; draw floats, and cast");
    /// ```
    ///
    /// # Errors
    /// Refuses unsound parameters (bounds that are not finite or not in order, an empty range of integers or one that leaves
    /// the dtype, a negative std, a truncation that is more than 1e150 of the std away, a probability outside [0, 1]; rates, shapes and
    /// scales as their fills do) and dtypes that have no such numbers.
    pub fn check(&self, dtype: DType) -> Result<()> {
        let whole = !dtype.is_float() && dtype != DType::Bool;
        let (has, remedy) = match self {
            Distribution::Bernoulli { .. } => (true, ""),
            Distribution::Bits | Distribution::UniformInt { .. } => {
                (whole, "draw integers, or another distribution")
            }
            Distribution::Poisson { .. } => {
                (dtype.is_float() || (whole && dtype != DType::U8), "draw i64, and cast")
            }
            _ => (dtype.is_float(), "draw floats, and cast"),
        };
        if !has {
            return Err(Error::invalid(self.name(), "this dtype has no such numbers", dtype.name(), remedy));
        }
        self.check_parameters(dtype)
    }

    /// Refuses unsound parameters, for a dtype that has such numbers.
    fn check_parameters(&self, dtype: DType) -> Result<()> {
        let expect = |sound: bool, rule| {
            if sound { Ok(()) } else { Err(Error::invalid(self.name(), rule, format!("{self:?}"), "")) }
        };
        match *self {
            Distribution::Uniform { low, high } => {
                let finite = [low, high, high - low].iter().all(|&x| wide(x, dtype).is_finite());
                expect(low <= high && finite, "bounds must be finite and in order")
            }
            Distribution::Normal { mean, std } => {
                let sound = mean.is_finite() && std.is_finite() && std >= 0.0;
                expect(sound, "mean and std must be finite, the std not negative")
            }
            Distribution::TruncatedNormal { mean, std, low, high } => {
                let sound = Truncated { mean, std, low, high }.check();
                sound.map_err(|e| named(self.name(), e))
            }
            Distribution::LogNormal { mean, std } => check_log_normal(mean, std),
            Distribution::Exponential { rate } => check_exponential(rate, dtype),
            Distribution::Gamma { shape, scale } => gamma::check(shape, scale, dtype),
            Distribution::Poisson { rate } => poisson::check(rate),
            Distribution::UniformInt { low, high } => integers::check(low, high, dtype),
            Distribution::Bernoulli { p } => expect((0.0..=1.0).contains(&p), "a probability lies in [0, 1]"),
            Distribution::Bits => Ok(()),
        }
    }
}

/// Replaces the verb of an error.
pub(in crate::rng) fn named(verb: &str, mut error: Error) -> Error {
    if let Error::Invalid(refusal) = &mut error {
        refusal.verb = verb.into();
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Mesh, Region, Spec};
    use crate::rng::Draw;
    use crate::rng::distributions::continuous::{exponential, log_normal};
    use crate::rng::distributions::fill::{bits32, bits64, normal, uniform};
    use crate::rng::distributions::integers::uniform_int;
    use crate::rng::distributions::keep::bernoulli;
    use crate::rng::{gamma, poisson};
    use crate::tensor::cpu::{Isa, with_isa};
    use crate::tensor::{Dims, Element, Shape, for_dtype};

    const DRAW: Draw = Draw { seed: 3, number: 8 };
    const ALL: [Distribution; 15] = [
        Distribution::UNIT,
        Distribution::Uniform { low: -0.1, high: 0.3 },
        Distribution::Normal { mean: 0.5, std: 2.0 },
        Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -1.0, high: 0.5 },
        Distribution::LogNormal { mean: -0.5, std: 0.7 },
        Distribution::Exponential { rate: 1.5 },
        Distribution::Gamma { shape: 0.4, scale: 2.0 },
        Distribution::Gamma { shape: 3.0, scale: 0.5 },
        Distribution::Poisson { rate: 2.5 },
        Distribution::Poisson { rate: 40.0 },
        Distribution::UniformInt { low: 7, high: 213 },
        // Half of the words are rejected, and a quarter of the pairs.
        Distribution::UniformInt { low: -1 << 30, high: (1 << 30) + 1 },
        Distribution::UniformInt { low: -3, high: 3 << 61 },
        Distribution::Bernoulli { p: 0.3 },
        Distribution::Bits,
    ];

    #[test]
    fn they_are_the_fills_that_they_name() {
        let (mut got, mut want) = ([0.0f32; 70], [0.0f32; 70]);
        Distribution::UNIT.fill(DRAW, 5, &mut got).unwrap();
        uniform(DRAW, 5, &mut want);
        assert_eq!(got, want);
        Distribution::STANDARD.fill(DRAW, 5, &mut got).unwrap();
        normal(DRAW, 5, &mut want);
        assert_eq!(got, want);
        let mut words = [0u32; 70];
        bits32(DRAW, 5, &mut words);
        let (mut ints, mut bytes) = ([0i32; 70], [0u8; 70]);
        Distribution::Bits.fill(DRAW, 5, &mut ints).unwrap();
        Distribution::Bits.fill(DRAW, 5, &mut bytes).unwrap();
        assert_eq!((ints.map(|x| x as u32), bytes.map(u32::from)), (words, words.map(|w| w >> 24)));
        Distribution::LogNormal { mean: 0.1, std: 0.3 }.fill(DRAW, 5, &mut got).unwrap();
        log_normal(DRAW, 5, 0.1, 0.3, &mut want).unwrap();
        assert_eq!(got, want);
        Distribution::Exponential { rate: 0.3 }.fill(DRAW, 5, &mut got).unwrap();
        exponential(DRAW, 5, 0.3, &mut want).unwrap();
        assert_eq!(got, want);
        Distribution::Gamma { shape: 0.3, scale: 2.0 }.fill(DRAW, 5, &mut got).unwrap();
        gamma(DRAW, 5, 0.3, 2.0, &mut want).unwrap();
        assert_eq!(got, want);
        Distribution::Poisson { rate: 12.0 }.fill(DRAW, 5, &mut got).unwrap();
        Distribution::Poisson { rate: 12.0 }.fill(DRAW, 5, &mut ints).unwrap();
        poisson(DRAW, 5, 12.0, &mut want).unwrap();
        assert_eq!((got, ints.map(|x| x as f32)), (want, want));
        Distribution::UniformInt { low: 5, high: 205 }.fill(DRAW, 5, &mut ints).unwrap();
        Distribution::UniformInt { low: 5, high: 205 }.fill(DRAW, 5, &mut bytes).unwrap();
        let mut some = [0i64; 70];
        uniform_int(DRAW, 5, 5, 205, &mut some).unwrap();
        assert_eq!((ints.map(i64::from), bytes.map(i64::from)), (some, some));
        let (mut longs, mut pairs) = ([0i64; 70], [0u64; 70]);
        Distribution::Bits.fill(DRAW, 5, &mut longs).unwrap();
        bits64(DRAW, 5, &mut pairs);
        assert_eq!(longs.map(|x| x as u64), pairs);
    }

    #[test]
    fn every_type_gets_the_same_coins() {
        let mut mask = [false; 1300];
        bernoulli(DRAW, 5, 0.3, &mut mask).unwrap();
        for dtype in DType::ALL {
            for_dtype!(any dtype, T => {
                let mut out = [T::default(); 1300];
                Distribution::Bernoulli { p: 0.3 }.fill(DRAW, 5, &mut out).unwrap();
                assert!(out.iter().zip(mask).all(|(x, bit)| x.to_f64() == f64::from(u8::from(bit))), "{dtype}");
            });
        }
    }

    /// Elements at huge indices, and parts that begin and end within a block of four or a pair, without the tensor.
    #[test]
    fn regions_beyond_any_memory_are_the_wholes_elements() {
        let huge = 1usize << 33;
        for spec in [
            format!("f32[{}]@(a:RS(0..1; {}, 7, 0, 2))", huge * 512 + 9, huge * 512),
            format!("f32[{}, 3]@(a:RS(0..2; {}, 2, 1, 0))", huge + 1, 3 * huge),
            format!("f32[2, {}, 3]@(a:RS(0..2; {}, 2, 0, 5))", huge * 3, huge * 6 - 7),
        ] {
            let mesh = Mesh::new(&[("a", 4)], 0).unwrap();
            let spec = Spec::parse(&spec, &mesh).unwrap_or_else(|e| panic!("{spec}: {e}"));
            for rank in 1..4 {
                let region = spec.region_at(&[rank]);
                for distribution in ALL {
                    for dtype in DType::ALL.into_iter().filter(|&d| distribution.check(d).is_ok()) {
                        for_dtype!(any dtype, T => {
                            let mut part = vec![T::default(); region.numel()];
                            distribution.fill_region(DRAW, &spec.shape, &region, &mut part).unwrap();
                            region.runs(&spec.shape, |start, at, len| {
                                assert!(start > 1 << 32);
                                for i in 0..len {
                                    let mut one = [T::default()];
                                    distribution.fill(DRAW, start + i as u64, &mut one).unwrap();
                                    assert_eq!(one[0], part[at + i], "{distribution:?} of {spec}");
                                }
                            });
                        });
                    }
                }
            }
        }
    }

    /// Ranges shorter and longer than a chunk, and more than one batch of them, on every instruction set.
    #[test]
    fn many_stretches_are_the_wholes_elements() {
        for (row, first, len) in [(3, 1, 1), (9, 2, 5), (100, 51, 48), (400, 99, 131), (700, 0, 300)] {
            let rows = 1200 / len + 3;
            let shape = Shape::from([(1 << 33) + rows, row]);
            let region = Region::of_box(Dims::from_slice(&[1 << 33, first]), [rows, len].into());
            for distribution in ALL {
                for dtype in DType::ALL.into_iter().filter(|&d| distribution.check(d).is_ok()) {
                    for_dtype!(any dtype, T => {
                        let mut want = vec![T::default(); region.numel()];
                        region.runs(&shape, |start, at, len| {
                            distribution.fill(DRAW, start, &mut want[at..at + len]).unwrap();
                        });
                        for &isa in Isa::available() {
                            let mut part = vec![T::default(); region.numel()];
                            let fill = || distribution.fill_region(DRAW, &shape, &region, &mut part);
                            with_isa(isa, fill).unwrap();
                            assert!(part == want, "{distribution:?} of {dtype}, {len} of {row}, {isa:?}");
                        }
                    });
                }
            }
        }
    }

    #[test]
    fn refusals() {
        let said = |d: Distribution, dtype| d.check(dtype).unwrap_err().to_string();
        assert_eq!(
            said(Distribution::Uniform { low: 1.0, high: 0.0 }, DType::F32),
            "uniform: bounds must be finite and in order; got Uniform { low: 1.0, high: 0.0 }"
        );
        assert_eq!(
            said(Distribution::Bernoulli { p: f64::NAN }, DType::Bool),
            "bernoulli: a probability lies in [0, 1]; got Bernoulli { p: NaN }"
        );
        assert!(said(Distribution::Normal { mean: 0.0, std: -1.0 }, DType::F32).starts_with("normal: "));
        let truncated = Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: 4.0, high: 3.0 };
        assert!(said(truncated, DType::F32).starts_with("truncated_normal: "));
        assert!(said(Distribution::Bits, DType::Bool).starts_with("bits: "));
        assert_eq!(
            said(Distribution::UniformInt { low: 3, high: 300 }, DType::U8),
            "uniform_int: wants low < high, within u8; got 3 to below 300; u8 holds 0 to 255"
        );
        assert_eq!(
            said(Distribution::UniformInt { low: 3, high: 3 }, DType::F32),
            "uniform_int: this dtype has no such numbers; got f32; draw integers, or another distribution"
        );
        assert_eq!(
            said(Distribution::Poisson { rate: 3.0 }, DType::U8),
            "poisson: this dtype has no such numbers; got u8; draw i64, and cast"
        );
        assert_eq!(
            said(Distribution::Poisson { rate: -1.0 }, DType::I32),
            "poisson: a rate lies between 0 and 2^50; got -1"
        );
        // This number is a rate in f64 and rounds to 0 in f32.
        let slow = Distribution::Exponential { rate: 1e-60 };
        slow.check(DType::F64).unwrap();
        assert!(said(slow, DType::BF16).starts_with("exponential: a rate is positive and finite; got 0.00"));
        let flat = Distribution::Gamma { shape: 0.0, scale: 1.0 };
        assert_eq!(
            said(flat, DType::F64),
            "gamma: shape and scale are positive and finite; got shape 0, scale 1 for f64"
        );
        assert_eq!(
            said(Distribution::LogNormal { mean: 0.0, std: -1.0 }, DType::F32),
            "log_normal: a mean is finite, a std finite and not negative; got mean 0, std -1"
        );
        said(Distribution::Exponential { rate: 1.0 }, DType::I64);
        said(Distribution::Uniform { low: -3e38, high: 3e38 }, DType::F16);
        Distribution::Uniform { low: -3e38, high: 3e38 }.check(DType::F64).unwrap();
        let region = Region::whole(&[3].into());
        let text = Distribution::UNIT.fill_region(DRAW, &[3].into(), &region, &mut [0.0f32; 2]);
        assert_eq!(
            text.unwrap_err().to_string(),
            "uniform: the storage is not the region's; got 2 elements for [3]"
        );
    }
}
