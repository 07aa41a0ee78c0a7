//! Explains plans: for each operator call of a piece of program, the module that makes it, the layouts it was given, the
//! rows that were chosen, what moves, and what other rows would have cost. Moves that the program asks for itself, such
//! as those at sites and FSDP's gathers, are listed too.
//!
//! Missing: collectives that move no tensor of a mesh, such as those of
//! [`DTensor::reduce_partials`](crate::dtensor::DTensor::reduce_partials) and of a user's own groups (a
//! [`Tally`](crate::comm::Tally) counts those).

use std::cell::RefCell;
use std::fmt;
use std::rc::{Rc, Weak};

use super::call_plan::{CallPlan, PlanKey};
use super::choose_rows::considered;
use crate::comm::{CallOrigin, Cost, ModulePath, Phase};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{Move, Redistribution, sample_coords, shared_time};
use crate::error::Result;
use crate::ops::Op;
use crate::placement::Spec;

/// The largest number of other shardings that an explanation lists.
const RUNNERS_UP: usize = 3;

/// The plans of a piece of program: made by [`DeviceMesh::explain`]. Printing it gives a paragraph per plan, by module;
/// [`Explanation::short`] a line for each that moves something.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// The plans, in the order of first calls.
    pub plans: Vec<ExplainedPlan>,
}

/// The plan of an operator for operands with certain layouts, as one module uses it; or a redistribution that the program
/// asks for, without rows.
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainedPlan {
    /// The module that makes the calls ([`ModulePath::enter`]). It is empty outside of all modules.
    pub path: ModulePath,
    /// The part of the training step.
    pub phase: Phase,
    /// The operator with its attributes; `redistribute` for a redistribution, and `backward` for that of a gradient.
    pub operator: String,
    /// The number of calls that used the plan.
    pub calls: u64,
    /// The operands as they were given, such as `f32[8, 8]@(tp:S0)`.
    pub operands: Vec<String>,
    /// The results.
    pub results: Vec<String>,
    /// The rows that were chosen, one per mesh axis.
    pub rows: String,
    /// The moves of operands.
    pub moves: Vec<ExplainedMove>,
    /// The bytes that a rank receives by these moves: least, mean and most over all ranks, or over the first, middle and
    /// last ranks along each axis on meshes of more than 64.
    pub received_bytes: [f64; 3],
    /// The modelled time of the slowest rank: moves and kernel.
    pub time: Cost,
    /// The cheapest other shardings, and their times.
    pub runners_up: Vec<(String, Cost)>,
}

/// The move of an operand.
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainedMove {
    /// The operand's number.
    pub operand: usize,
    /// The layout after the move.
    pub to: String,
    /// The calls, and the bytes that this rank receives.
    pub plan: String,
}

/// An explanation that is being written, with the keys of its plans.
type OpenExplanation = RefCell<(Explanation, Vec<ExplainedKey>)>;

/// The key of an explained plan. Redistributions have the numbers of the metadata before and after.
struct ExplainedKey {
    path: ModulePath,
    phase: Phase,
    plan: ExplainedCall,
}

enum ExplainedCall {
    Operator(PlanKey),
    Moves { operator: &'static str, ends: Vec<(u32, u32)> },
}

/// The explanations that are being written.
#[derive(Default)]
struct OpenExplanations(RefCell<Vec<Weak<OpenExplanation>>>);

impl MeshCache for OpenExplanations {
    const PLACE: CachePlace = CachePlace::Explanations;
}

impl DeviceMesh {
    /// Runs a piece of program and explains the plans of its operator calls, those of backward passes included.
    /// Communicates nothing itself.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "tp=2")?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 64], "(S0)")?;
    ///     let w = DTensor::zeros(&mesh, DType::F32, [64, 6], "(S1)")?;
    ///     let (_, explanation) = mesh.explain(|| x.matmul(&w))?;
    ///     let product = &explanation.plans[0];
    ///     assert_eq!(product.rows, "tp: R S1 -> S1");
    ///     assert_eq!(product.moves[0].plan, "all_gather over tp{0, 1}: receives 512 bytes");
    ///     assert_eq!(product.received_bytes, [512.0; 3]);
    ///     assert_eq!(product.runners_up[0].0, "tp: S0 R -> S0");
    ///     println!("{explanation}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the program's error.
    pub fn explain<T>(&self, program: impl FnOnce() -> Result<T>) -> Result<(T, Explanation)> {
        let open: &OpenExplanations = self.cache();
        let own = Rc::<OpenExplanation>::default();
        open.0.borrow_mut().push(Rc::downgrade(&own));
        self.0.observers.set(self.0.observers.get() + 1);
        let result = program();
        self.0.observers.set(self.0.observers.get() - 1);
        open.0.borrow_mut().retain(|other| other.strong_count() > 0 && !other.ptr_eq(&Rc::downgrade(&own)));
        let (explanation, _) = own.take();
        Ok((result?, explanation))
    }
}

impl Explanation {
    /// Returns the short form: a line for each plan by which ranks receive bytes, with its module, its operator, the layouts of what
    /// moves before and after, the most bytes that a rank receives in a call, and the calls; then the sum.
    ///
    /// ```
    /// use isoshard::{comm::{ModulePath, spmd}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "tp=2")?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 64], "(S0)")?;
    ///     let w = DTensor::zeros(&mesh, DType::F32, [64, 6], "(S1)")?;
    ///     let _scope = ModulePath::new("head").enter();
    ///     let (_, explanation) = mesh.explain(|| x.matmul(&w)?.neg())?; // the negation moves nothing
    ///     assert_eq!(explanation.short(), "\
    /// head  Matmul  f32[4, 64]@(tp:S0) -> (R)  512 bytes  1 call
    /// in all 512 bytes in 1 call
    /// ");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn short(&self) -> String {
        let (mut rows, mut bytes, mut calls) = (Vec::new(), 0.0, 0);
        for plan in self.plans.iter().filter(|plan| plan.received_bytes[2] > 0.0) {
            let ExplainedPlan { path, phase, received_bytes: [_, _, most], .. } = plan;
            let place = match (path.as_str(), phase) {
                ("", Phase::Forward) => "outside of modules".to_string(),
                ("", phase) => format!("outside of modules, {phase}"),
                (path, Phase::Forward) => path.to_string(),
                (path, phase) => format!("{path}, {phase}"),
            };
            let operator = plan.operator.split([' ', '(', '{']).next().unwrap_or_default().to_string();
            let moved = |m: &ExplainedMove| format!("{} -> {}", plan.operands[m.operand], m.to);
            let moved = plan.moves.iter().map(moved).collect::<Vec<_>>().join(", ");
            let times = if plan.calls == 1 { "1 call".into() } else { format!("{} calls", plan.calls) };
            rows.push([place, operator, moved, format!("{most:.0} bytes"), times]);
            (bytes, calls) = (bytes + most * plan.calls as f64, calls + plan.calls);
        }
        let width = |k: usize| rows.iter().map(|row: &[String; 5]| row[k].chars().count()).max().unwrap_or(0);
        let [place, operator, moved, most] = [0, 1, 2, 3].map(width);
        let line = |[a, b, c, d, e]: &[String; 5]| {
            format!("{a:place$}  {b:operator$}  {c:moved$}  {d:>most$}  {e}\n")
        };
        let times = if calls == 1 { "1 call".into() } else { format!("{calls} calls") };
        rows.iter().map(line).chain([format!("in all {bytes:.0} bytes in {times}\n")]).collect()
    }
}

/// Adds a call to the explanations that are being written.
pub(in crate::dtensor) fn note(mesh: &DeviceMesh, op: &dyn Op, plan: &CallPlan) {
    let same = |key: &ExplainedCall| matches!(key, ExplainedCall::Operator(key) if plan.has_key(key));
    add(mesh, same, || (ExplainedCall::Operator(plan.key()), explain(mesh, op, plan)));
}

/// Adds a redistribution that the program asks for to the explanations that are being written, if there are any.
#[inline]
pub(in crate::dtensor) fn note_move(mesh: &DeviceMesh, m: &Move, from: &TensorMeta, to: &TensorMeta) {
    note_moves(mesh, &[(m, from, to)]);
}

/// Adds redistributions that share a call, in the form of [`note_move`].
#[inline]
pub(in crate::dtensor) fn note_moves(mesh: &DeviceMesh, moves: &[(&Move, &TensorMeta, &TensorMeta)]) {
    if mesh.0.observers.get() > 0 {
        add_moves(mesh, moves);
    }
}

#[cold]
fn add_moves(mesh: &DeviceMesh, moves: &[(&Move, &TensorMeta, &TensorMeta)]) {
    let operator = CallOrigin::current().operator;
    let ends: Vec<(u32, u32)> = moves.iter().map(|(_, from, to)| (from.id, to.id)).collect();
    let same = |key: &ExplainedCall| matches!(key, ExplainedCall::Moves { operator: o, ends: e } if (*o, e) == (operator, &ends));
    let explained_move = |(operand, (m, _, to)): (usize, &(&Move, &TensorMeta, &TensorMeta))| {
        let plan = match operand {
            0 => m.plan().to_string(),
            _ => format!("in the same call: receives {} bytes", m.plan().received_bytes()),
        };
        ExplainedMove { operand, to: to.layout().to_string(), plan }
    };
    let explained = || {
        let specs: Vec<(Spec, Spec)> =
            moves.iter().map(|(_, from, to)| (from.spec().clone(), to.spec().clone())).collect();
        ExplainedPlan {
            path: ModulePath::current(),
            phase: Phase::current(),
            operator: operator.into(),
            calls: 1,
            operands: specs.iter().map(|(from, _)| from.to_string()).collect(),
            results: specs.iter().map(|(_, to)| to.to_string()).collect(),
            rows: String::new(),
            moves: moves.iter().enumerate().map(explained_move).collect(),
            received_bytes: received_bytes(mesh, &specs),
            time: shared_time(mesh, moves.iter().map(|(m, ..)| *m)),
            runners_up: Vec::new(),
        }
    };
    add(mesh, same, || (ExplainedCall::Moves { operator, ends: ends.clone() }, explained()));
}

/// Counts a call of the current module, which is explained at the first.
fn add(
    mesh: &DeviceMesh,
    same: impl Fn(&ExplainedCall) -> bool,
    first: impl Fn() -> (ExplainedCall, ExplainedPlan),
) {
    let (path, phase) = (ModulePath::current(), Phase::current());
    let open: &OpenExplanations = mesh.cache();
    for explanation in open.0.borrow().iter().filter_map(Weak::upgrade) {
        let (explanation, keys) = &mut *explanation.borrow_mut();
        let known = |key: &ExplainedKey| (key.path, key.phase) == (path, phase) && same(&key.plan);
        match keys.iter().position(known) {
            Some(i) => explanation.plans[i].calls += 1,
            None => {
                let (plan, explained) = first();
                keys.push(ExplainedKey { path, phase, plan });
                explanation.plans.push(explained);
            }
        }
    }
}

fn explain(mesh: &DeviceMesh, op: &dyn Op, plan: &CallPlan) -> ExplainedPlan {
    let given = plan.given().map(|spec| mesh.intern(spec.clone()));
    let given: Vec<Rc<TensorMeta>> = given.map(|meta| meta.expect("it was interned for the call")).collect();
    let outs: Vec<_> = plan.outs.iter().map(|m| m.meta()).collect();
    let ins: Vec<&Rc<TensorMeta>> = given.iter().collect();
    let all = considered(mesh, op, &ins, &plan.metas, &outs);
    let layouts = || plan.targets.iter().chain(&plan.outs).map(|m| m.layout());
    let chosen = all.iter().position(|c| c.layouts.iter().eq(layouts()));
    let (rows, time) = chosen.map_or_else(Default::default, |i| (all[i].rows.clone(), all[i].time));
    let others = all.iter().enumerate().filter(|(i, _)| Some(*i) != chosen).take(RUNNERS_UP);
    let moved = plan.moves.iter().enumerate().filter_map(|(i, m)| Some((i, m.as_ref()?)));
    let specs: Vec<(Spec, Spec)> =
        moved.clone().map(|(i, (_, to))| (given[i].spec().clone(), to.spec().clone())).collect();
    ExplainedPlan {
        path: ModulePath::current(),
        phase: Phase::current(),
        operator: format!("{op:?}"),
        calls: 1,
        operands: given.iter().map(|m| m.spec().to_string()).collect(),
        results: plan.outs.iter().map(|m| m.spec().to_string()).collect(),
        rows,
        moves: moved
            .map(|(operand, (m, to))| ExplainedMove {
                operand,
                to: to.layout().to_string(),
                plan: m.plan().to_string(),
            })
            .collect(),
        received_bytes: received_bytes(mesh, &specs),
        time,
        runners_up: others.map(|(_, c)| (c.rows.clone(), c.time)).collect(),
    }
}

/// Returns the least, mean and most bytes that a rank receives by these moves.
fn received_bytes(mesh: &DeviceMesh, moves: &[(Spec, Spec)]) -> [f64; 3] {
    let Some((first, to)) = moves.first() else { return [0.0; 3] };
    let ranks = sample_coords(mesh.mesh(), [&first.layout, &to.layout]);
    let of = |rank: usize, (from, to): &(Spec, Spec)| -> u64 {
        let seen = |spec: &Spec| Spec { mesh: spec.mesh.seen_from(rank).expect("a member"), ..spec.clone() };
        let planned = Redistribution::over(mesh.rank().network(), &seen(from), &seen(to));
        planned.map_or(0, |p| p.received_bytes())
    };
    let all: Vec<u64> =
        ranks.iter().map(|c| moves.iter().map(|m| of(mesh.mesh().rank_at(c), m)).sum()).collect();
    let [least, most] = [all.iter().min(), all.iter().max()].map(|n| *n.expect("a mesh has a rank") as f64);
    [least, all.iter().sum::<u64>() as f64 / all.len() as f64, most]
}

/// Prints a paragraph per plan: calls, operands, rows, moves, bytes, time, and the runners-up. The paragraphs of a module
/// follow a line with its path, in the order of the modules' first calls.
///
/// ```
/// use isoshard::{comm::{ModulePath, spmd}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let texts = spmd(2, |rank| {
///     let mesh = DeviceMesh::parse(&rank, "dp=2")?;
///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
///     let alone = mesh.explain(|| x.neg())?.1.to_string();
///     let _scope = ModulePath::new("h.0").enter();
///     Ok([alone, mesh.explain(|| x.neg())?.1.to_string()])
/// })?;
/// let paragraph = "Neg, 1 call: f32[4]@(dp:S0) -> f32[4]@(dp:S0)";
/// assert!(texts[0][0].starts_with(&format!("{paragraph}\n  rows dp: S0 -> S0")), "{}", texts[0][0]);
/// assert!(texts[0][1].starts_with(&format!("h.0\n  {paragraph}")), "{}", texts[0][1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = |plan: &ExplainedPlan| (plan.path, plan.phase);
        let mut modules: Vec<(ModulePath, Phase)> = Vec::new();
        for plan in &self.plans {
            if !modules.contains(&key(plan)) {
                modules.push(key(plan));
            }
        }
        if modules.iter().all(|&(path, phase)| path.as_str().is_empty() && phase == Phase::Forward) {
            return self.plans.iter().try_for_each(|plan| write!(f, "{plan}"));
        }
        for module @ (path, phase) in modules {
            let path = if path.as_str().is_empty() { "outside of modules" } else { path.as_str() };
            match phase {
                Phase::Forward => writeln!(f, "{path}")?,
                Phase::Backward | Phase::Recomputation => writeln!(f, "{path}, {phase}")?,
            }
            for plan in self.plans.iter().filter(|plan| key(plan) == module) {
                plan.to_string().lines().try_for_each(|line| writeln!(f, "  {line}"))?;
            }
        }
        Ok(())
    }
}

/// Prints the paragraph.
impl fmt::Display for ExplainedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = if self.calls == 1 { "call" } else { "calls" };
        let (operands, results) = (self.operands.join(", "), self.results.join(", "));
        writeln!(f, "{}, {} {calls}: {operands} -> {results}", self.operator, self.calls)?;
        match self.rows.is_empty() {
            true => write!(f, "  {}", self.time)?,
            false => write!(f, "  rows {}; {}", self.rows, self.time)?,
        }
        let [least, mean, most] = self.received_bytes;
        match self.moves.is_empty() {
            true => writeln!(f, "; nothing moves")?,
            false => writeln!(f, "; each rank receives {least:.0} to {most:.0} bytes, {mean:.0} on average")?,
        }
        for m in &self.moves {
            match self.rows.is_empty() {
                true => writeln!(f, "  {}", m.plan)?,
                false => writeln!(f, "  operand {} to {}: {}", m.operand, m.to, m.plan)?,
            }
        }
        let others: Vec<String> =
            self.runners_up.iter().map(|(rows, time)| format!("{rows} ({time})")).collect();
        match others.is_empty() {
            true => Ok(()),
            false => writeln!(f, "  instead of {}", others.join("; ")),
        }
    }
}
