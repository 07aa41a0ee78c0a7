//! Matrix products of tensors.

use super::{exact, fast};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tensor::cuda::Gpu;

/// Returns `a @ b`, contiguous, for `a` of shape `[batch, m, k]` and `b` of `[batch, k, n]`, with any strides, on one
/// device.
///
/// If `exact`, the result has the bits of [`cpu::gemm`](crate::tensor::cpu::gemm()): `tree` gives the extents that
/// `k` consists of. If not, the vendor's library multiplies if the driver has one: f16 and bf16 are summed in f32,
/// and f32 uses [tf32](super::set_tf32) if that is allowed.
///
/// # Errors
/// Refuses operands that are not three-dimensional or whose shapes or dtypes do not fit, extents whose product is not
/// `k`, and integers. Returns an error if the device is out of memory.
///
/// ```
/// use isoshard::tensor::{Device, Tensor, cuda};
///
/// if cuda::is_available() {
///     let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [1, 2, 2])?.to_device(Device::Cuda(0))?;
///     let y = cuda::gemm("square", &x, &x, &[2], true)?;
///     assert_eq!(y.to_vec::<f32>()?, [7.0, 10.0, 15.0, 22.0]);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn gemm(verb: &str, a: &Tensor, b: &Tensor, tree: &[usize], exact: bool) -> Result<Tensor> {
    let fits = match (&a.shape()[..], &b.shape()[..]) {
        ([ab, _, ak], [bb, bk, _]) => {
            let len = tree.iter().try_fold(1usize, |len, &extent| len.checked_mul(extent));
            (ab, ak) == (bb, bk) && len == Some(*ak)
        }
        _ => false,
    };
    if !fits || a.dtype() != b.dtype() || a.device() != b.device() {
        return Err(Error::invalid(
            verb,
            "wants [batch, m, k], [batch, k, n] of one dtype on one device, and extents whose product is k",
            format!(
                "{} on {}, {} on {}, extents {tree:?}",
                a.notation(),
                a.device(),
                b.notation(),
                b.device()
            ),
            "reshape, expand, cast or move them first",
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
    let (x, y) = merge_batch(a, b)?;
    if exact || !fast::multiply(&gpu, &x, &y, &mut out)? {
        exact::multiply(verb, &gpu, (&x, &y), tree, &mut out)?;
    }
    Ok(out)
}

/// Merges a batch into one product if all products share `b` and the rows of `a` are contiguous over the batch; else
/// returns the operands unchanged. The result's memory is the same.
fn merge_batch(a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    let (batch, m, k) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    let runs_on = m == 1 || a.strides()[0] == m * a.strides()[1];
    if batch == 1 || b.strides()[0] != 0 || !runs_on {
        return Ok((a.clone(), b.clone()));
    }
    let rows = if m == 1 { a.transpose(0, 1)? } else { a.reshape([1, batch * m, k])? };
    Ok((rows, b.narrow(0, 0, 1)?))
}
