//! Tensors from the parts that ranks hold already.

use std::hash::Hasher;
use std::rc::Rc;

use rustc_hash::FxHasher;

use super::agree::{grouped, listed, texts, words};
use super::device_mesh::DeviceMesh;
use super::tensor::DTensor;
use super::tensor_meta::TensorMeta;
use crate::error::{Error, Result};
use crate::placement::Layout;
use crate::tensor::{Shape, Tensor};

impl DTensor {
    /// The tensor whose part on this rank is `local`. Communicates nothing: a rank whose part does not fit fails by
    /// itself, and the others hear of it when they next wait for it. [`DTensor::from_local_checked`] makes all fail.
    ///
    /// `shape` is the global shape. For `Partial`, `local` is this rank's contribution.
    ///
    /// # Errors
    /// Refuses a layout that does not fit, and a `local` of another shape than the layout gives this rank.
    pub fn from_local(
        mesh: &DeviceMesh,
        local: Tensor,
        shape: impl Into<Shape>,
        layout: Layout,
    ) -> Result<DTensor> {
        let meta = mesh.meta(local.dtype(), &shape.into(), &layout)?;
        if local.shape() == meta.local_shape() {
            return Ok(Self::wrap(mesh, local.to_device(mesh.device())?, meta));
        }
        let parts = parts(&meta);
        let remedy = match &parts[..] {
            [_] => "pass the part that belongs to this rank".into(),
            parts => format!("pass {}", listed(parts, "other parts", Shape::to_string)),
        };
        Err(Error::invalid(
            "from_local",
            format!("the layout gives rank {} a {}{}", mesh.mesh().rank(), local.dtype(), meta.local_shape()),
            format!("{} for {}", local.notation(), meta.spec()),
            remedy,
        ))
    }

    /// As [`DTensor::from_local`], called by all ranks of the mesh, which compare what they bring: one all-gather of 16
    /// bytes a rank (not counted in [`DeviceMesh::received_bytes`]; none on a single rank). If one is wrong, all fail
    /// alike.
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
    /// What [`DTensor::from_local`] refuses on any rank, with what each gave and should have; ranks that name different
    /// dtypes, shapes or layouts. A fault of communication.
    pub fn from_local_checked(
        mesh: &DeviceMesh,
        local: Tensor,
        shape: impl Into<Shape>,
        layout: Layout,
    ) -> Result<DTensor> {
        let shape = shape.into();
        let (dtype, given) = (local.dtype(), local.notation());
        let named = format!("{dtype}{shape} {layout}");
        let made = Self::from_local(mesh, local, &shape, layout.clone());
        let group = mesh.everyone()?;
        if group.len() == 1 {
            return made;
        }
        let mut hasher = FxHasher::default();
        hasher.write(named.as_bytes());
        let mine = vec![i64::from(made.is_ok()), hasher.finish() as i64];
        let all = words(&group, mesh.device(), mine)?;
        let differ = all.iter().any(|other| other[1] != all[0][1]);
        if !differ && all.iter().all(|other| other[0] == 1) {
            return made;
        }
        let told = texts(&group, mesh.device(), if differ { &named } else { &given })?;
        let told = grouped(group.ranks().iter().copied().zip(told));
        let told = listed(&told, "others", String::clone);
        if differ {
            let (rule, remedy) = ("ranks name different tensors", "name one dtype, global shape and layout");
            return Err(Error::invalid("from_local", rule, told, remedy));
        }
        // What is refused from facts that all share needs no more words.
        let meta = mesh.meta(dtype, &shape, &layout)?;
        let due = listed(&parts(&meta), "other parts", Shape::to_string);
        Err(Error::invalid(
            "from_local",
            "a part is not the one that the layout gives its rank",
            format!("{told} for {}", meta.spec()),
            format!("pass {due}"),
        ))
    }
}

/// The shapes of all parts, with the ranks that hold them.
fn parts(meta: &Rc<TensorMeta>) -> Vec<(Shape, Vec<usize>)> {
    let spec = meta.spec();
    let part = |rank| spec.local_shape_at(&spec.mesh.coords_of(rank).expect("a mesh's own rank"));
    grouped(spec.mesh.ranks().map(|rank| (rank, part(rank))))
}
