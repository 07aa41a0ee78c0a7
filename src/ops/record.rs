//! The record that every operator fills.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::meta::list;
use super::{MeshAxis, Meta, Metas, Row, Work};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{DType, Device, Shape, Tensor};

/// A few tensors, one an operand or a result.
pub type Tensors = SmallVec<[Tensor; 3]>;

/// Everything true about one operator.
///
/// The value itself holds the attributes (a dim, a probability); it is compared and hashed as part of a plan's key.
/// All methods speak of *global* shapes except [`Op::eval`], which computes this rank's part.
pub trait Op: Key + fmt::Debug + Send + Sync {
    /// The name, as users call it.
    fn name(&self) -> &'static str;

    /// The results' dtypes and global shapes.
    ///
    /// # Errors
    /// Refuses, in the operator's name, operands it cannot take.
    fn infer(&self, ins: &[Meta]) -> Result<Metas>;

    /// What one mesh axis of `axis.ranks` ranks may do: each row gives placements of operands under which every rank,
    /// computing on what it holds, gets its part of the results in the placements the row gives.
    ///
    /// That replicated operands give replicated results is true of every operator and not listed. Operands have
    /// passed [`Op::infer`].
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row>;

    /// This rank's part of the results, from its parts of the operands.
    ///
    /// `at` tells where the parts lie in the whole. A kernel may take an operand's buffer for its result where it is
    /// the only owner ([`Tensor::is_unique`]).
    ///
    /// # Errors
    /// Only for what [`Op::infer`] cannot see, such as an index out of range.
    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// The same on operands that lie on one CUDA device: puts kernels on this rank's stream and waits for nothing.
    ///
    /// # Errors
    /// A device without room, a launch that fails. What [`Op::eval`] finds in values, kernels report, and the next read
    /// of a value gives the error.
    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// The work of a call on operands that have passed [`Op::infer`], with the results that it gives: operations and bytes, as a
    /// formula of shapes. A row that cuts operands and results divides it among the ranks.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work;

    /// The derivative, as an expression over other operators; see [`Vjp`].
    ///
    /// # Errors
    /// Passes on what the expression's operators refuse.
    fn vjp(&self, g: &mut Vjp) -> Result<()>;

    /// Of an operator with one result: the same where the first `outer` of the dims it sums over are kept, in front of the
    /// result's dims. With it a rank computes many nodes in one call; without, in a call for each.
    fn keep_leading(&self, _outer: usize) -> Option<Box<dyn Op>> {
        None
    }

    /// True where [`Op::eval`] reads no element: its results are views of the operands, or copies that strides force.
    fn is_view(&self) -> bool {
        false
    }

    /// True if elements of a result add several terms, which in fast mode may round differently from one mesh to another. Tests
    /// hold a derivative without such a step to the last bit there too.
    fn adds(&self) -> bool {
        false
    }

    /// The operands that must be computed from others for results to be finite, such as the maximum of a row whose distances
    /// to it are exponentiated. Tests compute them; every other operand may have any value.
    fn statistics(&self, _ins: &[Meta]) -> Vec<Statistic> {
        Vec::new()
    }
}

/// An operand that is a result of another operator on other operands; see [`Op::statistics`].
#[derive(Clone, Debug)]
pub struct Statistic {
    /// The operand's number.
    pub operand: usize,
    /// The operator that gives it.
    pub op: Arc<dyn Op>,
    /// The numbers of the operands from which it is computed, in order.
    pub of: Vec<usize>,
    /// The number of the result that it is.
    pub result: usize,
}

/// A value of a program: an operand, a result, a gradient that came in, or the result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ref(pub(crate) u32);

/// One application of an operator.
#[derive(Clone)]
pub struct Step {
    /// The operator.
    pub op: Arc<dyn Op>,
    /// Its operands.
    pub ins: SmallVec<[Ref; 4]>,
    /// Its first result; the others follow.
    pub out: Ref,
    /// The number of its results.
    pub out_len: usize,
}

/// A finished derivative. Values are numbered: operands, results, gradients of the results, then the steps' results.
#[derive(Clone)]
pub struct Program {
    /// In order of execution.
    pub steps: Vec<Step>,
    /// One an operand: its gradient, or none because none was asked for or none exists.
    pub grads: SmallVec<[Option<Ref>; 4]>,
    /// The number of values.
    pub values_len: usize,
    /// Which operands, results and incoming gradients the program reads.
    pub reads: SmallVec<[bool; 8]>,
    /// Results that are constants to the derivative, as the operator says ([`Vjp::constant`]).
    pub constants: SmallVec<[bool; 4]>,
}

/// The program being written: what [`Op::vjp`] gets.
///
/// ```
/// use isoshard::ops::{Meta, Op, Vjp, Mul};
/// // d(a·b) = (g·b, g·a), the product's own file says; here for the first operand alone:
/// let metas = [Meta::new(isoshard::tensor::DType::F32, [2]), Meta::new(isoshard::tensor::DType::F32, [2])];
/// let program = Vjp::write(&Mul, &metas, &[true, false])?;
/// assert_eq!(program.steps.len(), 1);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Vjp<'a> {
    pub(super) op: &'a dyn Op,
    pub(super) metas: Vec<Meta>,
    pub(super) ins_len: usize,
    pub(super) outs_len: usize,
    pub(super) needs: &'a [bool],
    pub(super) steps: Vec<Step>,
    pub(super) grads: SmallVec<[Option<Ref>; 4]>,
    pub(super) answered: SmallVec<[bool; 4]>,
    pub(super) reads: SmallVec<[bool; 8]>,
    pub(super) constants: SmallVec<[bool; 4]>,
}

/// An operator that a CUDA device can compute for many calls in one launch: an optimizer's step on many parameters.
///
/// [`nn::Params::update`](crate::nn::Params::update) and [`DTensor::apply_owned_batch`](crate::dtensor::DTensor::apply_owned_batch)
/// take such operators. On the CPU every call is made by itself.
pub trait Batched: Op + Sized {
    /// [`Op::cuda`] of every call, an operator and its operands, which lie on one device. Gives each call's results, in order.
    ///
    /// An operator without kernels of its own leaves it as it is: then every call is made by itself.
    ///
    /// # Errors
    /// As [`Op::cuda`]; no call has results then.
    fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], at: &[&Windows]) -> Result<Vec<Tensors>> {
        calls.iter_mut().zip(at).map(|((op, ins), at)| op.cuda(ins, at)).collect()
    }
}

/// Comparing, hashing and copying operators behind `dyn Op`; implemented for every `Clone + Eq + Hash` operator.
pub trait Key: Any {
    /// Equal type and attributes.
    fn key_eq(&self, other: &dyn Op) -> bool;
    /// Hashes type and attributes.
    fn key_hash(&self, state: &mut dyn Hasher);
    /// For downcasting.
    fn as_any(&self) -> &dyn Any;
    /// A shared copy.
    fn to_shared(&self) -> Arc<dyn Op>;
}

impl<T: Op + Clone + Eq + Hash> Key for T {
    fn key_eq(&self, other: &dyn Op) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|o| o == self)
    }

    fn key_hash(&self, mut state: &mut dyn Hasher) {
        std::any::TypeId::of::<T>().hash(&mut state);
        self.hash(&mut state);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn to_shared(&self) -> Arc<dyn Op> {
        Arc::new(self.clone())
    }
}

/// An attribute that may differ from call to call without changing the plan (a draw number, a learning rate): any two are
/// equal and have one hash.
///
/// Calls that differ in such an attribute alone share a plan but no derivative: an operator that has one writes its
/// derivative anew for each call. It need not say so: the attribute is noticed when the operator is compared with itself and
/// hashed. An attribute that an operator leaves out of its comparison must therefore be a `Unkeyed`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unkeyed<T>(pub T);

thread_local! {
    /// True if this thread has compared or hashed a [`Unkeyed`] since the flag was cleared.
    static MET_UNKEYED: Cell<bool> = const { Cell::new(false) };
}

/// True if `op` has a [`Unkeyed`] attribute.
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

/// A floating attribute that is compared and hashed by its bits.
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

/// Where one operand's or result's local part lies in the whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The global extents.
    pub global: Shape,
    /// The global indices held here, and their places in local storage.
    pub region: Region,
}

/// The windows of one call of an operator on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// One an operand.
    pub ins: SmallVec<[Window; 3]>,
    /// One a result.
    pub outs: SmallVec<[Window; 3]>,
    /// Whether the bits must be those of the summation tree, as every kernel's are but a device's fastest products and
    /// attention.
    pub exact: bool,
}

impl Window {
    /// The window that is the whole.
    pub fn whole(shape: &Shape) -> Window {
        Window { global: shape.clone(), region: Region::whole(shape) }
    }

    /// The local shape.
    pub fn local(&self) -> &Shape {
        &self.region.local
    }

    /// The first global index held along `dim`; 0 where the part is empty.
    ///
    /// # Panics
    /// On a part that is ragged over several dims, which no row that asks for a start admits.
    pub fn start(&self, dim: usize) -> usize {
        if self.region.is_empty() {
            return 0;
        }
        self.region.start(dim).expect("rows admit several-dim ragged parts to pointwise operators only")
    }
}

impl Windows {
    /// The windows of a single rank, which holds everything.
    pub fn whole(ins: &[Meta], outs: &[Meta]) -> Windows {
        let whole = |m: &Meta| Window::whole(&m.shape);
        Windows { ins: ins.iter().map(whole).collect(), outs: outs.iter().map(whole).collect(), exact: true }
    }
}

/// Refuses another number of operands than `N`.
pub(crate) fn arity<'a, const N: usize>(verb: &str, ins: &'a [Meta]) -> Result<&'a [Meta; N]> {
    ins.try_into().map_err(|_| {
        Error::invalid(verb, format!("wants {N} operand(s)"), format!("{}: {}", ins.len(), list(ins)), "")
    })
}

/// Runs an operator on whole tensors, as a mesh of one rank would.
///
/// # Errors
/// Passes on refusals of the operator.
pub fn eval_whole(op: &dyn Op, ins: &[Tensor]) -> Result<Tensors> {
    let metas: Metas = ins.iter().map(Meta::of).collect();
    let outs = op.infer(&metas)?;
    let mut ins: Tensors = ins.iter().cloned().collect();
    let at = Windows::whole(&metas, &outs);
    if ins.first().is_some_and(Tensor::is_meta) && !op.is_view() {
        return absent(&mut ins, outs.into_iter().map(|m| (m.dtype, m.shape)));
    }
    run(op, &mut ins, &at)
}

/// Runs an operator's kernel where its operands are.
///
/// # Errors
/// Refuses operands on different devices; what the kernel refuses.
pub(crate) fn run(op: &dyn Op, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
    let device = ins.first().map_or(Device::Cpu, Tensor::device);
    if let Some(other) = ins.iter().find(|x| x.device() != device) {
        let given = format!("{} on {device}, {} on {}", ins[0].notation(), other.notation(), other.device());
        let rule = "the operands lie on different devices";
        return Err(Error::invalid(op.name(), rule, given, "move them to one with to_device"));
    }
    match device {
        Device::Cpu => op.eval(ins, at),
        Device::Cuda(_) => op.cuda(ins, at),
        Device::Meta if op.is_view() => op.eval(ins, at),
        Device::Meta => {
            let given = ins[0].notation();
            Err(Error::unsupported(op.name(), "tensors on meta have no elements to compute with", given, ""))
        }
    }
}

/// Results without elements, which are `outs` in dtype and shape. A result takes an operand's buffer where kernels may: it
/// has its size, and nobody else needs it.
pub(crate) fn absent(ins: &mut [Tensor], outs: impl Iterator<Item = (DType, Shape)>) -> Result<Tensors> {
    let mut taken: SmallVec<[bool; 8]> = SmallVec::from_elem(false, ins.len());
    let mut one = |(dtype, shape): (DType, Shape)| {
        let fits = |x: &mut Tensor| x.dtype() == dtype && *x.shape() == shape && x.is_unique();
        match (0..ins.len()).find(|&i| !taken[i] && fits(&mut ins[i])) {
            Some(i) => {
                taken[i] = true;
                Ok(ins[i].clone())
            }
            None => Tensor::absent(dtype, shape),
        }
    };
    outs.map(&mut one).collect()
}
