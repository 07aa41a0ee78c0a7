//! Plans: which operands of a call move how, where the local kernel works, and how the results lie.

use std::cell::RefCell;
use std::hash::Hasher;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::facts::Facts;
use super::redistribute::{self, Move};
use crate::error::{Error, Result};
use crate::ops::{Axis, Meta, Metas, Op, Program, Row, Slot, Vjp, Windows};
use crate::placement::{Layout, Placement};
use crate::tensor::Dims;

/// Beyond this number of plans a rank starts over: attributes that differ at every call must not fill its memory.
const PLANS_LEN: usize = 8192;

/// One an operand: how it moves first, and to what.
type Moves = SmallVec<[Option<(Rc<Move>, Rc<Facts>)>; 3]>;
type Programs = SmallVec<[(Needs, Rc<Program>); 1]>;

/// How one operator runs on operands with given facts.
pub(super) struct Plan {
    pub op: Arc<dyn Op>,
    ins: SmallVec<[u32; 4]>,
    pub moves: Moves,
    pub windows: Windows,
    pub outs: SmallVec<[Rc<Facts>; 3]>,
    metas: Metas,
    programs: RefCell<Programs>,
}

/// The operands whose gradients are wanted, as a bit set in which those from the 64th on are one.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Needs(u64);

#[derive(Default)]
pub(super) struct PlanCache(RefCell<FxHashMap<u64, SmallVec<[Rc<Plan>; 1]>>>);

impl Needs {
    pub fn of(wanted: impl Iterator<Item = bool>) -> Needs {
        Needs(wanted.enumerate().fold(0, |bits, (i, w)| bits | u64::from(w) << i.min(63)))
    }

    fn contains(self, i: usize) -> bool {
        self.0 >> i.min(63) & 1 == 1
    }
}

impl Plan {
    /// The plan for `op` on operands with these facts, made at the first call.
    pub fn find(mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<Facts>]) -> Result<Rc<Plan>> {
        let mut hasher = FxHasher::default();
        op.key_hash(&mut hasher);
        ins.iter().for_each(|f| hasher.write_u32(f.id));
        let key = hasher.finish();
        let found = mesh.0.plans.0.borrow().get(&key).and_then(|plans| {
            plans.iter().find(|p| p.ins.iter().eq(ins.iter().map(|f| &f.id)) && p.op.key_eq(op)).cloned()
        });
        if let Some(plan) = found {
            refuse_in_strict(mesh, op, ins, &plan.moves)?;
            return Ok(plan);
        }
        let plan = Rc::new(Plan::make(mesh, op, ins)?);
        refuse_in_strict(mesh, op, ins, &plan.moves)?;
        let mut plans = mesh.0.plans.0.borrow_mut();
        if plans.len() >= PLANS_LEN {
            plans.clear();
        }
        plans.entry(key).or_default().push(plan.clone());
        Ok(plan)
    }

    /// The derivative with respect to the operands that `needs` names.
    pub fn program(&self, op: &dyn Op, needs: Needs) -> Result<Rc<Program>> {
        let known = self.programs.borrow().iter().find(|(n, _)| *n == needs).map(|(_, p)| p.clone());
        if let Some(program) = known {
            return Ok(program);
        }
        let wanted: SmallVec<[bool; 8]> = (0..self.metas.len()).map(|i| needs.contains(i)).collect();
        let program = Rc::new(Vjp::write(op, &self.metas, &wanted)?);
        if !op.has_free() {
            self.programs.borrow_mut().push((needs, program.clone()));
        }
        Ok(program)
    }

    fn make(mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<Facts>]) -> Result<Plan> {
        let metas: Metas = ins.iter().map(|f| f.meta()).collect();
        let out_metas = op.infer(&metas)?;
        let (targets, outs) = choose(mesh, op, ins, &metas, &out_metas)?;
        let mut moves = SmallVec::new();
        for (from, to) in ins.iter().zip(&targets) {
            let m = if *from == to { None } else { Some((redistribute::find(mesh, from, to)?, to.clone())) };
            moves.push(m);
        }
        let windows = Windows {
            ins: targets.iter().map(|f| f.window().clone()).collect(),
            outs: outs.iter().map(|f| f.window().clone()).collect(),
        };
        let ids = ins.iter().map(|f| f.id).collect();
        Ok(Plan { op: op.to_shared(), ins: ids, moves, windows, outs, programs: RefCell::default(), metas })
    }
}

type Chosen = (SmallVec<[Rc<Facts>; 3]>, SmallVec<[Rc<Facts>; 3]>);

/// Chooses a row on every mesh axis by the bytes its moves would take, and puts the axes together.
fn choose(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<Facts>],
    metas: &[Meta],
    outs: &[Meta],
) -> Result<Chosen> {
    let ndim = mesh.mesh().ndim();
    let order = common_order(ins);
    // Rows that could not be put together on an axis, as with a ragged cut that another axis's cut does not allow.
    let mut barred: Vec<Vec<Row>> = vec![Vec::new(); ndim];
    loop {
        let mut in_placements = vec![SmallVec::<[Placement; 4]>::new(); ins.len()];
        let mut out_placements = vec![SmallVec::<[Placement; 4]>::new(); outs.len()];
        let mut rows = Vec::with_capacity(ndim);
        for (a, barred) in barred.iter().enumerate() {
            let (row, ragged) = cheapest(mesh, op, ins, metas, outs, a, barred);
            let placed = |s: &Slot| instantiate(*s, ragged.as_ref());
            in_placements.iter_mut().zip(&row.ins).for_each(|(p, s)| p.push(placed(s)));
            out_placements.iter_mut().zip(&row.outs).for_each(|(p, s)| p.push(placed(s)));
            rows.push(row);
        }
        // A row was chosen for the cuts that the operands had; the moves may have brought others beside it.
        let stands = |a: usize| {
            rows[a].ins.iter().chain(&rows[a].outs).all(|s| *s == Slot::R)
                || op.rows(metas, axis_beside(mesh, a, &in_placements[0])).contains(&rows[a])
        };
        if let Some(a) = (0..ndim).rev().find(|&a| !stands(a)) {
            barred[a].push(rows[a].clone());
            continue;
        }
        let facts = |m: &Meta, p: SmallVec<[Placement; 4]>| {
            mesh.facts(m.dtype, &m.shape, &Layout::new(p).with_order(&order)?)
        };
        let all = || -> Result<Chosen> {
            let ins = metas.iter().zip(in_placements).map(|(m, p)| facts(m, p)).collect::<Result<_>>()?;
            let outs = outs.iter().zip(out_placements).map(|(m, p)| facts(m, p)).collect::<Result<_>>()?;
            Ok((ins, outs))
        };
        match all() {
            Ok(chosen) => return Ok(chosen),
            Err(e) => {
                // Bar the ragged row, or any other that is not replicated, of the innermost axis; replicated rows always fit.
                let cut = |r: &Row| r.ins.iter().chain(&r.outs).any(|s| *s != Slot::R);
                let ragged = |r: &Row| r.ins.contains(&Slot::Ragged);
                let Some(a) = rows.iter().rposition(ragged).or_else(|| rows.iter().rposition(cut)) else {
                    return Err(e);
                };
                barred[a].push(rows[a].clone());
            }
        }
    }
}

/// The row of `op` on axis `a` whose moves take the fewest bytes; the first listed among equals, replication last.
fn cheapest(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<Facts>],
    metas: &[Meta],
    outs: &[Meta],
    a: usize,
    barred: &[Row],
) -> (Row, Option<Placement>) {
    let replicated = Row::new(ins.iter().map(|_| Slot::R), outs.iter().map(|_| Slot::R));
    if ins.iter().all(|f| f.layout().axis(a).is_replicate()) {
        // Whatever is whole everywhere stays so: cutting the result would only have to be undone.
        return (replicated, None);
    }
    let ragged =
        ins.iter().map(|f| f.layout().axis(a)).find(|p| matches!(p, Placement::RaggedShard { .. })).cloned();
    let axis = axis_beside(mesh, a, ins[0].layout().placements());
    let ranks = axis.ranks;
    let mut rows = op.rows(metas, axis);
    rows.push(replicated);
    let cost = |row: &Row| -> f64 {
        let moved = row.ins.iter().zip(ins);
        moved
            .map(|(s, f)| {
                if ragged.is_none() && *s == Slot::Ragged {
                    f64::INFINITY
                } else {
                    move_cost(f, a, &instantiate(*s, ragged.as_ref()), ranks as f64)
                }
            })
            .sum()
    };
    let fits = |row: &&Row| ragged.is_some() || !row.outs.contains(&Slot::Ragged);
    let mut best: Option<(f64, &Row)> = None;
    for row in rows.iter().filter(|r| !barred.contains(r)).filter(fits) {
        let c = cost(row);
        if best.is_none_or(|(b, _)| c < b) {
            best = Some((c, row));
        }
    }
    let row = best.expect("the replicated row is never barred").1.clone();
    (row, ragged)
}

/// Axis `a`, beside the cuts that the other axes make in the first operand where it lies so.
fn axis_beside(mesh: &DeviceMesh, a: usize, first: &[Placement]) -> Axis {
    let mesh = mesh.mesh();
    (0..mesh.ndim()).filter(|&b| b != a).fold(Axis::alone(mesh.axis_len(a)), |axis, b| {
        first[b].split_dims().fold(axis, |axis, d| axis.beside(d, mesh.axis_len(b)))
    })
}

fn instantiate(slot: Slot, ragged: Option<&Placement>) -> Placement {
    match slot {
        Slot::R => Placement::Replicate,
        Slot::S(d) => Placement::Shard(d),
        Slot::P(op) => Placement::Partial(op),
        Slot::Ragged => ragged.cloned().unwrap_or(Placement::Replicate),
    }
}

/// Bytes that a rank receives when the operand's placement on axis `a` becomes `to`, the other axes held; infinite for
/// what is never done silently (opening a partial).
fn move_cost(f: &Facts, a: usize, to: &Placement, n: f64) -> f64 {
    use Placement::{Partial, RaggedShard, Replicate, Shard};
    let from = f.layout().axis(a);
    if from == to {
        return 0.0;
    }
    // Bytes of what the ranks along this axis hold together.
    let cut = |p: &Placement| matches!(p, Shard(_) | RaggedShard { .. });
    let other_cuts: usize = (0..f.spec().mesh.ndim())
        .filter(|&b| b != a && cut(f.layout().axis(b)))
        .map(|b| f.spec().mesh.axis_len(b))
        .product();
    let bytes = f.meta().len_bytes() as f64 / other_cuts as f64;
    // What costs no bytes, a slice or a move on an axis of one rank, is not as good as nothing.
    const MOVE: f64 = 1e-3;
    MOVE + match (from, to) {
        (_, Partial(_)) => f64::INFINITY,
        (Replicate, _) => 0.0,
        (Partial(_), Replicate) => bytes * 2.0 * (n - 1.0) / n,
        (Partial(_), _) | (_, Replicate) => bytes * (n - 1.0) / n,
        _ => bytes * (n - 1.0) / (n * n),
    }
}

/// The order of axes to use for all operands and results: that of the largest operand which has one of its own.
fn common_order(ins: &[&Rc<Facts>]) -> Dims {
    let natural = |l: &Layout| l.order().iter().copied().eq(0..l.order().len());
    let largest = ins.iter().filter(|f| !natural(f.layout())).max_by_key(|f| f.shape().numel());
    let any = largest.or(ins.first());
    any.map(|f| f.layout().order().iter().copied().collect()).unwrap_or_default()
}

fn refuse_in_strict(mesh: &DeviceMesh, op: &dyn Op, ins: &[&Rc<Facts>], moves: &Moves) -> Result<()> {
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
    use crate::tensor::DType;

    fn zeros(mesh: &DeviceMesh, shape: &[usize], layout: &str) -> Result<DTensor> {
        let whole = crate::tensor::Tensor::zeros(DType::F32, shape);
        DTensor::distribute(mesh, &whole, Layout::replicated(mesh.mesh().ndim()))?
            .redistribute(layout.parse()?)
    }

    #[test]
    fn the_order_is_that_of_the_largest_operand_that_has_one() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 2)])?;
            let order = |layouts: &[(&[usize], &str)]| -> Result<Vec<usize>> {
                let xs: Vec<DTensor> =
                    layouts.iter().map(|(s, l)| zeros(&mesh, s, l)).collect::<Result<_>>()?;
                Ok(common_order(&xs.iter().map(|x| &x.facts).collect::<Vec<_>>()).to_vec())
            };
            assert_eq!(order(&[(&[4], "(S0, S0)")])?, [0, 1]);
            assert_eq!(order(&[(&[9], "(S0, S0)"), (&[4], "(S0^1, S0^0)")])?, [1, 0]);
            assert_eq!(order(&[(&[4], "(S0^1, S0^0)"), (&[9], "(R, S0)")])?, [1, 0]);
            assert_eq!(order(&[(&[4], "(R, R)"), (&[9], "(S0, S0)")])?, [0, 1]);
            Ok(())
        };
        spmd(4, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn plans_are_found_again_and_as_few_operands_move_as_can() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 1)])?;
            let plan = |x: &DTensor, y: &DTensor| Plan::find(&mesh, &Add, &[&x.facts, &y.facts]);
            let (s0, s1) = (zeros(&mesh, &[4, 4], "(S0, S1)")?, zeros(&mesh, &[4, 4], "(S1, S1)")?);
            let first = plan(&s0, &s0)?;
            assert!(Rc::ptr_eq(&first, &plan(&s0, &s0)?));
            assert!(first.moves.iter().all(Option::is_none));
            assert_eq!(first.outs[0], s0.facts, "an axis of one rank keeps its cut");
            let moved = plan(&s0, &s1)?;
            assert_eq!(
                moved.moves.iter().filter(|m| m.is_some()).count(),
                1,
                "one of both follows the other"
            );
            // Equal numbers on another mesh are other facts.
            let other = DeviceMesh::new(mesh.rank(), &[("a", 2), ("b", 1)])?;
            let twin = zeros(&other, &[4, 4], "(S0, S1)")?;
            assert_eq!(twin.facts.id, s0.facts.id);
            assert_ne!(twin.facts, s0.facts);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
