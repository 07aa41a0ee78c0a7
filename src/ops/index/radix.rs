//! A stable radix sort on a CUDA device: `kernels/cuda/radix.cu`.

use crate::error::Result;
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Tensor};

/// Sorts 32-bit keys by their lower `bits` bits and returns them with `positions`, or if there are none with their
/// former positions, in the same order. The sort is stable.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails.
pub(in crate::ops) fn sort(
    gpu: &Gpu,
    mut keys: Tensor,
    mut positions: Option<Tensor>,
    bits: u32,
) -> Result<(Tensor, Tensor)> {
    const DIGIT_BITS: u32 = 8;
    let hits = keys.numel();
    let sorters = hits.div_ceil(2048).clamp(1, 256);
    let stretch = hits.div_ceil(sorters);
    for shift in (0..bits.max(1)).step_by(DIGIT_BITS as usize) {
        let counts_len = sorters << DIGIT_BITS;
        let mut counts = gpu.uninit(DType::I32, [counts_len])?;
        let launch = gpu.kernel("radix", "count", DType::I64)?.read(&keys).write(&mut counts);
        launch.arg(hits as u64).arg(stretch as u64).arg(shift).start(sorters as u32, 256, 0)?;
        let launch = gpu.kernel("radix", "scan", DType::I64)?.write(&mut counts);
        launch.arg(counts_len as u32).start(1, 1024, 0)?;
        let (mut sorted, mut to) = (gpu.uninit(DType::I32, [hits])?, gpu.uninit(DType::I32, [hits])?);
        let launch = gpu.kernel("radix", "place", DType::I64)?.read(&keys);
        let launch = launch.read_or_null(positions.as_ref()).write(&mut sorted).write(&mut to).read(&counts);
        launch.arg(hits as u64).arg(stretch as u64).arg(shift).start(sorters as u32, 256, 0)?;
        (keys, positions) = (sorted, Some(to));
    }
    Ok((keys, positions.expect("there is a digit")))
}
