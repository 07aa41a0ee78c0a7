//! Plans: which operands of a call move how, where the local kernel works, and how the results lie.

use std::cell::RefCell;
use std::hash::Hasher;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::facts::Facts;
use super::nodes::Nodes;
use super::redistribute::{self, Move};
use super::reduction::Reduction;
use crate::error::{Error, Result};
use crate::ops::{Axis, Meta, Metas, Op, Program, Row, Slot, Vjp, Windows};
use crate::placement::{Layout, Placement, Spec, Terms};
use crate::tensor::{Dims, ReduceOp};

/// Beyond this number of plans a rank starts over: attributes that differ at every call must not fill its memory.
const PLANS_LEN: usize = 8192;

/// One an operand: how it moves first, and to what.
type Moves = SmallVec<[Option<(Rc<Move>, Rc<Facts>)>; 3]>;
type Programs = SmallVec<[(Needs, Rc<Program>); 1]>;

/// How one operator runs on operands with given facts.
pub(super) struct Plan {
    pub op: Arc<dyn Op>,
    ins: SmallVec<[u32; 4]>,
    reduction: Reduction,
    pub moves: Moves,
    pub windows: Windows,
    /// Where the kernel runs once for each node of a sum in parts.
    pub nodes: Option<Nodes>,
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
        let reduction = mesh.reduction();
        hasher.write_u8(reduction as u8);
        ins.iter().for_each(|f| hasher.write_u32(f.id));
        let key = hasher.finish();
        let found = mesh.0.plans.0.borrow().get(&key).and_then(|plans| {
            let same = |p: &&Rc<Plan>| {
                p.reduction == reduction && p.ins.iter().eq(ins.iter().map(|f| &f.id)) && p.op.key_eq(op)
            };
            plans.iter().find(same).cloned()
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
        let Chosen { ins: targets, outs, made } = choose(mesh, op, ins, &metas, &out_metas)?;
        let mut moves = SmallVec::new();
        for (from, to) in ins.iter().zip(&targets) {
            let m = if *from == to { None } else { Some((redistribute::find(mesh, from, to)?, to.clone())) };
            moves.push(m);
        }
        let windows = Windows {
            ins: targets.iter().map(|f| f.window().clone()).collect(),
            outs: outs.iter().map(|f| f.window().clone()).collect(),
        };
        let nodes = Nodes::find(op, &metas, &targets, &outs, &made);
        let ins = ins.iter().map(|f| f.id).collect();
        let (op, reduction, programs) = (op.to_shared(), mesh.reduction(), RefCell::default());
        Ok(Plan { op, ins, reduction, moves, windows, nodes, outs, programs, metas })
    }
}

/// How the operands are to lie, and the results will.
struct Chosen {
    ins: SmallVec<[Rc<Facts>; 3]>,
    outs: SmallVec<[Rc<Facts>; 3]>,
    /// The results that are sums over terms which this operator cuts.
    made: SmallVec<[bool; 3]>,
}

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
        let mut raggeds = Vec::with_capacity(ndim);
        for (a, barred) in barred.iter().enumerate() {
            let (row, ragged) = cheapest(mesh, op, ins, metas, outs, a, barred);
            let placed = |s: &Slot| instantiate(*s, ragged.as_ref());
            in_placements.iter_mut().zip(&row.ins).for_each(|(p, s)| p.push(placed(s)));
            out_placements.iter_mut().zip(&row.outs).for_each(|(p, s)| p.push(placed(s)));
            rows.push(row);
            raggeds.push(ragged);
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
        let layout = |p: SmallVec<[Placement; 4]>| Layout::new(p).with_order(&order);
        let exact = mesh.reduction() == Reduction::Exact;
        let mut summed: SmallVec<[Option<Terms>; 3]> = SmallVec::new();
        if exact {
            for k in 0..outs.len() {
                summed.push(summed_terms(op, metas, k, &rows, &raggeds, &order)?);
            }
            if summed.iter().flatten().any(|t| mesh.most_nodes(t).is_none()) {
                // Some cut leaves no rank a whole leaf of the summation tree: move operands instead.
                let makes = |r: &Row| r.outs.iter().any(|s| matches!(s, Slot::Terms(_)));
                let a = rows.iter().rposition(makes).expect("the terms come from a row");
                barred[a].push(rows[a].clone());
                continue;
            }
        }
        let all = || -> Result<Option<Chosen>> {
            let target = |(f, p): (&&Rc<Facts>, SmallVec<[Placement; 4]>)| {
                let mut spec = f.spec().with_layout(layout(p)?)?;
                if !exact {
                    // A sum in parts from before the mode was changed goes on as one part a rank.
                    spec.terms = None;
                }
                mesh.facts_of(spec)
            };
            let ins: SmallVec<[Rc<Facts>; 3]> =
                ins.iter().zip(in_placements).map(target).collect::<Result<_>>()?;
            let made: SmallVec<[bool; 3]> = summed.iter().map(Option::is_some).collect();
            if made.contains(&true) && ins.iter().any(|f| f.spec().terms.is_some()) {
                // The kernel runs on nodes of what it sums, or on those that its operands bring, and not on both.
                return Ok(None);
            }
            let mut laid = SmallVec::new();
            for (k, (m, p)) in outs.iter().zip(out_placements).enumerate() {
                let mut spec = Spec::new(mesh.mesh(), m.dtype, m.shape.clone(), layout(p)?)?;
                spec.terms = match summed.get(k).cloned().flatten() {
                    Some(terms) => Some(Arc::new(terms)),
                    None if exact && spec.layout.has_partial() => match passed_terms(&ins) {
                        Some(terms) => terms,
                        None => return Ok(None),
                    },
                    None => None,
                };
                laid.push(mesh.facts_of(spec)?);
            }
            Ok(Some(Chosen { ins, outs: laid, made }))
        };
        match all() {
            Ok(Some(chosen)) => return Ok(chosen),
            Ok(None) => {
                // Sums over different terms cannot pass side by side, nor beside one that is made here.
                let passes = |r: &Row| r.ins.contains(&Slot::SUM);
                let a = rows.iter().rposition(passes).expect("only a row that passes sums has several");
                barred[a].push(rows[a].clone());
            }
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
    let exact = mesh.reduction() == Reduction::Exact;
    let made = |row: &Row| -> f64 {
        let sums = row.outs.iter().enumerate().filter(|(_, s)| exact && matches!(s, Slot::Terms(_)));
        // Infinitely many nodes of no bytes are still too many.
        sums.map(|(k, _)| {
            more_nodes(mesh, op, metas, k, a, row, ragged.as_ref()) * outs[k].len_bytes().max(1) as f64
        })
        .sum()
    };
    let cost = |row: &Row| -> f64 {
        if ragged.is_none() && row.ins.contains(&Slot::Ragged) {
            return f64::INFINITY;
        }
        let moved = row.ins.iter().zip(ins);
        let moved = moved
            .map(|(s, f)| move_cost(mesh, f, a, &instantiate(*s, ragged.as_ref()), ranks as f64))
            .sum::<f64>();
        moved + made(row)
    };
    let fits =
        |row: &&Row| (row.by_bits || !exact) && (ragged.is_some() || !row.outs.contains(&Slot::Ragged));
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
        Slot::Terms(_) => Placement::Partial(ReduceOp::Sum),
        Slot::Ragged => ragged.cloned().unwrap_or(Placement::Replicate),
    }
}

/// The terms of result `k`, if some row of those chosen cuts dims that it sums over.
fn summed_terms(
    op: &dyn Op,
    metas: &[Meta],
    k: usize,
    rows: &[Row],
    raggeds: &[Option<Placement>],
    order: &[usize],
) -> Result<Option<Terms>> {
    if !rows.iter().any(|r| matches!(r.outs[k], Slot::Terms(_))) {
        return Ok(None);
    }
    let dims = term_rows(op, metas, k);
    let Some(Slot::Terms(leaf)) = dims.first().map(|r| r.outs[k]) else { unreachable!("a row was chosen") };
    let place = |(row, ragged): (&Row, &Option<Placement>)| match row.outs[k] {
        Slot::Terms(_) if row.ins.contains(&Slot::Ragged) => {
            ragged.clone().expect("the row was chosen for it")
        }
        Slot::Terms(_) => {
            let j = dims.iter().position(|r| r.ins == row.ins);
            Placement::Shard(j.expect("rows with terms do not depend on the axis"))
        }
        _ => Placement::Replicate,
    };
    let layout = Layout::new(rows.iter().zip(raggeds).map(place)).with_order(order)?;
    Ok(Some(Terms::new(dims.iter().map(|r| extent(r, metas)).collect(), leaf, layout)))
}

/// The rows that cut one dim which result `k` sums over: the dims of its summation tree, outermost first.
pub(super) fn term_rows(op: &dyn Op, metas: &[Meta], k: usize) -> Vec<Row> {
    let mut rows = op.rows(metas, Axis::alone(1));
    rows.retain(|r| matches!(r.outs[k], Slot::Terms(_)) && !r.ins.contains(&Slot::Ragged));
    rows
}

/// The extent of the dim that a row cuts.
fn extent(row: &Row, metas: &[Meta]) -> usize {
    let cut = row
        .ins
        .iter()
        .zip(metas)
        .find_map(|(s, m)| if let Slot::S(d) = *s { Some(m.shape[d]) } else { None });
    cut.expect("a row with terms cuts an operand")
}

/// How many nodes more than one a rank holds of result `k` where axis `a` alone is cut by `row`; infinite where that cuts a
/// leaf.
fn more_nodes(
    mesh: &DeviceMesh,
    op: &dyn Op,
    metas: &[Meta],
    k: usize,
    a: usize,
    row: &Row,
    ragged: Option<&Placement>,
) -> f64 {
    let (ndim, order): (usize, Dims) = (mesh.mesh().ndim(), (0..mesh.mesh().ndim()).collect());
    let whole = Row::new(row.ins.iter().map(|_| Slot::R), row.outs.iter().map(|_| Slot::R));
    let rows: Vec<Row> = (0..ndim).map(|b| if a == b { row.clone() } else { whole.clone() }).collect();
    let raggeds: Vec<Option<Placement>> = (0..ndim).map(|_| ragged.cloned()).collect();
    match summed_terms(op, metas, k, &rows, &raggeds, &order) {
        Ok(Some(terms)) => mesh.most_nodes(&terms).map_or(f64::INFINITY, |n| n.saturating_sub(1) as f64),
        _ => f64::INFINITY,
    }
}

/// The terms that the operands' sums in parts have in common, if they have; sums without terms have `None` in common.
fn passed_terms(ins: &[Rc<Facts>]) -> Option<Option<Arc<Terms>>> {
    let mut sums = ins.iter().filter(|f| f.layout().has_partial()).map(|f| &f.spec().terms);
    let Some(first) = sums.next() else { return Some(None) };
    sums.all(|t| t == first).then(|| first.clone())
}

/// Bytes that a rank receives when the operand's placement on axis `a` becomes `to`, the other axes held; infinite for
/// what is never done silently (opening a partial).
fn move_cost(mesh: &DeviceMesh, f: &Facts, a: usize, to: &Placement, n: f64) -> f64 {
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
    // A sum in parts takes as much for each node that a rank has finished.
    let nodes = f.spec().terms.as_ref().map_or(1, |t| mesh.most_nodes(t).expect("what is held fits"));
    let bytes = (f.meta().len_bytes() * nodes) as f64 / other_cuts as f64;
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
