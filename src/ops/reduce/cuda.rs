//! The index of the largest element along a dim, on a device.

use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::reduce::KeptDims;
use crate::tensor::{DType, Shape, Tensor};

const THREADS: u32 = 256;

/// The index along `dim` of the first largest element, which leaves, as [`cpu::argmax`](super::cpu::argmax).
///
/// # Errors
/// A device without room, a kernel that fails.
pub(super) fn argmax(verb: &str, x: &Tensor, dim: usize) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (n, stride) = (x.shape()[dim], x.strides()[dim]);
    let others: Vec<usize> = (0..x.shape().len()).filter(|&d| d != dim).collect();
    let mut out = gpu.uninit(DType::I64, others.iter().map(|&d| x.shape()[d]).collect::<Shape>())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let strides = others.iter().zip(out.strides()).map(|(&d, &to)| (x.shape()[d], x.strides()[d], to));
    let Some(nest) = KeptDims::new(strides).filter(|_| n <= u32::MAX as usize) else {
        if !x.is_contiguous() {
            return argmax(verb, &x.to_owned_copy()?, dim);
        }
        let given = format!("dim {dim} of {}", x.notation());
        return Err(Error::unsupported(verb, "2^32 elements or more in one kernel", given, "split it"));
    };
    let lines = out.numel();
    if stride == 1 && n > 8 {
        let team = if n > 1024 { 3u32 } else { 0 };
        let launch = gpu.kernel("argmax", "rows", x.dtype())?.read(x).write(&mut out).arg(nest);
        let launch = launch.arg(lines as u64).arg(n as u32).arg(team);
        launch.run(lines.div_ceil(8 >> team) as u32, THREADS, 0)?;
    } else {
        let launch = gpu.kernel("argmax", "columns", x.dtype())?.read(x).write(&mut out).arg(nest);
        let launch = launch.arg(lines as u64).arg(stride as u64).arg(n as u32);
        launch.run(lines.div_ceil(THREADS as usize) as u32, THREADS, 0)?;
    }
    Ok(out)
}
