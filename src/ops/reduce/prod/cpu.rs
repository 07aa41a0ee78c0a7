//! CPU kernels of `prod` and its derivative.

use crate::error::Result;
use crate::tensor::cpu::{
    Isa, JoinOperation, Kernel, Num, Reducer, RowTree, as_elements_mut, cast, dispatch,
};
use crate::tensor::{DType, Dims, Shape, Tensor};

/// The product.
#[derive(Clone, Copy)]
struct ProductReducer;

impl<T: Num> Reducer<T> for ProductReducer {
    const OPERATION: JoinOperation = JoinOperation::Mul;
    const PAD: T = T::ONE;
    const EMPTY: T = T::ONE;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.mul(b)
    }
}

/// Returns the dtype that products of `dtype` are computed in.
pub(super) fn computed(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => DType::F32,
        DType::F64 => DType::F64,
        DType::I64 | DType::I32 | DType::U8 | DType::Bool => DType::I64,
    }
}

/// Multiplies over `dims`, in the order of the kept dims; the result has the dtype `to`.
///
/// # Errors
/// Returns an error if the elements are not in the CPU's memory.
pub(super) fn prod(x: &Tensor, dims: &[usize], to: DType) -> Result<Tensor> {
    let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
    let kept: Shape = (0..x.shape().len()).filter(|d| !dims.contains(d)).map(|d| x.shape()[d]).collect();
    let rows = cast(&x.permute(&reduced_last(dims, x.shape().len()))?, computed(x.dtype()))?.contiguous()?;
    let mut out = Tensor::uninit(rows.dtype(), kept);
    match rows.dtype() {
        DType::F32 => {
            dispatch(ProductRows { rows: rows.as_slice::<f32>()?, n, out: as_elements_mut(out.bytes_mut()) })
        }
        DType::F64 => {
            dispatch(ProductRows { rows: rows.as_slice::<f64>()?, n, out: as_elements_mut(out.bytes_mut()) })
        }
        _ => {
            dispatch(ProductRows { rows: rows.as_slice::<i64>()?, n, out: as_elements_mut(out.bytes_mut()) })
        }
    }
    cast(&out, to)
}

/// The loop over rows of `n` elements.
struct ProductRows<'a, T> {
    rows: &'a [T],
    n: usize,
    out: &'a mut [T],
}

impl<T: Num> Kernel for ProductRows<'_, T> {
    type Out = ();
    /// The tree has its own vectors.
    const WIDEST: Isa = Isa::Baseline;
    #[inline(always)]
    fn run(self) {
        RowTree::<T>::new(self.n).fold_rows::<ProductReducer>(self.rows, self.out);
    }
}

/// Returns `dy` times the product of the other elements, for each element of `x`.
///
/// # Errors
/// Returns the errors of [`prod`].
pub(super) fn prod_grad(dy: &Tensor, x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let order = reduced_last(dims, x.shape().len());
    let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
    let wide = computed(x.dtype());
    let rows = cast(&x.permute(&order)?, wide)?.contiguous()?;
    let dy = cast(&dy.permute(&order)?, wide)?.contiguous()?;
    let mut out = Tensor::uninit(wide, rows.shape());
    match wide {
        DType::F32 => others::<f32>(dy.as_slice()?, rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
        _ => others::<f64>(dy.as_slice()?, rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
    }
    let mut back = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(k, &d)| back[d] = k);
    cast(&out, x.dtype())?.permute(&back)?.contiguous()
}

/// Writes each row's products of the other elements, times `dy`.
fn others<T: Num>(dy: &[T], rows: &[T], n: usize, out: &mut [T]) {
    if n == 0 {
        return;
    }
    for ((row, out), &dy) in rows.chunks_exact(n).zip(out.chunks_exact_mut(n)).zip(dy) {
        let mut before = T::ONE;
        for (o, &x) in out.iter_mut().zip(row) {
            *o = before;
            before = before.mul(x);
        }
        let mut after = dy;
        for (o, &x) in out.iter_mut().zip(row).rev() {
            *o = o.mul(after);
            after = after.mul(x);
        }
    }
}

/// Returns the kept dims, then the reduced ones.
pub(super) fn reduced_last(dims: &[usize], of: usize) -> Dims {
    (0..of).filter(|d| !dims.contains(d)).chain(dims.iter().copied()).collect()
}
