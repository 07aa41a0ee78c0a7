//! Products of tensors.

use super::{exact, fast};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tensor::cuda::Gpu;

/// `a @ b` for `a` of shape `[batch, m, k]` and `b` of `[batch, k, n]`, in any strides, on one device; the result is
/// contiguous.
///
/// As [`cpu::gemm`](crate::tensor::cpu::gemm()), with its bits if `exact`. If not, the vendor's library multiplies where the
/// driver offers it: f16 and bf16 with sums in f32, f32 with [tf32](super::set_tf32) by choice.
///
/// # Errors
/// Refuses operands that are not three-dimensional, whose shapes do not fit or whose dtypes differ, extents whose product
/// is not `k`, and integers; a device without room.
pub fn gemm(verb: &str, a: &Tensor, b: &Tensor, tree: &[usize], exact: bool) -> Result<Tensor> {
    let fits = match (&a.shape()[..], &b.shape()[..]) {
        ([ab, _, ak], [bb, bk, _]) => (ab, ak) == (bb, bk) && tree.iter().product::<usize>() == *ak,
        _ => false,
    };
    if !fits || a.dtype() != b.dtype() {
        return Err(Error::invalid(
            verb,
            "wants [batch, m, k], [batch, k, n] of one dtype, and extents whose product is k",
            format!("{}, {}, extents {tree:?}", a.notation(), b.notation()),
            "reshape, expand or cast them first",
        ));
    }
    if !a.dtype().is_float() {
        let given = a.notation();
        return Err(Error::unsupported(verb, "integer products are not built", given, "cast to f64 first"));
    }
    let gpu = Gpu::of(a)?;
    let (batch, m, k, n) = (a.shape()[0], a.shape()[1], a.shape()[2], b.shape()[2]);
    if k == 0 {
        return gpu.zeros(a.dtype(), [batch, m, n]);
    }
    let mut out = gpu.uninit(a.dtype(), [batch, m, n])?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let (x, y) = as_one(a, b)?;
    if exact || !fast::multiply(&gpu, &x, &y, &mut out)? {
        exact::multiply(verb, &gpu, (&x, &y), tree, &mut out)?;
    }
    Ok(out)
}

/// The operands of one product where all products share `b` and `a`'s batch runs on into its rows; as they are where not. In
/// memory the results are the same.
fn as_one(a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    let (batch, m, k) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    let runs_on = m == 1 || a.strides()[0] == m * a.strides()[1];
    if batch == 1 || b.strides()[0] != 0 || !runs_on {
        return Ok((a.clone(), b.clone()));
    }
    let rows = if m == 1 { a.transpose(0, 1)? } else { a.reshape([1, batch * m, k])? };
    Ok((rows, b.narrow(0, 0, 1)?))
}
