//! Initialisations of parameters, as values.

use super::counter::index_ranges::{IndexRanges, IndexSource};
use super::distributions::distribution::named;
use super::distributions::fill::RandomFloat;
use super::distributions::random_element::floats;
use super::orthogonal::Orthogonal;
use super::regions::{expect_storage, unshare};
use super::{Distribution, Draw, cuda};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{DType, Device, Element, Float, Shape, Tensor, for_dtype};

/// An initialisation of a parameter.
///
/// The fans are those of the *global* shape: see [`Fans::of`].
///
/// ```
/// use isoshard::rng::{Generator, Init};
/// let draw = Generator::new(0).next_draw();
/// let mut row = [0.0f32; 64]; // row 5 of a weight [128, 64]
/// Init::KaimingUniform { gain: 1.0 }.fill(draw, &[128, 64], 5 * 64, &mut row)?;
/// assert!(row.iter().all(|x| x.abs() <= (3.0f32 / 64.0).sqrt()));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// 0.
    Zeros,
    /// 1.
    Ones,
    /// This value.
    Constant(f64),
    /// Uniform between `low` and `high`: fma(u, high - low, low), with both rounded to f32 (f64 for f64).
    Uniform {
        /// The lowest value.
        low: f64,
        /// The upper end, which occurs only by rounding.
        high: f64,
    },
    /// Normal: fma(z, std, mean), with both rounded to f32 (f64 for f64).
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Normal, conditioned on [`low`, `high`]; by rejection per element.
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
    /// Uniform within ±gain sqrt(6 / (fan in + fan out)) (Glorot and Bengio, AISTATS 2010).
    XavierUniform {
        /// A factor, 1 for linear units.
        gain: f64,
    },
    /// Normal with std gain sqrt(2 / (fan in + fan out)).
    XavierNormal {
        /// A factor, 1 for linear units.
        gain: f64,
    },
    /// Uniform within ±gain sqrt(3 / fan in) (He et al., ICCV 2015). PyTorch's `Linear` starts from gain sqrt(1/3).
    KaimingUniform {
        /// A factor, sqrt(2) for rectified units.
        gain: f64,
    },
    /// Normal with std gain / sqrt(fan in).
    KaimingNormal {
        /// A factor, sqrt(2) for rectified units.
        gain: f64,
    },
    /// A random matrix with orthonormal rows or columns, whichever are fewer, times `gain`. A tensor of more dims is seen as
    /// `[first, all others]` (Saxe, McClelland and Ganguli, ICLR 2014).
    ///
    /// It is Q of the QR decomposition, by Householder reflections in f64, of the draw's normal matrix (of its transpose if it is
    /// wide), with the sign of R's diagonal per column, rounded once. So it is uniform over all such matrices (Mezzadri, Notices
    /// of the AMS 54, 2007), and the same for all dtypes up to that rounding.
    ///
    /// Each element depends on all others. Every rank that stores any computes the whole matrix, in 4 m n^2 operations and 8 m n
    /// bytes for m >= n, and keeps its shard: 0.2 s for 768 x 768, 1 s for 3072 x 768 and 4 s for 2048 x 2048 on one core with
    /// AVX-512. Nothing is communicated.
    Orthogonal {
        /// A factor.
        gain: f64,
    },
}

/// The number of inputs per output of a weight, and the number of outputs per input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fans {
    /// Inputs per output.
    pub fan_in: usize,
    /// Outputs per input.
    pub fan_out: usize,
}

impl Fans {
    /// Returns the fans of a weight `[out, in, ...]`. Further dims are a receptive field, whose size multiplies both.
    ///
    /// ```
    /// use isoshard::rng::Fans;
    /// assert_eq!(Fans::of(&[8, 3, 5, 5])?, Fans { fan_in: 75, fan_out: 200 });
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses fewer than two dims, and shapes of more than 2^63 - 1 elements.
    pub fn of(global_shape: &[usize]) -> Result<Fans> {
        let [outputs, inputs, field @ ..] = global_shape else {
            return Err(Error::invalid(
                "init",
                "fans need a weight of two or more dims, [out, in, …]",
                Shape::from(global_shape).to_string(),
                "name a distribution with its own width",
            ));
        };
        Shape::from(global_shape).checked_numel("init")?;
        let field: usize = field.iter().product();
        Ok(Fans { fan_in: inputs * field, fan_out: outputs * field })
    }
}

impl Init {
    /// Writes the values of elements `start..start + out.len()` (global, row-major) of a tensor of this global shape.
    ///
    /// A part has the whole's values. Constants do not read `draw`. To fill many ranges, [prepare](Init::prepare) once.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Init};
    /// let mut row = [0.0f32; 3];
    /// Init::Constant(2.0).fill(Generator::new(0).next_draw(), &[4, 3], 3, &mut row)?;
    /// assert_eq!(row, [2.0; 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a range that leaves the tensor, bounds that are not finite or not in order, a negative std, a truncation
    /// that is more than 1e150 of the std away, and fans of a shape that has none.
    pub fn fill<T: RandomFloat>(
        &self,
        draw: Draw,
        global_shape: &[usize],
        start: u64,
        out: &mut [T],
    ) -> Result<()> {
        self.prepare(draw, global_shape)?.fill(start, out)
    }

    /// Returns the values of a tensor of this global shape, ready to be written range by range.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Init};
    /// let values = Init::Orthogonal { gain: 1.0 }.prepare(Generator::new(0).next_draw(), &[2, 2])?;
    /// let (mut first, mut second) = ([0.0f64; 2], [0.0f64; 2]);
    /// values.fill(0, &mut first)?;
    /// values.fill(2, &mut second)?;
    /// assert!((first[0] * second[0] + first[1] * second[1]).abs() < 1e-12);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Init::fill`], except that of the range.
    pub fn prepare(&self, draw: Draw, global_shape: &[usize]) -> Result<InitValues> {
        let global = Shape::from(global_shape);
        global.checked_numel("init")?;
        let rule = match self.resolve(global_shape)? {
            Init::Constant(value) => InitRule::Constant(value),
            Init::Orthogonal { gain } => InitRule::Matrix(Orthogonal::new(draw, global_shape, gain)),
            other => InitRule::Independent(
                draw,
                other.distribution().expect("resolve leaves constants, matrices and these"),
            ),
        };
        Ok(InitValues { global, rule })
    }

    /// Returns the same initialisation as one of `Constant`, `Uniform`, `Normal`, `TruncatedNormal` and `Orthogonal`.
    ///
    /// ```
    /// use isoshard::rng::Init;
    /// let resolved = Init::KaimingNormal { gain: 2.0 }.resolve(&[8, 16])?;
    /// assert_eq!(resolved, Init::Normal { mean: 0.0, std: 0.5 });
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Init::fill`], except that of the range.
    pub fn resolve(&self, global_shape: &[usize]) -> Result<Init> {
        let symmetric = |bound: f64| Init::Uniform { low: -bound, high: bound };
        let centred = |std: f64| Init::Normal { mean: 0.0, std };
        // The fans of a weight without elements are 0.
        let fan_in = || Ok::<_, Error>(Fans::of(global_shape)?.fan_in.max(1) as f64);
        let fan_sum = || Fans::of(global_shape).map(|f| (f.fan_in + f.fan_out).max(1) as f64);
        let resolved = match *self {
            Init::Zeros => Init::Constant(0.0),
            Init::Ones => Init::Constant(1.0),
            Init::XavierUniform { gain } => symmetric(gain * (6.0 / fan_sum()?).sqrt()),
            Init::XavierNormal { gain } => centred(gain * (2.0 / fan_sum()?).sqrt()),
            Init::KaimingUniform { gain } => symmetric(gain * (3.0 / fan_in()?).sqrt()),
            Init::KaimingNormal { gain } => centred(gain / fan_in()?.sqrt()),
            other => other,
        };
        resolved.check(global_shape)?;
        Ok(resolved)
    }

    /// Returns the distribution of the elements, if they are independent and the initialisation is resolved.
    fn distribution(&self) -> Option<Distribution> {
        Some(match *self {
            Init::Uniform { low, high } => Distribution::Uniform { low, high },
            Init::Normal { mean, std } => Distribution::Normal { mean, std },
            Init::TruncatedNormal { mean, std, low, high } => {
                Distribution::TruncatedNormal { mean, std, low, high }
            }
            _ => return None,
        })
    }

    fn check(&self, global_shape: &[usize]) -> Result<()> {
        if let Some(distribution) = self.distribution() {
            return distribution.check(DType::F64).map_err(|e| named("init", e));
        }
        match *self {
            Init::Orthogonal { .. } if global_shape.len() < 2 => Err(Error::invalid(
                "init",
                "an orthogonal matrix has two or more dims, [rows, columns, …]",
                Shape::from(global_shape).to_string(),
                "draw a vector from a distribution",
            )),
            Init::Orthogonal { gain } if !gain.is_finite() => {
                Err(Error::invalid("init", "a gain is finite", format!("{self:?}"), ""))
            }
            _ => Ok(()),
        }
    }
}

/// The values of one parameter, made by [`Init::prepare`].
#[derive(Clone, Debug)]
pub struct InitValues {
    global: Shape,
    rule: InitRule,
}

#[derive(Clone, Debug)]
enum InitRule {
    Constant(f64),
    Independent(Draw, Distribution),
    Matrix(Orthogonal),
}

impl InitValues {
    /// Writes elements `start..start + out.len()` (global, row-major).
    ///
    /// ```
    /// use isoshard::rng::{Generator, Init};
    /// let values = Init::Ones.prepare(Generator::new(0).next_draw(), &[4])?;
    /// let mut tail = [0.0f32; 2];
    /// values.fill(2, &mut tail)?;
    /// assert_eq!(tail, [1.0, 1.0]);
    /// assert!(values.fill(3, &mut tail).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a range that leaves the tensor, and an orthogonal matrix for which there is no room.
    pub fn fill<T: RandomFloat>(&self, start: u64, out: &mut [T]) -> Result<()> {
        self.expect_inside(start, out.len())?;
        match &self.rule {
            InitRule::Constant(value) => out.fill(T::narrow(Element::from_f64(*value))),
            InitRule::Independent(draw, from) => floats(*from, *draw, start.ranges(), out),
            InitRule::Matrix(matrix) => return matrix.fill(start, out),
        }
        Ok(())
    }

    /// Writes the elements of `region` to `out`, the region's local storage.
    ///
    /// # Errors
    /// Refuses an `out` of another length than the region's, and a region of another tensor that leaves this one.
    pub(crate) fn fill_region<T: RandomFloat>(&self, region: &Region, out: &mut [T]) -> Result<()> {
        expect_storage("init", region, out.len())?;
        if let InitRule::Independent(draw, from) = &self.rule {
            return IndexRanges::of(region, &self.global, |at, here| {
                self.expect_inside(at.index(here.len() - 1), 1)?;
                floats(*from, *draw, at, &mut out[here]);
                Ok(())
            });
        }
        let mut done = Ok(());
        region.runs(&self.global, |start, at, len| {
            if done.is_ok() {
                done = self.fill(start, &mut out[at..at + len]);
            }
        });
        done
    }

    /// Writes the elements of `region` to `local`, the region's storage on any device, in place if the storage is not shared.
    /// Every device gives the same bits. An orthogonal matrix is computed on the host and copied.
    ///
    /// ```
    /// use isoshard::{placement::Region, rng::{Generator, Init}, tensor::{DType, Tensor}};
    /// let mut x = Tensor::zeros(DType::F32, [3]);
    /// let values = Init::Constant(0.5).prepare(Generator::new(0).next_draw(), &[3])?;
    /// values.fill_tensor(&Region::whole(&[3].into()), &mut x)?;
    /// assert_eq!(x.to_vec::<f32>()?, [0.5; 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `local` of another length than the region's; refuses a `local` that is not floating; returns
    /// [`Error::OutOfMemory`] if the device has no room.
    pub fn fill_tensor(&self, region: &Region, local: &mut Tensor) -> Result<()> {
        let (device, dtype) = (local.device(), local.dtype());
        if device == Device::Cpu {
            return for_dtype!(float "init", dtype, T => self.fill_region::<T>(region, local.make_mut()?));
        }
        dtype.expect_float("init")?;
        expect_storage("init", region, local.numel())?;
        if device == Device::Meta {
            return Ok(());
        }
        match &self.rule {
            InitRule::Matrix(_) => {
                let mut host = Tensor::try_uninit(dtype, local.shape())?;
                self.fill_tensor(region, &mut host)?;
                *local = host.to_device(device)?;
                Ok(())
            }
            InitRule::Constant(value) => {
                unshare(local)?;
                // Rounded as a fill on the CPU rounds it, so that the kernel has nothing to round.
                let rounded = for_dtype!(float "init", dtype, T => {
                    Ok(<T as Float>::narrow(Element::from_f64(*value)).to_f64())
                })?;
                crate::tensor::cuda::fill(local, rounded)
            }
            InitRule::Independent(draw, from) => {
                let strides = self.global.strides();
                for block in &region.boxes {
                    let last = block.start.iter().zip(&block.len).zip(&strides);
                    self.expect_inside(last.map(|((i, n), s)| ((i + n - 1) * s) as u64).sum(), 1)?;
                }
                unshare(local)?;
                cuda::fill(*from, *draw, &self.global, region, local)
            }
        }
    }

    fn expect_inside(&self, start: u64, len: usize) -> Result<()> {
        let numel = self.global.numel() as u64;
        if start.checked_add(len as u64).is_some_and(|end| end <= numel) {
            return Ok(());
        }
        Err(Error::invalid(
            "init",
            "the range leaves the tensor",
            format!("{len} elements from {start} of {}", self.global),
            format!("there are {numel} elements"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW: Draw = Draw { seed: 1, number: 2 };

    fn values(init: Init, shape: &[usize]) -> Vec<f32> {
        let mut out = vec![f32::NAN; shape.iter().product()];
        init.fill(DRAW, shape, 0, &mut out).unwrap();
        out
    }

    fn std(x: &[f32]) -> f64 {
        (x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / x.len() as f64).sqrt()
    }

    #[test]
    fn widths_follow_the_global_fans() {
        assert_eq!(Fans::of(&[5, 7, 3, 2]).unwrap(), Fans { fan_in: 42, fan_out: 30 });
        let shape = [300, 200];
        // The std of 60,000 values errs by less than 2 % (normal: 7 sigma).
        for (init, want) in [
            (Init::XavierUniform { gain: 2.0 }, 2.0 * (2.0f64 / 500.0).sqrt()),
            (Init::XavierNormal { gain: 2.0 }, 2.0 * (2.0f64 / 500.0).sqrt()),
            (Init::KaimingUniform { gain: 1.5 }, 1.5 * (1.0f64 / 200.0).sqrt()),
            (Init::KaimingNormal { gain: 1.5 }, 1.5 * (1.0f64 / 200.0).sqrt()),
        ] {
            let got = std(&values(init, &shape));
            assert!((got / want - 1.0).abs() < 0.02, "{init:?}: {got} for {want}");
        }
        assert_eq!(values(Init::Ones, &[3]), [1.0; 3]);
        assert_eq!(values(Init::Zeros, &[3]), [0.0; 3]);
        assert_eq!(values(Init::Constant(0.1), &[]), [0.1]);
        assert_eq!(values(Init::KaimingNormal { gain: 1.0 }, &[0, 3]), [0.0; 0]);
        assert_eq!(values(Init::Normal { mean: 3.0, std: 0.0 }, &[3]), [3.0; 3]);
    }

    #[test]
    fn affine_is_one_rounding_of_the_standard_number() {
        let (mut u, mut z) = ([0.0f32; 50], [0.0f32; 50]);
        crate::rng::uniform(DRAW, 0, &mut u);
        crate::rng::normal(DRAW, 0, &mut z);
        let got = values(Init::Uniform { low: -0.3, high: 0.4 }, &[50]);
        assert_eq!(got, u.map(|u| u.mul_add(0.7, -0.3)));
        let got = values(Init::Normal { mean: 0.1, std: 0.02 }, &[50]);
        assert_eq!(got, z.map(|z| z.mul_add(0.02, 0.1)));
    }

    #[test]
    fn truncation_keeps_what_was_inside_and_redraws_the_rest() {
        let init = Init::TruncatedNormal { mean: 1.0, std: 0.5, low: 0.5, high: 1.75 };
        let got = values(init, &[4001]);
        let mut z = vec![0.0f32; 4001];
        crate::rng::normal(DRAW, 0, &mut z);
        let mut redrawn = 0;
        for (&x, &z) in got.iter().zip(&z) {
            assert!((0.5..=1.75).contains(&x));
            let first = (f64::from(z) * 0.5 + 1.0) as f32;
            if (0.5..=1.75).contains(&first) {
                assert_eq!(x, first);
            } else {
                redrawn += 1;
            }
        }
        // 22.5 % fall outside (-1, 1.5): 902 of 4001, with a std of 26.
        assert!((750..1050).contains(&redrawn), "{redrawn}");
        let mut part = [0.0f32; 700];
        init.fill(DRAW, &[4001], 1203, &mut part).unwrap();
        assert_eq!(part, got[1203..1903]);
    }

    #[test]
    fn refusals() {
        let refused = |init: Init, shape: &[usize], start| {
            init.fill(DRAW, shape, start, &mut [0.0f32; 2]).unwrap_err().to_string()
        };
        assert_eq!(
            refused(Init::KaimingNormal { gain: 1.0 }, &[9], 0),
            "init: fans need a weight of two or more dims, [out, in, …]; got [9]; name a distribution with its own width"
        );
        assert_eq!(
            refused(Init::Zeros, &[2, 3], 5),
            "init: the range leaves the tensor; got 2 elements from 5 of [2, 3]; there are 6 elements"
        );
        refused(Init::Zeros, &[2, 3], u64::MAX);
        refused(Init::Uniform { low: 1.0, high: 0.0 }, &[9], 0);
        refused(Init::Uniform { low: 0.0, high: f64::NAN }, &[9], 0);
        refused(Init::Normal { mean: 0.0, std: -1.0 }, &[9], 0);
        refused(Init::TruncatedNormal { mean: 0.0, std: 1.0, low: 4.0, high: 3.0 }, &[9], 0);
        refused(Init::TruncatedNormal { mean: 0.0, std: 1.0, low: f64::NAN, high: f64::NAN }, &[9], 0);
    }
}
