//! Derivative programs as the tape keeps them.

use std::cell::{OnceCell, RefCell};
use std::ops::Deref;
use std::rc::{Rc, Weak};

use smallvec::SmallVec;

use super::call_plan::CallPlan;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::Result;
use crate::ops::{Add, VjpProgram, VjpStep, VjpValue};

/// A derivative program that knows when its values are read for the last time, and remembers how it ran last.
pub(in crate::dtensor) struct DerivativeProgram {
    program: VjpProgram,
    /// Per step, a bit per operand, set if no later step reads the value and it is no gradient of the program. Operands
    /// from the 64th on have no bit.
    pub last_reads: Vec<u64>,
    /// True if the only step passes partial sums on by bits, once it has been asked for.
    pub passes_sums: OnceCell<bool>,
    /// The incoming gradients that only one step reads, which adds them to something: they need not be there if they are
    /// zero.
    only_added: SmallVec<[VjpValue; 1]>,
    /// The plan of each step's last call. The mesh's cache owns the plans.
    plans: RefCell<SmallVec<[Weak<CallPlan>; 2]>>,
}

impl DerivativeProgram {
    pub fn new(program: VjpProgram) -> DerivativeProgram {
        let mut read_later = vec![false; program.values_len];
        program.grads.iter().flatten().for_each(|v| read_later[v.0 as usize] = true);
        let mut last_reads = vec![0; program.steps.len()];
        for (step, last) in program.steps.iter().zip(&mut last_reads).rev() {
            for (i, v) in step.ins.iter().enumerate().rev() {
                if !std::mem::replace(&mut read_later[v.0 as usize], true) && i < 64 {
                    *last |= 1 << i;
                }
            }
        }
        let only_added = only_added(&program);
        let (passes_sums, plans) = (OnceCell::new(), RefCell::default());
        DerivativeProgram { program, last_reads, passes_sums, only_added, plans }
    }

    /// Returns the plan for a step on operands with this metadata. A repeated pass needs no lookup in the mesh's cache.
    pub fn step_plan(&self, mesh: &DeviceMesh, step: usize, ins: &[&Rc<TensorMeta>]) -> Result<Rc<CallPlan>> {
        let mut plans = self.plans.borrow_mut();
        if plans.len() <= step {
            plans.resize(self.steps.len(), Weak::new());
        }
        CallPlan::find_known(&mut plans[step], mesh, &*self.steps[step].op, ins)
    }

    /// Returns true if value `v` is an incoming gradient that one step adds, and nothing else reads.
    pub fn is_only_added(&self, v: usize) -> bool {
        self.only_added.iter().any(|added| added.index() == v) && !self.is_gradient(v)
    }

    /// Returns true if value `v` is the gradient of an operand, unchanged.
    pub fn is_gradient(&self, v: usize) -> bool {
        self.program.grads.iter().flatten().any(|grad| grad.index() == v)
    }

    /// Returns true if value `v` is the gradient of one of the `operands`, a bit set, and nothing else.
    pub fn is_gradient_of(&self, v: usize, operands: u64) -> bool {
        let is = |grad: &Option<VjpValue>| grad.is_some_and(|grad| grad.0 as usize == v);
        let mut of = self.program.grads.iter().enumerate().filter(|(_, grad)| is(grad)).map(|(i, _)| i);
        let (Some(only), None) = (of.next(), of.next()) else { return false };
        let read = self.program.steps.iter().flat_map(|step| &step.ins).any(|r| r.0 as usize == v);
        only < 64 && operands >> only & 1 == 1 && !read
    }
}

/// Returns the incoming gradients that one step adds to a value that is none, and that no other step reads.
fn only_added(program: &VjpProgram) -> SmallVec<[VjpValue; 1]> {
    let incoming = program.reads.len() - program.constants.len()..program.reads.len();
    let is_incoming = |v: &&VjpValue| incoming.contains(&v.index());
    let reads =
        |v: VjpValue| program.steps.iter().flat_map(|step| &step.ins).filter(move |read| **read == v).count();
    let term = |step: &VjpStep| {
        let mut terms = step.ins.iter().filter(is_incoming);
        let only = terms.next().filter(|_| terms.next().is_none());
        only.copied().filter(|&v| step.op.as_any().is::<Add>() && reads(v) == 1)
    };
    program.steps.iter().filter_map(term).collect()
}

impl Deref for DerivativeProgram {
    type Target = VjpProgram;

    fn deref(&self) -> &VjpProgram {
        &self.program
    }
}
