//! Dispatch: one operator on distributed operands.
//!
//! TensorMeta -> plan (cached) -> moves -> local kernel -> results, and a tape node if a gradient is wanted. Nothing here
//! knows any operator.

use std::rc::Rc;

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::list::DTensors;
use super::plan::Plan;
use super::redistribute::Move;
use super::tape;
use super::tensor::DTensor;
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope;
use crate::error::{Error, Result};
use crate::ops::{Batched, Op, Tensors, absent, run};
use crate::tensor::Tensor;

impl DTensor {
    /// Applies any operator, the caller's own included. Operands move where the operator's rows ask for it.
    ///
    /// # Errors
    /// What the operator refuses; operands on different meshes; in strict mode, operands that would have to move.
    pub fn apply(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensors> {
        let plan = plan_for(op, ins)?;
        Self::apply_by(&plan, op, ins)
    }

    /// As [`DTensor::apply`], by the plan for these operands.
    pub(super) fn apply_by(plan: &Plan, op: &dyn Op, ins: &[&DTensor]) -> Result<DTensors> {
        let mut moved: SmallVec<[Option<DTensor>; 3]> = SmallVec::new();
        for (x, m) in ins.iter().zip(&plan.moves) {
            moved.push(match m {
                None => None,
                Some((m, to)) => {
                    let _label = operator_scope(op.name());
                    Some(DTensor::wrap(&x.mesh, m.run(&x.mesh, x.local.clone())?, to.clone()))
                }
            });
        }
        let mut locals: Tensors =
            ins.iter().zip(&moved).map(|(x, m)| m.as_ref().unwrap_or(x).local.clone()).collect();
        let outs = execute(op, plan, &ins[0].mesh, &mut locals)?;
        drop(locals);
        tape::record(op, plan, ins, &moved, outs)
    }

    /// Applies an operator that has one result.
    ///
    /// # Errors
    /// As [`DTensor::apply`]; refuses an operator that has several results, or none.
    pub fn apply_one(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensor> {
        let mut outs = Self::apply(op, ins)?;
        if outs.len() != 1 {
            let given = format!("{} of {op:?}", outs.len());
            return Err(Error::invalid(op.name(), "has not exactly one result", given, "use DTensor::apply"));
        }
        Ok(outs.remove(0))
    }

    /// Applies an operator to operands that are given up, so that its kernel may reuse their buffers. Keeps no history.
    ///
    /// # Errors
    /// As [`DTensor::apply`]. `ins` is empty after success; after an error it holds the operands as before, except that a
    /// kernel which fails halfway may have written to them.
    pub fn apply_owned(op: &dyn Op, ins: &mut DTensors) -> Result<DTensors> {
        let plan = plan_of(op, ins)?;
        Self::run_owned(op, ins, plan)
    }

    fn run_owned(op: &dyn Op, ins: &mut DTensors, plan: Rc<Plan>) -> Result<DTensors> {
        let mut ready = Ready::new(op, ins, plan)?;
        let outs = execute(op, &ready.plan, &ready.mesh, &mut ready.locals);
        ready.end(ins, outs.is_ok());
        outs
    }

    /// [`DTensor::apply_owned`] of each of `calls` in turn, up to the first that fails. What lies on a CUDA device is computed
    /// in as few launches as the operator needs for all ([`Batched`]). Returns the results of the calls that succeeded.
    ///
    /// # Errors
    /// As [`DTensor::apply_owned`]. A call that is refused is refused before any is made; what fails later is a fault of
    /// communication, of a device, or what a kernel finds in values.
    pub fn apply_owned_batch<O: Batched>(calls: &mut [(&O, &mut DTensors)]) -> (Vec<DTensors>, Result<()>) {
        Self::apply_owned_if(calls, |_, _| Ok(()))
    }

    /// [`DTensor::apply_owned_batch`], if `accept` accepts the facts of every call's results, given the call's number.
    pub(crate) fn apply_owned_if<O: Batched>(
        calls: &mut [(&O, &mut DTensors)],
        accept: impl Fn(usize, &[Rc<TensorMeta>]) -> Result<()>,
    ) -> (Vec<DTensors>, Result<()>) {
        let mut outs = Vec::with_capacity(calls.len());
        let plan = |(i, (op, ins)): (usize, &(&O, &mut DTensors))| {
            let plan = plan_of(*op, ins)?;
            accept(i, &plan.outs)?;
            Ok(plan)
        };
        let plans = match calls.iter().enumerate().map(plan).collect::<Result<Vec<_>>>() {
            Ok(plans) => plans,
            Err(e) => return (outs, Err(e)),
        };
        let on_device = |ins: &DTensors| ins.iter().all(|x| x.local.device().is_cuda());
        if !calls.iter().all(|(_, ins)| on_device(ins)) {
            for ((op, ins), plan) in calls.iter_mut().zip(plans) {
                match Self::run_owned(*op, ins, plan) {
                    Ok(all) => outs.push(all),
                    Err(e) => return (outs, Err(e)),
                }
            }
            return (outs, Ok(()));
        }
        let mut ready = Vec::with_capacity(calls.len());
        let mut result = Ok(());
        for ((op, ins), plan) in calls.iter_mut().zip(plans) {
            match Ready::new(*op, ins, plan) {
                Ok(call) => ready.push(call),
                Err(e) => {
                    result = Err(e);
                    break;
                }
            }
        }
        match compute(calls, &mut ready) {
            Ok(locals) => outs.extend(locals.into_iter().zip(&ready).map(|(locals, call)| call.wrap(locals))),
            Err(e) => result = Err(e),
        }
        let computed = outs.len() == ready.len();
        ready.into_iter().zip(calls).for_each(|(call, (_, ins))| call.end(ins, computed));
        (outs, result)
    }

    /// The value without its history, moved out. What stays behind has the facts and the history, but no elements: only
    /// [`DTensor::put_back`] makes it a tensor again.
    pub(crate) fn take_value(&mut self) -> DTensor {
        let value = self.detach();
        self.local = Tensor::default();
        value
    }

    /// Gives back what [`DTensor::take_value`] took.
    pub(crate) fn put_back(&mut self, value: DTensor) {
        self.local = value.local;
    }
}

/// A call whose operands were given up and have moved.
struct Ready {
    plan: Rc<Plan>,
    mesh: DeviceMesh,
    locals: Tensors,
}

impl Ready {
    /// Takes the operands' local parts out of `ins`, where they do not move.
    fn new(op: &dyn Op, ins: &mut DTensors, plan: Rc<Plan>) -> Result<Ready> {
        let mut moved: SmallVec<[Option<Tensor>; 5]> = SmallVec::new();
        for (x, m) in ins.iter().zip(&plan.moves) {
            let run = |(m, _): &(Rc<Move>, _)| {
                let _label = operator_scope(op.name());
                m.run(&x.mesh, x.local.clone())
            };
            moved.push(m.as_ref().map(run).transpose()?);
        }
        let mesh = ins[0].mesh.clone();
        let stays = |m: Option<Tensor>, x: &mut DTensor| m.unwrap_or_else(|| std::mem::take(&mut x.local));
        let locals = moved.into_iter().zip(ins.iter_mut()).map(|(m, x)| stays(m, x)).collect();
        Ok(Ready { plan, mesh, locals })
    }

    /// Empties `ins` where the call was `done`, else gives back what was taken.
    fn end(self, ins: &mut DTensors, done: bool) {
        if done {
            return ins.0.clear();
        }
        let stayed = ins.iter_mut().zip(self.locals).zip(&self.plan.moves).filter(|(_, m)| m.is_none());
        stayed.for_each(|((x, local), _)| x.local = local);
    }

    fn wrap(&self, locals: Tensors) -> DTensors {
        let outs = locals.into_iter().zip(&self.plan.outs);
        outs.map(|(t, f)| DTensor::wrap(&self.mesh, t, f.clone())).collect()
    }
}

/// The local results of those calls that are ready, which are the first ones.
fn compute<O: Batched>(calls: &[(&O, &mut DTensors)], ready: &mut [Ready]) -> Result<Vec<Tensors>> {
    let Some(name) = calls.first().map(|(op, _)| op.name()) else { return Ok(Vec::new()) };
    let (mut all, mut at) = (Vec::with_capacity(ready.len()), Vec::with_capacity(ready.len()));
    let lens: SmallVec<[usize; 8]> = ready.iter().map(|call| call.plan.outs.len()).collect();
    for ((op, _), Ready { plan, locals, .. }) in calls.iter().zip(ready) {
        all.push((*op, &mut locals[..]));
        at.push(&plan.windows);
    }
    let locals = O::cuda_batch(&mut all, &at)?;
    if !locals.iter().map(|outs| outs.len()).eq(lens.iter().copied()) {
        let given =
            format!("{} result(s) for {} call(s)", locals.iter().map(|o| o.len()).sum::<usize>(), lens.len());
        return Err(Error::invalid(name, "cuda_batch gives each call's results, in order", given, ""));
    }
    Ok(locals)
}

fn plan_of(op: &dyn Op, ins: &DTensors) -> Result<Rc<Plan>> {
    plan_for(op, &ins.iter().collect::<SmallVec<[&DTensor; 4]>>())
}

/// The plan for a call.
pub(super) fn plan_for(op: &dyn Op, ins: &[&DTensor]) -> Result<Rc<Plan>> {
    let first = ins.first().ok_or_else(|| Error::invalid(op.name(), "wants operands", "none", ""))?;
    if let Some(other) = ins.iter().find(|x| !x.mesh.same(&first.mesh)) {
        return Err(Error::sharding(
            op.name(),
            "the operands live on different meshes",
            format!("{} on {}, {} on {}", first.spec(), first.mesh.mesh(), other.spec(), other.mesh.mesh()),
            "make both on one DeviceMesh",
        ));
    }
    let meta: SmallVec<[_; 4]> = ins.iter().map(|x| &x.meta).collect();
    Plan::find(&first.mesh, op, &meta)
}

#[cfg(test)]
thread_local!(
    /// The number of calls that this rank has run.
    pub(super) static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) }
);

fn execute(op: &dyn Op, plan: &Plan, mesh: &DeviceMesh, locals: &mut Tensors) -> Result<DTensors> {
    #[cfg(test)]
    CALLS.with(|c| c.set(c.get() + 1));
    let outs = match &plan.nodes {
        // No elements: the results are what the plan says of them.
        nodes if locals.first().is_some_and(Tensor::is_meta) && !(op.is_view() && nodes.is_none()) => {
            absent(locals, plan.stored())?
        }
        None => run(op, locals, &plan.windows)?,
        Some(nodes) => nodes.run(op, locals, &plan.windows, &plan.outs)?,
    };
    debug_assert_eq!(outs.len(), plan.outs.len(), "{}", op.name());
    Ok(outs.into_iter().zip(&plan.outs).map(|(t, f)| DTensor::wrap(mesh, t, f.clone())).collect())
}
