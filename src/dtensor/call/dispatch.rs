//! Dispatch: runs one operator on distributed operands.
//!
//! A call looks up its plan by the operands' metadata, redistributes operands as the plan says, runs the local
//! kernel, wraps the results, and records a tape node if a gradient is wanted. This file names no operator.

use std::rc::Rc;

use smallvec::SmallVec;

use super::check_results::check_results;
use super::offloaded;
use super::operator_span::operator_span;
use super::record::record;
use super::work_tally;
use crate::comm::{Lineage, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::explain;
use crate::dtensor::redistribute::Move;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::list::DTensors;
use crate::error::{Error, Result};
use crate::ops::{Batched, Op, Tensors, Windows, meta_results, run_into};
use crate::tensor::{Tensor, short_list};

impl DTensor {
    /// Applies any operator, including one defined by the caller, and returns its results. Operands are redistributed
    /// if the operator's sharding rules require it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 2.0)?;
    ///     let results = DTensor::apply(&ops::Add, &[&x, &x])?;
    ///     assert_eq!(results[0].full_tensor()?.to_vec::<f32>()?, [4.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what the operator refuses, operands on different meshes, and, in strict mode, operands that would have
    /// to be redistributed with communication.
    pub fn apply(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensors> {
        let plan = plan_for(op, ins)?;
        let _span = operator_span(op, &plan);
        Self::apply_by(&plan, op, ins)
    }

    /// Applies an operator by the plan for these operands.
    pub(in crate::dtensor) fn apply_by(plan: &CallPlan, op: &dyn Op, ins: &[&DTensor]) -> Result<DTensors> {
        let mut locals = Tensors::new();
        let (moved, lineage) = run_call(plan, op, ins, &mut locals)?;
        let mut outs = wrap_results(&ins[0].mesh, plan, locals, lineage);
        record(op, plan, ins, &moved, &mut outs)?;
        Ok(outs)
    }

    /// Applies an operator that has one result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 2.0)?;
    ///     let y = DTensor::apply_one(&ops::Mul, &[&x, &x])?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [4.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::apply`] refuses, and an operator that does not have exactly one result.
    pub fn apply_one(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensor> {
        let plan = plan_for(op, ins)?;
        let [meta] = &plan.outs[..] else {
            let given = format!("{} of {op:?}", plan.outs.len());
            return Err(Error::invalid(
                op.name(),
                "does not have exactly one result",
                given,
                "use DTensor::apply",
            ));
        };
        let _span = operator_span(op, &plan);
        let mut locals = Tensors::new();
        let (moved, lineage) = run_call(&plan, op, ins, &mut locals)?;
        let local = locals.pop().expect("the results are those of the plan");
        let mut out = DTensor::wrap(&ins[0].mesh, local, meta.clone(), lineage);
        record(op, &plan, ins, &moved, std::slice::from_mut(&mut out))?;
        Ok(out)
    }

    /// Applies an operator to operands that it takes over, so that its kernel may reuse their buffers. Records no
    /// history.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let ones = |value: f64| DTensor::full(&mesh, DType::F32, [4], "(S0)", value);
    ///     let mut ins = [ones(1.0)?, ones(2.0)?].into_iter().collect();
    ///     let results = DTensor::apply_owned(&ops::Add, &mut ins)?;
    ///     assert!(ins.is_empty());
    ///     assert_eq!(results[0].full_tensor()?.to_vec::<f32>()?, [3.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::apply`] refuses. After an error `ins` holds the operands as before, except that a
    /// kernel that fails halfway may have written to them.
    pub fn apply_owned(op: &dyn Op, ins: &mut DTensors) -> Result<DTensors> {
        let plan = plan_of(op, ins)?;
        Self::run_owned(op, ins, plan)
    }

    fn run_owned(op: &dyn Op, ins: &mut DTensors, plan: Rc<CallPlan>) -> Result<DTensors> {
        let _span = operator_span(op, &plan);
        let mut prepared = PreparedCall::new(op, ins, plan)?;
        let mut locals = Tensors::new();
        let ended = execute(op, &prepared.plan, &prepared.mesh, &mut prepared.locals, &mut locals);
        let outs = ended.and_then(|()| prepared.wrap_where_it_was(locals));
        prepared.end(ins, outs.is_ok());
        outs
    }

    /// Applies [`DTensor::apply_owned`] to each of `calls` in turn, up to the first that fails, and returns the
    /// results of the calls that succeeded. On a CUDA device the calls are computed in as few launches as the
    /// operator needs for all ([`Batched`]).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let full = |shape: &[usize], value: f64| DTensor::full(&mesh, DType::F32, shape, "(R)", value);
    ///     let sgd = ops::SgdStep {
    ///         momentum: ops::Bits(0.0), weight_decay: ops::Bits(0.0), nesterov: false, lr: ops::Unkeyed(0.5),
    ///     };
    ///     // Parameter, gradient, momentum buffer and gradient scale.
    ///     let ins = [full(&[3], 1.0)?, full(&[3], 2.0)?, full(&[3], 0.0)?, full(&[], 1.0)?];
    ///     let mut ins = ins.into_iter().collect();
    ///     let (results, outcome) = DTensor::apply_owned_batch(&mut [(&sgd, &mut ins)]);
    ///     outcome?;
    ///     assert_eq!(results[0][0].local().to_vec::<f32>()?, [0.0; 3]); // 1 - 0.5 * 2
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns, next to the results, what [`DTensor::apply_owned`] refuses. If a call is refused, no call is made.
    /// Later errors are failures of communication, of a device, or of a kernel that finds wrong values.
    pub fn apply_owned_batch<O: Batched>(calls: &mut [(&O, &mut DTensors)]) -> (Vec<DTensors>, Result<()>) {
        Self::apply_owned_if(calls, |_, _| Ok(()))
    }

    /// Runs [`DTensor::apply_owned_batch`] if `accept` accepts the metadata of each call's results, given the call's
    /// index.
    pub(crate) fn apply_owned_if<O: Batched>(
        calls: &mut [(&O, &mut DTensors)],
        accept: impl Fn(usize, &[Rc<TensorMeta>]) -> Result<()>,
    ) -> (Vec<DTensors>, Result<()>) {
        let mut ops: Vec<&O> = Vec::with_capacity(calls.len());
        let mut of_any_type: Vec<(&dyn Op, &mut DTensors)> = Vec::with_capacity(calls.len());
        for (op, ins) in calls {
            ops.push(op);
            of_any_type.push((*op, ins));
        }
        Self::apply_batch(&mut of_any_type, &accept, &|locals, at| {
            let mut ready: Vec<(&O, &mut [Tensor])> = Vec::with_capacity(locals.len());
            for (op, locals) in ops.iter().zip(locals) {
                ready.push((op, locals));
            }
            O::cuda_batch(&mut ready, at)
        })
    }

    /// Runs the calls of [`DTensor::apply_owned_if`], whatever their operators' type; `cuda_batch` makes those on a device.
    fn apply_batch(
        calls: &mut [(&dyn Op, &mut DTensors)],
        accept: AcceptResults,
        cuda_batch: CudaBatch,
    ) -> (Vec<DTensors>, Result<()>) {
        let mut outs = Vec::with_capacity(calls.len());
        let plan = |(i, (op, ins)): (usize, &(&dyn Op, &mut DTensors))| {
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
        let _span = calls.first().zip(plans.first()).and_then(|((op, _), plan)| operator_span(*op, plan));
        let mut prepared = Vec::with_capacity(calls.len());
        let mut result = Ok(());
        for ((op, ins), plan) in calls.iter_mut().zip(plans) {
            match PreparedCall::new(*op, ins, plan) {
                Ok(call) => prepared.push(call),
                Err(e) => {
                    result = Err(e);
                    break;
                }
            }
        }
        match compute(calls, &mut prepared, cuda_batch) {
            Ok(locals) => {
                outs.extend(locals.into_iter().zip(&prepared).map(|(locals, call)| call.wrap(locals)))
            }
            Err(e) => result = Err(e),
        }
        let computed = outs.len() == prepared.len();
        prepared.into_iter().zip(calls).for_each(|(call, (_, ins))| call.end(ins, computed));
        (outs, result)
    }

    /// Moves the value out, without its history. This tensor keeps its metadata and history, but has no elements
    /// until [`DTensor::put_back`] returns them.
    pub(crate) fn take_value(&mut self) -> DTensor {
        let value = self.detach();
        self.local = Tensor::default();
        value
    }

    /// Returns the elements that [`DTensor::take_value`] took.
    pub(crate) fn put_back(&mut self, value: DTensor) {
        self.local = value.local;
    }
}

/// A call that has taken over its operands and redistributed them.
struct PreparedCall {
    plan: Rc<CallPlan>,
    mesh: DeviceMesh,
    locals: Tensors,
    lineage: Lineage,
    /// The first operand, if it is on a device and the call is computed on the CPU.
    on_device: Option<Tensor>,
}

impl PreparedCall {
    /// Redistributes operands, and takes the others' local tensors out of `ins`.
    fn new(op: &dyn Op, ins: &mut DTensors, plan: Rc<CallPlan>) -> Result<PreparedCall> {
        let mut moved: SmallVec<[Option<Tensor>; 5]> = SmallVec::new();
        for (x, m) in ins.iter().zip(&plan.moves) {
            let run = |(m, _): &(Rc<Move>, _)| {
                let _label = operator_scope(op.name());
                x.run_move(m)
            };
            moved.push(m.as_ref().map(run).transpose()?);
        }
        let mesh = ins[0].mesh.clone();
        let stays = |m: Option<Tensor>, x: &mut DTensor| m.unwrap_or_else(|| std::mem::take(&mut x.local));
        let locals = moved.into_iter().zip(ins.iter_mut()).map(|(m, x)| stays(m, x)).collect();
        let lineage = plan.lineage(ins.iter().map(|x| x.lineage));
        let mut call = PreparedCall { plan, mesh, locals, lineage, on_device: None };
        match offloaded::offload_all(&call.mesh, &mut call.locals) {
            Ok(on_device) => call.on_device = on_device,
            Err(e) => {
                call.end(ins, false);
                return Err(e);
            }
        }
        Ok(call)
    }

    /// Empties `ins` if the call was `done`; otherwise gives back what was taken.
    fn end(mut self, ins: &mut DTensors, done: bool) {
        if done {
            return ins.0.clear();
        }
        if let Some(first) = self.on_device {
            self.locals[0] = first;
        }
        let stayed = ins.iter_mut().zip(self.locals).zip(&self.plan.moves).filter(|(_, m)| m.is_none());
        stayed.for_each(|((x, local), _)| x.local = local);
    }

    /// Returns the results; the first is where the first operand was.
    fn wrap_where_it_was(&mut self, mut locals: Tensors) -> Result<DTensors> {
        if let (Some(place), Some(first)) = (self.on_device.take(), locals.first_mut()) {
            *first = offloaded::returned_to(place, first)?;
        }
        Ok(self.wrap(locals))
    }

    fn wrap(&self, locals: Tensors) -> DTensors {
        wrap_results(&self.mesh, &self.plan, locals, self.lineage)
    }
}

/// A function that may refuse a call, given its index and the metadata of its results.
type AcceptResults<'a> = &'a dyn Fn(usize, &[Rc<TensorMeta>]) -> Result<()>;

/// A function that makes the first of some calls by their operators' [`Batched::cuda_batch`].
type CudaBatch<'a> = &'a dyn Fn(&mut [&mut [Tensor]], &[&Windows]) -> Result<Vec<Tensors>>;

/// Computes the local results of the calls that are ready, which are the first ones.
fn compute(
    calls: &[(&dyn Op, &mut DTensors)],
    prepared: &mut [PreparedCall],
    cuda_batch: CudaBatch,
) -> Result<Vec<Tensors>> {
    let Some(name) = calls.first().map(|(op, _)| op.name()) else { return Ok(Vec::new()) };
    let (mut all, mut at) = (Vec::with_capacity(prepared.len()), Vec::with_capacity(prepared.len()));
    let lens: SmallVec<[usize; 8]> = short_list(prepared.iter().map(|call| call.plan.outs.len()));
    for ((op, _), PreparedCall { plan, locals, mesh, .. }) in calls.iter().zip(prepared) {
        observe(mesh, *op, plan);
        all.push(&mut locals[..]);
        at.push(&plan.windows);
    }
    let locals = cuda_batch(&mut all, &at)?;
    if !locals.iter().map(|outs| outs.len()).eq(lens.iter().copied()) {
        let given =
            format!("{} result(s) for {} call(s)", locals.iter().map(|o| o.len()).sum::<usize>(), lens.len());
        return Err(Error::invalid(name, "cuda_batch gives each call's results, in order", given, ""));
    }
    Ok(locals)
}

/// Redistributes operands as the plan says, and writes the local results to `locals`, which is empty before. Returns
/// the operands that moved and the first result's lineage.
#[inline]
fn run_call(
    plan: &CallPlan,
    op: &dyn Op,
    ins: &[&DTensor],
    locals: &mut Tensors,
) -> Result<(Vec<Option<DTensor>>, Lineage)> {
    let moved = move_operands(plan, op, ins)?;
    let mut operands = Tensors::new();
    add_local_operands(ins, &moved, &mut operands)?;
    execute(op, plan, &ins[0].mesh, &mut operands, locals)?;
    Ok((moved, plan.lineage(ins.iter().map(|x| x.lineage))))
}

/// Redistributes operands as the plan says. The list is empty if all stay.
fn move_operands(plan: &CallPlan, op: &dyn Op, ins: &[&DTensor]) -> Result<Vec<Option<DTensor>>> {
    if plan.moves.iter().all(Option::is_none) {
        return Ok(Vec::new());
    }
    let mut moved = Vec::with_capacity(ins.len());
    for (x, m) in ins.iter().zip(&plan.moves) {
        moved.push(match m {
            None => None,
            // A derivative reduces partial operands once for several steps.
            Some((_, to)) if x.meta == *to => None,
            Some((m, to)) => {
                let _label = operator_scope(op.name());
                Some(DTensor::wrap(&x.mesh, x.run_move(m)?, to.clone(), x.lineage))
            }
        });
    }
    Ok(moved)
}

/// Adds the operands' local tensors after their redistribution.
fn add_local_operands(ins: &[&DTensor], moved: &[Option<DTensor>], locals: &mut Tensors) -> Result<()> {
    for (i, x) in ins.iter().enumerate() {
        let moved = moved.get(i).and_then(Option::as_ref);
        locals.push(moved.unwrap_or(x).resident()?);
    }
    Ok(())
}

/// Returns the results of a call, given their local tensors and the first one's lineage.
fn wrap_results(mesh: &DeviceMesh, plan: &CallPlan, locals: Tensors, lineage: Lineage) -> DTensors {
    let mut outs = DTensors::new();
    for (i, (local, meta)) in locals.into_iter().zip(&plan.outs).enumerate() {
        outs.push(DTensor::wrap(mesh, local, meta.clone(), lineage.result(i)));
    }
    outs
}

fn plan_of(op: &dyn Op, ins: &DTensors) -> Result<Rc<CallPlan>> {
    plan_for(op, &ins.iter().collect::<SmallVec<[&DTensor; 4]>>())
}

/// Returns the plan for a call.
pub(in crate::dtensor) fn plan_for(op: &dyn Op, ins: &[&DTensor]) -> Result<Rc<CallPlan>> {
    let first = ins.first().ok_or_else(|| Error::invalid(op.name(), "wants operands", "none", ""))?;
    if let Some(other) = ins.iter().find(|x| !x.mesh.same(&first.mesh)) {
        let [here, there] = first.mesh.told_apart(&other.mesh);
        return Err(Error::sharding(
            op.name(),
            "the operands are on different meshes",
            format!("{} on {here}, {} on {there}", first.spec(), other.spec()),
            "make both on one DeviceMesh, of which clones are the same mesh",
        ));
    }
    let mut meta = SmallVec::<[_; 4]>::new();
    ins.iter().for_each(|x| meta.push(&x.meta));
    CallPlan::find(&first.mesh, op, &meta)
}

#[cfg(test)]
thread_local!(
    /// The number of calls that this rank has run.
    pub(in crate::dtensor) static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) }
);

/// Adds a call to the tallies and explanations of its mesh, if there are any.
#[inline]
pub(in crate::dtensor) fn observe(mesh: &DeviceMesh, op: &dyn Op, plan: &CallPlan) {
    if mesh.0.observers.get() > 0 {
        work_tally::count(mesh, op, plan);
        explain::note(mesh, op, plan);
    }
}

/// Computes the local results of a call from its operands, which have been moved as the plan says, and writes them to
/// `outs`, which is empty before. A list of tensors takes as long to move as a small kernel.
pub(in crate::dtensor) fn execute(
    op: &dyn Op,
    plan: &CallPlan,
    mesh: &DeviceMesh,
    locals: &mut Tensors,
    outs: &mut Tensors,
) -> Result<()> {
    #[cfg(test)]
    CALLS.with(|c| c.set(c.get() + 1));
    observe(mesh, op, plan);
    match &plan.nodes {
        // A dry run has no elements: the plan gives the results' shapes.
        nodes if locals.first().is_some_and(Tensor::is_meta) && !(op.is_view() && nodes.is_none()) => {
            *outs = meta_results(locals, plan.stored())?;
        }
        None => run_into(op, locals, &plan.windows, outs)?,
        Some(nodes) => *outs = nodes.run(op, locals, &plan.windows, &plan.outs)?,
    }
    check_results(op, plan, outs)
}
