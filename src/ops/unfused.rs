//! Derivatives of fused operators' derivatives, by the *unfused expression*: a straight-line program of ordinary
//! operators.
//!
//! A fused operator such as `layer_norm_grad` computes in one pass what many ordinary operators compute. It states them
//! as an [`UnfusedExpression`], and its derivative is that of the expression, found by reverse-mode differentiation over
//! the expression's steps. The expression is never run by itself, so its results need not have the fused operator's
//! bits. The steps of its derivative are ordinary operators, so derivatives of any order work.

use smallvec::SmallVec;

use super::record::vjp::live_values;
use super::{
    Add, Bits, Cast, Expand, Meta, Metas, MulScalar, Op, Reshape, Sum, Vjp, VjpStep, VjpValue, ZeroGrad,
    accumulator, infer_results,
};
use crate::error::Result;
use crate::tensor::{DType, Shape, short_list};

/// A straight-line program of ordinary operators. Values are numbered in this order: operands, then the steps' results.
pub(super) struct UnfusedExpression {
    ins_len: usize,
    metas: Vec<Meta>,
    steps: Vec<VjpStep>,
    /// The results; `None` is a result that is zero.
    outs: Vec<Option<VjpValue>>,
}

impl UnfusedExpression {
    /// Returns an expression without steps, of operands with these dtypes and shapes.
    pub fn of(ins: &[&Meta]) -> UnfusedExpression {
        let metas: Vec<Meta> = ins.iter().map(|&meta| meta.clone()).collect();
        UnfusedExpression { ins_len: metas.len(), metas, steps: Vec::new(), outs: Vec::new() }
    }

    /// Returns operand `i`.
    pub fn input(&self, i: usize) -> VjpValue {
        VjpValue(i as u32)
    }

    /// Returns the dtype and global shape of a value.
    pub fn meta(&self, value: VjpValue) -> &Meta {
        &self.metas[value.index()]
    }

    /// Adds a step and returns its first result.
    ///
    /// # Errors
    /// Returns the operator's error if it refuses the operands.
    pub fn apply(&mut self, op: impl Op, ins: &[VjpValue]) -> Result<VjpValue> {
        self.add_step(VjpStep { op: op.to_shared(), ins: ins.into(), out: VjpValue(0), out_len: 0 })
    }

    /// Makes a value the next result.
    pub fn returns(&mut self, value: VjpValue) {
        self.outs.push(Some(value));
    }

    /// Returns `x` in this dtype.
    pub fn cast(&mut self, x: VjpValue, dtype: DType) -> Result<VjpValue> {
        if self.meta(x).dtype == dtype { Ok(x) } else { self.apply(Cast { dtype }, &[x]) }
    }

    /// Returns operand `i` in the dtype of its sums.
    pub fn wide_input(&mut self, i: usize) -> Result<VjpValue> {
        let x = self.input(i);
        self.cast(x, accumulator(self.meta(x).dtype))
    }

    /// Returns `x` repeated to the shape of `like`.
    pub fn expand(&mut self, x: VjpValue, like: VjpValue) -> Result<VjpValue> {
        let shape = self.meta(like).shape.clone();
        if self.meta(x).shape == shape { Ok(x) } else { self.apply(Expand { shape }, &[x]) }
    }

    /// Returns `x` with another shape and the same elements.
    pub fn reshape(&mut self, x: VjpValue, shape: impl Into<Shape>) -> Result<VjpValue> {
        let shape = shape.into();
        if self.meta(x).shape == shape { Ok(x) } else { self.apply(Reshape { shape }, &[x]) }
    }

    /// Returns the means of `x` over its last dim, which is kept with extent 1.
    pub fn row_means(&mut self, x: VjpValue) -> Result<VjpValue> {
        let last = self.meta(x).shape.len() - 1;
        let factor = Bits(1.0 / self.meta(x).shape[last] as f64);
        let sums = self.apply(Sum { dims: [last].into_iter().collect(), keep: true }, &[x])?;
        self.apply(MulScalar { factor }, &[sums])
    }

    /// Returns the expression of the gradients of those operands for which `wrt` is true, in order. Its operands are
    /// those of this expression, then the gradient of each of its results.
    ///
    /// # Errors
    /// Returns the error of a step whose operator has no derivative.
    pub fn gradient(&self, wrt: &[bool]) -> Result<UnfusedExpression> {
        let (ins_len, outs_len) = (self.ins_len, self.outs.len());
        let zero = Meta::new(DType::F64, [0]); // stands for the gradient of a result that is zero: it is not read
        let grads = self.outs.iter().map(|out| out.map_or(&zero, |out| self.meta(out)));
        let mut all = UnfusedExpression::of(&self.metas[..ins_len].iter().chain(grads).collect::<Vec<_>>());
        let renamed =
            |value: VjpValue| VjpValue(value.0 + if value.index() < ins_len { 0 } else { outs_len as u32 });
        for step in &self.steps {
            all.add_step(VjpStep { ins: step.ins.iter().map(|&v| renamed(v)).collect(), ..step.clone() })?;
        }
        let mut active: Vec<bool> = (0..ins_len).map(|i| wrt[i] && self.metas[i].dtype.is_float()).collect();
        for step in &self.steps {
            let any = step.ins.iter().any(|v| active[v.index()]);
            active.extend(step.outs().map(|out| any && self.metas[out].dtype.is_float()));
        }
        let mut grads: Vec<Option<VjpValue>> = vec![None; self.metas.len()];
        for (k, out) in self.outs.iter().enumerate() {
            if let Some(out) = out.filter(|out| active[out.index()]) {
                let grad = VjpValue((ins_len + k) as u32);
                all.accumulate(&mut grads[out.index()], grad)?;
            }
        }
        for step in self.steps.iter().rev() {
            let needs: SmallVec<[bool; 4]> = short_list(step.ins.iter().map(|v| active[v.index()]));
            if !needs.contains(&true) || step.outs().all(|out| grads[out].is_none()) {
                continue;
            }
            let metas: Metas = short_list(step.ins.iter().map(|&v| self.meta(v).clone()));
            let program = Vjp::write(step.op.as_ref(), &metas, &needs)?;
            let outs = step.outs().map(|out| VjpValue(out as u32));
            let mut values: Vec<VjpValue> = step.ins.iter().copied().chain(outs).map(renamed).collect();
            for out in step.outs() {
                let read = program.reads[values.len()];
                values.push(match grads[out] {
                    Some(grad) => grad,
                    None if read => all.apply(ZeroGrad, &[renamed(VjpValue(out as u32))])?,
                    None => VjpValue(u32::MAX), // it is not read
                });
            }
            all.append(&program.steps, &mut values)?;
            for (of, grad) in step.ins.iter().zip(&program.grads) {
                if let Some(grad) = grad {
                    all.accumulate(&mut grads[of.index()], values[grad.index()])?;
                }
            }
        }
        all.outs = (0..ins_len).filter(|&i| wrt[i]).map(|i| grads[i]).collect();
        Ok(all)
    }

    /// Writes the derivative of an operator with the results of this expression. Operand `i` of the expression is the
    /// operator's operand `of[i]`.
    ///
    /// # Errors
    /// Returns the error of a step whose operator has no derivative.
    pub fn write_vjp(&self, g: &mut Vjp, of: &[usize]) -> Result<()> {
        let wrt: Vec<bool> = of.iter().map(|&i| g.needs(i) && g.input_meta(i).dtype.is_float()).collect();
        if !wrt.contains(&true) {
            return Ok(());
        }
        let gradient = self.gradient(&wrt)?;
        let operands = of.iter().map(|&i| g.input(i));
        let mut values: Vec<VjpValue> = operands.chain((0..self.outs.len()).map(|k| g.grad(k))).collect();
        let live =
            live_values(&gradient.steps, gradient.metas.len(), gradient.outs.iter().flatten().copied());
        for step in &gradient.steps {
            if step.outs().all(|out| !live[out]) {
                values.extend(step.outs().map(|_| VjpValue(u32::MAX))); // it is not read
                continue;
            }
            let ins: SmallVec<[VjpValue; 4]> = short_list(step.ins.iter().map(|v| values[v.index()]));
            values.extend(g.add_step(step.op.clone(), &ins)?);
        }
        let wanted = of.iter().zip(&wrt).filter(|&(_, &wanted)| wanted);
        for ((&i, _), grad) in wanted.zip(&gradient.outs) {
            match grad {
                Some(grad) => g.set(i, values[grad.index()]),
                None => g.none(i, "no result depends on it"),
            }
        }
        Ok(())
    }

    /// Adds a gradient to a sum of gradients.
    fn accumulate(&mut self, sum: &mut Option<VjpValue>, grad: VjpValue) -> Result<()> {
        *sum = Some(match *sum {
            None => grad,
            Some(sum) => self.apply(Add, &[sum, grad])?,
        });
        Ok(())
    }

    /// Adds the steps of another program, whose values `values` have these numbers here so far.
    fn append(&mut self, steps: &[VjpStep], values: &mut Vec<VjpValue>) -> Result<()> {
        for step in steps {
            debug_assert_eq!(step.out.index(), values.len(), "steps' results are numbered in order");
            let ins = step.ins.iter().map(|v| values[v.index()]).collect();
            let first = self.add_step(VjpStep { ins, ..step.clone() })?;
            values.extend((0..step.out_len as u32).map(|k| VjpValue(first.0 + k)));
        }
        Ok(())
    }

    /// Adds a step, whose results are numbered anew, and returns its first result.
    fn add_step(&mut self, step: VjpStep) -> Result<VjpValue> {
        let metas: Metas = short_list(step.ins.iter().map(|&v| self.meta(v).clone()));
        let outs = infer_results(step.op.as_ref(), &metas)?;
        let out = VjpValue(self.metas.len() as u32);
        self.steps.push(VjpStep { out, out_len: outs.len(), ..step });
        self.metas.extend(outs);
        Ok(out)
    }
}
