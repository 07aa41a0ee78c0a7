//! Softmax of rows, its logarithm, and their derivatives.

use super::each_row::{RowBody, each_row};
use crate::num::real::Real;
use crate::sums::reducer::SumReducer;
use crate::sums::tree::{RowTree, row_max};

/// An element type of softmax: f32 or f64. The rows, of `len` elements, are summed along the [tree](RowTree) of their length. A row
/// that has only -inf, or a NaN, gives NaN.
///
/// ```
/// use isoshard_kernels::rows::Softmax;
/// let mut y = [0.0f32; 4];
/// f32::softmax([&[2.0, 2.0, f32::NEG_INFINITY, 1.0]], 2, &mut y);
/// assert_eq!(y, [0.5, 0.5, 0.0, 1.0]);
/// ```
pub trait Softmax: Real {
    /// Computes `e^x / sum(e^x)`.
    fn softmax(x: [&[Self]; 1], len: usize, out: &mut [Self]);
    /// Computes `x - ln(sum(e^x))`.
    fn log_softmax(x: [&[Self]; 1], len: usize, out: &mut [Self]);
    /// Computes the gradient of a softmax's input from the gradient of its output and the output.
    fn softmax_backward(dy_y: [&[Self]; 2], len: usize, out: &mut [Self]);
    /// Computes the gradient of a log-softmax's input from the gradient of its output and the output.
    fn log_softmax_backward(dy_y: [&[Self]; 2], len: usize, out: &mut [Self]);
}

macro_rules! softmax {
    ($($t:ty)*) => {$(
        impl Softmax for $t {
            fn softmax(x: [&[$t]; 1], len: usize, out: &mut [$t]) {
                each_row(x, len, out, SoftmaxRow);
            }

            fn log_softmax(x: [&[$t]; 1], len: usize, out: &mut [$t]) {
                each_row(x, len, out, LogSoftmaxRow);
            }

            fn softmax_backward(dy_y: [&[$t]; 2], len: usize, out: &mut [$t]) {
                each_row(dy_y, len, out, SoftmaxBackwardRow);
            }

            fn log_softmax_backward(dy_y: [&[$t]; 2], len: usize, out: &mut [$t]) {
                each_row(dy_y, len, out, LogSoftmaxBackwardRow);
            }
        }
    )*};
}
softmax!(f32 f64);

#[derive(Clone, Copy)]
struct SoftmaxRow;

impl RowBody<1> for SoftmaxRow {
    #[inline(always)]
    fn row<T: Real>(self, [x]: [&[T]; 1], out: &mut [T], tree: &mut RowTree<T>, _: &mut [T]) {
        let max = row_max(x);
        for (o, &x) in out.iter_mut().zip(x) {
            *o = (x - max).exp();
        }
        let scale = tree.fold::<SumReducer>(out).recip();
        for o in out {
            *o = *o * scale;
        }
    }
}

#[derive(Clone, Copy)]
struct LogSoftmaxRow;

impl RowBody<1> for LogSoftmaxRow {
    #[inline(always)]
    fn row<T: Real>(self, [x]: [&[T]; 1], out: &mut [T], tree: &mut RowTree<T>, _: &mut [T]) {
        let max = row_max(x);
        for (o, &x) in out.iter_mut().zip(x) {
            *o = (x - max).exp();
        }
        let log = tree.fold::<SumReducer>(out).ln();
        for (o, &x) in out.iter_mut().zip(x) {
            *o = (x - max) - log;
        }
    }
}

#[derive(Clone, Copy)]
struct SoftmaxBackwardRow;

impl RowBody<2> for SoftmaxBackwardRow {
    #[inline(always)]
    fn row<T: Real>(self, [dy, y]: [&[T]; 2], out: &mut [T], tree: &mut RowTree<T>, scratch: &mut [T]) {
        for (s, (&dy, &y)) in scratch.iter_mut().zip(dy.iter().zip(y)) {
            *s = dy * y;
        }
        let dot = tree.fold::<SumReducer>(scratch);
        for (o, (&dy, &y)) in out.iter_mut().zip(dy.iter().zip(y)) {
            *o = y * (dy - dot);
        }
    }
}

#[derive(Clone, Copy)]
struct LogSoftmaxBackwardRow;

impl RowBody<2> for LogSoftmaxBackwardRow {
    #[inline(always)]
    fn row<T: Real>(self, [dy, y]: [&[T]; 2], out: &mut [T], tree: &mut RowTree<T>, _: &mut [T]) {
        let sum = tree.fold::<SumReducer>(dy);
        for (o, (&dy, &y)) in out.iter_mut().zip(dy.iter().zip(y)) {
            *o = (-y.exp()).mul_add(sum, dy);
        }
    }
}
