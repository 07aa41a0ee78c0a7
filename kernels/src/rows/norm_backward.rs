//! The derivative of the normalisation of rows.

use super::norm_forward::power_of_two;
use crate::element::DType;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::num::real::Real;
use crate::sums::reducer::SumReducer;
use crate::sums::tree::RowTree;
use crate::threads::parts::RowsMut;
use crate::threads::team::for_each_part;

/// Computes the gradients of all rows.
pub(super) fn normalise_backward<T: Real>(call: NormBackward<'_, T>) {
    let NormBackward { dy, x, weight, mean, rstd, len, dx, dw } = call;
    let rows = |data| RowsMut { data, len };
    for_each_part(x.len() / len, 2 * x.len(), (rows(dx), rows(dw)), |at, (dx, dw)| {
        let elements = at.start * len..at.end * len;
        dispatch(NormBackward::<T> {
            dy: &dy[elements.clone()],
            x: &x[elements],
            weight,
            mean: mean.map(|mean| &mean[at.clone()]),
            rstd: &rstd[at],
            len,
            dx: dx.data,
            dw: dw.data,
        });
    });
}

/// The derivative of the normalisation of rows: the gradient of the input, and the product per element whose sum over the rows is the
/// gradient of the weight.
pub struct NormBackward<'a, T> {
    /// The gradient of the result.
    pub dy: &'a [T],
    /// The rows.
    pub x: &'a [T],
    /// The factors of a row's normalised elements.
    pub weight: Option<&'a [T]>,
    /// The mean of each row, if distances to it were normalised.
    pub mean: Option<&'a [T]>,
    /// `1 / sqrt(variance + eps)` of each row.
    pub rstd: &'a [T],
    /// The number of elements in a row, at least 1.
    pub len: usize,
    /// The gradient of the rows.
    pub dx: &'a mut [T],
    /// The products of `dy` and the normalised elements.
    pub dw: &'a mut [T],
}

impl<T: Real> Kernel for NormBackward<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        let count = T::of(len as f64);
        let mut tree = RowTree::new(len);
        let (mut g, mut gx) = (vec![T::ZERO; len], vec![T::ZERO; len]);
        let inputs = self.dy.chunks_exact(len).zip(self.x.chunks_exact(len));
        let outputs = self.dx.chunks_exact_mut(len).zip(self.dw.chunks_exact_mut(len));
        for (i, ((dy, x), (dx, dw))) in inputs.zip(outputs).enumerate() {
            let rstd = self.rstd[i];
            let normal = NormalRow::new(self.mean.map_or(T::ZERO, |m| m[i]), rstd);
            match self.weight {
                Some(w) => g.iter_mut().zip(dy.iter().zip(w)).for_each(|(g, (&dy, &w))| *g = dy * w),
                None => g.copy_from_slice(dy),
            }
            for (((gx, &g), dw), (&dy, &x)) in gx.iter_mut().zip(&g).zip(dw.iter_mut()).zip(dy.iter().zip(x))
            {
                let normal = normal.at(x);
                *gx = g * normal;
                *dw = dy * normal;
            }
            // RMS norm has no mean and does not centre.
            let c1 = if self.mean.is_some() { tree.fold::<SumReducer>(&g) / count } else { T::ZERO };
            let c2 = tree.fold::<SumReducer>(&gx) / count;
            for (dx, (&g, &x)) in dx.iter_mut().zip(g.iter().zip(x)) {
                *dx = normal.at(x).mul_add(-c2, g - c1) * rstd;
            }
        }
    }
}

/// The normalised elements of a row, computed from its statistics. In rows of large elements, whose distance to the
/// mean may overflow, both are divided by 16 first.
#[derive(Clone, Copy)]
struct NormalRow<T> {
    scale: T,
    mean: T,
    rstd: T,
}

impl<T: Real> NormalRow<T> {
    #[inline(always)]
    fn new(mean: T, rstd: T) -> NormalRow<T> {
        let bound = if T::DTYPE == DType::F64 { power_of_two(-500) } else { power_of_two(-60) };
        let scale = T::of(if rstd < T::of(bound) { 0.0625 } else { 1.0 });
        NormalRow { scale, mean: mean * scale, rstd: rstd / scale }
    }

    #[inline(always)]
    fn at(self, x: T) -> T {
        (x * self.scale - self.mean) * self.rstd
    }
}
