//! The distributed tensor.

use std::fmt;
use std::rc::Rc;

use super::saved::Origin;
use super::tape::{GradientDestination, GradientUnit, TapeNode, TapeOutput};
use crate::comm::Lineage;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::{Error, Result};
use crate::ops::Meta;
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape, Tensor};

/// One tensor, sharded or replicated on a mesh of ranks.
///
/// A `DTensor` behaves as the global tensor: its shape, its operators and its gradients are those of the whole, and
/// their values do not depend on the layout. All ranks of the mesh make the same calls in the same order. Cloning
/// shares the data. [`DTensor::spec`] gives the one-line notation `f32[64, 128]@(dp:S0, tp:R)`; `Display` also prints
/// this rank's values.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, Placement}, tensor::Tensor};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let whole = Tensor::from_vec((0..6).map(|i| i as f32).collect(), [3, 2])?;
///     let x = DTensor::distribute(&mesh, &whole, Layout::new([Placement::Shard(0)]))?;
///     assert_eq!(x.spec().to_string(), "f32[3, 2]@(dp:S0)");
///     assert_eq!(x.local().shape()[0], [2, 1][rank.rank()]); // three rows on two ranks
///     assert_eq!(x.sum_all()?.item()?, 15.0);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// An operator takes no plain tensor beside a distributed one, since only the program knows the plain tensor's layout. Such
/// a call does not compile:
///
/// ```compile_fail,E0308
/// use isoshard::{dtensor::DTensor, tensor::Tensor};
/// fn sum(x: &DTensor, plain: &Tensor) -> isoshard::Result<DTensor> {
///     x.add(plain) // DTensor::distribute(x.mesh(), plain, layout) first
/// }
/// ```
#[derive(Clone)]
pub struct DTensor {
    pub(in crate::dtensor) local: Tensor,
    pub(in crate::dtensor) meta: Rc<TensorMeta>,
    pub(in crate::dtensor) mesh: DeviceMesh,
    pub(in crate::dtensor) lineage: Lineage,
    pub(in crate::dtensor) history: Option<TapeOutput>,
    /// The way in which the backward pass gets this tensor again instead of keeping it, if it is so marked.
    pub(in crate::dtensor) origin: Option<Origin>,
    /// True if a backward pass has freed the history.
    pub(in crate::dtensor) freed: bool,
}

impl DTensor {
    /// Creates a tensor without history from its stored tensor, metadata and lineage.
    #[inline]
    pub(in crate::dtensor) fn wrap(
        mesh: &DeviceMesh,
        local: Tensor,
        meta: Rc<TensorMeta>,
        lineage: Lineage,
    ) -> DTensor {
        debug_assert_eq!(local.shape(), meta.stored_shape(), "{}", meta.spec());
        debug_assert_eq!(local.dtype(), meta.spec().stored_dtype(), "{}", meta.spec());
        DTensor { local, meta, mesh: mesh.clone(), lineage, history: None, origin: None, freed: false }
    }

    /// Returns this rank's stored tensor: its shard or replica, or its partial values.
    ///
    /// A partial sum that an operator made in exact mode is stored as one tensor per finished node of the [reduction
    /// tree](crate::placement::ReductionTree), stacked along a new first dim unless there is one node; f16 and bf16
    /// sums are stored in f32.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [4])?, "(S0)")?;
    ///     assert_eq!(x.local().to_vec::<f32>()?, [[1.0, 2.0], [3.0, 4.0]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local(&self) -> &Tensor {
        &self.local
    }

    /// Returns this rank's stored tensor by value. Its buffer is unique if no other tensor shares it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     assert_eq!(x.into_local().shape().to_vec(), [2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn into_local(self) -> Tensor {
        self.local
    }

    /// Returns the global shape.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 3], "(S0)")?;
    ///     assert_eq!(x.shape().to_vec(), [5, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn shape(&self) -> &Shape {
        self.meta.shape()
    }

    /// Returns the number of elements of the global shape.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 3], "(S0)")?;
    ///     assert_eq!(x.numel(), 15); // on each rank
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn numel(&self) -> usize {
        self.shape().numel()
    }

    /// Returns the element type.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::BF16, [4], "(S0)")?;
    ///     assert_eq!(x.dtype(), DType::BF16);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn dtype(&self) -> DType {
        self.meta.dtype()
    }

    /// Returns the placement along each mesh axis.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 3], "(S1)")?;
    ///     assert_eq!(x.layout().to_string(), "(S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn layout(&self) -> &Layout {
        self.meta.layout()
    }

    /// Returns mesh, dtype, global shape and layout. Its `Display` is the one-line notation.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 3], "(S1)")?;
    ///     assert_eq!(x.spec().to_string(), "f32[5, 3]@(dp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn spec(&self) -> &Spec {
        self.meta.spec()
    }

    /// Returns the metadata that all ranks share, with this rank's window of the global tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     assert_eq!(x.tensor_meta().local_shape().to_vec(), [[3], [2]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn tensor_meta(&self) -> &Rc<TensorMeta> {
        &self.meta
    }

    /// Returns the mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     assert_eq!(x.mesh().mesh().to_string(), "(dp=2)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns dtype and global shape.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     assert_eq!((x.meta().dtype, x.meta().shape.to_vec()), (DType::F32, vec![5]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn meta(&self) -> Meta {
        self.meta.meta()
    }

    /// Returns the value without its history: gradients stop here.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [3], "(S0)")?.requires_grad()?;
    ///     assert!(x.exp()?.has_history() && !x.exp()?.detach().has_history());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn detach(&self) -> DTensor {
        let DTensor { local, meta, mesh, lineage, history: _, origin, freed: _ } = self;
        let (local, meta, mesh, lineage) = (local.clone(), meta.clone(), mesh.clone(), *lineage);
        // A program may write other values to this tensor than the call computed.
        let origin = origin.clone().filter(|origin| matches!(origin, Origin::Gathered(_)));
        DTensor { local, meta, mesh, lineage, history: None, origin, freed: false }
    }

    /// Returns this value as a leaf tensor: [`DTensor::backward`] computes its gradient, in this layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [3], "(S0)", 2.0)?.requires_grad()?;
    ///     let gradients = w.mul(&w)?.sum_all()?.backward()?;
    ///     assert_eq!(gradients.get(&w).expect("w is a leaf").full_tensor()?.to_vec::<f32>()?, [4.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point, and `Partial` layouts.
    pub fn requires_grad(&self) -> Result<DTensor> {
        self.dtype().expect_float("requires_grad")?;
        refuse_partial("requires_grad", &self.meta)?;
        Ok(DTensor {
            history: Some(TapeOutput { node: TapeNode::leaf(self, None), out: 0 }),
            ..self.detach()
        })
    }

    /// Returns [`DTensor::requires_grad`] of a leaf whose gradient arrives in `layout`, and is reduced together with those of
    /// the other leaves of `unit`.
    pub(crate) fn requires_grad_in(
        &self,
        layout: Layout,
        unit: GradientUnit,
        number: usize,
    ) -> Result<DTensor> {
        self.dtype().expect_float("requires_grad")?;
        refuse_partial("requires_grad", &self.meta)?;
        let meta = self.mesh.intern(self.meta.spec().with_layout(layout)?)?;
        refuse_partial("requires_grad", &meta)?;
        let destination = Some(Box::new(GradientDestination { meta, unit, number }));
        let output = TapeOutput { node: TapeNode::leaf(self, destination), out: 0 };
        Ok(DTensor { history: Some(output), ..self.detach() })
    }

    /// Returns true if a backward pass reaches this value.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [3], "(S0)")?;
    ///     assert!(!x.has_history() && x.requires_grad()?.exp()?.has_history());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn has_history(&self) -> bool {
        self.history.is_some()
    }
}

/// Refuses `Partial` layouts.
pub(in crate::dtensor) fn refuse_partial(verb: &str, meta: &TensorMeta) -> Result<()> {
    if !meta.layout().has_partial() {
        return Ok(());
    }
    Err(Error::sharding(
        verb,
        "a Partial layout has no values of its own",
        meta.spec().to_string(),
        "redistribute first",
    ))
}

/// Prints the notation and this rank's values, without communication:
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
/// let texts = spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
///     let whole = Tensor::from_vec(vec![1.5f32, 2.0, 3.0, 4.25], [2, 2])?;
///     Ok(DTensor::distribute(&mesh, &whole, "(S1)")?.to_string())
/// })?;
/// assert_eq!(texts[1], "f32[2, 2]@(tp:S1), rank 1 of (tp=2) stores\n[[2.  ]\n [4.25]]\nf32[2, 1]");
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// [`DTensor::spec`] prints the notation alone.
impl fmt::Display for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.mesh.mesh();
        writeln!(f, "{}, rank {} of {mesh} stores", self.spec(), self.mesh.rank().rank())?;
        fmt::Display::fmt(&self.local, f)
    }
}

/// Prints the notation with the first local values, in one line.
impl fmt::Debug for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} local {:?}", self.meta.spec(), self.local)
    }
}
