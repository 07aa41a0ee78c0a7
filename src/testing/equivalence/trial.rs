//! The mesh that a tested program sees, and what the program draws from it and records on it.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, RangeInclusive};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::scenario::Scenario;
use super::trace::{Trace, TraceEntry, Usage};
use crate::base::lock;
use crate::comm::Tally;
use crate::dtensor::{DTensor, DeviceMesh, Reduction, WorkTally};
use crate::error::{Error, Result};
use crate::nn::Params;
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape, Tensor};
use crate::testing::shards::{exact_shares, spread_by};
use crate::testing::strategies::layouts;
use crate::testing::values::{mix, ordinary, small_ints, tensor};

/// The number of elements up to which the harness makes tensors: eight gigabytes of f64 per rank.
const WHOLE_LEN: usize = 1 << 30;

/// The beginning of the names of records of modules.
pub(super) const MODULE: &str = "module ";

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
    draws: Arc<Mutex<Draws>>,
    state: RefCell<TrialState>,
    step: Cell<usize>,
    /// Bytes received for the harness itself.
    own_bytes: Cell<u64>,
}

/// A run's sizes, with the least that each may be, and layouts: kept even if the program fails.
#[derive(Default)]
pub(super) struct Draws {
    pub sizes: Vec<(String, usize, usize)>,
    pub layouts: Vec<(String, Layout)>,
    /// True if the program has read the seed.
    pub reads_seed: bool,
}

#[derive(Default)]
struct TrialState {
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
    pub(super) fn new(mesh: DeviceMesh, tally: Tally, scenario: Scenario, draws: Arc<Mutex<Draws>>) -> Trial {
        let (state, step, own_bytes) = (RefCell::default(), Cell::new(0), Cell::new(0));
        let work = mesh.tally_work();
        Trial { mesh, tally, work, scenario, draws, state, step, own_bytes }
    }

    /// Returns the seed of this run, for the program's own [`Generator`](crate::rng::Generator).
    ///
    /// ```
    /// use isoshard::{dtensor::DTensor, rng::Generator, tensor::DType, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let layout = mesh.layout("x", DType::F32, &[7].into());
    ///     DTensor::randn(mesh, DType::F32, [7], layout, &mut Generator::new(mesh.seed()))
    /// });
    /// ```
    pub fn seed(&self) -> u64 {
        lock(&self.draws).reads_seed = true;
        self.scenario.seed
    }

    /// Draws a number in `range`, the same on every mesh. A failure shrinks towards the range's start.
    ///
    /// ```
    /// isoshard::testing::equivalent(|mesh| {
    ///     let n = mesh.size("n", 1..=100);
    ///     assert_eq!(mesh.size("n", 1..=100), n, "one name is one number");
    ///     mesh.record_value("n", n as f64)
    /// });
    /// ```
    ///
    /// # Panics
    /// Panics if the range is empty.
    pub fn size(&self, name: &str, range: RangeInclusive<usize>) -> usize {
        let (from, to) = (*range.start(), *range.end());
        assert!(from <= to, "size {name}: the range {from}..={to} is empty");
        // A range of all numbers has one more than fits.
        let below = (to - from).checked_add(1);
        let drawn = || from + below.map_or(self.hash(name), |n| self.hash(name) % n as u64) as usize;
        let size = self.scenario.size(name).map_or_else(drawn, |size| size.clamp(from, to));
        let mut draws = lock(&self.draws);
        if !draws.sizes.iter().any(|(known, ..)| known == name) {
            draws.sizes.push((name.into(), from, size));
        }
        size
    }

    /// Draws a tensor in a random layout, which may be `Partial` if the dtype is floating-point. Integers are from 0 to 3.
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let tokens = mesh.input("tokens", DType::I64, [2, 7])?;
    ///     mesh.leaf("table", DType::F32, [4, 3])?.embedding(&tokens)
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error if the shape's number of elements overflows.
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<DTensor> {
        self.place(name, &self.values(name, dtype, &shape.into())?)
    }

    /// Draws a leaf tensor in a random layout, which is not `Partial`. Its gradient is compared too: from each tensor that
    /// the program returns, and from those that it gives to [`Trial::record_gradients`]. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let product = |mesh: &isoshard::testing::Trial| {
    ///     mesh.leaf("a", DType::F32, [3, 5])?.matmul(&mesh.leaf("b", DType::F32, [5, 2])?)
    /// };
    /// let report = Equivalence::new(product).assert();
    /// assert_eq!(report.compared, 3 * report.runs); // the product and two gradients
    /// ```
    ///
    /// # Errors
    /// Refuses integer and bool dtypes.
    pub fn leaf(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<DTensor> {
        let whole = self.values(name, dtype, &shape.into())?;
        let leaf = self.place_in(name, &whole, false)?.requires_grad()?;
        self.state.borrow_mut().leaves.push((name.into(), leaf.clone()));
        Ok(leaf)
    }

    /// Places a tensor that every rank holds whole in a random layout, which may be `Partial` if the dtype is
    /// floating-point. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{tensor::Tensor, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let x = mesh.place("x", &Tensor::from_vec(vec![0.1f32, -0.0, f32::INFINITY], [3])?)?;
    ///     x.tanh()
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device has no memory for it.
    pub fn place(&self, name: &str, whole: &Tensor) -> Result<DTensor> {
        self.place_in(name, whole, whole.dtype().is_float())
    }

    /// Redistributes a tensor to a random layout, which is not `Partial`. Communicates as
    /// [`DTensor::redistribute`] does, and those bytes count as the program's.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let x = mesh.leaf("x", DType::F32, [5, 4])?;
    ///     let hidden = mesh.moved("hidden", &x.exp()?)?;
    ///     hidden.softmax(1)
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn moved(&self, name: &str, x: &DTensor) -> Result<DTensor> {
        x.redistribute(self.layout(name, x.dtype(), x.shape()))
    }

    /// Draws a layout for a tensor of this shape; it is not `Partial`.
    ///
    /// ```
    /// use isoshard::{dtensor::DTensor, tensor::{DType, Tensor}, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let whole = Tensor::from_vec((0..15).collect::<Vec<i64>>(), [5, 3])?;
    ///     DTensor::distribute(mesh, &whole, mesh.layout("x", DType::I64, whole.shape()))
    /// });
    /// ```
    pub fn layout(&self, name: &str, dtype: DType, shape: &Shape) -> Layout {
        self.drawn_layout(name, dtype, shape, false)
    }

    /// Records a tensor, to be compared with a single rank's. A failure names the step and the path.
    ///
    /// The harness keeps this rank's shard, and reduces a `Partial` tensor; that communication does not count. All ranks
    /// record the same paths in the same order.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let x = mesh.input("x", DType::F32, [6, 2])?;
    ///     let mean = x.mean(&[0], true)?;
    ///     mesh.record("mean", &mean)?;
    ///     x.sub(&mean)
    /// });
    /// ```
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

    /// Records a number that every rank computes, such as a loss on the host. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::equivalent};
    /// equivalent(|mesh| {
    ///     let largest: f64 = mesh.input("x", DType::F32, [8])?.max(&[0], false)?.item()?;
    ///     mesh.record_value("largest", largest)
    /// });
    /// ```
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
    /// ```
    /// use isoshard::nn::{Linear, Params, Plan};
    /// use isoshard::{rng::Init, testing::Equivalence};
    /// let check = Equivalence::new(|mesh| {
    ///     let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     Linear::new(params.root().child("up"), 3, 4, Init::Normal { mean: 0.0, std: 1.0 })?;
    ///     mesh.record_params(&params)
    /// });
    /// assert_eq!(check.meshes(["fsdp=3"]).assert().compared, 2); // up.weight and up.bias
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn record_params(&self, params: &Params) -> Result<()> {
        params.ids().try_for_each(|id| self.record(params.path(id), params.value(id)))
    }

    /// Begins the next step: later records belong to it. Records before the first call belong to step 0.
    ///
    /// ```
    /// use isoshard::testing::Equivalence;
    /// let failed = Equivalence::new(|mesh| {
    ///     mesh.record_value("loss", 1.0)?;
    ///     mesh.next_step();
    ///     mesh.record_value("loss", mesh.mesh().rank() as f64)
    /// })
    /// .check()
    /// .unwrap_err();
    /// assert!(failed.to_string().contains("step 1, loss"), "{failed}");
    /// ```
    pub fn next_step(&self) {
        self.step.set(self.step.get() + 1);
    }

    /// Records the gradient of every [`leaf`](Trial::leaf) from `result`, given a random gradient of the result in a
    /// random layout. Does nothing for a result without history. Tensors that a program returns need no call.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let check = Equivalence::new(|mesh| {
    ///     let hidden = mesh.leaf("x", DType::F32, [7])?.tanh()?;
    ///     mesh.record_gradients("hidden", &hidden)?;
    ///     hidden.sum_all()
    /// });
    /// let report = check.assert();
    /// assert_eq!(report.compared, 3 * report.runs); // the sum, and a gradient from each of two tensors
    /// ```
    ///
    /// # Errors
    /// Returns an error if the backward pass fails.
    pub fn record_gradients(&self, name: &str, result: &DTensor) -> Result<()> {
        let leaves = self.state.borrow().leaves.clone();
        if !result.has_history() || leaves.is_empty() {
            return Ok(());
        }
        let seed = format!("gradient of {name}");
        let whole = self.values(&seed, result.dtype(), result.shape())?;
        let gradients = result.clone().backward_from(self.place(&seed, &whole)?)?;
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

    /// Records the results of modules too from now on, before all that the program records later.
    pub(super) fn watch_modules(self: &Rc<Self>) {
        let trial = Rc::downgrade(self);
        self.mesh.watch_modules(Rc::new(move |path, y: &DTensor| match trial.upgrade() {
            Some(trial) => trial.record(format!("{MODULE}{path}"), y),
            None => Ok(()),
        }));
    }

    pub(super) fn finish(&self, usage: Usage) -> Trace {
        Trace {
            entries: std::mem::take(&mut self.state.borrow_mut().entries),
            usage,
            calls: self.tally.to_string(),
        }
    }

    fn values(&self, name: &str, dtype: DType, shape: &Shape) -> Result<Tensor> {
        shape.checked_bytes(name, dtype)?;
        if shape.numel() > WHOLE_LEN {
            let rule =
                format!("the harness makes a whole tensor on each rank, of at most {WHOLE_LEN} elements");
            return Err(Error::invalid(name, rule, format!("{dtype}{shape}"), "draw a smaller size"));
        }
        let salt = self.hash(name) >> 32;
        Ok(match self.mesh.reduction() {
            _ if !dtype.is_float() => {
                let below = if dtype == DType::Bool { 2 } else { 4 };
                let value = |e: u64| (mix(e ^ salt << 32) % below) as f64;
                tensor(dtype, &(0..shape.numel() as u64).map(value).collect::<Vec<_>>(), shape)
            }
            Reduction::Exact | Reduction::Grouped(_) => ordinary(dtype, shape, salt),
            Reduction::Fast => small_ints(dtype, shape, salt),
        })
    }

    fn place_in(&self, name: &str, whole: &Tensor, partials: bool) -> Result<DTensor> {
        let layout = self.drawn_layout(name, whole.dtype(), whole.shape(), partials);
        let spec = Spec::new(self.mesh.mesh(), whole.dtype(), whole.shape().clone(), layout)?;
        spread_by(exact_shares, &self.mesh, whole, &spec, self.hash(name))
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
        let mut draws = lock(&self.draws);
        if !draws.layouts.iter().any(|(known, _)| known == name) {
            draws.layouts.push((name.into(), layout.clone()));
        }
        drop(draws);
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
    /// A type of the program's own records its tensors as a list:
    ///
    /// ```
    /// use isoshard::{Result, dtensor::DTensor, tensor::DType, testing::{Outcomes, Trial, equivalent}};
    /// struct Moments { mean: DTensor, variance: DTensor }
    /// impl Outcomes for Moments {
    ///     fn record(self, trial: &Trial) -> Result<()> {
    ///         [("mean", self.mean), ("variance", self.variance)].record(trial)
    ///     }
    /// }
    /// equivalent(|mesh| {
    ///     let x = mesh.leaf("x", DType::F32, [5, 3])?;
    ///     Ok(Moments { mean: x.mean(&[0], false)?, variance: x.var(&[0], 1, false)? })
    /// });
    /// ```
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
impl Outcomes for Vec<f64> {
    fn record(self, trial: &Trial) -> Result<()> {
        for loss in self {
            trial.record_value("loss", loss)?;
            trial.next_step();
        }
        Ok(())
    }
}

/// Losses of the steps in order.
impl Outcomes for Vec<f32> {
    fn record(self, trial: &Trial) -> Result<()> {
        self.into_iter().map(f64::from).collect::<Vec<f64>>().record(trial)
    }
}

/// Returns an error if a name would not survive being written and read again.
pub(super) fn check_names(draws: &Draws) -> Result<()> {
    let names = draws.sizes.iter().map(|(name, ..)| name).chain(draws.layouts.iter().map(|(name, _)| name));
    for name in names {
        if name.trim() != name || name.is_empty() || name.contains(['|', '=']) {
            let rule = "a drawn name has no '|', no '=' and no space at an end";
            return Err(Error::invalid("equivalent", rule, format!("{name:?}"), "use letters"));
        }
    }
    Ok(())
}
