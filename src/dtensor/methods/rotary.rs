//! Rotary position embedding: the rotation of queries and keys by their positions.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Bits, Rotary};

/// Rotary position embedding.
impl DTensor {
    /// Applies rotary position embedding (Su et al., 2021) to vectors `[.., time, width]`: at position
    /// `p = offset + t`, elements `i` and `i + width/2` are rotated as a pair by the angle `p * base^(-2i/width)`.
    /// `offset` is the number of earlier positions, as when decoding with a cache.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 1.0, 2.0], [2, 2])?, "(R)".parse()?)?;
    ///     let y = x.rotary(10_000.0, 0)?;
    ///     assert_eq!(y.slice(0, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0]); // position 0 is not rotated
    ///     let last = x.slice(0, 1, 1)?.rotary(10_000.0, 1)?;
    ///     assert_eq!(last.full_tensor()?.to_vec::<f32>()?, y.slice(0, 1, 1)?.full_tensor()?.to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an odd width, and a base that is not positive.
    pub fn rotary(&self, base: f64, offset: usize) -> Result<DTensor> {
        DTensor::apply_one(&Rotary { base: Bits(base), offset, inverse: false }, &[self])
    }
}
