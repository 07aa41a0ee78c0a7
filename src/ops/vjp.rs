//! Derivatives as programs: straight-line expressions over other operators.
//!
//! An operator's [`Op::vjp`] writes the program once, for global shapes; the engine runs it on distributed tensors, so
//! a derivative shards itself on every mesh and device. The engine keeps exactly the operands and results that the
//! program reads.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::meta::{Meta, Metas};
use super::record::{Op, Vjp, VjpProgram, VjpStep, VjpValue};
use crate::error::{Error, Result};

impl VjpValue {
    /// The value's number in its program.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl<'a> Vjp<'a> {
    /// The derivative of `op` with respect to those operands that `needs` names.
    ///
    /// # Errors
    /// Refuses an operator that leaves a wanted gradient unanswered, and passes on what it refuses itself.
    pub fn write(op: &'a dyn Op, ins: &[Meta], needs: &'a [bool]) -> Result<VjpProgram> {
        let outs = op.infer(ins)?;
        let metas: Vec<Meta> = ins.iter().chain(&outs).chain(&outs).cloned().collect();
        let mut g = Vjp {
            op,
            ins_len: ins.len(),
            outs_len: outs.len(),
            needs,
            steps: Vec::new(),
            grads: SmallVec::from_elem(None, ins.len()),
            answered: SmallVec::from_elem(false, ins.len()),
            reads: SmallVec::from_elem(false, metas.len()),
            constants: SmallVec::from_elem(false, outs.len()),
            metas,
        };
        op.vjp(&mut g)?;
        g.finish()
    }

    /// Operand `i`.
    pub fn input(&self, i: usize) -> VjpValue {
        VjpValue(i as u32)
    }

    /// Result `i`.
    pub fn output(&self, i: usize) -> VjpValue {
        VjpValue((self.ins_len + i) as u32)
    }

    /// The gradient that came for result `i`; zeros if none came.
    pub fn grad(&self, i: usize) -> VjpValue {
        VjpValue((self.ins_len + self.outs_len + i) as u32)
    }

    /// True where the gradient of operand `i` is wanted: leave out the steps of others.
    pub fn needs(&self, i: usize) -> bool {
        self.needs[i]
    }

    /// Dtype and global shape of a value.
    pub fn meta(&self, value: VjpValue) -> &Meta {
        &self.metas[value.0 as usize]
    }

    /// The number of operands.
    pub fn ins_len(&self) -> usize {
        self.ins_len
    }

    /// Dtype and global shape of operand `i`, without reading it.
    pub fn input_meta(&self, i: usize) -> &Meta {
        &self.metas[i]
    }

    /// Dtype and global shape of result `i`, without reading it.
    pub fn output_meta(&self, i: usize) -> &Meta {
        &self.metas[self.ins_len + i]
    }

    /// The result of an operator that has one.
    ///
    /// # Errors
    /// Passes on refusals of the operator.
    pub fn apply(&mut self, op: impl Op, ins: &[VjpValue]) -> Result<VjpValue> {
        Ok(self.apply_all(op, ins)?[0])
    }

    /// All results of an operator.
    ///
    /// # Errors
    /// Passes on refusals of the operator.
    pub fn apply_all(&mut self, op: impl Op, ins: &[VjpValue]) -> Result<SmallVec<[VjpValue; 4]>> {
        self.add_step(Arc::new(op), ins)
    }

    /// The result of an operator without free attributes that has one result; that of the same step taken before, if there
    /// is one.
    pub(super) fn apply_once(&mut self, op: &dyn Op, ins: &[VjpValue]) -> Result<VjpValue> {
        let same = |s: &&VjpStep| s.ins[..] == *ins && s.op.key_eq(op);
        match self.steps.iter().find(same) {
            Some(step) => Ok(step.out),
            None => Ok(self.add_step(op.to_shared(), ins)?[0]),
        }
    }

    fn add_step(&mut self, op: Arc<dyn Op>, ins: &[VjpValue]) -> Result<SmallVec<[VjpValue; 4]>> {
        ins.iter().for_each(|&value| self.read(value));
        let metas: Metas = ins.iter().map(|r| self.metas[r.0 as usize].clone()).collect();
        let outs = op.infer(&metas)?;
        let first = self.metas.len();
        let refs = (first..first + outs.len()).map(|v| VjpValue(v as u32)).collect();
        self.steps.push(VjpStep {
            op,
            ins: ins.iter().copied().collect(),
            out: VjpValue(first as u32),
            out_len: outs.len(),
        });
        self.metas.extend(outs);
        Ok(refs)
    }

    /// `grad` is the gradient of operand `i`. Ignored if it is not wanted.
    ///
    /// # Panics
    /// If its shape or dtype is not the operand's: a wrong derivative.
    pub fn set(&mut self, i: usize, grad: VjpValue) {
        assert_eq!(
            self.meta(grad),
            &self.metas[i],
            "{}: the gradient of operand {i} has its shape",
            self.op.name()
        );
        self.answered[i] = true;
        if self.needs[i] {
            self.read(grad);
            self.grads[i] = Some(grad);
        }
    }

    /// Operand `i` has no gradient, because of `why`: the gradient is zero, or stops here by definition.
    pub fn none(&mut self, i: usize, why: &'static str) {
        debug_assert!(!why.is_empty());
        self.answered[i] = true;
    }

    /// No operand has a gradient, because of `why`.
    pub fn none_at_all(&mut self, why: &'static str) {
        (0..self.ins_len).for_each(|i| self.none(i, why));
    }

    /// Result `i` is a constant to the derivative, because of `why`: a gradient that comes for it is dropped.
    pub fn constant(&mut self, i: usize, why: &'static str) {
        debug_assert!(!why.is_empty());
        self.constants[i] = true;
    }

    /// Says that the operator has no derivative, because of `why`: it stands in those of others only.
    ///
    /// # Errors
    /// Always, if some gradient is wanted.
    pub fn refuse(&mut self, why: &'static str) -> Result<()> {
        if !self.needs.contains(&true) {
            return Ok(());
        }
        let rule = format!("no derivative: {why}");
        Err(Error::unsupported(self.op.name(), rule, format!("{:?}", self.op), "detach the operands"))
    }

    /// Notes that the program reads a value, if it is an operand, a result or a gradient that came in.
    fn read(&mut self, value: VjpValue) {
        if let Some(read) = self.reads.get_mut(value.index()) {
            *read = true;
        }
    }

    fn finish(self) -> Result<VjpProgram> {
        let missing = (0..self.ins_len).find(|&i| self.needs[i] && !self.answered[i]);
        if let Some(i) = missing {
            return Err(Error::unsupported(
                self.op.name(),
                format!("no derivative with respect to operand {i}"),
                format!("{:?}", self.op),
                "detach the operand",
            ));
        }
        let Vjp { steps, grads, metas, reads, constants, .. } = self;
        Ok(VjpProgram { steps, grads, values_len: metas.len(), reads, constants })
    }
}

/// The steps, one a line: `%5 = mul(%4, %1)`.
impl fmt::Debug for VjpProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for s in &self.steps {
            let ins: Vec<String> = s.ins.iter().map(|r| format!("%{}", r.0)).collect();
            writeln!(f, "%{} = {:?}({})", s.out.0, s.op, ins.join(", "))?;
        }
        write!(f, "grads {:?}", self.grads)
    }
}
