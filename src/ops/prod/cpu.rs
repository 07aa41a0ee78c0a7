//! CPU kernels of `prod` and its derivative.

use isoshard_kernels::sums::Products;

use crate::error::Result;
use crate::tensor::cpu::{as_elements_mut, cast};
use crate::tensor::{DType, Dims, Shape, Tensor};

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
        DType::F32 => f32::products_of_rows(rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
        DType::F64 => f64::products_of_rows(rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
        _ => i64::products_of_rows(rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
    }
    cast(&out, to)
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
        DType::F32 => {
            f32::products_of_others(dy.as_slice()?, rows.as_slice()?, n, as_elements_mut(out.bytes_mut()))
        }
        _ => f64::products_of_others(dy.as_slice()?, rows.as_slice()?, n, as_elements_mut(out.bytes_mut())),
    }
    let mut back = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(k, &d)| back[d] = k);
    cast(&out, x.dtype())?.permute(&back)?.contiguous()
}

/// Returns the kept dims, then the reduced ones.
pub(super) fn reduced_last(dims: &[usize], of: usize) -> Dims {
    (0..of).filter(|d| !dims.contains(d)).chain(dims.iter().copied()).collect()
}
