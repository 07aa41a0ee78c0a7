//! The derivative being written, as a list of steps of other operators.
//!
//! [`Op::vjp`] writes the steps once per plan, from global shapes. The engine runs them on distributed tensors, so the
//! derivative needs no sharding rules of its own.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::run::infer_results;
use super::{Meta, Metas, Op, VjpProgram, VjpStep, VjpValue};
use crate::error::{Error, Result};
use crate::tensor::short_list;

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

/// Returns, per value of a program, true if one of `wanted` depends on it.
pub(in crate::ops) fn live_values(
    steps: &[VjpStep],
    values_len: usize,
    wanted: impl Iterator<Item = VjpValue>,
) -> Vec<bool> {
    let mut live = vec![false; values_len];
    wanted.for_each(|value| live[value.index()] = true);
    for step in steps.iter().rev() {
        if step.outs().any(|out| live[out]) {
            step.ins.iter().for_each(|value| live[value.index()] = true);
        }
    }
    live
}

impl<'a> Vjp<'a> {
    /// Writes the derivative of `op` with respect to the operands for which `needs` is true.
    ///
    /// ```
    /// use isoshard::{ops::{Exp, Meta, Vjp}, tensor::DType};
    /// // y = e^x: 0 is x, 1 is y, 2 is dy.
    /// let program = Vjp::write(&Exp, &[Meta::new(DType::F32, [3])], &[true])?;
    /// assert_eq!(format!("{program:?}"), "%3 = Mul(%2, %1)\ngrads [%3]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `op` neither sets a wanted gradient nor states that there is none, and the error of `op` if
    /// it returns one.
    pub fn write(op: &'a dyn Op, ins: &[Meta], needs: &'a [bool]) -> Result<VjpProgram> {
        let outs = infer_results(op, ins)?;
        let metas: Vec<Meta> = ins.iter().chain(&outs).chain(&outs).cloned().collect();
        let mut g = Vjp {
            op,
            ins_len: ins.len(),
            outs_len: outs.len(),
            needs,
            steps: Vec::new(),
            grads: SmallVec::from_elem(None, ins.len()),
            answered: SmallVec::from_elem(false, ins.len()),
            reasons: SmallVec::from_elem(None, ins.len()),
            reads: SmallVec::from_elem(false, metas.len()),
            constants: SmallVec::from_elem(false, outs.len()),
            metas,
            broken: RefCell::default(),
        };
        let written = op.vjp(&mut g);
        // Later errors follow from the first broken call.
        if let Some(broken) = g.broken.take() {
            return Err(broken);
        }
        written?;
        g.finish()
    }

    /// Returns operand `i` as a value.
    pub fn input(&self, i: usize) -> VjpValue {
        VjpValue(self.operand("input", i) as u32)
    }

    /// Returns result `i` as a value.
    pub fn output(&self, i: usize) -> VjpValue {
        VjpValue((self.ins_len + self.result("output", i)) as u32)
    }

    /// Returns the incoming gradient of result `i`. The engine passes zeros if result `i` has no gradient.
    pub fn grad(&self, i: usize) -> VjpValue {
        VjpValue((self.ins_len + self.outs_len + self.result("grad", i)) as u32)
    }

    /// Returns true if the gradient of operand `i` is wanted. Skip the steps of gradients that are not.
    pub fn needs(&self, i: usize) -> bool {
        self.needs.get(self.operand("needs", i)).copied().unwrap_or(false)
    }

    /// Returns the dtype and global shape of a value.
    pub fn meta(&self, value: VjpValue) -> &Meta {
        &self.metas[self.value("meta", value)]
    }

    /// Returns the number of operands.
    pub(crate) fn ins_len(&self) -> usize {
        self.ins_len
    }

    /// Returns the dtype and global shape of operand `i`. The program does not read the operand for that.
    pub fn input_meta(&self, i: usize) -> &Meta {
        &self.metas[self.operand("input_meta", i)]
    }

    /// Returns the dtype and global shape of result `i`. The program does not read the result for that.
    pub(crate) fn output_meta(&self, i: usize) -> &Meta {
        &self.metas[self.ins_len + self.result("output_meta", i)]
    }

    /// Adds a step and returns its first result.
    ///
    /// # Errors
    /// Returns the operator's error if it refuses the operands.
    pub fn apply(&mut self, op: impl Op, ins: &[VjpValue]) -> Result<VjpValue> {
        self.apply_shared(Arc::new(op), ins)
    }

    fn apply_shared(&mut self, op: Arc<dyn Op>, ins: &[VjpValue]) -> Result<VjpValue> {
        let name = op.name();
        let outs = self.add_step(op, ins)?;
        let none = || Error::invalid(name, "a step has a result", "none", "use apply_all");
        outs.first().copied().ok_or_else(none)
    }

    /// Adds a step and returns all its results.
    ///
    /// # Errors
    /// Returns the operator's error if it refuses the operands.
    pub fn apply_all(&mut self, op: impl Op, ins: &[VjpValue]) -> Result<SmallVec<[VjpValue; 4]>> {
        self.add_step(Arc::new(op), ins)
    }

    /// Adds a step of an operator that has one result and no [`Unkeyed`](super::Unkeyed) attribute, and returns the
    /// result. Returns the earlier step's result if an equal step exists.
    pub(in crate::ops) fn apply_once(&mut self, op: &dyn Op, ins: &[VjpValue]) -> Result<VjpValue> {
        let same = |s: &&VjpStep| s.ins[..] == *ins && s.op.key_eq(op);
        match self.steps.iter().find(same) {
            Some(step) => Ok(step.out),
            None => Ok(self.add_step(op.to_shared(), ins)?[0]),
        }
    }

    pub(in crate::ops) fn add_step(
        &mut self,
        op: Arc<dyn Op>,
        ins: &[VjpValue],
    ) -> Result<SmallVec<[VjpValue; 4]>> {
        let places: SmallVec<[usize; 4]> = short_list(ins.iter().map(|&value| self.value(op.name(), value)));
        if let Some(broken) = self.broken.borrow().clone() {
            return Err(broken);
        }
        ins.iter().for_each(|&value| self.read(value));
        let metas: Metas = short_list(places.iter().map(|&at| self.metas[at].clone()));
        let outs = infer_results(&*op, &metas)?;
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

    /// Sets the gradient of operand `i`. Does nothing if the gradient is not wanted.
    ///
    /// If there is no such operand, or `grad` does not have the operand's shape and dtype, [`Vjp::write`] returns an error
    /// that says so. The same is true for a number that another method is given and that does not exist.
    pub fn set(&mut self, i: usize, grad: VjpValue) {
        let (at, value) = (self.operand("set", i), self.value("set", grad));
        if self.broken.borrow().is_some() {
            return;
        }
        if self.metas[value] != self.metas[at] {
            let rule = format!("the gradient of operand {i} has the operand's shape and dtype");
            let given = format!("{} for {}", self.metas[value], self.metas[at]);
            return self.note(rule, given, "sum it, or cast it");
        }
        self.answered[i] = true;
        if self.needs[i] {
            self.read(grad);
            self.grads[i] = Some(grad);
        }
    }

    /// States that operand `i` has no gradient, and why: it is zero, or is not propagated by definition.
    ///
    /// ```
    /// use isoshard::{ops::{Embedding, Meta, Vjp}, tensor::DType};
    /// // Embedding's vjp calls `g.none(1, "an index has no derivative")`.
    /// let ins = [Meta::new(DType::F32, [100, 8]), Meta::new(DType::I64, [4])];
    /// let program = Vjp::write(&Embedding, &ins, &[true, true])?;
    /// assert!(program.grads[0].is_some() && program.grads[1].is_none());
    /// assert_eq!(program.reasons[1], Some("an index has no derivative"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn none(&mut self, i: usize, why: &'static str) {
        let i = self.operand("none", i);
        if let (Some(reason), Some(answered)) = (self.reasons.get_mut(i), self.answered.get_mut(i)) {
            *reason = Some(why);
            *answered = true;
        }
    }

    /// States that no operand has a gradient, and why.
    pub fn no_gradients(&mut self, why: &'static str) {
        (0..self.ins_len).for_each(|i| self.none(i, why));
    }

    /// States that the derivative treats result `i` as a constant, and why. An incoming gradient of the result is
    /// dropped.
    pub fn constant(&mut self, i: usize, why: &'static str) {
        debug_assert!(!why.is_empty());
        let i = self.result("constant", i);
        if let Some(constant) = self.constants.get_mut(i) {
            *constant = true;
        }
    }

    /// States that the operator's derivative is not implemented, and why.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Trigamma, Vjp}, tensor::DType};
    /// let refused = Vjp::write(&Trigamma, &[Meta::new(DType::F64, [3])], &[true]).unwrap_err();
    /// assert!(refused.to_string().contains("the second derivative of digamma is not available"));
    /// ```
    ///
    /// # Errors
    /// Returns an error if any gradient is wanted.
    pub fn refuse(&mut self, why: &'static str) -> Result<()> {
        if !self.needs.contains(&true) {
            return Ok(());
        }
        let rule = format!("no derivative: {why}");
        Err(Error::unsupported(self.op.name(), rule, format!("{:?}", self.op), "detach the operands"))
    }

    /// Returns `i`, and notes if there is no such operand.
    fn operand(&self, method: &str, i: usize) -> usize {
        self.known(method, "operand", i, self.ins_len)
    }

    /// Returns `i`, and notes if there is no such result.
    fn result(&self, method: &str, i: usize) -> usize {
        self.known(method, "result", i, self.outs_len)
    }

    /// Returns a value's place among the program's values, and notes if it is that of another program.
    fn value(&self, method: &str, value: VjpValue) -> usize {
        self.known(method, "value", value.index(), self.metas.len())
    }

    /// Returns `i`, or 0 after noting that the derivative names something beyond `len`.
    fn known(&self, method: &str, what: &str, i: usize, len: usize) -> usize {
        if i < len {
            return i;
        }
        let rule = format!("the derivative names the {what}s that there are");
        self.note(rule, format!("{what} {i} of {len} in `{method}`"), "mend Op::vjp");
        0
    }

    /// Notes the first call that breaks the contract of [`Op::vjp`].
    fn note(&self, rule: String, given: String, remedy: &str) {
        self.broken.borrow_mut().get_or_insert_with(|| Error::invalid(self.op.name(), rule, given, remedy));
    }

    /// Records that the program reads a value, if the value is an operand, a result or an incoming gradient.
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
        let Vjp { steps, grads, reasons, metas, reads, constants, .. } = self;
        Ok(VjpProgram { steps, grads, reasons, values_len: metas.len(), reads, constants })
    }
}

/// Writes one step per line, such as `%5 = Mul(%4, %1)`, then each operand's gradient: `grads [%5, -]`.
impl fmt::Debug for VjpProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for s in &self.steps {
            let ins: Vec<String> = s.ins.iter().map(|r| format!("%{}", r.0)).collect();
            writeln!(f, "%{} = {:?}({})", s.out.0, s.op, ins.join(", "))?;
        }
        let grads: Vec<String> =
            self.grads.iter().map(|g| g.map_or("-".into(), |value| format!("%{}", value.0))).collect();
        write!(f, "grads [{}]", grads.join(", "))
    }
}
