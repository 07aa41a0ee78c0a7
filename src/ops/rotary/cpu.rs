//! The CPU kernel of rotary position embedding.

use bytemuck::Pod;

use crate::error::{Error, Result};
use crate::tensor::cpu::{
    Isa, Kernel, Real, RowsMut, StridedRows, as_elements_mut, cast, dispatch, for_each_part, widest_of,
};
use crate::tensor::math::exp::exp_f64;
use crate::tensor::math::log::ln_f64;
use crate::tensor::math::trig::sin_cos_2pi_f64;
use crate::tensor::{DType, Dims, KernelList, Tensor, sort_by_key};

/// A rotation of elements `i` and `i + d/2` of the last dim, of extent `d`, by `position · base^(-2i/d)` radians. The
/// position is `start` plus the index along the second-to-last dim.
///
/// Angles are computed in f64, and full turns are subtracted exactly. Up to position 2^20 the largest error found is
/// 1.4e-10 radians. Sines and cosines are rounded once, to f32 (f64 for f64).
///
/// ```
/// use isoshard::{ops::cpu::Rotation, tensor::Tensor};
/// let rotation = Rotation { base: 1e4, start: 5, inverse: false };
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [1, 4])?;
/// let y = rotation.apply("rotary", &x)?;
/// let back = Rotation { inverse: true, ..rotation }.apply("rotary", &y)?;
/// assert_eq!(format!("{:.6?}", back.to_f64_vec()), "[1.000000, 2.000000, 3.000000, 4.000000]");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// The base of the geometric sequence of angles.
    pub base: f64,
    /// The position of the first row.
    pub start: usize,
    /// True to rotate by the negative angle.
    pub inverse: bool,
}

impl Rotation {
    /// Rotates `x` `[.., time, d]`, which may have any strides. The result has the same order of dims in memory as `x`.
    /// f16 and bf16 compute in f32 and round once.
    ///
    /// # Errors
    /// Refuses integers and bools, fewer than two dims, and an odd last extent. The error begins with `verb`.
    pub fn apply(&self, verb: &str, x: &Tensor) -> Result<Tensor> {
        let &[.., _, d] = &x.shape()[..] else { return Err(misfit(verb, x)) };
        if d % 2 != 0 {
            return Err(misfit(verb, x));
        }
        // Order the dims as in memory, the last one excepted.
        let last = x.shape().len() - 1;
        let mut order: Dims = (0..last).collect();
        sort_by_key(&mut order, |&dim| std::cmp::Reverse(x.strides()[dim]));
        let time = order.iter().position(|&dim| dim + 1 == last).expect("the time is a dim");
        order.push(last);
        let mut inverse = Dims::from_elem(0, order.len());
        order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
        let x = x.permute(&order)?;
        let y = match x.dtype() {
            DType::F32 => self.rotate::<f32>(&x, time)?,
            DType::F64 => self.rotate::<f64>(&x, time)?,
            half => {
                half.expect_float(verb)?;
                cast(&self.rotate::<f32>(&cast(&x, DType::F32)?, time)?, half)?
            }
        };
        y.permute(&inverse)
    }

    /// Rotates vectors along the last dim, whose positions count along dim `time`. The result is contiguous.
    fn rotate<T: Real + Pod>(&self, x: &Tensor, time: usize) -> Result<Tensor> {
        let last = x.shape().len() - 1;
        let (len, d) = (x.shape()[time], x.shape()[last]);
        let copied = if d > 1 && x.strides()[last] != 1 { x.contiguous()? } else { x.clone() };
        let mut out = Tensor::uninit(T::DTYPE, x.shape());
        if out.numel() > 0 {
            let mut steps = Dims::from_elem(0, last);
            steps[time] = 1;
            let strided = StridedRows::new(&x.shape()[..last], [&copied.strides()[..last], &steps]);
            let mut runs = Vec::with_capacity(strided.row_count());
            strided.each_row(|run| runs.push(*run));
            let (x, rows, table) =
                (copied.data::<T>()?, strided.row_len(), Table::new("rotary", self, len, d / 2)?);
            let steps = [strided.row_stride(0), strided.row_stride(1)];
            let nanos = out.numel();
            let out = RowsMut { data: as_elements_mut::<T>(out.bytes_mut()), len: rows * d };
            for_each_part(runs.len(), nanos, out, |at, out| {
                dispatch(Rotate { x, runs: &runs[at], rows, steps, table: &table, out: out.data });
            });
        }
        Ok(out)
    }
}

fn misfit(verb: &str, x: &Tensor) -> Error {
    Error::invalid(verb, "wants [.., time, d] with an even d", x.notation(), "")
}

/// Cosines and sines `[time, pairs]`.
struct Table<A> {
    cos: KernelList<A>,
    sin: KernelList<A>,
    pairs: usize,
}

impl<A: Real + Pod> Table<A> {
    fn new(verb: &str, rotation: &Rotation, time: usize, pairs: usize) -> Result<Self> {
        // Turns per position.
        let ln = ln_f64(rotation.base);
        let turns: Vec<f64> = (0..pairs)
            .map(|i| exp_f64(-(i as f64 / pairs as f64) * ln) * std::f64::consts::FRAC_1_PI * 0.5)
            .collect();
        let zeros = || KernelList::zeros(verb, time * pairs);
        let mut table = Table { cos: zeros()?, sin: zeros()?, pairs };
        if pairs > 0 {
            dispatch(FillTable { table: &mut table, turns: &turns, rotation });
        }
        Ok(table)
    }

    /// Returns the cosines and sines of row `i`.
    #[inline(always)]
    fn row(&self, i: usize) -> (&[A], &[A]) {
        let at = i * self.pairs..(i + 1) * self.pairs;
        (&self.cos[at.clone()], &self.sin[at])
    }
}

/// The kernel that computes the table.
struct FillTable<'a, A> {
    table: &'a mut Table<A>,
    turns: &'a [f64],
    rotation: &'a Rotation,
}

impl<A: Real + Pod> Kernel for FillTable<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        // Adding 1.5 * 2^52 and subtracting it again rounds to the nearest integer.
        const ROUND: f64 = 6_755_399_441_055_744.0;
        let sign = if self.rotation.inverse { -1.0 } else { 1.0 };
        let pairs = self.table.pairs;
        let rows = self.table.cos.chunks_exact_mut(pairs).zip(self.table.sin.chunks_exact_mut(pairs));
        for (i, (cos, sin)) in rows.enumerate() {
            let position = (self.rotation.start + i) as f64;
            for ((cos, sin), &turn) in cos.iter_mut().zip(sin).zip(self.turns) {
                let high = position * turn;
                let low = position.mul_add(turn, -high);
                let (s, c) = sin_cos_2pi_f64((high - ((high + ROUND) - ROUND)) + low);
                (*cos, *sin) = (A::of(c), A::of(sign * s));
            }
        }
    }
}

/// The kernel that rotates rows.
struct Rotate<'a, T> {
    x: &'a [T],
    /// For each run of rows, the offset in `x` and the position of its first row.
    runs: &'a [[usize; 2]],
    /// The number of rows per run.
    rows: usize,
    /// The steps of offset and position from one row to the next.
    steps: [usize; 2],
    table: &'a Table<T>,
    out: &'a mut [T],
}

impl<T: Real + Pod> Kernel for Rotate<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let d = 2 * self.table.pairs;
        for (&[at, position], out) in self.runs.iter().zip(self.out.chunks_exact_mut(self.rows * d)) {
            for (i, out) in out.chunks_exact_mut(d).enumerate() {
                let x = &self.x[at + i * self.steps[0]..][..d];
                rotate_row(x, self.table.row(position + i * self.steps[1]), out);
            }
        }
    }
}

#[inline(always)]
fn rotate_row<A: Real>(x: &[A], (cos, sin): (&[A], &[A]), out: &mut [A]) {
    let pairs = cos.len();
    let ((a, b), (x, y)) = (x.split_at(pairs), out.split_at_mut(pairs));
    let (a, b, sin, x, y) = (&a[..pairs], &b[..pairs], &sin[..pairs], &mut x[..pairs], &mut y[..pairs]);
    for i in 0..pairs {
        x[i] = a[i].mul_add(cos[i], -(b[i] * sin[i]));
        y[i] = b[i].mul_add(cos[i], a[i] * sin[i]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Isa, with_isa};

    const FORWARD: Rotation = Rotation { base: 1e4, start: 0, inverse: false };

    fn noise(shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919) % 1009) as f64 * 0.003 - 1.5;
        Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<f64>>(), shape).unwrap()
    }

    #[test]
    fn angles_are_right_up_to_a_million_positions() {
        let (d, time) = (64, 70);
        let x = noise([1, time, d]);
        let mut worst = 0.0f64;
        for start in [0, 1000, 123_456, 1_048_576 - time] {
            for base in [1e4, 5e5] {
                let y = Rotation { base, start, ..FORWARD }.apply("rotary", &x).unwrap().to_f64_vec();
                let x = x.to_f64_vec();
                for (i, j) in (0..time).flat_map(|i| (0..d / 2).map(move |j| (i, j))) {
                    let angle = (start + i) as f64 * base.powf(-(2.0 * j as f64) / d as f64);
                    let ((s, c), at) = (angle.sin_cos(), i * d + j);
                    let (a, b) = (x[at], x[at + d / 2]);
                    worst = worst.max((y[at] - (a * c - b * s)).abs());
                    worst = worst.max((y[at + d / 2] - (b * c + a * s)).abs());
                }
            }
        }
        assert!(worst < 4e-9, "{worst}: the library's power and product are no better than that");
    }

    #[test]
    fn layouts_cuts_and_instruction_sets_give_the_same_bits() {
        let bits = |t: &Tensor| t.contiguous().unwrap().as_bytes().unwrap().to_vec();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = cast(&noise([2, 3, 7, 6]), dtype).unwrap();
            let want = FORWARD.apply("rotary", &x).unwrap();
            let transposed = x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
            let got = FORWARD.apply("rotary", &transposed).unwrap();
            assert_eq!(bits(&got), bits(&want), "{dtype}");
            assert!(
                got.transpose(1, 2).unwrap().is_contiguous(),
                "the result's strides are ordered as the operand's"
            );
            let apart = x.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap();
            assert_eq!(bits(&FORWARD.apply("rotary", &apart).unwrap()), bits(&want), "{dtype}");
            for (start, len) in [(0, 1), (3, 4), (6, 1), (2, 0)] {
                let part = Rotation { start, ..FORWARD }.apply("rotary", &x.narrow(2, start, len).unwrap());
                assert_eq!(bits(&part.unwrap()), bits(&want.narrow(2, start, len).unwrap()), "{dtype}");
            }
            for &isa in Isa::available() {
                with_isa(isa, || assert_eq!(bits(&FORWARD.apply("rotary", &x).unwrap()), bits(&want)));
            }
        }
    }

    #[test]
    fn turning_back_undoes_it() {
        let x = noise([3, 5, 4]);
        let y = Rotation { start: 999_999, ..FORWARD }.apply("rotary", &x).unwrap();
        let back = Rotation { start: 999_999, inverse: true, ..FORWARD }.apply("rotary", &y).unwrap();
        for (got, want) in back.to_f64_vec().iter().zip(x.to_f64_vec()) {
            assert!((got - want).abs() < 1e-14);
        }
        let first = y.narrow(1, 0, 1).unwrap();
        assert_ne!(first.to_f64_vec(), x.narrow(1, 0, 1).unwrap().to_f64_vec());
    }

    #[test]
    fn refusals_and_empty() {
        let refused = FORWARD.apply("rotary", &noise([2, 3])).unwrap_err().to_string();
        assert_eq!(refused, "rotary: wants [.., time, d] with an even d; got f64[2, 3]");
        assert!(FORWARD.apply("rotary", &noise([4])).is_err());
        assert!(FORWARD.apply("rotary", &Tensor::zeros(DType::I64, [2, 4])).is_err());
        assert_eq!(FORWARD.apply("rotary", &noise([2, 0, 4])).unwrap().shape()[..], [2, 0, 4]);
        assert_eq!(FORWARD.apply("rotary", &noise([2, 3, 0])).unwrap().shape()[..], [2, 3, 0]);
    }
}
