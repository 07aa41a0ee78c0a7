//! The check: runs a program on meshes, compares, and shrinks what fails.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::counterexample::{Counterexample, Finding};
use super::scenario::Scenario;
use super::shrinking::{smaller, weight};
use super::trace::{Trace, Usage, compare};
use super::trial::{Draws, MODULE, Outcomes, Trial, check_names};
use crate::base::lock;
use crate::comm::{Rank, Spmd, Tally};
use crate::dtensor::{DeviceMesh, Reduction};
use crate::error::Result;
use crate::tensor::Device;
use crate::testing::expected_panics::quiet_panics_here;

/// The meshes on which programs run unless the caller names others.
const MESHES: [&str; 5] = ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3"];
/// The time after which a collective gives up, unless the caller sets one.
const DEADLINE: Duration = Duration::from_secs(60);
/// The largest number of runs that shrinking takes.
const SHRINKING_RUNS: usize = 300;

/// Asserts that a program gives on five meshes, from random layouts and at random sizes, the bits that a single rank
/// gives, forward and backward.
///
/// The meshes are `a=2`, `a=3`, `a=4`, `a=2,b=2` and `a=2,b=3`; [`Equivalence`] takes others. A failure is shrunk to
/// the smallest mesh, the plainest layouts and the smallest sizes that still fail. Panics of the program's ranks print
/// no message of their own; the failure contains it.
///
/// ```
/// use isoshard::{tensor::DType, testing::equivalent};
/// equivalent(|mesh| {
///     let n = mesh.size("n", 0..=7);
///     let x = mesh.leaf("x", DType::F32, [n, 3])?;
///     x.softmax(1)?.sum(&[0], false)
/// });
/// ```
///
/// # Panics
/// Panics with a [`Counterexample`] if a run differs or fails.
#[track_caller]
pub fn equivalent<T: Outcomes>(program: impl Fn(&Trial) -> Result<T> + Send + Sync + 'static) {
    Equivalence::new(program).assert();
}

/// A check that a program is equivalent to a single rank's, with options.
///
/// ```
/// use isoshard::{tensor::DType, testing::Equivalence};
///
/// // Only the sum of the shards' sums moves: at most one f32 from each of the other ranks.
/// let report = Equivalence::new(|mesh| {
///     let x = mesh.place("x", &isoshard::tensor::Tensor::full(DType::F32, [12], 0.1))?;
///     x.sum_all()
/// })
/// .meshes(["dp=2", "dp=3"])
/// .runs(5)
/// .at_most(48)
/// .check();
/// assert_eq!(report.unwrap().runs, 10);
/// ```
#[derive(Clone)]
pub struct Equivalence {
    program: Arc<TrialProgram>,
    pub(super) meshes: Vec<String>,
    runs: usize,
    pub(super) seed: u64,
    mode: Reduction,
    bound: f64,
    at_most: Option<u64>,
    least_work: Option<f64>,
    pub(super) device: Device,
    pub(super) deadline: Option<Duration>,
    shrink_for: Duration,
    /// True if the results of modules are recorded too.
    watches_modules: bool,
    replay: Option<Scenario>,
}

/// A program that records its outcomes, and returns what it used.
type TrialProgram = dyn Fn(&Trial) -> Result<Usage> + Send + Sync;

/// The runs of an [`Equivalence`] that found no difference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EquivalenceReport {
    /// The number of runs on meshes of several ranks.
    pub runs: usize,
    /// The number of tensors compared, over all runs.
    pub compared: usize,
    /// For each mesh, the most bytes that a rank received in a run of the program.
    pub received_bytes: Vec<(String, u64)>,
}

impl Equivalence {
    /// Creates the check of a program: the meshes of [`equivalent`], four runs per mesh, exact mode.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let report = Equivalence::new(|mesh| mesh.leaf("x", DType::F64, [6])?.exp()).assert();
    /// assert_eq!(report.runs, 5 * 4);
    /// assert_eq!(report.compared, 2 * report.runs); // the result, and the gradient of x
    /// ```
    pub fn new<T: Outcomes>(program: impl Fn(&Trial) -> Result<T> + Send + Sync + 'static) -> Equivalence {
        let program = move |trial: &Trial| {
            let outcomes = program(trial)?;
            let usage = trial.usage();
            outcomes.record(trial)?;
            Ok(usage)
        };
        Equivalence {
            program: Arc::new(program),
            meshes: MESHES.map(String::from).into(),
            runs: 4,
            seed: 1,
            mode: Reduction::Exact,
            bound: 0.0,
            at_most: None,
            least_work: None,
            device: Device::Cpu,
            deadline: None,
            shrink_for: Duration::from_secs(20),
            watches_modules: false,
            replay: None,
        }
    }

    /// Sets the meshes, in the notation `dp=2,tp=2`. The single rank's mesh has the same axes with one rank each.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let check = Equivalence::new(|mesh| mesh.input("x", DType::F32, [3, 4]));
    /// let received = check.meshes(["dp=2", "dp=1,tp=3"]).assert().received_bytes;
    /// assert_eq!(received, [("dp=2".to_string(), 0), ("dp=1,tp=3".to_string(), 0)]);
    /// ```
    pub fn meshes<S: Into<String>>(mut self, meshes: impl IntoIterator<Item = S>) -> Equivalence {
        self.meshes = meshes.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of runs per mesh, each with other sizes, layouts and values. A program that draws none of them
    /// runs once per mesh.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let drawing = Equivalence::new(|mesh| mesh.input("x", DType::F32, [9])?.exp()).meshes(["dp=2"]);
    /// assert_eq!(drawing.runs(7).assert().runs, 7);
    /// let fixed = Equivalence::new(|mesh| mesh.record_value("pi", 3.14)).meshes(["dp=2"]);
    /// assert_eq!(fixed.runs(7).assert().runs, 1);
    /// ```
    pub fn runs(mut self, runs: usize) -> Equivalence {
        self.runs = runs;
        self
    }

    /// Sets the seed of the first run, 1 unless set; later runs have the next numbers.
    ///
    /// ```
    /// use isoshard::testing::Equivalence;
    /// let program = |mesh: &isoshard::testing::Trial| mesh.record_value("rank", mesh.mesh().rank() as f64);
    /// let failed = Equivalence::new(program).meshes(["dp=2"]).seed(9).check().unwrap_err();
    /// assert_eq!(failed.scenario.to_string(), "dp=2 | seed 9");
    /// ```
    pub fn seed(mut self, seed: u64) -> Equivalence {
        self.seed = seed;
        self
    }

    /// Runs and compares in fast mode: elements may differ by `bound` times the largest absolute value of the tensor, or
    /// times 1 if that is larger. Drawn elements are integers from -3 to 3.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// // A sum of 50 terms in any order differs by at most 50 roundings.
    /// let check = Equivalence::new(|mesh| mesh.input("x", DType::F32, [50])?.exp()?.sum_all());
    /// check.fast(50.0 * f64::from(f32::EPSILON)).assert();
    /// ```
    pub fn fast(mut self, bound: f64) -> Equivalence {
        (self.mode, self.bound) = (Reduction::Fast, bound);
        self
    }

    /// Fails if a rank receives more bytes than this in a run of the program. The bytes that the harness itself moves,
    /// and those of the gradients that it computes from returned tensors, do not count.
    ///
    /// ```
    /// use isoshard::{dtensor::DTensor, tensor::DType, testing::{Equivalence, Finding}};
    /// let check = Equivalence::new(|mesh| {
    ///     DTensor::zeros(mesh, DType::F32, [4, 2], "(S0)")?.redistribute("(R)")
    /// });
    /// // A rank lacks two of the four rows.
    /// let check = check.meshes(["dp=2"]).at_most(2 * 2 * 4);
    /// check.assert();
    /// let failed = check.at_most(15).check().unwrap_err();
    /// assert!(matches!(failed.finding, Finding::TooManyBytes { received: 16, .. }));
    /// ```
    pub fn at_most(mut self, bytes: u64) -> Equivalence {
        self.at_most = Some(bytes);
        self
    }

    /// Fails if a rank does less than `fraction` of the operations of the busiest rank in a run of the program, as
    /// [`WorkTally`](crate::dtensor::WorkTally) counts them. A fraction above 0 finds ranks that idle.
    ///
    /// ```
    /// use isoshard::{dtensor::DTensor, tensor::DType, testing::Equivalence};
    /// let rows = |n| Equivalence::new(move |mesh| {
    ///     DTensor::full(mesh, DType::F32, [n, 2], "(S0)", 1.0)?.exp()
    /// });
    /// rows(6).meshes(["dp=3"]).least_work(0.9).assert();
    /// // Three ranks share four rows by two, two and none.
    /// let idle = rows(4).meshes(["dp=3"]).least_work(0.1).check().unwrap_err();
    /// assert!(idle.to_string().contains("rank 2 does 0 of"), "{idle}");
    /// ```
    pub fn least_work(mut self, fraction: f64) -> Equivalence {
        self.least_work = Some(fraction);
        self
    }

    /// Sets the device on which all ranks compute, the single rank too: the CPU unless set.
    ///
    /// ```
    /// use isoshard::{tensor::{DType, Device}, testing::Equivalence};
    /// let check = Equivalence::new(|mesh| mesh.input("x", DType::F32, [5])?.neg());
    /// check.on(Device::Cpu).assert();
    /// ```
    pub fn on(mut self, device: Device) -> Equivalence {
        self.device = device;
        self
    }

    /// Sets the time after which a collective gives up waiting for a rank: 60 seconds unless set, and 3 seconds in
    /// [`with_fault`](Equivalence::with_fault).
    ///
    /// ```
    /// use isoshard::testing::{Equivalence, Finding};
    /// // Rank 1 alone waits for the others.
    /// let check = Equivalence::new(|mesh| if mesh.mesh().rank() == 1 { mesh.barrier() } else { Ok(()) });
    /// let check = check.meshes(["dp=2"]).deadline(std::time::Duration::from_millis(100));
    /// assert!(matches!(check.check().unwrap_err().finding, Finding::Fails(_)));
    /// ```
    pub fn deadline(mut self, deadline: Duration) -> Equivalence {
        self.deadline = Some(deadline);
        self
    }

    /// Sets how long a failure is shrunk: 20 seconds unless set. Shrinking ends after 300 runs in any case.
    ///
    /// ```
    /// use isoshard::testing::Equivalence;
    /// let check = Equivalence::new(|mesh| mesh.record_value("ranks", mesh.mesh().rank_len() as f64)).meshes(["dp=4"]);
    /// assert_eq!(check.check().unwrap_err().scenario.rank_len(), 2);
    /// let first = check.shrink_for(std::time::Duration::ZERO).check().unwrap_err();
    /// assert_eq!((first.scenario.rank_len(), first.shrinking_runs), (4, 0));
    /// ```
    pub fn shrink_for(mut self, time: Duration) -> Equivalence {
        self.shrink_for = time;
        self
    }

    /// Runs this scenario only, as a failure prints it, and does not shrink. The meshes and the number of runs do not
    /// matter then.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// let check = Equivalence::new(|mesh| {
    ///     let n = mesh.size("n", 0..=9);
    ///     assert_eq!(n, 5, "the scenario's");
    ///     mesh.input("x", DType::F32, [n])
    /// });
    /// assert_eq!(check.replay("dp=3 | seed 2 | n = 5 | x = (S0)").assert().runs, 1);
    /// ```
    ///
    /// # Panics
    /// Panics if the text is no scenario.
    #[track_caller]
    pub fn replay(mut self, scenario: &str) -> Equivalence {
        self.replay = Some(scenario.parse().unwrap_or_else(|e| panic!("{e}")));
        self
    }

    /// Runs the check, and returns what it ran.
    ///
    /// ```should_panic
    /// use isoshard::testing::Equivalence;
    /// // Not equivalent to a single rank: the number of ranks is not 1.
    /// Equivalence::new(|mesh| mesh.record_value("ranks", mesh.mesh().rank_len() as f64)).assert();
    /// ```
    ///
    /// # Panics
    /// Panics with the [`Counterexample`] if a run differs or fails.
    #[track_caller]
    pub fn assert(&self) -> EquivalenceReport {
        match self.check() {
            Ok(report) => report,
            Err(counterexample) => panic!("{counterexample}"),
        }
    }

    /// Runs the check, and returns the smallest counterexample if there is one.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::{Equivalence, Finding}};
    /// let failed = Equivalence::new(|mesh| {
    ///     let x = mesh.input("x", DType::F32, [mesh.size("n", 2..=9)])?;
    ///     x.sum_all()?.div_scalar(x.local().numel() as f64) // this rank's elements instead of all
    /// })
    /// .check()
    /// .unwrap_err();
    /// assert!(matches!(failed.finding, Finding::Differs { .. }));
    /// assert_eq!((failed.scenario.rank_len(), &*failed.scenario.sizes), (2, &[("n".to_string(), 2)][..]));
    /// ```
    ///
    /// # Errors
    /// Returns the counterexample.
    ///
    /// # Panics
    /// Panics if a mesh cannot be read, and if there is none.
    #[track_caller]
    pub fn check(&self) -> Result<EquivalenceReport, Box<Counterexample>> {
        let mut report = EquivalenceReport::default();
        let singles = Singles::default();
        if let Some(scenario) = &self.replay {
            self.run_once(scenario, &singles, &mut report).map_err(|failed| failed.alone())?;
            return Ok(report);
        }
        let ranks = |mesh: &String| Scenario::new(mesh, 0).unwrap_or_else(|e| panic!("{e}")).rank_len();
        assert!(self.meshes.iter().any(|mesh| ranks(mesh) > 1), "no mesh of {:?} has two ranks", self.meshes);
        for (m, mesh) in self.meshes.iter().enumerate() {
            for run in 0..self.runs.max(1) {
                // The first run of every mesh has one seed, so that programs which draw nothing run once on one rank.
                let number = if run == 0 {
                    0
                } else {
                    (m as u64).wrapping_mul(self.runs as u64).wrapping_add(run as u64)
                };
                let scenario = Scenario::new(mesh, self.seed.wrapping_add(number));
                let scenario = scenario.unwrap_or_else(|e| panic!("{e}"));
                let draws = match self.run_once(&scenario, &singles, &mut report) {
                    Ok(draws) => draws,
                    Err(failed) => return Err(self.shrink(failed, &singles)),
                };
                if !draws {
                    break;
                }
            }
        }
        Ok(report)
    }

    /// Runs a scenario and compares. Returns true if the program drew sizes or layouts, or read the seed.
    fn run_once(
        &self,
        scenario: &Scenario,
        singles: &Singles,
        report: &mut EquivalenceReport,
    ) -> Result<bool, Box<FailedRun>> {
        let (draws, traces) = self.run(scenario);
        let drawn = Scenario {
            sizes: draws.sizes.iter().map(|(name, _, size)| (name.clone(), *size)).collect(),
            layouts: draws.layouts.clone(),
            ..scenario.clone()
        };
        let least = draws.sizes.iter().map(|(name, least, _)| (name.clone(), *least)).collect();
        let fail = |finding| Box::new(FailedRun { scenario: drawn.clone(), finding, least });
        if let Err(error) = check_names(&draws) {
            return Err(fail(Finding::FailsAlone(error.to_string())));
        }
        let (single, traces) = match (singles.of(self, &drawn), traces) {
            (Ok(single), Ok(traces)) => (single, traces),
            (Ok(_), Err(error)) => return Err(fail(Finding::Fails(error))),
            // The error of a single rank is the program's own.
            (Err(error), _) => return Err(fail(Finding::FailsAlone(error))),
        };
        if single[0].entries.is_empty() && self.at_most.is_none() && self.least_work.is_none() {
            return Err(fail(Finding::NothingRecorded));
        }
        if let Some(finding) = compare(&traces, &single[0], self.mode, self.bound) {
            return Err(fail(finding));
        }
        let most = (0..traces.len()).max_by_key(|&rank| traces[rank].usage.received_bytes).unwrap_or(0);
        let received = traces[most].usage.received_bytes;
        if let Some(at_most) = self.at_most.filter(|&at_most| received > at_most) {
            let calls = traces[most].calls.clone();
            return Err(fail(Finding::TooManyBytes { rank: most, received, at_most, calls }));
        }
        let flops = |rank: &usize| traces[*rank].usage.flops;
        let busiest = (0..traces.len()).map(|rank| flops(&rank)).max().unwrap_or(0);
        let idlest = (0..traces.len()).min_by_key(flops).unwrap_or(0);
        if let Some(fraction) = self.least_work.filter(|f| (flops(&idlest) as f64) < f * busiest as f64) {
            return Err(fail(Finding::Idles { rank: idlest, flops: flops(&idlest), busiest, fraction }));
        }
        report.runs += 1;
        report.compared += single[0].entries.len();
        let mesh = scenario.mesh();
        match report.received_bytes.iter_mut().find(|(known, _)| *known == mesh) {
            Some((_, most)) => *most = received.max(*most),
            None => report.received_bytes.push((mesh, received)),
        }
        Ok(draws.reads_seed || !drawn.sizes.is_empty() || !drawn.layouts.is_empty())
    }

    /// Runs the program. Returns rank 0's draws and each rank's records.
    fn run(&self, scenario: &Scenario) -> (Draws, Result<Vec<Trace>, String>) {
        let (check, scenario, device) = (self.clone(), scenario.clone(), self.device);
        let draws = Arc::new(Mutex::new(Draws::default()));
        let first = draws.clone();
        let spmd = Spmd::new(scenario.rank_len()).deadline(self.deadline.unwrap_or(DEADLINE));
        let run = move |rank: Rank| {
            quiet_panics_here();
            let draws = if rank.rank() == 0 { first.clone() } else { Arc::default() };
            check.run_rank(&rank, &scenario, draws)
        };
        let traces = spmd.on(move |_| device).run(run).map_err(|e| e.to_string());
        (std::mem::take(&mut *lock(&draws)), traces)
    }

    /// Runs the program as one rank.
    pub(super) fn run_rank(
        &self,
        rank: &Rank,
        scenario: &Scenario,
        draws: Arc<Mutex<Draws>>,
    ) -> Result<Trace> {
        let (uncounted, (rank, tally)) = (rank, Tally::of(rank)?);
        let axes: Vec<(&str, usize)> = scenario.axes.iter().map(|(name, len)| (&**name, *len)).collect();
        let mesh = DeviceMesh::new(&rank, &axes)?;
        mesh.set_reduction(self.mode);
        // Own code is checked by a mesh whose bytes do not count.
        mesh.check_replicas_on(DeviceMesh::new(uncounted, &axes)?);
        let trial = Rc::new(Trial::new(mesh, tally, scenario.clone(), draws));
        if self.watches_modules {
            trial.watch_modules();
        }
        let usage = (self.program)(&trial)?;
        Ok(trial.finish(usage))
    }

    /// Looks for a smaller scenario that fails in the same way.
    fn shrink(&self, failed: Box<FailedRun>, singles: &Singles) -> Box<Counterexample> {
        // A time that ends after the clock's last instant has no end; the number of runs has.
        let until = Instant::now().checked_add(self.shrink_for);
        let (mut best, mut runs) = (failed, 0);
        'smaller: loop {
            for candidate in smaller(&best.scenario, &best.least) {
                if runs == SHRINKING_RUNS || until.is_some_and(|until| Instant::now() >= until) {
                    break 'smaller;
                }
                runs += 1;
                if let Err(failed) = self.run_once(&candidate, singles, &mut EquivalenceReport::default())
                    && failed.finding.is_like(&best.finding)
                    && weight(&failed.scenario) < weight(&best.scenario)
                {
                    best = failed;
                    continue 'smaller;
                }
            }
            break;
        }
        let FailedRun { scenario, finding, .. } = *best;
        let module = match finding {
            Finding::Differs { .. } => self.first_module(&scenario),
            _ => None,
        };
        Box::new(Counterexample { scenario, finding, module, shrinking_runs: runs })
    }

    /// Runs a scenario and its single rank again, and returns the path of the first module whose result differs. `None` if the
    /// results of all modules are equal: the difference comes later, or in the backward pass.
    fn first_module(&self, scenario: &Scenario) -> Option<String> {
        let watching = Equivalence { watches_modules: true, ..self.clone() };
        let (Ok(traces), Ok(single)) = (watching.run(scenario).1, watching.run(&scenario.single_rank()).1)
        else {
            return None;
        };
        let place = match compare(&traces, single.first()?, self.mode, self.bound)? {
            Finding::Differs { place, .. } | Finding::OtherShape { place, .. } => place,
            _ => return None,
        };
        let (_, name) = place.split_once(", ")?;
        name.strip_prefix(MODULE).map(String::from)
    }
}

impl fmt::Debug for Equivalence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Equivalence { meshes, runs, seed, mode, .. } = self;
        let mut of = f.debug_struct("Equivalence");
        of.field("meshes", meshes)
            .field("runs", runs)
            .field("seed", seed)
            .field("mode", mode)
            .finish_non_exhaustive()
    }
}

/// A run that differs.
struct FailedRun {
    scenario: Scenario,
    finding: Finding,
    /// The smallest value of each drawn size.
    least: Vec<(String, usize)>,
}

impl FailedRun {
    fn alone(self: Box<Self>) -> Box<Counterexample> {
        Box::new(Counterexample {
            scenario: self.scenario,
            finding: self.finding,
            module: None,
            shrinking_runs: 0,
        })
    }
}

/// The records of single ranks that have run.
#[derive(Default)]
struct Singles(RefCell<HashMap<String, SingleRun>>);

type SingleRun = Result<Rc<Vec<Trace>>, String>;

impl Singles {
    fn of(&self, check: &Equivalence, scenario: &Scenario) -> SingleRun {
        let single = scenario.single_rank();
        let key = single.to_string();
        let mut known = self.0.borrow_mut();
        known.entry(key).or_insert_with(|| check.run(&single).1.map(Rc::new)).clone()
    }
}
