//! Random tensors: each rank draws its own elements, and every layout gives the values a single rank gives.

use super::device_mesh::DeviceMesh;
use super::tensor::{DTensor, refuse_partial};
use crate::error::Result;
use crate::placement::Layout;
use crate::rng::{Draw, Init};
use crate::tensor::{DType, Shape, Tensor, for_dtype};

impl DTensor {
    /// A tensor that `init` fills by `draw` and global index. Communicates nothing; no rank makes more than its part.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, Placement}};
    /// use isoshard::{rng::{Draw, Init}, tensor::DType};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let draw = Draw { seed: 7, number: 0 };
    ///     let init = Init::Normal { mean: 0.0, std: 1.0 };
    ///     let sharded = DTensor::init(&mesh, DType::F32, [5, 2], Layout::new([Placement::Shard(0)]), init, draw)?;
    ///     let whole = DTensor::init(&mesh, DType::F32, [5, 2], Layout::replicated(1), init, draw)?;
    ///     assert_eq!(sharded.full_tensor()?.to_vec::<f32>()?, whole.local().to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit, `Partial`, dtypes that are not floating, and an `init` that does not fit the
    /// shape.
    pub fn init(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: Layout,
        init: Init,
        draw: Draw,
    ) -> Result<DTensor> {
        let facts = mesh.facts(dtype, &shape.into(), &layout)?;
        refuse_partial("init", &facts)?;
        let mut local = Tensor::stale(dtype, facts.local_shape());
        for_dtype!(float "init", dtype, T => {
            let out = local.make_mut::<T>()?;
            let mut filled = Ok(());
            facts.window().region.runs(facts.shape(), |global, at, len| {
                if filled.is_ok() {
                    filled = init.fill(draw, facts.shape(), global, &mut out[at..at + len]);
                }
            });
            filled
        })?;
        Ok(DTensor::wrap(mesh, local, facts))
    }
}
