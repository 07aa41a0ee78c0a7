//! The tape: nodes with the history of tensors, the calls that computed them and what their derivatives need.
//!
//! A result refers to its node, and a node to those of its call's operands: dropping a result drops its history. A node keeps
//! the operands and results that its derivative reads ([`Saved`]).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use smallvec::SmallVec;

use super::dtensor::DTensor;
use super::saved::Saved;
use crate::comm::ModulePath;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::error::Result;
use crate::tensor::DType;

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

impl TapeNode {
    /// Makes the youngest node, which belongs to the module that this thread has entered.
    #[inline]
    pub fn new(outs: SmallVec<[Rc<TensorMeta>; 1]>, call: Option<TapeCall>) -> Rc<TapeNode> {
        let (id, path) = (next_id(), ModulePath::current());
        Rc::new(TapeNode { id, path, outs, call, pending_grads: Cell::default(), destination: None })
    }

    /// Makes the node of a leaf.
    pub fn leaf(x: &DTensor, destination: Option<Box<GradientDestination>>) -> Rc<TapeNode> {
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

impl Drop for TapeNode {
    /// Drops long chains in a loop: recursion could exhaust the stack. A node that only a user's closure holds joins the
    /// loop in which the closure is dropped.
    fn drop(&mut self) {
        thread_local!(static JOINING: RefCell<Option<Vec<TapeCall>>> = const { RefCell::new(None) });
        let Some(call) = self.call.take() else { return };
        let mut calls: SmallVec<[TapeCall; 2]> = SmallVec::new();
        calls.push(call);
        let joins = JOINING.try_with(|joining| match &mut *joining.borrow_mut() {
            Some(others) => {
                others.extend(calls.drain(..));
                true
            }
            none => {
                *none = Some(Vec::new());
                false
            }
        });
        // An ending thread has no such list any more.
        if joins == Ok(true) {
            return;
        }
        while let Some(TapeCall { inputs, derivative }) = calls.pop() {
            for output in inputs.into_iter().flatten() {
                if let Ok(mut node) = Rc::try_unwrap(output.node) {
                    calls.extend(node.call.take());
                }
            }
            drop(derivative);
            let join = |joining: &RefCell<Option<Vec<_>>>| {
                joining.borrow_mut().iter_mut().for_each(|others| calls.extend(others.drain(..)))
            };
            let _ = JOINING.try_with(join);
        }
        let _ = JOINING.try_with(|joining| *joining.borrow_mut() = None);
    }
}
