//! Copies of boxes between local tensors.

use crate::error::Result;
use crate::placement::Region;
use crate::tensor::Tensor;

/// Returns a tensor for the region `to`, with the elements that `from`, stored by `region`, has of it. The rest is zero.
pub(super) fn copy_overlap(from: &Tensor, region: &Region, to: &Region) -> Result<Tensor> {
    let mut found = Tensor::zeros(from.dtype(), to.local.clone());
    copy_into(&mut found, to, from.as_bytes()?, region);
    Ok(found)
}

/// Copies the common elements of two regions into the first one's tensor.
pub(super) fn copy_into(into: &mut Tensor, to: &Region, from: &[u8], region: &Region) {
    let size = into.dtype().size_bytes();
    let target = into.bytes_mut();
    for overlap in to.intersect(region) {
        overlap.runs(|a, b, len| {
            target[a * size..][..len * size].copy_from_slice(&from[b * size..][..len * size]);
        });
    }
}
