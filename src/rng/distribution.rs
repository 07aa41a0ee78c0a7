//! Distributions as values: what is drawn, apart from where its elements lie.

use half::{bf16, f16};

use super::fill::{Real, bits32, bits64};
use super::sample::{Affine, Normal, Uniform};
use super::truncated::Truncated;
use super::{Draw, bernoulli};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{DType, Element, Shape};

/// What the elements of a random tensor are drawn from.
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
        /// The upper end, met only by rounding.
        high: f64,
    },
    /// Normal: fma(z, std, mean), with both rounded to f32 (f64 for f64). Floating.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Normal, conditioned on [`low`, `high`]; by rejection, each element on its own. Floating.
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
    /// True, or 1, with probability `p` (to 2^-32); else false, or 0. Any dtype, the same elements in all.
    Bernoulli {
        /// The probability.
        p: f64,
    },
    /// All bits: of i64 the 64-bit draw, of i32 the 32-bit one, of u8 its upper 8 bits. Integers.
    Bits,
}

/// An element type that a [`Distribution`] can fill: every one there is. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait Drawn: Element + Fill {}

impl<T: Fill> Drawn for T {}

impl Distribution {
    /// Uniform in [0, 1).
    pub const UNIT: Distribution = Distribution::Uniform { low: 0.0, high: 1.0 };
    /// Normal with mean 0 and standard deviation 1.
    pub const STANDARD: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

    /// The name, as errors call it.
    pub fn name(&self) -> &'static str {
        match self {
            Distribution::Uniform { .. } => "uniform",
            Distribution::Normal { .. } => "normal",
            Distribution::TruncatedNormal { .. } => "truncated_normal",
            Distribution::Bernoulli { .. } => "bernoulli",
            Distribution::Bits => "bits",
        }
    }

    /// Whether elements of this dtype can be drawn from it.
    ///
    /// # Errors
    /// Refuses, by name, parameters that are unsound (bounds that are not finite or not in order, a negative std, a
    /// truncation that leaves almost nothing, a probability outside [0, 1]) and dtypes that have no such numbers.
    pub fn check(&self, dtype: DType) -> Result<()> {
        let refuse = |rule| Err(Error::invalid(self.name(), rule, format!("{self:?}"), ""));
        match *self {
            Distribution::Uniform { low, high } if !(low <= high && (high - low).is_finite()) => {
                return refuse("bounds must be finite and in order");
            }
            Distribution::Normal { mean, std } if !(mean.is_finite() && std.is_finite() && std >= 0.0) => {
                return refuse("mean and std must be finite, the std not negative");
            }
            Distribution::TruncatedNormal { mean, std, low, high } => {
                let sound = Truncated { mean, std, low, high }.check();
                sound.map_err(|e| named(self.name(), e))?;
            }
            Distribution::Bernoulli { p } if !(0.0..=1.0).contains(&p) => {
                return refuse("a probability lies in [0, 1]");
            }
            _ => {}
        }
        let has = match self {
            Distribution::Bernoulli { .. } => true,
            Distribution::Bits => !dtype.is_float() && dtype != DType::Bool,
            _ => dtype.is_float(),
        };
        if has {
            return Ok(());
        }
        Err(Error::invalid(
            self.name(),
            "this dtype has no such numbers",
            dtype.name(),
            if dtype.is_float() { "draw integers, or another distribution" } else { "draw floats, and cast" },
        ))
    }

    /// Writes the values of elements `start..start + out.len()` (global, row-major) of a tensor.
    ///
    /// Communicates nothing; any cut of the tensor gets the same values.
    ///
    /// # Errors
    /// As [`Distribution::check`].
    pub fn fill<T: Drawn>(&self, draw: Draw, start: u64, out: &mut [T]) -> Result<()> {
        self.check(T::DTYPE)?;
        T::fill(*self, draw, start, out);
        Ok(())
    }

    /// Writes the values of the elements that `region` holds of a tensor of shape `global` into `out`, its local
    /// storage: those of the whole, however it is cut.
    ///
    /// # Errors
    /// As [`Distribution::check`]; refuses an `out` of another length than the region's.
    pub fn fill_region<T: Drawn>(
        &self,
        draw: Draw,
        global: &Shape,
        region: &Region,
        out: &mut [T],
    ) -> Result<()> {
        self.check(T::DTYPE)?;
        expect_storage(self.name(), region, out.len())?;
        region.runs(global, |start, at, len| T::fill(*self, draw, start, &mut out[at..at + len]));
        Ok(())
    }
}

/// A refusal in the name of `verb`.
pub(super) fn named(verb: &str, mut error: Error) -> Error {
    if let Error::Invalid(refusal) = &mut error {
        refusal.verb = verb.into();
    }
    error
}

/// Refuses, in the name of `verb`, local storage of another length than the region's.
pub(super) fn expect_storage(verb: &str, region: &Region, len: usize) -> Result<()> {
    if region.numel() == len {
        return Ok(());
    }
    let given = format!("{len} elements for {}", region.local);
    Err(Error::invalid(verb, "the storage is not the region's", given, ""))
}

/// Fills from a distribution that was checked for this type.
trait Fill: Element {
    fn fill(from: Distribution, draw: Draw, start: u64, out: &mut [Self]);
}

macro_rules! fill {
    ($($t:ty => $with:expr;)*) => {$(
        impl Fill for $t {
            fn fill(from: Distribution, draw: Draw, start: u64, out: &mut [Self]) {
                let with: fn(Distribution, Draw, u64, &mut [Self]) = $with;
                with(from, draw, start, out)
            }
        }
    )*};
}

fill! {
    f32 => floats;
    f64 => floats;
    f16 => floats;
    bf16 => floats;
    i64 => |from, draw, start, out| match from {
        Distribution::Bits => bits64(draw, start, bytemuck::cast_slice_mut(out)),
        _ => any(from, draw, start, out),
    };
    i32 => |from, draw, start, out| match from {
        Distribution::Bits => bits32(draw, start, bytemuck::cast_slice_mut(out)),
        _ => any(from, draw, start, out),
    };
    u8 => |from, draw, start, out| match from {
        Distribution::Bits => {
            by_chunks(start, out, |start, words: &mut [u32]| bits32(draw, start, words), |w| (w >> 24) as u8)
        }
        _ => any(from, draw, start, out),
    };
    bool => |from, draw, start, out| match from {
        Distribution::Bernoulli { p } => bernoulli(draw, start, p, out).expect("checked"),
        _ => any(from, draw, start, out),
    };
}

/// What floating types have; `from` was checked.
pub(super) fn floats<T: Real>(from: Distribution, draw: Draw, start: u64, out: &mut [T]) {
    match from {
        Distribution::Uniform { low, high } => {
            T::sample(draw, 0, start, out, Uniform(Affine { scale: high - low, shift: low }));
        }
        Distribution::Normal { mean, std } => {
            T::sample(draw, 0, start, out, Normal(Affine { scale: std, shift: mean }));
        }
        Distribution::TruncatedNormal { mean, std, low, high } => {
            Truncated { mean, std, low, high }.fill(draw, start, out);
        }
        _ => any(from, draw, start, out),
    }
}

/// What every type has.
fn any<T: Element>(from: Distribution, draw: Draw, start: u64, out: &mut [T]) {
    let Distribution::Bernoulli { p } = from else { unreachable!("{from:?} was checked for {}", T::DTYPE) };
    let [no, yes] = [0.0, 1.0].map(T::from_f64);
    let mask = |start, mask: &mut [bool]| bernoulli(draw, start, p, mask).expect("checked");
    by_chunks(start, out, mask, |bit| if bit { yes } else { no });
}

/// Fills from numbers of another type, a chunk of them at a time.
fn by_chunks<A: Copy + Default, T>(
    start: u64,
    out: &mut [T],
    draw: impl Fn(u64, &mut [A]),
    to: impl Fn(A) -> T,
) {
    const CHUNK: usize = 512;
    let mut numbers = [A::default(); CHUNK];
    for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
        let numbers = &mut numbers[..out.len()];
        draw(start.wrapping_add((chunk * CHUNK) as u64), numbers);
        out.iter_mut().zip(numbers).for_each(|(out, &mut number)| *out = to(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Mesh, Spec};
    use crate::rng::{normal, uniform};
    use crate::tensor::for_dtype;

    const DRAW: Draw = Draw { seed: 3, number: 8 };
    const ALL: [Distribution; 6] = [
        Distribution::UNIT,
        Distribution::Uniform { low: -0.1, high: 0.3 },
        Distribution::Normal { mean: 0.5, std: 2.0 },
        Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -1.0, high: 0.5 },
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

    /// Elements far out, and parts that begin and end within a block of four or a pair, without the tensor.
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
        let truncated = Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: 3.0, high: 4.0 };
        assert!(said(truncated, DType::F32).starts_with("truncated_normal: "));
        assert!(said(Distribution::Bits, DType::Bool).starts_with("bits: "));
        let region = Region::whole(&[3].into());
        let text = Distribution::UNIT.fill_region(DRAW, &[3].into(), &region, &mut [0.0f32; 2]);
        assert_eq!(
            text.unwrap_err().to_string(),
            "uniform: the storage is not the region's; got 2 elements for [3]"
        );
    }
}
