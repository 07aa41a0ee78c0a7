//! Every operator, on meshes of one and two axes and from random legal layouts of its operands, gives the results of a
//! single rank, forward and backward, over the real engine.
//!
//! Layouts are replicated, sharded (uneven and empty shards, both nesting orders), ragged with empty ranks, and
//! partial. A failure prints sample, mesh and layouts in the notation, shrunk towards replication.
//!
//! Exact mode is compared by bits on ordinary values: normals times powers of ten, whose sums are hardly ever exact.
//! One rank holds the value of a partial operand and the other ranks -0, so that the operand has one value.
//!
//! Fast mode is compared on small integers, by bits too, with three exceptions: operators that a partial sum passed
//! through, samples that declare rounded sums, and gradients that contain a sum of values that are not short dyadic
//! numbers. For these `common::bound` and `gradient_bound` give the largest difference.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::ops::{AxisPlacement, MeshAxis, Meta, Op, Row, Sample, Vjp, VjpProgram, eval_whole};
use isoshard::placement::{Layout, Mesh, Placement, Spec};
use isoshard::tensor::{DType, ReduceOp, Tensor};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{BoxedStrategy, Strategy};

use crate::common::failures::{Failures, is_complete, is_emulated};
use crate::common::samples::{catalog, is_whole, long_sums};
use crate::common::{
    agree, bits_differ, bound, epsilon, has_no_derivative, magnitude, on_mesh, ordinary, ordinary_values,
    owned, small_ints, spread, spread_by, values,
};
use isoshard::testing::strategies::layouts;

/// The meshes, in groups. `cargo test` takes one mesh per sample and group, in turn, and `tests/complete.sh` all.
const MESHES: [&[&str]; 4] = [&["1"], &["a=2", "a=3"], &["a=4", "a=5"], &["a=2,b=2", "a=2,b=3"]];
/// The groups for the kernels of the emulated device, which see shards of one axis and of two.
const EMULATED: [&[&str]; 2] = [&["1"], &["a=2", "a=3", "a=2,b=2"]];
/// Worlds per sample and mesh, and those of `tests/complete.sh`.
const WORLDS: [u32; 2] = [1, 3];
/// The largest number of layouts per world, and that of `tests/complete.sh`; later ones find the cached plans of earlier ones.
const CASES: [usize; 2] = [4, 7];
/// The number of sets of values.
const SALTS: u64 = 8;

#[test]
fn exact_results_are_those_of_a_single_rank() {
    over_all(Reduction::Exact, false, results);
}

#[test]
fn exact_gradients_are_those_of_a_single_rank() {
    over_all(Reduction::Exact, true, gradients);
}

#[test]
fn fast_results_are_those_of_a_single_rank_up_to_rounding() {
    over_all(Reduction::Fast, false, results);
}

#[test]
fn fast_gradients_are_those_of_a_single_rank_up_to_rounding() {
    over_all(Reduction::Fast, true, gradients);
}

fn results(sample: &Sample, mesh: &DeviceMesh, given: &Given, known: &Known) -> Result<Vec<String>> {
    let (xs, mut found) = (given.leaves(mesh, &known.ins)?, Vec::new());
    let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
    for (k, (out, whole)) in outs.iter().zip(&known.outs).enumerate() {
        // The parts of a partial sum may pass an operator separately, and each is rounded.
        let parts = if given.has_sums() { 16.0 * mesh.mesh().rank_len() as f64 } else { 0.0 };
        let bound = bound(sample, whole) + parts * epsilon(whole.dtype()) * magnitude(whole);
        found.extend(given.difference(&format!("result {k}, {out:?}"), &out.full_tensor()?, whole, bound));
    }
    Ok(found)
}

fn gradients(sample: &Sample, mesh: &DeviceMesh, given: &Given, known: &Known) -> Result<Vec<String>> {
    let (mut leaves, mut found) = (given.leaves(mesh, &known.ins)?, Vec::new());
    for leaf in leaves.iter_mut().filter(|l| l.dtype().is_float()) {
        *leaf = leaf.requires_grad()?;
    }
    // Half of the operands result from a redistribution, whose derivative is the identity.
    let moved = leaves.iter().zip(&given.moves).map(|(leaf, to)| match to {
        Some(to) => leaf.redistribute(to.layout.clone()),
        None => Ok(leaf.clone()),
    });
    let xs = moved.collect::<Result<Vec<_>>>()?;
    let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
    for (k, out) in outs.iter().enumerate().filter(|(_, o)| o.has_history()) {
        let whole = gradient_of(given.mode, out, given.salt);
        let grads = out.clone().backward_from(given.spread(mesh, &whole, &given.grads[k])?)?;
        for (i, leaf) in leaves.iter().enumerate() {
            let what = format!("gradient of operand {i} from result {k}");
            match (grads.get(leaf), &known.grads[k][i]) {
                (Some(g), Some(want)) => {
                    if g.layout() != leaf.layout() {
                        found.push(format!("{what} lies as {g:?}"));
                    }
                    let bound = gradient_bound(sample, &known.ins, want, given.has_sums())?;
                    found.extend(given.difference(&what, &g.full_tensor()?, want, bound));
                }
                (None, None) => {}
                (got, want) => found.push(format!("{what}: {got:?} instead of {want:?}")),
            }
        }
    }
    Ok(found)
}

/// Returns the gradient from which a backward pass starts.
fn gradient_of(mode: Reduction, out: &DTensor, salt: u64) -> Tensor {
    match mode {
        Reduction::Exact | Reduction::Grouped(_) => ordinary(out.dtype(), out.shape(), salt + 77),
        Reduction::Fast => small_ints(out.dtype(), out.shape(), salt),
    }
}

/// The catalog's samples, and in exact mode calls whose sums have several leaves, full and partly filled.
fn samples(mode: Reduction) -> Vec<Sample> {
    let mut all = catalog();
    if mode == Reduction::Exact {
        all.extend(long_sums());
    }
    all
}

/// The largest difference that a gradient may have. It is 0 if no rounded sum can contribute: no operand is a partial
/// sum, and either nothing is added, or the values and their terms are multiples of 2^-10 below 2^12. Else `n`
/// additions of terms not larger than the largest gradient or operand are each wrong by half an ulp, on both sides,
/// and the same again for products of two such sums.
fn gradient_bound(sample: &Sample, ins: &[Tensor], want: &Tensor, sums: bool) -> Result<f64> {
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
    let program = Vjp::write(sample.op.as_ref(), &metas, &needs)?;
    let adds = adds(&program, metas, sample.op.as_ref())?;
    let short = want.to_f64_vec().iter().all(|v| v.abs() < 4096.0 && (v * 1024.0).fract() == 0.0);
    if sample.rounded_sums == 0 && !sums && (!adds || short) {
        return Ok(0.0);
    }
    let n = ins.iter().map(Tensor::numel).max().unwrap_or(1).max(sample.rounded_sums) + 8;
    let largest = ins.iter().map(magnitude).fold(magnitude(want), f64::max);
    Ok(4.0 * n as f64 * epsilon(want.dtype()) * largest)
}

/// Returns true if a step of the derivative can round a sum differently on different meshes: a row of its operator makes
/// a partial sum of operands that are none.
fn adds(program: &VjpProgram, mut values: Vec<Meta>, op: &dyn Op) -> Result<bool> {
    let results = op.infer(&values)?;
    // A gradient has the dtype and the shape of its result.
    values.extend(results.iter().chain(&results).cloned());
    let is_sum = |row: &Row, p: &AxisPlacement| {
        matches!(p, AxisPlacement::TreeSum(_)) || *p == AxisPlacement::SUM && !row.by_bits
    };
    let makes_sums =
        |row: &Row| !row.ins.contains(&AxisPlacement::SUM) && row.outs.iter().any(|p| is_sum(row, p));
    for step in &program.steps {
        let ins: Vec<Meta> = step.ins.iter().map(|v| values[v.index()].clone()).collect();
        if step.op.rows(&ins, MeshAxis::new(2)).iter().any(makes_sums) {
            return Ok(true);
        }
        values.extend(step.op.infer(&ins)?);
    }
    Ok(false)
}

/// The layouts of one call.
#[derive(Clone)]
struct Given {
    mode: Reduction,
    /// The seed of the values.
    salt: u64,
    ins: Vec<Spec>,
    /// The layouts that operands are moved to before use.
    moves: Vec<Option<Spec>>,
    grads: Vec<Spec>,
}

impl Given {
    /// Draws any layouts; operands that need gradients are not partial until they are moved.
    fn any(mode: Reduction, mesh: &Mesh, known: &Known, gradients: bool) -> BoxedStrategy<Given> {
        let of = |t: &Tensor, partials| layouts(mesh, t.dtype(), t.shape(), partials);
        let ins: Vec<_> = known.ins.iter().map(|t| of(t, !gradients)).collect();
        let wanted: (&[Tensor], &[Tensor]) = if gradients { (&known.ins, &known.outs) } else { (&[], &[]) };
        let moves: Vec<_> = wanted.0.iter().map(|t| option::of(of(t, true))).collect();
        let grads: Vec<_> = wanted.1.iter().map(|t| of(t, true)).collect();
        let given = (0..SALTS, ins, moves, grads);
        given.prop_map(move |(salt, ins, moves, grads)| Given { mode, salt, ins, moves, grads }).boxed()
    }

    fn leaves(&self, mesh: &DeviceMesh, wholes: &[Tensor]) -> Result<Vec<DTensor>> {
        wholes.iter().zip(&self.ins).map(|(whole, spec)| self.spread(mesh, whole, spec)).collect()
    }

    fn spread(&self, mesh: &DeviceMesh, whole: &Tensor, spec: &Spec) -> Result<DTensor> {
        match self.mode {
            Reduction::Exact | Reduction::Grouped(_) => spread_by(owned, mesh, whole, spec, self.salt),
            Reduction::Fast => spread(mesh, whole, spec, self.salt),
        }
    }

    fn has_sums(&self) -> bool {
        let is_sum = |p: &Placement| *p == Placement::Partial(ReduceOp::Sum);
        let all = self.ins.iter().chain(self.moves.iter().flatten()).chain(&self.grads);
        all.into_iter().any(|s| s.layout.placements().iter().any(is_sum))
    }

    fn difference(&self, what: &str, got: &Tensor, want: &Tensor, bound: f64) -> Option<String> {
        if self.mode == Reduction::Exact {
            return bits_differ(got, want).map(|how| format!("{what}, {how}"));
        }
        if got.shape() != want.shape() || got.dtype() != want.dtype() {
            return Some(format!("{what}: {} instead of {}", got.notation(), want.notation()));
        }
        // Infinite parts of a sum may add up to NaN, which the judge allows too.
        let sums = self.has_sums();
        let fits = |g: f64, w: f64| agree(g, w, bound) || (sums && g.is_nan() && !w.is_finite());
        let mut pairs = got.to_f64_vec().into_iter().zip(want.to_f64_vec()).enumerate();
        let (e, (g, w)) = pairs.find(|(_, (g, w))| !fits(*g, *w))?;
        Some(format!("{what}, element {e}: {g} instead of {w} (bound {bound:e})"))
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, spec) in self.ins.iter().enumerate() {
            write!(f, "{}{spec}", if i == 0 { "" } else { ", " })?;
            if let Some(Some(to)) = self.moves.get(i) {
                write!(f, " moved to {}", to.layout)?;
            }
        }
        for grad in &self.grads {
            write!(f, ", gradient {grad}")?;
        }
        write!(f, " (values {})", self.salt)
    }
}

/// The results of a single rank.
struct Known {
    ins: Vec<Tensor>,
    outs: Vec<Tensor>,
    /// The gradient of every operand from every result.
    grads: Vec<Vec<Option<Tensor>>>,
}

impl Known {
    fn of(mode: Reduction, sample: &Sample, salt: u64, gradients: bool) -> Result<Known> {
        let ins = match mode {
            Reduction::Exact | Reduction::Grouped(_) => {
                let dtype = [DType::F32, DType::F32, DType::F64, DType::BF16, DType::F16][salt as usize % 5];
                let ins = ordinary_values(sample, dtype, salt + 1);
                // Not if an operand's dtype depends on another's: a statistic of halves is f32.
                let fits = sample.op.infer(&ins.iter().map(Meta::of).collect::<Vec<_>>()).is_ok();
                if fits { ins } else { ordinary_values(sample, DType::F32, salt + 1) }
            }
            Reduction::Fast => values(sample, DType::F32, salt + 1),
        };
        let outs = eval_whole(sample.op.as_ref(), &ins)?.into_vec();
        let (of, from) = (sample.clone(), ins.clone());
        let run = move |rank| single_rank(&rank, mode, &of, &from, salt);
        let grads = if gradients { spmd(1, run)?.swap_remove(0) } else { Vec::new() };
        Ok(Known { ins, outs, grads })
    }
}

fn single_rank(
    rank: &isoshard::comm::Rank,
    mode: Reduction,
    sample: &Sample,
    ins: &[Tensor],
    salt: u64,
) -> Result<Vec<Vec<Option<Tensor>>>> {
    let mesh = DeviceMesh::parse(rank, "1")?;
    let mut xs = Vec::new();
    for whole in ins {
        let x = DTensor::distribute(&mesh, whole, Layout::replicated(0))?;
        xs.push(if whole.dtype().is_float() { x.requires_grad()? } else { x });
    }
    let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
    let from = |out: &DTensor| -> Result<Vec<Option<Tensor>>> {
        if !out.has_history() {
            return Ok(vec![None; xs.len()]);
        }
        let grad = gradient_of(mode, out, salt);
        let grads = out.clone().backward_from(DTensor::distribute(&mesh, &grad, Layout::replicated(0))?)?;
        Ok(xs.iter().map(|x| grads.get(x).map(|g| g.local().clone())).collect())
    };
    outs.iter().map(from).collect()
}

/// Returns the meshes for a sample: all if the run is complete or for named operators alone, else one per group.
fn meshes(turn: usize) -> Vec<&'static str> {
    match is_complete() || !is_whole() {
        true => MESHES.concat(),
        false => {
            let groups = if is_emulated() { &EMULATED[..] } else { &MESHES[..] };
            groups.iter().enumerate().map(|(g, group)| group[(turn + g) % group.len()]).collect()
        }
    }
}

/// Runs `check` for every sample on its meshes, from random layouts, and reports failures. The two modes take different
/// meshes of a group for a sample, and so do results and gradients.
fn over_all(
    mode: Reduction,
    gradients: bool,
    check: impl Fn(&Sample, &DeviceMesh, &Given, &Known) -> Result<Vec<String>> + Copy + Send + Sync + 'static,
) {
    let mut failures = Failures::default();
    let (worlds, most) = (WORLDS[usize::from(is_complete())], CASES[usize::from(is_complete())]);
    let first = usize::from((mode == Reduction::Exact) == gradients);
    for (i, sample) in samples(mode).into_iter().enumerate() {
        if gradients && has_no_derivative(&sample) {
            continue;
        }
        let seen: RefCell<HashMap<u64, Arc<Known>>> = RefCell::default();
        let known = |salt: u64| {
            let of =
                || Known::of(mode, &sample, salt, gradients).unwrap_or_else(|e| panic!("{sample:?}: {e}"));
            seen.borrow_mut().entry(salt).or_insert_with(|| Arc::new(of())).clone()
        };
        for text in meshes(first + i) {
            let mesh = Mesh::parse(text, 0).expect("a mesh");
            let world = vec(Given::any(mode, &mesh, &known(0), gradients), 1..=most);
            failures.check(&format!("{sample:?} on {text}"), worlds, &world, |cases| {
                let known: Vec<Arc<Known>> = cases.iter().map(|given| known(given.salt)).collect();
                let sample = sample.clone();
                on_mesh(&mesh, move |mesh| {
                    mesh.set_reduction(mode);
                    for (given, known) in cases.iter().zip(&known) {
                        let found = check(&sample, mesh, given, known)?;
                        if !found.is_empty() {
                            return Ok(found);
                        }
                    }
                    Ok(Vec::new())
                })
            });
        }
    }
    failures.report();
}
