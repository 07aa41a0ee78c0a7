//! Rotary position embedding: the rotation of queries and keys by their positions.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Bits, Rotary, RotaryApply, RotaryFrequencies, RotaryPairing, RotaryTable};
use crate::placement::Layout;
use crate::tensor::{DType, Shape, Tensor};

/// Rotary position embedding.
impl DTensor {
    /// Applies rotary position embedding (Su et al., 2021) to vectors `[.., time, width]`: at position
    /// `p = offset + t`, elements `i` and `i + width/2` are rotated as a pair by the angle `p * base^(-2i/width)`.
    /// `offset` is the number of earlier positions, as when decoding with a cache. Communicates nothing unless the last
    /// dim is sharded or this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 1.0, 2.0], [2, 2])?, "(R)")?;
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
    /// Refuses an odd width, a base that is not positive, and positions that overflow.
    pub fn rotary(&self, base: f64, offset: usize) -> Result<DTensor> {
        DTensor::apply_one(&Rotary { base: Bits(base), offset, inverse: false }, &[self])
    }

    /// Returns the cosines and sines of these positions (i64 `[..]`) for [`DTensor::rotary_with`], `[.., width/2]` each:
    /// `cos[.., i] = scale * cos(position * angle[i])` with the angles and the scale of `frequencies`. `dtype` is f32, or
    /// f64 for vectors of f64. Communicates nothing.
    ///
    /// Several documents that are packed into one sequence have positions of their own, such as `[0, 1, 2, 0, 1]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops::RotaryFrequencies, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let positions = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 1, 2, 0, 1], [5])?, "(S0)")?;
    ///     let (cos, _) = positions.rotary_tables(&RotaryFrequencies::geometric(2, 1e4)?, DType::F32)?;
    ///     assert_eq!(cos.spec().to_string(), "f32[5, 1]@(dp:S0)");
    ///     let cos = cos.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(cos[0] == 1.0 && cos[3] == 1.0 && cos[1] == cos[4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses positions that are not i64, and a `dtype` other than f32 and f64.
    pub fn rotary_tables(&self, frequencies: &RotaryFrequencies, dtype: DType) -> Result<(DTensor, DTensor)> {
        let angles = Tensor::from_slice(&frequencies.angles, [frequencies.angles.len()])?;
        let replicated = Layout::replicated(self.mesh.mesh().ndim());
        let angles = DTensor::distribute(&self.mesh, &angles, replicated)?;
        let op = RotaryTable { dtype, scale: Bits(frequencies.scale) };
        let mut tables = DTensor::apply(&op, &[self, &angles])?;
        Ok((tables.remove(0), tables.remove(0)))
    }

    /// Rotates pairs of elements of vectors `[.., width]` by given cosines and sines, `[.., width/2]`, in f32 (f64 for
    /// f64), such as those of [`DTensor::rotary_tables`]. The tables' dims before the last broadcast to those of the
    /// vectors. Communicates nothing unless the last dim is sharded through a pair.
    ///
    /// Queries `[batch, heads, time, width]` take tables `[time, width/2]`, or `[batch, 1, time, width/2]` if each
    /// sequence has positions of its own.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// use isoshard::ops::{RotaryFrequencies, RotaryPairing};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let q = Tensor::from_vec((0..24).map(|i| i as f32).collect(), [1, 2, 3, 4])?;
    ///     let q = DTensor::distribute(&mesh, &q, "(S1)")?;
    ///     let positions = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 1, 2], [3])?, "(R)")?;
    ///     let (cos, sin) = positions.rotary_tables(&RotaryFrequencies::geometric(4, 1e4)?, DType::F32)?;
    ///     let y = q.rotary_with(&cos, &sin, RotaryPairing::Halves)?;
    ///     // These frequencies and positions are those of `rotary`.
    ///     assert_eq!(y.local().to_vec::<f32>()?, q.rotary(1e4, 0)?.local().to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an odd width, tables of another width or dtype, and tables that do not broadcast to the vectors.
    pub fn rotary_with(&self, cos: &DTensor, sin: &DTensor, pairing: RotaryPairing) -> Result<DTensor> {
        let mut shape: Shape = self.shape().clone();
        if let Some(width) = shape.last_mut() {
            *width /= 2;
        }
        let op = RotaryApply { pairing, inverse: false };
        DTensor::apply_one(&op, &[self, &cos.expand(shape.clone())?, &sin.expand(shape)?])
    }
}
