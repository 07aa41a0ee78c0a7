//! The distributed tensor, and the nodes of the tape that record its history.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::comm::{Lineage, ModulePath};
use crate::dtensor::mesh::counted_list::CountedList;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::dtensor::redistribute::InFlight;
use crate::error::{Error, Result};
use crate::ops::{Meta, Op};
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

/// One result of a tape node.
#[derive(Clone)]
pub(in crate::dtensor) struct TapeOutput {
    pub node: Rc<TapeNode>,
    pub out: usize,
}

/// The history of a leaf tensor, or of the results of one call.
pub(in crate::dtensor) struct TapeNode {
    pub id: u64,
    /// The module that made the call or the leaf.
    pub path: ModulePath,
    pub outs: SmallVec<[Rc<TensorMeta>; 1]>,
    /// The call that computed the results; `None` for a leaf.
    pub call: Option<TapeCall>,
    /// The number of a backward pass, and the number of gradients that this pass has still to add.
    pub pending_grads: Cell<(u64, usize)>,
    /// A leaf's wishes for its gradient, if it has some.
    pub destination: Option<Box<GradientDestination>>,
}

/// The layout of a leaf's gradient, and the unit with which it is reduced.
pub(in crate::dtensor) struct GradientDestination {
    pub meta: Rc<TensorMeta>,
    pub unit: GradientUnit,
    /// The leaf's number in the unit.
    pub number: usize,
}

/// A unit: leaves whose gradients share calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GradientUnit {
    number: u64,
    /// The bytes of gradients, counted globally, from which on they wait for no others.
    pub limit_bytes: usize,
    /// The dtype in which ranks send partial sums, if the program says one.
    pub reduced_in: Option<DType>,
}

/// One call, with what its derivative needs.
pub(in crate::dtensor) struct TapeCall {
    /// Per operand, its history, if its gradient is wanted and it has one.
    pub inputs: SmallVec<[Option<TapeOutput>; 3]>,
    pub derivative: CallDerivative,
}

/// The derivative of a call.
pub(in crate::dtensor) enum CallDerivative {
    /// An operator's, with those operands and results that the program reads, in the order of their numbers.
    Program { program: Rc<DerivativeProgram>, saved: Vec<Saved> },
    /// A user's function's ([`DTensor::custom_vjp`]).
    Custom(Box<CustomDerivative>),
    /// The derivative of a function whose operators are recorded in the backward pass ([`DTensor::recompute`]).
    Recomputed(Box<Recomputation>),
}

/// A function that runs again in the backward pass.
pub(in crate::dtensor) struct Recomputation {
    pub name: &'static str,
    pub operands: Vec<RecomputeInput>,
    pub run: Box<RecomputedFunction>,
    /// The mode in which the function ran.
    pub reduction: Reduction,
    /// True for each result that had a history.
    pub tracked: SmallVec<[bool; 1]>,
}

/// A function of the operands; the flag says if its derivative is recorded.
pub(in crate::dtensor) type RecomputedFunction = dyn Fn(&[DTensor], bool) -> Result<Vec<DTensor>>;

/// A tensor that a recomputed function reads, with its history.
pub(crate) struct RecomputeInput {
    pub(in crate::dtensor) saved: Saved,
    pub(in crate::dtensor) history: Option<TapeOutput>,
}

/// A user's derivative, which maps the saved tensors and the results' gradients to a gradient per operand.
pub(in crate::dtensor) type CustomBackward =
    dyn Fn(&[DTensor], &[DTensor], &GradientNeeds<'_>) -> Result<Vec<Option<DTensor>>>;

/// The derivative of a user's function.
pub(in crate::dtensor) struct CustomDerivative {
    pub name: &'static str,
    pub backward: Box<CustomBackward>,
    pub saved: Vec<(Saved, SavedTensorOrigin)>,
    pub ins: SmallVec<[Rc<TensorMeta>; 3]>,
}

/// The tensor that a user's function has saved, which decides its history.
#[derive(Clone, Copy)]
pub(in crate::dtensor) enum SavedTensorOrigin {
    Operand(usize),
    Result(usize),
    /// A value computed in between, whose history is not recorded.
    Intermediate,
}

/// A value that the derivative reads.
#[derive(Clone)]
pub(in crate::dtensor) enum Saved {
    Kept(DTensor),
    Again(Origin),
}

/// The way in which a derivative gets a value that the tape does not keep.
#[derive(Clone)]
pub(in crate::dtensor) enum Origin {
    Gathered(Rc<GatheredFrom>),
    Computed(Rc<ComputedFrom>),
}

/// The call that computes a tensor again ([`DeviceMesh::recompute_cheap`]).
pub(in crate::dtensor) struct ComputedFrom {
    pub op: Arc<dyn Op>,
    pub ins: SmallVec<[Saved; 3]>,
    /// The number of the call's result.
    pub out: usize,
    pub mesh: DeviceMesh,
    /// The module and the mode in which it was computed first.
    pub path: ModulePath,
    pub reduction: Reduction,
    /// The number of recomputed calls that lead to this value: 1 if all operands are kept.
    pub depth: usize,
}

/// The shards from which the backward pass gathers a tensor again.
pub(in crate::dtensor) struct GatheredFrom {
    pub shard: DTensor,
    /// The module that gathered it first.
    pub path: ModulePath,
    pub meta: Rc<TensorMeta>,
    pub in_flight: RefCell<Option<InFlight>>,
    pub held: RefCell<HeldGather>,
    /// The tensors of the unit that ran before this one in the forward pass: their gathers start when this tensor is
    /// read.
    pub earlier: UnitGathers,
    /// The tensors of its own unit, which share its gather unless that was started ahead.
    pub unit: UnitGathers,
    /// The number of the backward pass that read it last.
    pub read_in: Cell<u64>,
}

/// The tensors of a unit that are gathered again in the backward pass, in one call if none is started ahead.
#[derive(Clone, Default)]
pub(crate) struct UnitGathers(pub(in crate::dtensor) Rc<UnitGatherList>);

/// The list of a unit's tensors, which those of the unit after it share.
#[derive(Default)]
pub(in crate::dtensor) struct UnitGatherList {
    pub all: RefCell<CountedList<Weak<GatheredFrom>>>,
    /// The number of the backward pass that last started the gathers of all, and how many there were.
    pub started: Cell<(u64, usize)>,
}

/// A gathered tensor that has not been dropped since the forward pass, so that the backward pass need not gather it.
#[derive(Default)]
pub(in crate::dtensor) enum HeldGather {
    #[default]
    Dropped,
    /// The forward pass holds it.
    ByForward(Tensor),
    /// The forward pass has ended; the first use drops it.
    ForFirstUse(Tensor),
}

impl TapeNode {
    /// Makes the youngest node, which belongs to the module that this thread has entered.
    #[inline]
    pub fn new(outs: SmallVec<[Rc<TensorMeta>; 1]>, call: Option<TapeCall>) -> Rc<TapeNode> {
        let (id, path) = (next_id(), ModulePath::current());
        Rc::new(TapeNode { id, path, outs, call, pending_grads: Cell::default(), destination: None })
    }

    fn leaf(x: &DTensor, destination: Option<Box<GradientDestination>>) -> Rc<TapeNode> {
        let outs = [x.meta.clone()].into_iter().collect();
        let (id, path) = (next_id(), ModulePath::current());
        Rc::new(TapeNode { id, path, outs, call: None, pending_grads: Cell::default(), destination })
    }

    /// Returns the metadata of a leaf's gradient: the leaf's own, unless the leaf says otherwise.
    pub fn gradient_meta(&self) -> &Rc<TensorMeta> {
        self.destination.as_ref().map_or(&self.outs[0], |destination| &destination.meta)
    }
}

impl GradientUnit {
    /// Returns a new unit.
    pub fn next(limit_bytes: usize, reduced_in: Option<DType>) -> GradientUnit {
        GradientUnit { number: next_id(), limit_bytes, reduced_in }
    }

    /// Returns the unit's number, which no other unit of this rank has.
    pub(in crate::dtensor) fn number(self) -> u64 {
        self.number
    }
}

/// Returns the next number for a tape node or a backward pass, from 1; later ones have larger numbers. The counter is
/// per thread, and each rank is a thread.
pub(in crate::dtensor) fn next_id() -> u64 {
    thread_local!(static NEXT: Cell<u64> = const { Cell::new(1) });
    NEXT.replace(NEXT.get() + 1)
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
