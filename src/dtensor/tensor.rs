//! The distributed tensor, and what it remembers of its history: the nodes of the tape.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::redistribute::{self, InFlight, Redistribution};
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope_if_none;
use crate::error::{Error, Result};
use crate::ops::{Meta, Program};
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Scalar, Shape, Tensor};

/// One tensor, stored in pieces on a mesh of ranks.
///
/// Written `f32[64, 128]@(dp:S0, tp:R)`. Every rank makes the same calls in the same order. Cloning shares the data.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, Placement}, tensor::Tensor};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let whole = Tensor::from_vec((0..6).map(|i| i as f32).collect(), [3, 2])?;
///     let x = DTensor::distribute(&mesh, &whole, Layout::new([Placement::Shard(0)]))?;
///     assert_eq!(x.spec().to_string(), "f32[3, 2]@(dp:S0)");
///     assert_eq!(x.local().shape()[0], [2, 1][rank.rank()]); // three rows on two ranks
///     assert_eq!(x.sum_all()?.full_tensor()?.item()?, 15.0);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct DTensor {
    pub(super) local: Tensor,
    pub(super) meta: Rc<TensorMeta>,
    pub(super) mesh: DeviceMesh,
    pub(super) edge: Option<Edge>,
    /// Where this tensor can be had again, if it is kept for the backward pass only as that.
    pub(super) origin: Option<Rc<GatheredFrom>>,
}

/// One result of one node of the tape.
#[derive(Clone)]
pub(super) struct Edge {
    pub node: Rc<Node>,
    pub out: usize,
}

/// The history of a leaf, or of one call's results.
pub(super) struct Node {
    pub id: u64,
    pub outs: SmallVec<[Rc<TensorMeta>; 1]>,
    /// None for a leaf.
    pub call: Option<TapeCall>,
    /// In the backward pass of this number: how many gradients have still to come.
    pub awaited: Cell<(u64, usize)>,
}

/// A call of an operator, as its derivative needs it.
pub(super) struct TapeCall {
    pub program: Rc<Program>,
    /// One an operand, where its gradient is wanted and there is one.
    pub edges: SmallVec<[Option<Edge>; 3]>,
    /// In the numbering of the program's values.
    pub saved: SmallVec<[Option<Saved>; 4]>,
}

/// A value that the derivative reads.
pub(super) enum Saved {
    Kept(DTensor),
    Regather(Rc<GatheredFrom>),
}

/// The source from which a gathered tensor can be had again.
pub(super) struct GatheredFrom {
    pub shard: DTensor,
    pub meta: Rc<TensorMeta>,
    pub flight: RefCell<Option<InFlight>>,
    /// The origins of the unit that ran before: asked for while this one is used.
    pub before: Vec<Weak<GatheredFrom>>,
}

impl Node {
    fn leaf(x: &DTensor) -> Rc<Node> {
        let outs = [x.meta.clone()].into_iter().collect();
        Rc::new(Node { id: next_id(), outs, call: None, awaited: Cell::default() })
    }
}

/// Younger nodes and passes have larger numbers, from 1. A rank is a thread, so the count is the rank's own.
pub(super) fn next_id() -> u64 {
    thread_local!(static NEXT: Cell<u64> = const { Cell::new(1) });
    NEXT.replace(NEXT.get() + 1)
}

impl DTensor {
    /// Cuts a tensor that every rank has whole. Communicates nothing; the ranks' copies must be equal.
    ///
    /// # Errors
    /// Refuses a layout that does not fit, and `Partial`.
    pub fn distribute(mesh: &DeviceMesh, whole: &Tensor, layout: Layout) -> Result<DTensor> {
        let everywhere = Layout::replicated(mesh.mesh().ndim());
        let meta = mesh.meta(whole.dtype(), whole.shape(), &everywhere)?;
        // What is cut away need not travel to the device: the whole is cut where it is.
        let cut = Self::wrap(mesh, whole.clone(), meta).redistribute(layout)?;
        let local = cut.local.to_device(mesh.device())?;
        Ok(DTensor { local, ..cut })
    }

    /// All elements equal to `value`. No rank makes more than its part.
    ///
    /// # Errors
    /// Refuses a layout that does not fit, and `Partial`.
    pub fn full(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        layout: Layout,
    ) -> Result<DTensor> {
        let meta = mesh.meta(dtype, &shape.into(), &layout)?;
        refuse_partial("full", &meta)?;
        Ok(Self::wrap(mesh, Tensor::full_on(mesh.device(), dtype, meta.local_shape(), value)?, meta))
    }

    /// All zeros. No rank makes more than its part.
    ///
    /// # Errors
    /// As [`DTensor::full`].
    pub fn zeros(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: Layout,
    ) -> Result<DTensor> {
        Self::full(mesh, dtype, shape, 0.0, layout)
    }

    pub(super) fn wrap(mesh: &DeviceMesh, local: Tensor, meta: Rc<TensorMeta>) -> DTensor {
        debug_assert_eq!(local.shape(), meta.stored_shape(), "{}", meta.spec());
        debug_assert_eq!(local.dtype(), meta.spec().stored_dtype(), "{}", meta.spec());
        DTensor { local, meta, mesh: mesh.clone(), edge: None, origin: None }
    }

    /// This rank's part. Of a sum in parts, one for each node of the summation tree that this rank has finished, stacked
    /// along a new first dim unless it is one node; parts of an f16 or bf16 sum are f32.
    pub fn local(&self) -> &Tensor {
        &self.local
    }

    /// This rank's part, moved out; its buffer is unique if no other tensor shares it.
    pub fn into_local(self) -> Tensor {
        self.local
    }

    /// The global shape.
    pub fn shape(&self) -> &Shape {
        self.meta.shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.meta.dtype()
    }

    /// The placements.
    pub fn layout(&self) -> &Layout {
        self.meta.layout()
    }

    /// Returns the mesh, dtype, global shape and layout; its `Display` is the one-line notation `f32[64, 128]@(dp:S0, tp:R)`.
    pub fn spec(&self) -> &Spec {
        self.meta.spec()
    }

    /// Returns all metadata that ranks share, and what follows from it on this rank.
    pub fn tensor_meta(&self) -> &Rc<TensorMeta> {
        &self.meta
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Dtype and global shape.
    pub fn meta(&self) -> Meta {
        self.meta.meta()
    }

    /// The same tensor in another layout: the identity, and so is its derivative.
    ///
    /// Without `Partial` every rank receives exactly the elements it lacks, once, in one exchange. With it, the reductions
    /// and moves are the cheapest that keep the bits: see [`Redistribution`].
    ///
    /// # Errors
    /// Refuses a layout that does not fit; a fault of communication.
    pub fn redistribute(&self, layout: Layout) -> Result<DTensor> {
        self.redistribute_async(layout)?.wait()
    }

    /// This tensor with every `Partial` axis reduced to `Replicate`; itself if it has none.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn reduce_partial(&self) -> Result<DTensor> {
        if !self.layout().has_partial() {
            return Ok(self.clone());
        }
        self.redistribute(self.layout().reduced())
    }

    /// What [`DTensor::redistribute`] would do on this rank, in words. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, short::{R, shard}}, tensor::DType};
    /// let said = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 4], Layout::new([shard(0)]))?;
    ///     x.explain(Layout::new([R]))
    /// })?;
    /// assert_eq!(said[0], "all_gather over dp{0, 1}: 32 bytes come"); // the two rows it lacks
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit.
    pub fn explain(&self, layout: Layout) -> Result<String> {
        Ok(self.plan_redistribute(layout)?.to_string())
    }

    /// What [`DTensor::redistribute`] would do on this rank: its calls, and the bytes that would come. Communicates nothing.
    ///
    /// # Errors
    /// Refuses a layout that does not fit.
    pub fn plan_redistribute(&self, layout: Layout) -> Result<Redistribution> {
        let spec = self.meta.spec();
        Redistribution::plan(spec, &spec.with_layout(layout)?)
    }

    /// Starts a redistribution; other work may come before [`PendingRedistribution::wait`]. Returns when its first call is on its way.
    ///
    /// Several may be on their way, to be waited for in any order, and in another on another rank. Where there is a second
    /// call ([`DTensor::plan_redistribute`] tells: for some of a `Partial`), it begins when this or a later such one is waited
    /// for; so all ranks wait for it, or all drop it. One of a single call may be dropped by some ranks and not by others. Over an engine without shared memory a large all-reduce has come when this returns.
    ///
    /// # Errors
    /// As [`DTensor::redistribute`].
    pub fn redistribute_async(&self, layout: Layout) -> Result<PendingRedistribution> {
        if layout == *self.layout() {
            return Ok(PendingRedistribution { source: self.clone(), meta: self.meta.clone(), flight: None });
        }
        let meta = self.mesh.intern(self.meta.spec().with_layout(layout)?)?;
        let m = redistribute::find(&self.mesh, &self.meta, &meta)?;
        let _label = operator_scope_if_none("redistribute");
        let flight = Some(m.start(&self.mesh, self.local.clone())?);
        Ok(PendingRedistribution { source: self.clone(), meta, flight })
    }

    /// The whole on every rank. Every rank receives what it lacks.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn full_tensor(&self) -> Result<Tensor> {
        let _guard = self.mesh.no_grad();
        Ok(self.redistribute(Layout::replicated(self.mesh.mesh().ndim()))?.local)
    }

    /// The value without its history: gradients stop here.
    pub fn detach(&self) -> DTensor {
        DTensor { edge: None, ..self.clone() }
    }

    /// This value as the start of a history: [`DTensor::backward`] gives its gradient, in this layout.
    ///
    /// # Errors
    /// Refuses dtypes without a derivative, and `Partial` layouts.
    pub fn requires_grad(&self) -> Result<DTensor> {
        self.dtype().expect_float("requires_grad")?;
        refuse_partial("requires_grad", &self.meta)?;
        Ok(DTensor { edge: Some(Edge { node: Node::leaf(self), out: 0 }), ..self.clone() })
    }

    /// True where a backward pass reaches this value.
    pub fn has_history(&self) -> bool {
        self.edge.is_some()
    }
}

pub(super) fn refuse_partial(verb: &str, meta: &TensorMeta) -> Result<()> {
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

/// A redistribution on its way. Dropping it is harmless.
#[must_use = "a redistribution's errors are lost unless it is waited for"]
pub struct PendingRedistribution {
    source: DTensor,
    meta: Rc<TensorMeta>,
    flight: Option<InFlight>,
}

impl PendingRedistribution {
    /// The redistributed tensor.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn wait(self) -> Result<DTensor> {
        let PendingRedistribution { source, meta, flight } = self;
        let Some(flight) = flight else { return Ok(source) };
        let mesh = source.mesh.clone();
        let local = flight.finish(&mesh)?;
        // The derivative of the identity is the identity.
        Ok(DTensor { edge: source.edge, ..DTensor::wrap(&mesh, local, meta) })
    }
}

/// Prints the notation and this rank's values, without communication:
///
/// ```text
/// f32[5, 3]@(dp:S0, tp:S1), rank 1 of (dp=2, tp=2) stores
/// [[ 2.0],
///  [ 5.0],
///  [ 8.0]]
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

/// The notation, with the first local values.
impl fmt::Debug for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} local {:?}", self.meta.spec(), self.local)
    }
}
