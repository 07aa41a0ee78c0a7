//! Tensors from what the ranks hold already: the whole, or their shards.

use std::hash::Hasher;
use std::rc::Rc;

use rustc_hash::FxHasher;

use super::dtensor::DTensor;
use super::lineage::lineage_of_new;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::rank_reports::{gather_texts, gather_words, group_by_value, list_values};
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::{Error, Result};
use crate::placement::{IntoLayout, Layout};
use crate::tensor::{Shape, Tensor};

impl DTensor {
    /// Creates a distributed tensor from a tensor that every rank holds whole. Each rank keeps its shard; the ranks'
    /// copies must be equal. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
    ///     let x = DTensor::distribute(&mesh, &whole, "(S0)")?;
    ///     assert_eq!(x.local().to_vec::<f32>()?, [vec![1.0, 2.0], vec![3.0]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the shape, and a `Partial` layout.
    pub fn distribute(mesh: &DeviceMesh, whole: &Tensor, layout: impl IntoLayout) -> Result<DTensor> {
        let everywhere = Layout::replicated(mesh.mesh().ndim());
        let meta = mesh.meta(whole.dtype(), whole.shape(), &everywhere)?;
        // Slice on the host first, so that only this rank's shard is copied to the device.
        let lineage = lineage_of_new("distribute", &meta, &[]);
        let cut = Self::wrap(mesh, whole.clone(), meta, lineage).redistribute(layout)?;
        let local = cut.local.to_device(mesh.device())?;
        Ok(DTensor { local, ..cut })
    }

    /// Creates the tensor of global shape `shape` whose shard on this rank is `local`. For a `Partial` layout,
    /// `local` is this rank's contribution.
    ///
    /// Communicates nothing: a rank whose shard has the wrong shape fails alone, and the other ranks fail when they
    /// next wait for it. [`DTensor::from_local_checked`] makes all ranks fail together.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mine = Tensor::from_vec(vec![rank.rank() as f32; 2], [2])?;
    ///     let x = DTensor::from_local(&mesh, mine, [4], "(S0)")?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [0.0, 0.0, 1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit, and a `local` whose shape is not the one that the layout gives this rank.
    pub fn from_local(
        mesh: &DeviceMesh,
        local: Tensor,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let meta = mesh.meta(local.dtype(), &shape.into(), &layout.into_layout()?)?;
        if local.shape() == meta.local_shape() {
            let lineage = lineage_of_new("from_local", &meta, &[]);
            return Ok(Self::wrap(mesh, local.to_device(mesh.device())?, meta, lineage));
        }
        let parts = parts(&meta);
        let remedy = match &parts[..] {
            [_] => "pass the part that belongs to this rank".into(),
            parts => format!("pass {}", list_values(parts, "other parts", Shape::to_string)),
        };
        Err(Error::invalid(
            "from_local",
            format!("the layout gives rank {} a {}{}", mesh.mesh().rank(), local.dtype(), meta.local_shape()),
            format!("{} for {}", local.notation(), meta.spec()),
            remedy,
        ))
    }

    /// Creates a tensor as [`DTensor::from_local`] does, after comparing dtypes, shapes and layouts over all ranks of the
    /// mesh: one all-gather of 16 bytes per rank (not counted in [`DeviceMesh::received_bytes`]; none on a single rank). If
    /// one rank is wrong, all ranks return the same error.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, short::shard}, tensor::{DType, Tensor}};
    /// let parts = |rows: [usize; 2]| spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mine = Tensor::zeros(DType::F32, [rows[rank.rank()], 2]);
    ///     let made = DTensor::from_local_checked(&mesh, mine, [5, 2], Layout::new([shard(0)]));
    ///     Ok(made.err().map(|e| e.to_string()))
    /// });
    /// assert_eq!(parts([3, 2])?, [None, None]);
    /// let said = "from_local: a part is not the one that the layout gives its rank; got f32[3, 2] on rank(s) 0, 1 for \
    ///             f32[5, 2]@(dp:S0); pass [3, 2] on rank(s) 0 and [2, 2] on rank(s) 1";
    /// assert_eq!(parts([3, 3])?, [Some(said.to_string()), Some(said.to_string())]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::from_local`] refuses on any rank, and ranks that name different dtypes, shapes or layouts;
    /// the text lists what each rank gave and should have given. Returns an error if communication fails.
    pub fn from_local_checked(
        mesh: &DeviceMesh,
        local: Tensor,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let (shape, layout) = (shape.into(), layout.into_layout()?);
        let (dtype, given) = (local.dtype(), local.notation());
        let named = format!("{dtype}{shape} {layout}");
        let made = Self::from_local(mesh, local, &shape, &layout);
        let group = mesh.all_ranks()?;
        if group.len() == 1 {
            return made;
        }
        let mut hasher = FxHasher::default();
        hasher.write(named.as_bytes());
        let mine = vec![i64::from(made.is_ok()), hasher.finish() as i64];
        let all = gather_words(&group, mesh.device(), mine)?;
        let differ = all.iter().any(|other| other[1] != all[0][1]);
        if !differ && all.iter().all(|other| other[0] == 1) {
            return made;
        }
        let told = gather_texts(&group, mesh.device(), if differ { &named } else { &given })?;
        let told = group_by_value(group.ranks().iter().copied().zip(told));
        let told = list_values(&told, "others", String::clone);
        if differ {
            let (rule, remedy) = ("ranks name different tensors", "name one dtype, global shape and layout");
            return Err(Error::invalid("from_local", rule, told, remedy));
        }
        // An error that follows from shared metadata is equal on all ranks without further communication.
        let meta = mesh.meta(dtype, &shape, &layout)?;
        let due = list_values(&parts(&meta), "other parts", Shape::to_string);
        Err(Error::invalid(
            "from_local",
            "a part is not the one that the layout gives its rank",
            format!("{told} for {}", meta.spec()),
            format!("pass {due}"),
        ))
    }
}

/// Returns the shapes of all shards, with the ranks that hold them.
fn parts(meta: &Rc<TensorMeta>) -> Vec<(Shape, Vec<usize>)> {
    let spec = meta.spec();
    let part = |rank| spec.local_shape_at(&spec.mesh.coords_of(rank).expect("a mesh's own rank"));
    group_by_value(spec.mesh.ranks().map(|rank| (rank, part(rank))))
}
