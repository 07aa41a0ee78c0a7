//! Call plans: which operands of a call are redistributed, on which windows the local kernel runs, and the layouts of
//! the results.

use std::cell::{OnceCell, RefCell};
use std::hash::{Hash, Hasher};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::choose_rows::{ChosenLayouts, choose_rows};
use super::derivative_program::DerivativeProgram;
use super::kernel_runs::KernelRuns;
use super::part_runs::PartRuns;
use crate::base::BoundedCache;
use crate::comm::Lineage;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{self, Move};
use crate::error::{Error, Result};
use crate::ops::{Metas, Op, RaggedBoxes, Vjp, Windows, Work, has_unkeyed, infer_results};
use crate::placement::Spec;
use crate::tensor::{DType, Shape, short_list};

/// Per operand, its redistribution and the metadata after it, or `None` if it stays.
type OperandMoves = SmallVec<[Option<(Rc<Move>, Rc<TensorMeta>)>; 3]>;
/// Derivative programs, by the operands whose gradients they compute.
type Programs = SmallVec<[(Needs, Rc<DerivativeProgram>); 1]>;

/// The plan for one operator on operands with given metadata.
pub(in crate::dtensor) struct CallPlan {
    pub op: Arc<dyn Op>,
    ins: SmallVec<[u32; 4]>,
    pub mode: PlanMode,
    pub moves: OperandMoves,
    pub windows: Windows,
    /// Set if the kernel runs once per node of a partial sum, or once per box of ragged operands.
    pub nodes: Option<KernelRuns>,
    pub outs: SmallVec<[Rc<TensorMeta>; 3]>,
    /// The operands' metadata after their redistribution.
    pub targets: SmallVec<[Rc<TensorMeta>; 3]>,
    pub metas: Metas,
    /// The hash of the operator and its attributes, with which the lineage of a result begins.
    lineage_seed: u64,
    /// The call's work and this rank's share of it, once they have been asked for.
    pub work: OnceCell<[Work; 2]>,
    /// The derivative programs, unless they differ between calls of this plan.
    programs: Option<RefCell<Programs>>,
    /// The plans for the same operator after some of the operands have been redistributed.
    followers: RefCell<SmallVec<[Weak<CallPlan>; 1]>>,
}

/// The key of a plan: the operator, the numbers of the operands' metadata, and the mode.
pub(in crate::dtensor) struct PlanKey {
    op: Arc<dyn Op>,
    ins: SmallVec<[u32; 4]>,
    mode: PlanMode,
}

/// The settings of a mesh on which the plans of calls depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::dtensor) struct PlanMode {
    pub reduction: Reduction,
    keeps_layouts: bool,
}

impl PlanMode {
    fn of(mesh: &DeviceMesh) -> PlanMode {
        PlanMode { reduction: mesh.reduction(), keeps_layouts: mesh.keeps_layouts() }
    }
}

/// The operands whose gradients are wanted, as a bit set; all operands from the 64th on share one bit.
#[derive(Clone, Copy, Default, PartialEq)]
pub(in crate::dtensor) struct Needs(u64);

/// The cached plans of a mesh, by the hash of their key.
#[derive(Default)]
struct CallPlans(RefCell<BoundedCache<u64, SmallVec<[Rc<CallPlan>; 1]>>>);

impl MeshCache for CallPlans {
    const PLACE: CachePlace = CachePlace::CallPlans;
}

impl Needs {
    pub fn of(wanted: impl Iterator<Item = bool>) -> Needs {
        Needs(wanted.enumerate().fold(0, |bits, (i, w)| bits | u64::from(w) << i.min(63)))
    }

    fn contains(self, i: usize) -> bool {
        self.0 >> i.min(63) & 1 == 1
    }
}

impl CallPlan {
    /// Returns the plan for `op` on operands with this metadata, made at the first call.
    pub fn find(mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<TensorMeta>]) -> Result<Rc<CallPlan>> {
        #[cfg(test)]
        LOOKUPS.with(|c| c.set(c.get() + 1));
        let mut hasher = FxHasher::default();
        op.as_any().type_id().hash(&mut hasher);
        op.key_hash(&mut hasher);
        let mode = PlanMode::of(mesh);
        mode.hash(&mut hasher);
        ins.iter().for_each(|f| hasher.write_u32(f.id));
        let key = hasher.finish();
        let cache: &CallPlans = mesh.cache();
        let found = cache.0.borrow().get(&key).and_then(|plans| {
            let same = |p: &&Rc<CallPlan>| p.mode == mode && p.is_for(ins) && p.op.key_eq(op);
            plans.iter().find(same).cloned()
        });
        if let Some(plan) = found {
            refuse_in_strict(mesh, op, ins, &plan.moves)?;
            return Ok(plan);
        }
        let plan = Rc::new(CallPlan::make(mesh, op, ins)?);
        refuse_in_strict(mesh, op, ins, &plan.moves)?;
        cache.0.borrow_mut().get_or_insert_with(key, SmallVec::new).push(plan.clone());
        Ok(plan)
    }

    /// Returns the plan for the same operator after some operands have been redistributed to this metadata. It
    /// remembers the plans that followed, so that a repeated pass needs no lookup in the cache.
    pub fn after(&self, mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<TensorMeta>]) -> Result<Rc<CallPlan>> {
        debug_assert_eq!(
            PlanMode::of(mesh),
            self.mode,
            "a plan is followed in the mode in which it was made"
        );
        let mut known = self.followers.borrow_mut();
        known.retain(|plan| plan.strong_count() > 0);
        if let Some(plan) = known.iter().filter_map(Weak::upgrade).find(|plan| plan.is_for(ins)) {
            refuse_in_strict(mesh, op, ins, &plan.moves)?;
            return Ok(plan);
        }
        let plan = CallPlan::find(mesh, op, ins)?;
        known.push(Rc::downgrade(&plan));
        Ok(plan)
    }

    /// Returns the plan that `known` names if it is for operands with this metadata, in the present mode. Otherwise finds the
    /// plan, and lets `known` name it. The caller keeps one `known` per operator.
    pub fn find_known(
        known: &mut Weak<CallPlan>,
        mesh: &DeviceMesh,
        op: &dyn Op,
        ins: &[&Rc<TensorMeta>],
    ) -> Result<Rc<CallPlan>> {
        let fits = |plan: &Rc<CallPlan>| plan.mode == PlanMode::of(mesh) && plan.is_for(ins);
        if let Some(plan) = known.upgrade().filter(fits) {
            debug_assert!(plan.op.key_eq(op), "one operator's plan for another");
            refuse_in_strict(mesh, op, ins, &plan.moves)?;
            return Ok(plan);
        }
        let plan = CallPlan::find(mesh, op, ins)?;
        *known = Rc::downgrade(&plan);
        Ok(plan)
    }

    /// Returns the key under which the plan is cached.
    pub fn key(&self) -> PlanKey {
        PlanKey { op: self.op.clone(), ins: self.ins.clone(), mode: self.mode }
    }

    pub fn has_key(&self, key: &PlanKey) -> bool {
        self.mode == key.mode && self.ins == key.ins && self.op.key_eq(&*key.op)
    }

    fn is_for(&self, ins: &[&Rc<TensorMeta>]) -> bool {
        self.ins.iter().eq(ins.iter().map(|f| &f.id))
    }

    /// Returns the lineage of the first result of a call on these operands.
    #[inline]
    pub fn lineage(&self, operands: impl Iterator<Item = Lineage>) -> Lineage {
        Lineage::of_call(self.op.name(), self.lineage_seed, operands)
    }

    /// Returns the operands as they were given, before their redistribution.
    pub fn given(&self) -> impl Iterator<Item = &Spec> {
        self.moves.iter().zip(&self.targets).map(|(m, to)| {
            let ends = m.as_ref().and_then(|(m, _)| m.plan().ends());
            ends.map_or(to.spec(), |(from, _)| from)
        })
    }

    /// Returns the dtype and shape that this rank stores, per result.
    pub fn stored(&self) -> impl Iterator<Item = (DType, Shape)> + '_ {
        self.outs.iter().map(|f| (f.spec().stored_dtype(), f.stored_shape().clone()))
    }

    /// Returns true if all calls of this plan compute the same, so that one of them can be made again.
    pub fn can_repeat(&self) -> bool {
        self.programs.is_some()
    }

    /// Returns the derivative with respect to the operands in `needs`.
    pub fn program(&self, op: &dyn Op, needs: Needs) -> Result<Rc<DerivativeProgram>> {
        let find = |programs: &RefCell<Programs>| {
            programs.borrow().iter().find(|(n, _)| *n == needs).map(|(_, p)| p.clone())
        };
        if let Some(program) = self.programs.as_ref().and_then(find) {
            return Ok(program);
        }
        let wanted: SmallVec<[bool; 8]> = short_list((0..self.metas.len()).map(|i| needs.contains(i)));
        let program = Rc::new(DerivativeProgram::new(Vjp::write(op, &self.metas, &wanted)?));
        if let Some(programs) = &self.programs {
            programs.borrow_mut().push((needs, program.clone()));
        }
        Ok(program)
    }

    fn make(mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<TensorMeta>]) -> Result<CallPlan> {
        let metas: Metas = short_list(ins.iter().map(|f| f.meta()));
        let out_metas = infer_results(op, &metas)?;
        let ChosenLayouts { ins: targets, outs, made, by_boxes } =
            choose_rows(mesh, op, ins, &metas, &out_metas)?;
        let mut moves = SmallVec::new();
        for (from, to) in ins.iter().zip(&targets) {
            let m = if *from == to { None } else { Some((redistribute::find(mesh, from, to)?, to.clone())) };
            moves.push(m);
        }
        let windows = Windows {
            ins: targets.iter().map(|f| f.window().clone()).collect(),
            outs: outs.iter().map(|f| f.window().clone()).collect(),
            exact: mesh.reduction().is_exact(),
        };
        let nodes = match by_boxes {
            true => Some(KernelRuns::Boxes(RaggedBoxes::of(&windows))),
            false => {
                let grouped = PartRuns::find(mesh, op, &metas, &targets, &outs);
                let of_nodes = || KernelRuns::find(op, &metas, &targets, &outs, &made, windows.exact);
                grouped.map(KernelRuns::Grouped).or_else(of_nodes)
            }
        };
        let ins = ins.iter().map(|f| f.id).collect();
        // Calls that differ in an `Unkeyed` attribute share the plan, but have derivatives of their own.
        let programs = (!has_unkeyed(op)).then(RefCell::default);
        let (op, mode, followers) = (op.to_shared(), PlanMode::of(mesh), RefCell::default());
        let work = OnceCell::new();
        let lineage_seed = lineage_seed(&*op);
        let plan = CallPlan {
            op,
            ins,
            mode,
            moves,
            windows,
            nodes,
            outs,
            targets,
            programs,
            followers,
            metas,
            lineage_seed,
            work,
        };
        Ok(plan)
    }
}

#[cfg(test)]
thread_local!(
    /// The number of lookups in the plan cache on this rank.
    pub(in crate::dtensor) static LOOKUPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) }
);

/// Returns a hash of an operator's name and attributes, the same in all processes. Attributes that plans do not tell apart
/// ([`Unkeyed`](crate::ops::Unkeyed)) do not count.
fn lineage_seed(op: &dyn Op) -> u64 {
    let mut hasher = FxHasher::default();
    op.name().hash(&mut hasher);
    op.key_hash(&mut hasher);
    hasher.finish()
}

/// Refuses, in strict mode, moves that communicate.
fn refuse_in_strict(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    moves: &OperandMoves,
) -> Result<()> {
    if !mesh.0.strict.get() {
        return Ok(());
    }
    let moved = moves.iter().position(|m| m.as_ref().is_some_and(|(m, _)| m.communicates()));
    let Some(i) = moved else { return Ok(()) };
    let to = &moves[i].as_ref().expect("found above").1;
    let given: Vec<String> = ins.iter().map(|f| f.spec().to_string()).collect();
    Err(Error::sharding(
        op.name(),
        format!("operand {i} would have to move, which strict mode forbids"),
        given.join(", "),
        format!("redistribute operand {i} to {} first", to.spec()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DTensor;
    use crate::ops::Add;

    #[test]
    fn plans_are_found_again_and_as_few_operands_move_as_can() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 1)])?;
            let plan = |x: &DTensor, y: &DTensor| CallPlan::find(&mesh, &Add, &[&x.meta, &y.meta]);
            let (s0, s1) = (
                DTensor::zeros(&mesh, DType::F32, [4, 4], "(S0, S1)")?,
                DTensor::zeros(&mesh, DType::F32, [4, 4], "(S1, S1)")?,
            );
            let first = plan(&s0, &s0)?;
            assert!(Rc::ptr_eq(&first, &plan(&s0, &s0)?));
            assert!(first.moves.iter().all(Option::is_none));
            assert_eq!(first.outs[0], s0.meta, "an axis of one rank keeps its cut");
            let moved = plan(&s0, &s1)?;
            assert_eq!(
                moved.moves.iter().filter(|m| m.is_some()).count(),
                1,
                "one of both follows the other"
            );
            // An equal number on another mesh is other metadata.
            let other = DeviceMesh::new(mesh.rank(), &[("a", 2), ("b", 1)])?;
            let twin = DTensor::zeros(&other, DType::F32, [4, 4], "(S0, S1)")?;
            assert_eq!(twin.meta.id, s0.meta.id);
            assert_ne!(twin.meta, s0.meta);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
