//! The mesh that a tested program sees, and what the program draws from it and records on it.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, RangeInclusive};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::scenario::Scenario;
use super::trace::{Trace, TraceEntry, Usage};
use crate::comm::Tally;
use crate::dtensor::{DTensor, DeviceMesh, Reduction, WorkTally};
use crate::error::{Error, Result};
use crate::nn::Params;
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape, Tensor};
use crate::testing::shards::{owned, spread_by};
use crate::testing::strategies::layouts;
use crate::testing::values::{mix, ordinary, small_ints, tensor};

/// The mesh of one run of a tested program; it derefs to [`DeviceMesh`].
///
/// Names identify what the program draws. A size has the same value on every mesh, a tensor the same elements; its
/// layout is random, and legal on the mesh. In exact mode elements are normals times powers of ten, whose sums are
/// hardly ever exact; in fast mode they are integers from -3 to 3.
///
/// ```
/// use isoshard::tensor::DType;
/// use isoshard::testing::equivalent;
///
/// equivalent(|mesh| {
///     let n = mesh.size("rows", 1..=9);
///     let x = mesh.input("x", DType::F32, [n, 4])?;
///     let w = mesh.leaf("w", DType::F32, [4, 3])?;
///     x.matmul(&w) // compared: the product, and the gradient of w
/// });
/// ```
pub struct Trial {
    mesh: DeviceMesh,
    tally: Tally,
    work: WorkTally,
    scenario: Scenario,
    state: RefCell<TrialState>,
    step: Cell<usize>,
    /// Bytes received for the harness itself.
    own_bytes: Cell<u64>,
}

#[derive(Default)]
struct TrialState {
    sizes: Vec<(String, RangeInclusive<usize>, usize)>,
    layouts: Vec<(String, Layout)>,
    leaves: Vec<(String, DTensor)>,
    entries: Vec<TraceEntry>,
}

impl Deref for Trial {
    type Target = DeviceMesh;

    fn deref(&self) -> &DeviceMesh {
        &self.mesh
    }
}

impl Trial {
    pub(super) fn new(mesh: DeviceMesh, tally: Tally, scenario: Scenario) -> Trial {
        let (state, step, own_bytes) = (RefCell::default(), Cell::new(0), Cell::new(0));
        let work = mesh.tally_work();
        Trial { mesh, tally, work, scenario, state, step, own_bytes }
    }

    /// Returns the seed of this run, for a [`Generator`](crate::rng::Generator) of the program's.
    pub fn seed(&self) -> u64 {
        self.scenario.seed
    }

    /// Draws a number in `range`, the same on every mesh. A failure shrinks towards the range's start.
    ///
    /// # Panics
    /// Panics if the range is empty.
    pub fn size(&self, name: &str, range: RangeInclusive<usize>) -> usize {
        let (from, to) = (*range.start(), *range.end());
        assert!(from <= to, "size {name}: the range {from}..={to} is empty");
        let drawn = || from + (self.hash(name) % (to - from + 1) as u64) as usize;
        let size = self.scenario.size(name).map_or_else(drawn, |size| size.clamp(from, to));
        let mut state = self.state.borrow_mut();
        if !state.sizes.iter().any(|(known, ..)| known == name) {
            state.sizes.push((name.into(), range, size));
        }
        size
    }

    /// Draws a tensor in a random layout, which may be `Partial` if the dtype is floating-point. Integer and bool
    /// dtypes have elements from 0 to 3 and false or true. Communicates nothing.
    ///
    /// # Errors
    /// Returns an error if the shape's number of elements overflows.
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<DTensor> {
        self.place(name, &self.values(name, dtype, &shape.into()))
    }

    /// Draws a leaf tensor in a random layout. Its gradient is compared too: from each tensor that the program
    /// returns, and by [`Trial::record_gradients`] where the program calls it.
    ///
    /// # Errors
    /// Refuses integer and bool dtypes.
    pub fn leaf(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<DTensor> {
        let whole = self.values(name, dtype, &shape.into());
        let leaf = self.place_in(name, &whole, false)?.requires_grad()?;
        self.state.borrow_mut().leaves.push((name.into(), leaf.clone()));
        Ok(leaf)
    }

    /// Places a tensor that every rank holds whole in a random layout. Communicates nothing.
    ///
    /// # Errors
    /// Returns an error if the device has no memory for it.
    pub fn place(&self, name: &str, whole: &Tensor) -> Result<DTensor> {
        self.place_in(name, whole, whole.dtype().is_float())
    }

    /// Moves a tensor to a random layout, which is not `Partial`.
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn moved(&self, name: &str, x: &DTensor) -> Result<DTensor> {
        x.redistribute(self.layout(name, x.dtype(), x.shape()))
    }

    /// Draws a layout for a tensor of this shape; it is not `Partial`.
    pub fn layout(&self, name: &str, dtype: DType, shape: &Shape) -> Layout {
        self.drawn_layout(name, dtype, shape, false)
    }

    /// Records a tensor, to be compared with a single rank's. A reader of a failure sees the path and the step.
    ///
    /// The harness keeps this rank's shard, and reduces a `Partial` tensor; that communication does not count.
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn record(&self, path: impl Into<String>, x: &DTensor) -> Result<()> {
        let before = self.tally.total().received_bytes;
        let reduced = match x.layout().has_partial() {
            true => x.detach().redistribute(x.layout().reduced())?,
            false => x.detach(),
        };
        self.own_bytes.set(self.own_bytes.get() + self.tally.total().received_bytes - before);
        let entry = TraceEntry {
            step: self.step.get(),
            path: path.into(),
            spec: reduced.spec().clone(),
            given: x.spec().to_string(),
            local: reduced.local().contiguous()?,
        };
        self.state.borrow_mut().entries.push(entry);
        Ok(())
    }

    /// Records a number that every rank computes, such as a loss on the host.
    ///
    /// # Errors
    /// Returns an error if the mesh refuses a scalar.
    pub fn record_value(&self, path: impl Into<String>, value: f64) -> Result<()> {
        let whole = tensor(DType::F64, &[value], &Shape::from([]));
        self.record(
            path,
            &DTensor::distribute(&self.mesh, &whole, Layout::replicated(self.mesh.mesh().ndim()))?,
        )
    }

    /// Records every parameter under its path.
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn record_params(&self, params: &Params) -> Result<()> {
        params.ids().try_for_each(|id| self.record(params.path(id), params.value(id)))
    }

    /// Begins the next step: later records belong to it. Records before the first call belong to step 0.
    pub fn next_step(&self) {
        self.step.set(self.step.get() + 1);
    }

    /// Records the gradient of every [`leaf`](Trial::leaf) from `result`, given a random gradient of the result in a
    /// random layout. Does nothing for a result without history.
    ///
    /// # Errors
    /// Returns an error if the backward pass fails.
    pub fn record_gradients(&self, name: &str, result: &DTensor) -> Result<()> {
        let leaves = self.state.borrow().leaves.clone();
        if !result.has_history() || leaves.is_empty() {
            return Ok(());
        }
        let seed = format!("gradient of {name}");
        let whole = self.values(&seed, result.dtype(), result.shape());
        let gradients = result.backward_from(self.place(&seed, &whole)?)?;
        for (leaf_name, leaf) in &leaves {
            if let Some(gradient) = gradients.get(leaf) {
                self.record(format!("gradient of {leaf_name} from {name}"), gradient)?;
            }
        }
        Ok(())
    }

    /// Returns what this rank has received and computed for the program.
    pub(super) fn usage(&self) -> Usage {
        let received_bytes = self.tally.total().received_bytes - self.own_bytes.get();
        Usage { received_bytes, flops: self.work.total().share.flops }
    }

    pub(super) fn finish(self, usage: Usage) -> Trace {
        let TrialState { sizes, layouts, entries, .. } = self.state.into_inner();
        Trace { sizes, layouts, entries, usage, calls: self.tally.to_string() }
    }

    fn values(&self, name: &str, dtype: DType, shape: &Shape) -> Tensor {
        let salt = self.hash(name) >> 32;
        match self.mesh.reduction() {
            _ if !dtype.is_float() => {
                let below = if dtype == DType::Bool { 2 } else { 4 };
                let value = |e: u64| (mix(e ^ salt << 32) % below) as f64;
                tensor(dtype, &(0..shape.numel() as u64).map(value).collect::<Vec<_>>(), shape)
            }
            Reduction::Exact => ordinary(dtype, shape, salt),
            Reduction::Fast => small_ints(dtype, shape, salt),
        }
    }

    fn place_in(&self, name: &str, whole: &Tensor, partials: bool) -> Result<DTensor> {
        let layout = self.drawn_layout(name, whole.dtype(), whole.shape(), partials);
        let spec = Spec::new(self.mesh.mesh(), whole.dtype(), whole.shape().clone(), layout)?;
        // One rank holds all of a partial sum's term, so that the value does not depend on the layout.
        spread_by(owned, &self.mesh, whole, &spec, self.hash(name))
    }

    fn drawn_layout(&self, name: &str, dtype: DType, shape: &Shape, partials: bool) -> Layout {
        let mesh = self.mesh.mesh();
        let fits = |layout: &&Layout| {
            (partials || !layout.has_partial())
                && Spec::new(mesh, dtype, shape.clone(), (*layout).clone()).is_ok()
        };
        let layout = match self.scenario.layout(name).filter(fits) {
            Some(layout) => layout.clone(),
            None if mesh.rank_len() == 1 => Layout::replicated(mesh.ndim()),
            None => {
                let mut seed = [0; 32];
                seed[..8].copy_from_slice(&self.hash(name).to_le_bytes());
                let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
                let mut runner = TestRunner::new_with_rng(Config::default(), rng);
                let drawn = layouts(mesh, dtype, shape, partials).new_tree(&mut runner);
                drawn.map_or_else(|_| Layout::replicated(mesh.ndim()), |tree| tree.current().layout)
            }
        };
        let mut state = self.state.borrow_mut();
        if !state.layouts.iter().any(|(known, _)| known == name) {
            state.layouts.push((name.into(), layout.clone()));
        }
        layout
    }

    fn hash(&self, name: &str) -> u64 {
        name.bytes().fold(mix(self.scenario.seed), |hash, byte| mix(hash ^ u64::from(byte)))
    }
}

/// Results that a tested program returns: each is recorded, and the gradients of the drawn leaf tensors from it.
///
/// ```
/// use isoshard::{tensor::DType, testing::equivalent};
/// equivalent(|mesh| {
///     let x = mesh.leaf("x", DType::F32, [5])?;
///     Ok([("square", x.mul(&x)?), ("sum", x.sum_all()?)])
/// });
/// ```
pub trait Outcomes {
    /// Records the results on the trial.
    ///
    /// # Errors
    /// Returns an error if communication or a backward pass fails.
    fn record(self, trial: &Trial) -> Result<()>;
}

impl Outcomes for () {
    fn record(self, _: &Trial) -> Result<()> {
        Ok(())
    }
}

impl Outcomes for DTensor {
    fn record(self, trial: &Trial) -> Result<()> {
        [("the result", self)].record(trial)
    }
}

impl<N: Into<String>> Outcomes for Vec<(N, DTensor)> {
    fn record(self, trial: &Trial) -> Result<()> {
        let all: Vec<(String, DTensor)> = self.into_iter().map(|(name, x)| (name.into(), x)).collect();
        all.iter().try_for_each(|(name, x)| trial.record(name, x))?;
        all.iter().try_for_each(|(name, x)| trial.record_gradients(name, x))
    }
}

impl<N: Into<String>, const LEN: usize> Outcomes for [(N, DTensor); LEN] {
    fn record(self, trial: &Trial) -> Result<()> {
        Vec::from(self).record(trial)
    }
}

/// Losses of the steps in order.
impl Outcomes for Vec<f32> {
    fn record(self, trial: &Trial) -> Result<()> {
        for loss in self {
            trial.record_value("loss", f64::from(loss))?;
            trial.next_step();
        }
        Ok(())
    }
}

/// Returns an error if a name would not survive being written and read again.
pub(super) fn check_names(trace: &Trace) -> Result<()> {
    let names = trace.sizes.iter().map(|(name, ..)| name).chain(trace.layouts.iter().map(|(name, _)| name));
    for name in names {
        if name.trim() != name || name.is_empty() || name.contains(['|', '=']) {
            let rule = "a drawn name has no '|', no '=' and no space at an end";
            return Err(Error::invalid("equivalent", rule, format!("{name:?}"), "use letters"));
        }
    }
    Ok(())
}
