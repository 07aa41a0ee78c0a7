//! The trait that every operator implements, and the types of its methods' arguments and results.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::{MeshAxis, Meta, Metas, Row, Work};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{Shape, Tensor};

/// A short list of local tensors, one per operand or result.
pub type Tensors = SmallVec<[Tensor; 3]>;

/// The record of one operator: shapes, sharding rows, kernels, work and derivative.
///
/// The value holds the operator's attributes, for example a dim or a probability. It is part of the key under which
/// plans are cached, so it is compared and hashed. `ins` and `outs` of type [`Meta`] have *global* shapes; the tensors
/// that [`Op::eval`] and [`Op::cuda`] take and return are this rank's shards. The [module's page](crate::ops) shows a
/// complete operator.
///
/// # Contract
/// The methods agree with each other. A broken clause is an error in the operator's name when a call is planned, when a
/// derivative is written, or when a kernel has run:
///
/// - Each row of [`Op::rows`] has one placement per operand, and one per result of [`Op::infer`]. It shards only dims that
///   the tensor has.
/// - A tree sum ([`AxisPlacement::TreeSum`](super::AxisPlacement::TreeSum)) is the placement of a result, in a row that
///   shards an operand. Rows with one are listed for every [`MeshAxis`], also for an axis of one rank.
/// - A result is ragged only if an operand is.
/// - [`Op::eval`] and [`Op::cuda`] return one tensor per result of [`Op::infer`], with its dtype and the local shape of its
///   window.
/// - [`Op::vjp`] names operands, results and values that there are. A gradient has its operand's dtype and shape. Each
///   operand whose gradient is wanted gets one ([`Vjp::set`]) or a reason why there is none ([`Vjp::none`]).
///
/// Nothing can check in a call that a row holds and that a kernel gives the same bits on every mesh: `testing::judge` and
/// `testing::equivalent` do that in a test.
pub trait Op: OpKey + fmt::Debug + Send + Sync {
    /// Returns the operator's name, with which its errors begin.
    ///
    /// ```
    /// use isoshard::ops::{Op, Softmax};
    /// assert_eq!(Softmax { dim: 1 }.name(), "softmax");
    /// ```
    fn name(&self) -> &'static str;

    /// Returns the results' dtypes and global shapes.
    ///
    /// ```
    /// use isoshard::{ops::{Matmul, Meta, Op}, tensor::DType};
    /// let ins = [Meta::new(DType::F32, [4, 6]), Meta::new(DType::F32, [6, 5])];
    /// let product = Matmul::new("m k, k n -> m n")?;
    /// assert_eq!(product.infer(&ins)?[0].to_string(), "f32[4, 5]");
    /// let refused = product.infer(&[ins[0].clone(), ins[0].clone()]).unwrap_err();
    /// assert!(refused.to_string().starts_with("matmul: dim k has extents 6 and 4"), "{refused}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands that the operator cannot take. The error begins with the operator's name.
    fn infer(&self, ins: &[Meta]) -> Result<Metas>;

    /// Returns the sharding rows for one mesh axis of `axis.ranks` ranks.
    ///
    /// A row is a claim: if the operands have the row's placements on this axis and each rank runs [`Op::eval`] on its
    /// shards, then the local results are the shards of the results in the row's placements. The row of replicated
    /// operands and results holds for every operator and is not listed. Rows for operands that are ragged over dims
    /// follow from rows that shard these dims, if operands and results have equal extents there; an operator lists
    /// [`AxisPlacement::Ragged`](super::AxisPlacement::Ragged) if its kernel computes flattened shards in one call.
    /// `ins` have passed [`Op::infer`].
    ///
    /// ```
    /// use isoshard::{ops::{MeshAxis, Meta, Op, Softmax}, tensor::DType};
    /// let x = Meta::new(DType::F32, [8, 100]);
    /// // Softmax over dim 1 needs whole rows, so only dim 0 may be sharded.
    /// assert_eq!(format!("{:?}", Softmax { dim: 1 }.rows(&[x], MeshAxis::new(2))), "[S0 -> S0]");
    /// ```
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row>;

    /// Computes this rank's shards of the results from its shards of the operands, on the CPU.
    ///
    /// `at` gives the window of each operand and result in its global tensor. A kernel may write its result over an
    /// operand's buffer if it is the buffer's only owner ([`Tensor::is_unique`]).
    ///
    /// ```
    /// use isoshard::ops::{Meta, Op, Sub, Windows};
    /// use isoshard::tensor::Tensor;
    /// let mut ins = [Tensor::from_vec(vec![5i32, 7], [2])?, Tensor::from_vec(vec![3i32, 0], [2])?];
    /// let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    /// let at = Windows::whole(&metas, &Sub.infer(&metas)?);
    /// assert_eq!(Sub.eval(&mut ins, &at)?[0].to_vec::<i32>()?, [2, 7]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error only for what [`Op::infer`] cannot see, such as an index out of range.
    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// Computes the same as [`Op::eval`] on operands that are stored on one CUDA device. Puts kernels on this rank's
    /// stream and does not wait for them.
    ///
    /// # Errors
    /// Returns an error if the device has no memory left or a launch fails. A kernel records faulty values, such as an
    /// index out of range, and the next call that reads a value on the host returns the error.
    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// Returns the operations and bytes of a call, as a formula of global shapes. If a row shards operands and results,
    /// each rank does its share of this work.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, Sum}, tensor::DType};
    /// let x = Meta::new(DType::F32, [1000]);
    /// let sum = Sum { dims: [0].into_iter().collect(), keep: false };
    /// let outs = sum.infer(&[x.clone()])?;
    /// let work = sum.work(&[x], &outs);
    /// assert_eq!((work.flops, work.bytes), (999, 4 * 1001));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work;

    /// Writes the derivative as steps of other operators; [`Vjp`] has an example.
    ///
    /// # Errors
    /// Returns an error if one of the steps' operators refuses its operands.
    fn vjp(&self, g: &mut Vjp) -> Result<()>;

    /// Returns a variant that keeps the first `outer` reduced dims as leading dims of the result, or `None` if there is
    /// none. Only for operators with one result.
    ///
    /// In exact mode a rank may have to return several nodes of the reduction tree. With this variant the rank computes
    /// them in one kernel call, without it in one call per node.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, Sum}, tensor::DType};
    /// let sum = Sum { dims: [0, 1].into_iter().collect(), keep: false };
    /// let per_row = sum.keep_leading(1).expect("sum has this variant");
    /// assert_eq!(per_row.infer(&[Meta::new(DType::F32, [4, 6])])?[0].to_string(), "f32[4]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn keep_leading(&self, _outer: usize) -> Option<Box<dyn Op>> {
        None
    }

    /// Returns true if a program can declare that this operator's sums are taken in parts: products, and the gradients
    /// of tables. Only for operators with one result.
    ///
    /// ```
    /// use isoshard::ops::{Matmul, Op, Sum};
    /// assert!(Matmul::for_dims(2, 2)?.takes_groups());
    /// assert!(!Sum { dims: [0].into_iter().collect(), keep: false }.takes_groups()); // losses stay exact
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn takes_groups(&self) -> bool {
        false
    }

    /// Returns true if [`Op::eval`] computes no element: its results are views of the operands, or copies if strides
    /// allow no view.
    ///
    /// ```
    /// use isoshard::ops::{Op, Permute, Softmax};
    /// assert!(Permute::swap(2, 0, 1).is_view() && !Softmax { dim: 1 }.is_view());
    /// ```
    fn is_view(&self) -> bool {
        false
    }

    /// Returns true if [`Op::eval`] writes a result over an operand that nothing else holds, if dtype and shape are the
    /// same. Dry runs use this to count memory.
    ///
    /// ```
    /// use isoshard::ops::{Add, Op, Softmax};
    /// assert!(Add.writes_in_place() && !Softmax { dim: 1 }.writes_in_place());
    /// ```
    fn writes_in_place(&self) -> bool {
        false
    }

    /// Returns true if an element of a result is a sum of several products or elements, so that fast mode may round it
    /// differently on different meshes. The tests compare derivatives without such steps bit for bit in fast mode too.
    ///
    /// ```
    /// use isoshard::ops::{Matmul, Op, Relu};
    /// assert!(Matmul::for_dims(2, 2)?.adds() && !Relu.adds());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn adds(&self) -> bool {
        false
    }

    /// Returns the operands that must be computed from other operands to give finite results, such as the maximum of
    /// each row that an exponential subtracts. The tests compute these; they give any values to the other operands.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, SumExp}, tensor::DType};
    /// let ins = [Meta::new(DType::F32, [4, 10]), Meta::new(DType::F32, [4, 1])];
    /// let statistics = SumExp.statistics(&ins);
    /// assert_eq!((statistics[0].operand, statistics[0].op.name()), (1, "max"));
    /// ```
    fn statistics(&self, _ins: &[Meta]) -> Vec<Statistic> {
        Vec::new()
    }
}

/// An operand that is a result of another operator on other operands; see [`Op::statistics`].
#[derive(Clone, Debug)]
pub struct Statistic {
    /// The operand's number.
    pub operand: usize,
    /// The operator that computes the operand.
    pub op: Arc<dyn Op>,
    /// The numbers of the operands that `op` takes, in order.
    pub of: Vec<usize>,
    /// The number of the result of `op` that the operand is.
    pub result: usize,
}

/// The number of a value in a [`VjpProgram`]: an operand, a result, an incoming gradient, or a result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VjpValue(pub(crate) u32);

/// One application of an operator in a [`VjpProgram`].
#[derive(Clone)]
pub struct VjpStep {
    /// The operator.
    pub op: Arc<dyn Op>,
    /// The operator's operands.
    pub ins: SmallVec<[VjpValue; 4]>,
    /// The operator's first result. The others have the next numbers.
    pub out: VjpValue,
    /// The number of results.
    pub out_len: usize,
}

/// A finished derivative: a list of steps that compute the operands' gradients.
///
/// Values are numbered in this order: operands, results, gradients of the results, then the steps' results.
///
/// ```
/// use isoshard::{ops::{Div, Meta, Vjp}, tensor::DType};
/// let x = Meta::new(DType::F32, [3]);
/// // z = x / y: 0 is x, 1 is y, 2 is z, 3 is dz. The first step computes dx = dz / y.
/// let program = Vjp::write(&Div, &[x.clone(), x], &[true, false])?;
/// assert_eq!(format!("{program:?}"), "%4 = Div(%3, %1)\ngrads [%4, -]");
/// assert_eq!(program.reads[..], [false, true, false, true]); // reads y and dz
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct VjpProgram {
    /// The steps in order of execution.
    pub steps: Vec<VjpStep>,
    /// The gradient of each operand, or `None` if it is not wanted or does not exist.
    pub grads: SmallVec<[Option<VjpValue>; 4]>,
    /// For each operand, the reason why it has no gradient ([`Vjp::none`]), if there is one.
    pub reasons: SmallVec<[Option<&'static str>; 4]>,
    /// The number of values.
    pub values_len: usize,
    /// For each operand, result and incoming gradient, true if the program reads it.
    pub reads: SmallVec<[bool; 8]>,
    /// For each result, true if the derivative treats it as a constant ([`Vjp::constant`]).
    pub constants: SmallVec<[bool; 4]>,
}

/// The derivative being written: the argument of [`Op::vjp`].
///
/// The derivative is a program on named values. It is written once per plan, from dtypes and global shapes; the engine
/// runs it on distributed tensors in the backward pass. The engine keeps exactly the operands and results that the
/// program reads.
///
/// ```
/// use isoshard::{Result, ops::{Meta, Mul, Vjp}, tensor::DType};
/// // d(a · b) = (g · b, g · a). `Mul` writes it; `vjp` could read:
/// fn vjp(g: &mut Vjp) -> Result<()> {
///     let (a, b, dz) = (g.input(0), g.input(1), g.grad(0));
///     if g.needs(0) {
///         let da = g.apply(Mul, &[dz, b])?;
///         g.set(0, da);
///     }
///     if g.needs(1) {
///         let db = g.apply(Mul, &[dz, a])?;
///         g.set(1, db);
///     }
///     Ok(())
/// }
/// let x = Meta::new(DType::F32, [2]);
/// let program = Vjp::write(&Mul, &[x.clone(), x], &[true, false])?;
/// assert_eq!(program.steps.len(), 1); // the second gradient is not wanted
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Vjp<'a> {
    pub(super) op: &'a dyn Op,
    pub(super) metas: Vec<Meta>,
    pub(super) ins_len: usize,
    pub(super) outs_len: usize,
    pub(super) needs: &'a [bool],
    pub(super) steps: Vec<VjpStep>,
    pub(super) grads: SmallVec<[Option<VjpValue>; 4]>,
    pub(super) answered: SmallVec<[bool; 4]>,
    pub(super) reasons: SmallVec<[Option<&'static str>; 4]>,
    pub(super) reads: SmallVec<[bool; 8]>,
    pub(super) constants: SmallVec<[bool; 4]>,
    /// The first call that named an operand, result or value that does not exist, or a gradient of another shape.
    pub(super) broken: RefCell<Option<Error>>,
}

/// An operator that a CUDA device can compute for many calls in one launch, such as an optimizer's step on many
/// parameters.
///
/// [`nn::Params::update`](crate::nn::Params::update) and
/// [`DTensor::apply_owned_batch`](crate::dtensor::DTensor::apply_owned_batch) take such operators. On the CPU they make
/// one kernel call per operand list.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::dtensor::{DTensor, DTensors, DeviceMesh};
/// use isoshard::ops::{Bits, SgdStep, Unkeyed};
/// use isoshard::placement::Layout;
/// use isoshard::tensor::DType;
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let full = |value| DTensor::full(&mesh, DType::F32, [4], "(S0)", value);
///     let scale = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
///     let op = SgdStep { momentum: Bits(0.0), weight_decay: Bits(0.0), nesterov: false, lr: Unkeyed(0.5) };
///     // Operands: parameter, gradient, momentum, scale of the gradient.
///     let mut first: DTensors = [full(1.0)?, full(2.0)?, full(0.0)?, scale.clone()].into_iter().collect();
///     let mut second: DTensors = [full(3.0)?, full(4.0)?, full(0.0)?, scale].into_iter().collect();
///     let (outs, end) = DTensor::apply_owned_batch(&mut [(&op, &mut first), (&op, &mut second)]);
///     end?;
///     assert_eq!(outs[0][0].full_tensor()?.to_f64_vec(), [0.0; 4]);
///     assert_eq!(outs[1][0].full_tensor()?.to_f64_vec(), [1.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Batched: Op + Sized {
    /// True for an optimizer's step that takes one more operand before the last, and returns it last: a tensor of an f32
    /// parameter's shape in f16 or bf16, which it overwrites with the new parameter, rounded.
    /// [`Params::update`](crate::nn::Params::update) brings it where modules compute in that dtype, so that no pass
    /// rounds the parameter again.
    const ROUNDS: bool = false;

    /// Makes all calls on one CUDA device and returns their results in order. A call is an operator and its operands,
    /// as for [`Op::cuda`].
    ///
    /// The default calls [`Op::cuda`] once per call. An operator with a kernel for many calls overrides it.
    ///
    /// # Errors
    /// Returns the errors of [`Op::cuda`]. If one call fails, none has results.
    fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], at: &[&Windows]) -> Result<Vec<Tensors>> {
        calls.iter_mut().zip(at).map(|((op, ins), at)| op.cuda(ins, at)).collect()
    }
}

/// Comparison, hashing and copying of operators behind `dyn Op`. Implemented for every operator that is
/// `Clone + Eq + Hash`.
///
/// ```
/// use std::sync::Arc;
/// use isoshard::ops::{LogSoftmax, Op, OpKey, Softmax};
/// let op: Arc<dyn Op> = Softmax { dim: 1 }.to_shared();
/// assert!(op.key_eq(&Softmax { dim: 1 }));
/// assert!(!op.key_eq(&Softmax { dim: 0 }) && !op.key_eq(&LogSoftmax { dim: 1 }));
/// assert_eq!(op.as_any().downcast_ref(), Some(&Softmax { dim: 1 }));
/// ```
pub trait OpKey: Any {
    /// Returns true if the other operator has the same type and equal attributes.
    fn key_eq(&self, other: &dyn Op) -> bool;
    /// Hashes the type and the attributes.
    fn key_hash(&self, state: &mut dyn Hasher);
    /// Returns the operator as `dyn Any`, to be downcast.
    fn as_any(&self) -> &dyn Any;
    /// Returns a copy in an `Arc`.
    fn to_shared(&self) -> Arc<dyn Op>;
}

impl<T: Op + Clone + Eq + Hash> OpKey for T {
    fn key_eq(&self, other: &dyn Op) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|o| o == self)
    }

    fn key_hash(&self, mut state: &mut dyn Hasher) {
        self.hash(&mut state);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn to_shared(&self) -> Arc<dyn Op> {
        Arc::new(self.clone())
    }
}

/// An attribute that is not part of the key under which plans are cached, such as a learning rate or a draw number. Any
/// two compare equal and have the same hash.
///
/// Calls that differ only in such attributes share a plan. They do not share a derivative: an operator with an
/// `Unkeyed` attribute writes its derivative once per call. The crate notices the attribute when it hashes the
/// operator, so an attribute that must not be compared has to be an `Unkeyed`, not a field that a hand-written
/// `PartialEq` skips.
///
/// ```
/// use isoshard::ops::Unkeyed;
/// assert_eq!(Unkeyed(0.1), Unkeyed(0.2));
/// assert_eq!(Unkeyed(0.1).0, 0.1);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Unkeyed<T>(pub T);

thread_local! {
    /// True if this thread has compared or hashed an [`Unkeyed`] since the flag was cleared.
    static MET_UNKEYED: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if `op` has an [`Unkeyed`] attribute.
pub(crate) fn has_unkeyed(op: &dyn Op) -> bool {
    MET_UNKEYED.set(false);
    op.key_hash(&mut FxHasher::default());
    op.key_eq(op);
    MET_UNKEYED.get()
}

impl<T> PartialEq for Unkeyed<T> {
    fn eq(&self, _: &Self) -> bool {
        MET_UNKEYED.set(true);
        true
    }
}

impl<T> Eq for Unkeyed<T> {}

impl<T> Hash for Unkeyed<T> {
    fn hash<H: Hasher>(&self, _: &mut H) {
        MET_UNKEYED.set(true);
    }
}

/// A floating-point attribute that is compared and hashed by its bits.
///
/// ```
/// use isoshard::ops::Bits;
/// assert_eq!(Bits(f64::NAN), Bits(f64::NAN));
/// assert_ne!(Bits(0.0), Bits(-0.0));
/// ```
#[derive(Clone, Copy, Default)]
pub struct Bits(pub f64);

impl PartialEq for Bits {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Bits {}

impl Hash for Bits {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// The region of a global tensor that this rank stores.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::dtensor::{DTensor, DeviceMesh};
/// use isoshard::tensor::DType;
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
///     let x = DTensor::zeros(&mesh, DType::F32, [5, 4], "(S0)")?;
///     let window = x.tensor_meta().window().clone();
///     let (start, rows) = [(0, 3), (3, 2)][rank.rank()];
///     assert_eq!(window.global[..], [5, 4]);
///     assert_eq!((window.start(0), &window.local()[..]), (start, &[rows, 4][..]));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The global shape.
    pub global: Shape,
    /// The global indices that this rank stores, and their positions in local storage.
    pub region: Region,
}

/// The windows of all operands and results of one call on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// One window per operand.
    pub ins: SmallVec<[Window; 3]>,
    /// One window per result.
    pub outs: SmallVec<[Window; 3]>,
    /// True if sums must follow the reduction tree. If false, a device may use its fastest matrix products and
    /// attention; all other kernels follow the tree in any case.
    pub exact: bool,
}

impl Window {
    /// Returns the window that covers the whole tensor.
    ///
    /// ```
    /// use isoshard::ops::Window;
    /// assert_eq!(Window::whole(&[5, 4].into()).local()[..], [5, 4]);
    /// ```
    pub fn whole(shape: &Shape) -> Window {
        Window { global: shape.clone(), region: Region::whole(shape) }
    }

    /// Returns the local shape.
    pub fn local(&self) -> &Shape {
        &self.region.local
    }

    /// Returns the first global index along `dim` that this rank stores, or 0 if it stores nothing.
    ///
    /// # Panics
    /// Panics if the region is ragged over several dims. Only operators that list ragged rows themselves get such windows.
    pub fn start(&self, dim: usize) -> usize {
        if self.region.is_empty() {
            return 0;
        }
        self.region.start(dim).expect("the operator lists ragged rows, and reads no start of a flattened dim")
    }
}

impl Windows {
    /// Returns the windows of a single rank, which stores all operands and results whole.
    pub fn whole(ins: &[Meta], outs: &[Meta]) -> Windows {
        let whole = |m: &Meta| Window::whole(&m.shape);
        Windows { ins: ins.iter().map(whole).collect(), outs: outs.iter().map(whole).collect(), exact: true }
    }
}
