//! The promise, over the real engine: every operator, on every mesh, from random legal layouts of its operands, gives what
//! a single rank gives, forward and backward, by bits.
//!
//! Layouts are replicated, sharded (uneven and empty shards, both nesting orders), ragged with empty ranks, and partial
//! with integer parts. A failure prints sample, mesh and layouts in the notation. Seeds are fixed.
//!
//! By bits, except: what a partial sum went through in parts; results of samples that say their sums are rounded; and
//! gradients behind which stands a sum of values that are not short dyadic numbers. For these `common::bound` and
//! `gradient_bound` say how far.

use std::sync::{Arc, Mutex};

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{Meta, Sample, Vjp, catalog, eval_whole};
use isoshard::placement::{Layout, Spec};
use isoshard::tensor::{DType, Tensor};

mod common;
use common::{
    Stream, agree, bound, epsilon, has_no_derivative, magnitude, part_of, random_layout, small_ints, values,
};

const MESHES: [(&str, usize); 7] =
    [("1", 1), ("a=2", 2), ("a=3", 3), ("a=4", 4), ("a=5", 5), ("a=2,b=2", 4), ("a=2,b=3", 6)];
/// Random layouts for each sample and mesh.
const CASES: u64 = 12;

#[test]
fn results_are_those_of_a_single_rank() {
    over_all(|sample, mesh, case, log| {
        let mut stream = Stream(case.seed);
        let ins = values(sample, DType::F32, case.number + 1);
        let wholes = eval_whole(sample.op.as_ref(), &ins)?;
        let mut xs = Vec::new();
        for whole in &ins {
            let layout = random_layout(&mut stream, mesh.mesh(), whole.dtype(), whole.shape(), true);
            xs.push(spread(mesh, whole, layout, case.number)?);
        }
        log.note(&xs);
        let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
        for (k, (out, whole)) in outs.iter().zip(&wholes).enumerate() {
            let full = out.full_tensor()?;
            // A partial sum may pass an operator in parts, each rounded.
            let parts = if log.has_sums() { 16.0 * mesh.mesh().rank_len() as f64 } else { 0.0 };
            let bound = bound(sample, whole) + parts * epsilon(whole.dtype()) * magnitude(whole);
            log.compare(&format!("result {k}, {out}"), &full, whole, bound);
        }
        Ok(())
    });
}

#[test]
fn gradients_are_those_of_a_single_rank() {
    over_all(|sample, mesh, case, log| {
        let ins = values(sample, DType::F32, case.number + 1);
        if has_no_derivative(sample) {
            return Ok(());
        }
        let known = case.reference(sample, &ins)?;
        let mut stream = Stream(case.seed ^ 0x6ead);
        let mut xs = Vec::new();
        let mut leaves = Vec::new();
        for whole in &ins {
            let lay = |stream: &mut Stream, partials| {
                random_layout(stream, mesh.mesh(), whole.dtype(), whole.shape(), partials)
            };
            let mut x = spread(mesh, whole, lay(&mut stream, false), case.number)?;
            if whole.dtype().is_float() {
                x = x.requires_grad()?;
            }
            leaves.push(x.clone());
            // Half of the operands come by a redistribution, whose derivative is the identity.
            let moved = lay(&mut stream, true);
            xs.push(if stream.below(2) == 0 { x } else { x.redistribute(moved)? });
        }
        log.note(&leaves);
        log.note(&xs);
        let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
        for (k, out) in outs.iter().enumerate().filter(|(_, o)| o.has_history()) {
            let whole = small_ints(out.dtype(), out.shape(), case.number);
            let layout = random_layout(&mut stream, mesh.mesh(), out.dtype(), out.shape(), true);
            let grad = spread(mesh, &whole, layout, case.number)?;
            log.note(std::slice::from_ref(&grad));
            let grads = out.backward_from(grad)?;
            for (i, leaf) in leaves.iter().enumerate() {
                let what = format!("gradient of operand {i} from result {k}");
                match (grads.get(leaf), &known[k][i]) {
                    (Some(g), Some(want)) => {
                        if g.layout() != leaf.layout() {
                            log.fail(&format!("{what} lies as {g}"));
                        }
                        log.compare(
                            &what,
                            &g.full_tensor()?,
                            want,
                            gradient_bound(sample, &ins, want, log.has_sums())?,
                        );
                    }
                    (None, None) => {}
                    (got, want) => log.fail(&format!("{what}: {got:?} instead of {want:?}")),
                }
            }
        }
        Ok(())
    });
}

/// Operators whose result adds several terms: where one stands in a derivative, terms that are not short may round
/// differently when they are split.
const ADDERS: [&str; 12] = [
    "sum",
    "matmul",
    "scatter_add",
    "sum_exp",
    "softmax",
    "log_softmax",
    "softmax_grad",
    "layer_norm_grad",
    "rms_norm_grad",
    "attention_grad",
    "embedding_grad",
    "cross_entropy_grad",
];

/// 0 where no rounded sum can stand behind the gradient: nothing came as a partial sum, and either nothing is added, or
/// the values are multiples of 2^-10 below 2^12, and so were the terms. Else `n` additions, each wrong by half an ulp, of
/// terms not larger than the largest gradient or operand; twice, once on either side, and the same again for products
/// of two such sums.
fn gradient_bound(sample: &Sample, ins: &[Tensor], want: &Tensor, sums: bool) -> Result<f64> {
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
    let program = Vjp::write(sample.op.as_ref(), &metas, &needs)?;
    let adds = program.steps.iter().any(|s| ADDERS.contains(&s.op.name()));
    let short = want.to_f64_vec().iter().all(|v| v.abs() < 4096.0 && (v * 1024.0).fract() == 0.0);
    if sample.rounded_sums == 0 && !sums && (!adds || short) {
        return Ok(0.0);
    }
    let n = ins.iter().map(Tensor::numel).max().unwrap_or(1).max(sample.rounded_sums) + 8;
    let largest = ins.iter().map(magnitude).fold(magnitude(want), f64::max);
    Ok(4.0 * n as f64 * epsilon(want.dtype()) * largest)
}

/// `whole` in `layout`, from parts that were cut without the engine.
fn spread(mesh: &DeviceMesh, whole: &Tensor, layout: Layout, salt: u64) -> Result<DTensor> {
    let spec = Spec::new(mesh.mesh(), whole.dtype(), whole.shape().clone(), layout.clone())?;
    DTensor::from_local(
        mesh,
        part_of(whole, &spec, mesh.mesh().coords(), salt),
        whole.shape().clone(),
        layout,
    )
}

type Grads = Vec<Vec<Option<Tensor>>>;

struct Case {
    number: u64,
    seed: u64,
    known: Arc<Mutex<Option<Arc<Grads>>>>,
}

impl Case {
    /// The gradients of every operand from every result, on a single rank, computed once for all ranks.
    fn reference(&self, sample: &Sample, ins: &[Tensor]) -> Result<Arc<Grads>> {
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(known) = &*known {
            return Ok(known.clone());
        }
        let (sample, ins, number) = (sample.clone(), ins.to_vec(), self.number);
        let run = move |rank| single_rank(&rank, &sample, &ins, number);
        let grads = Arc::new(spmd(1, run)?.swap_remove(0));
        *known = Some(grads.clone());
        Ok(grads)
    }
}

fn single_rank(rank: &isoshard::comm::Rank, sample: &Sample, ins: &[Tensor], number: u64) -> Result<Grads> {
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
        let grad = small_ints(out.dtype(), out.shape(), number);
        let grads = out.backward_from(DTensor::distribute(&mesh, &grad, Layout::replicated(0))?)?;
        Ok(xs.iter().map(|x| grads.get(x).map(|g| g.local().clone())).collect())
    };
    outs.iter().map(from).collect()
}

/// What a case has found wrong, with what it was given.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<String>, Vec<String>)>>);

impl Log {
    fn lock(&self) -> std::sync::MutexGuard<'_, (Vec<String>, Vec<String>)> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn note(&self, xs: &[DTensor]) {
        let given: Vec<String> = xs.iter().map(DTensor::to_string).collect();
        self.lock().0.push(given.join(", "));
    }

    fn has_sums(&self) -> bool {
        self.lock().0.iter().any(|xs| xs.contains("P(sum)"))
    }

    fn fail(&self, what: &str) {
        self.lock().1.push(what.into());
    }

    fn compare(&self, what: &str, got: &Tensor, want: &Tensor, bound: f64) {
        if got.shape() != want.shape() || got.dtype() != want.dtype() {
            return self.fail(&format!("{what}: {got} instead of {want}"));
        }
        // Infinite parts of a sum may add up to NaN, as the judge says too.
        let sums = self.has_sums();
        let fits = |g: f64, w: f64| agree(g, w, bound) || (sums && g.is_nan() && !w.is_finite());
        let pairs = got.to_f64_vec().into_iter().zip(want.to_f64_vec());
        if let Some((e, (g, w))) = pairs.enumerate().find(|(_, (g, w))| !fits(*g, *w)) {
            self.fail(&format!("{what}, element {e}: {g} instead of {w} (bound {bound:e})"));
        }
    }
}

/// Runs `check` on every sample, mesh and case, and reports what failed.
fn over_all(check: impl Fn(&Sample, &DeviceMesh, &Case, &Log) -> Result<()> + Copy + Send + Sync + 'static) {
    let mut failures = Vec::new();
    for (s, sample) in catalog().into_iter().enumerate() {
        let known: Vec<Arc<Mutex<Option<Arc<Grads>>>>> = (0..CASES).map(|_| Arc::default()).collect();
        for (text, ranks) in MESHES {
            // One world for all cases; the cases of the last one left behind tell which failed.
            let logs: Vec<Log> = (0..CASES).map(|_| Log::default()).collect();
            let (shared, of, known) = (logs.clone(), sample.clone(), known.clone());
            let outcome = spmd(ranks, move |rank| {
                let mesh = DeviceMesh::parse(&rank, text)?;
                for number in 0..CASES {
                    let seed = common::mix(s as u64 * 64 + number) ^ ranks as u64;
                    let case = Case { number, seed, known: known[number as usize].clone() };
                    let log = if rank.rank() == 0 { shared[number as usize].clone() } else { Log::default() };
                    check(&of, &mesh, &case, &log)?;
                    let failed = log.lock().1.clone();
                    assert!(rank.rank() == 0 || failed.is_empty(), "{}", failed.join("; "));
                }
                Ok(())
            });
            let given = |log: &Log| log.lock().0.join(" then ");
            for log in &logs {
                let failed = log.lock().1.join("; ");
                if !failed.is_empty() {
                    failures.push(format!("{sample:?} on {text}, from {}: {failed}", given(log)));
                }
            }
            if let Err(e) = outcome {
                let last = logs.iter().rev().find(|l| !l.lock().0.is_empty()).map(given).unwrap_or_default();
                failures.push(format!("{sample:?} on {text}, from {last}: {e}"));
            }
        }
    }
    let shown: Vec<String> = failures.iter().take(60).cloned().collect();
    assert!(failures.is_empty(), "{} cases differ:\n{}", failures.len(), shown.join("\n"));
}
