//! Rotation of pairs by angles that grow with the position.

use crate::error::{Error, Result};
use crate::tensor::cpu::{Kernel, Nest, Real, as_elements_mut, cast, dispatch};
use crate::tensor::math::exp::exp_f64;
use crate::tensor::math::log::ln_f64;
use crate::tensor::math::trig::sin_cos_2pi_f64;
use crate::tensor::{DType, Dims, Tensor};

/// Elements `i` and `i + d/2` of the last dim, of extent `d`, turned by `position · base^(-2i/d)` radians.
///
/// Positions count along the dim before it. Angles are computed in f64, their turns taken off exactly; up to position
/// 2^20 the largest error found is 1.4e-10 radians. Sines and cosines are rounded to f32 (f64 for f64) once.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// The base of the geometric sequence of angles.
    pub base: f64,
    /// The position of the first row.
    pub start: usize,
    /// Whether to turn back.
    pub inverse: bool,
}

impl Rotation {
    /// `x` `[.., time, d]`, in any strides, turned. The result lies in memory as `x` does. f16 and bf16 compute in f32 and
    /// round once.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, other dtypes than floats, fewer than two dims and an odd last one.
    pub fn apply(&self, verb: &str, x: &Tensor) -> Result<Tensor> {
        let &[.., _, d] = &x.shape()[..] else { return Err(misfit(verb, x)) };
        if d % 2 != 0 {
            return Err(misfit(verb, x));
        }
        // In the order of memory, but for the last dim.
        let last = x.shape().len() - 1;
        let mut order: Dims = (0..last).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(x.strides()[dim]));
        let time = order.iter().position(|&dim| dim + 1 == last).expect("the time is a dim");
        order.push(last);
        let mut inverse = Dims::from_elem(0, order.len());
        order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
        let x = x.permute(&order)?;
        let y = match x.dtype() {
            DType::F32 => self.turn::<f32>(&x, time)?,
            DType::F64 => self.turn::<f64>(&x, time)?,
            half => {
                half.expect_float(verb)?;
                cast(&self.turn::<f32>(&cast(&x, DType::F32)?, time)?, half)?
            }
        };
        y.permute(&inverse)
    }

    /// Vectors along the last dim, at positions along dim `time`; the result is contiguous.
    fn turn<T: Real>(&self, x: &Tensor, time: usize) -> Result<Tensor> {
        let last = x.shape().len() - 1;
        let (len, d) = (x.shape()[time], x.shape()[last]);
        let copied = if d > 1 && x.strides()[last] != 1 { x.contiguous()? } else { x.clone() };
        let mut out = Tensor::uninit(T::DTYPE, x.shape());
        if out.numel() > 0 {
            let mut steps = Dims::from_elem(0, last);
            steps[time] = 1;
            let nest = Nest::new(&x.shape()[..last], [&copied.strides()[..last], &steps]);
            let mut runs = Vec::with_capacity(nest.rows());
            nest.each_row(|run| runs.push(*run));
            dispatch(Rotate {
                x: copied.data::<T>()?,
                runs,
                rows: nest.row_len(),
                steps: [nest.row_stride(0), nest.row_stride(1)],
                table: Table::new(self, len, d / 2),
                out: as_elements_mut::<T>(out.bytes_mut()),
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
    cos: Vec<A>,
    sin: Vec<A>,
    pairs: usize,
}

impl<A: Real> Table<A> {
    fn new(rotation: &Rotation, time: usize, pairs: usize) -> Self {
        // Turns a position.
        let ln = ln_f64(rotation.base);
        let turns: Vec<f64> = (0..pairs)
            .map(|i| exp_f64(-(i as f64 / pairs as f64) * ln) * std::f64::consts::FRAC_1_PI * 0.5)
            .collect();
        let mut table = Table { cos: vec![A::ZERO; time * pairs], sin: vec![A::ZERO; time * pairs], pairs };
        if pairs > 0 {
            dispatch(Fill { table: &mut table, turns: &turns, rotation });
        }
        table
    }

    /// The cosines and sines of row `i`.
    #[inline(always)]
    fn row(&self, i: usize) -> (&[A], &[A]) {
        let at = i * self.pairs..(i + 1) * self.pairs;
        (&self.cos[at.clone()], &self.sin[at])
    }
}

struct Fill<'a, A> {
    table: &'a mut Table<A>,
    turns: &'a [f64],
    rotation: &'a Rotation,
}

impl<A: Real> Kernel for Fill<'_, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        // Adding 1.5 * 2^52 and taking it off again leaves the nearest integer.
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

struct Rotate<'a, T> {
    x: &'a [T],
    /// Runs of rows: the place in `x` and the position of the first.
    runs: Vec<[usize; 2]>,
    /// The rows of a run, and how place and position move from one to the next.
    rows: usize,
    steps: [usize; 2],
    table: Table<T>,
    out: &'a mut [T],
}

impl<T: Real> Kernel for Rotate<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let d = 2 * self.table.pairs;
        for (&[at, position], out) in self.runs.iter().zip(self.out.chunks_exact_mut(self.rows * d)) {
            for (i, out) in out.chunks_exact_mut(d).enumerate() {
                let x = &self.x[at + i * self.steps[0]..][..d];
                turn_row(x, self.table.row(position + i * self.steps[1]), out);
            }
        }
    }
}

#[inline(always)]
fn turn_row<A: Real>(x: &[A], (cos, sin): (&[A], &[A]), out: &mut [A]) {
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
            let turned = x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
            let got = FORWARD.apply("rotary", &turned).unwrap();
            assert_eq!(bits(&got), bits(&want), "{dtype}");
            assert!(got.transpose(1, 2).unwrap().is_contiguous(), "it lies as the operand does");
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
