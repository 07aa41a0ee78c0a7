//! Records on the tape what the derivatives of calls need.

use super::recompute_cheap::mark_cheap;
use crate::dtensor::plan::call_plan::{CallPlan, Needs};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::Saved;
use crate::dtensor::tensor::tape::{CallDerivative, TapeCall, TapeNode, TapeOutput};
use crate::error::Result;
use crate::ops::Op;

/// Records what the derivative of this call needs, if a gradient is wanted. `moved` has the operands that were
/// redistributed, and is empty if all stayed.
#[inline]
pub(in crate::dtensor) fn record(
    op: &dyn Op,
    plan: &CallPlan,
    ins: &[&DTensor],
    moved: &[Option<DTensor>],
    outs: &mut [DTensor],
) -> Result<()> {
    if !ins[0].mesh.grad_enabled()
        || !ins.iter().any(|x| x.has_history())
        || !outs.iter().any(|o| o.dtype().is_float())
    {
        return Ok(());
    }
    record_call(op, plan, ins, moved, outs)
}

fn record_call(
    op: &dyn Op,
    plan: &CallPlan,
    ins: &[&DTensor],
    moved: &[Option<DTensor>],
    outs: &mut [DTensor],
) -> Result<()> {
    let program = plan.program(op, Needs::of(ins.iter().map(|x| x.has_history())))?;
    // A result whose gradient the derivative does not read, such as a statistic, is a constant.
    let (operand_reads, others) = program.reads.split_at(ins.len());
    let (result_reads, grad_reads) = others.split_at(outs.len());
    if !grad_reads.contains(&true) {
        return Ok(());
    }
    let len = operand_reads.iter().chain(result_reads).filter(|reads| **reads).count();
    let mut saved = Vec::with_capacity(len);
    for (i, x) in ins.iter().enumerate().filter(|(i, _)| operand_reads[*i]) {
        // A reduced partial value is kept reduced. Any other redistributed operand is kept as given, and moves again.
        let x = match moved.get(i) {
            Some(Some(m)) if x.layout().has_partial() => m,
            _ => x,
        };
        saved.push(Saved::of(x));
    }
    if ins[0].mesh.0.recompute_cheap.get() > 0 {
        mark_cheap(op, plan, &program, ins, &saved, outs)?;
    }
    for (o, _) in outs.iter().zip(result_reads).filter(|(_, reads)| **reads) {
        saved.push(Saved::Kept(o.detach()));
    }
    let inputs = ins.iter().zip(&program.grads).map(|(x, grad)| grad.and_then(|_| x.history.clone()));
    let call = TapeCall {
        inputs: inputs.collect(),
        derivative: CallDerivative::Program { program: program.clone(), saved },
    };
    let node = TapeNode::new(outs.iter().map(|o| o.meta.clone()).collect(), Some(call));
    for (out, o) in outs.iter_mut().enumerate().filter(|(out, _)| grad_reads[*out]) {
        o.history = Some(TapeOutput { node: node.clone(), out });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::ops::{Bits, RmsNorm};
    use crate::placement::Layout;
    use crate::tensor::Tensor;

    fn vector(mesh: &DeviceMesh, values: [f32; 3]) -> Result<DTensor> {
        DTensor::distribute(mesh, &Tensor::from_vec(values.to_vec(), [3])?, "(S0)")
    }

    #[test]
    fn constants_have_no_history() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let x = vector(&mesh, [1.0, 2.0, 4.0])?.reshape([3, 1])?.requires_grad()?;
            let w = DTensor::full(&mesh, x.dtype(), [1], Layout::replicated(1), 1.0)?;
            let outs = DTensor::apply(&RmsNorm { eps: Bits(0.0) }, &[&x, &w])?;
            let history: Vec<bool> = outs.iter().map(DTensor::has_history).collect();
            assert_eq!(history, [true, false], "the statistic is a constant to the derivative");
            assert!(!x.lt(&x)?.has_history(), "bools have no derivative");
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn any_number_of_operands() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let parts: Vec<DTensor> = (0..70).map(|i| vector(&mesh, [i as f32; 3])).collect::<Result<_>>()?;
            let leaf = parts[66].requires_grad()?;
            let ins: Vec<&DTensor> = parts[..66].iter().chain([&leaf]).chain(&parts[67..]).collect();
            let y = DTensor::cat(&ins, 0)?;
            let inputs =
                &y.history.as_ref().expect("one operand wants a gradient").node.call.as_ref().unwrap().inputs;
            assert_eq!(inputs.iter().position(Option::is_some), Some(66));
            let gradients = y.mul(&y)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&leaf).unwrap().full_tensor()?.to_f64_vec(), [132.0; 3]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
