//! The handle by which a program communicates.

use std::sync::{Arc, Mutex, Weak};

use super::group::Group;
use super::group_threads::KnownGroups;
use super::timeline::Timeline;
use crate::base::lock;
use crate::comm::calls::NAME_BYTES;
use crate::comm::diagnostics::Recorder;
use crate::comm::machine::Machine;
use crate::comm::network::Network;
use crate::comm::transport::Engine;
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Shape, Tensor};

/// One rank of an SPMD program: its number, its device, and the groups that it can make.
#[derive(Clone, Debug)]
pub struct Rank {
    engine: Arc<dyn Engine>,
    world: Group,
    device: Device,
    recorder: Arc<Recorder>,
    known: KnownGroups,
    network: Network,
    machine: Machine,
    /// The clock of a dry run.
    timeline: Option<Timeline>,
}

impl Rank {
    /// Makes the rank that `engine` connects, with its tensors on the CPU.
    ///
    /// ```
    /// use isoshard::comm::{Rank, spmd};
    /// let same = spmd(2, |rank| Ok(Rank::new(rank.engine().clone())?.rank() == rank.rank()))?;
    /// assert_eq!(same, [true, true]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the engine cannot open the world's group.
    pub fn new(engine: Arc<dyn Engine>) -> Result<Rank> {
        let recorder = Recorder::alone(engine.rank(), engine.world_len());
        Self::recorded(engine, recorder)
    }

    /// Like [`Rank::new`], with a flight record that other ranks may read.
    pub(super) fn recorded(engine: Arc<dyn Engine>, recorder: Arc<Recorder>) -> Result<Rank> {
        // The recorder may live in the engine's world, so it must not own the engine.
        let teller = Arc::downgrade(&engine);
        recorder.announcer.tell_by(move |work| {
            if let Some(engine) = teller.upgrade() {
                engine.announce(work);
            }
        });
        Self::knowing(engine, recorder, KnownGroups::default())
    }

    /// Makes a rank that has the groups `known`, if it makes them.
    fn knowing(engine: Arc<dyn Engine>, recorder: Arc<Recorder>, known: KnownGroups) -> Result<Rank> {
        let everyone = everyone(engine.world_len());
        let channel = engine.open(&everyone, "world")?;
        let world = Group::over(channel, engine.rank(), everyone, "world", &recorder, &known);
        let (network, machine) = (Network::default(), Machine::default());
        Ok(Rank { engine, world, device: Device::Cpu, recorder, known, network, machine, timeline: None })
    }

    /// Returns the rank with its tensors on `device`: meshes made from it allocate there.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::Device};
    /// let devices = spmd(1, |rank| Ok(rank.on(Device::Meta).device()))?;
    /// assert_eq!(devices, [Device::Meta]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn on(mut self, device: Device) -> Rank {
        self.device = device;
        self
    }

    /// Returns the device of this rank's tensors.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::Device};
    /// assert_eq!(spmd(2, |rank| Ok(rank.device()))?, [Device::Cpu; 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the rank with another model of the network. It determines which moves are chosen, never their results.
    /// Every rank must use the same one.
    ///
    /// ```
    /// use isoshard::comm::{Network, spmd};
    /// let levels = spmd(2, |rank| {
    ///     let rank = rank.with_network(Network::uniform(1e-6, 1e9)?);
    ///     Ok(rank.network().to_string())
    /// })?;
    /// assert_eq!(levels[1], "[all ranks, 1e-6 s, 1e9 B/s]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn with_network(mut self, network: Network) -> Rank {
        self.network = network;
        self
    }

    /// Returns the model of the network by which moves are chosen.
    ///
    /// ```
    /// use isoshard::comm::{Network, spmd};
    /// assert_eq!(spmd(2, |rank| Ok(*rank.network() == Network::default()))?, [true, true]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the rank with a model of its processor, by which plans are chosen. All ranks of the world call this; the
    /// lowest of their rates counts on each of them, so that ranks which measured differently plan alike.
    /// One all-gather of 40 bytes per rank.
    ///
    /// ```
    /// use isoshard::comm::{Machine, spmd};
    /// let rates = spmd(2, |rank| {
    ///     let measured = Machine { bytes_per_s: [3e10, 2e10][rank.rank()], ..Machine::default() };
    ///     Ok(rank.with_machine(measured)?.machine().bytes_per_s)
    /// })?;
    /// assert_eq!(rates, [2e10, 2e10]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses rates that are not finite numbers above 0, on all ranks, and names the rank that gave them. Returns an
    /// error if the exchange fails.
    pub fn with_machine(mut self, machine: Machine) -> Result<Rank> {
        let own = machine.checked();
        self.machine = match self.device {
            // A dry run has no peers, and rounds as an exchange does.
            Device::Meta => Machine::of_words(&own?.to_words())?,
            Device::Cpu | Device::Cuda(_) => {
                // A refusal on one rank is a refusal on all: rates of zero stand for it.
                let words = own.as_ref().map_or([0.0; 5], Machine::to_words);
                let words = Tensor::from_vec(words.to_vec(), [5])?.to_device(self.device)?;
                let shapes = vec![Shape::from([5]); self.world_len()];
                let all = self.world.all_gather(&words, &shapes)?;
                own?;
                let read = |(rank, words): (usize, Tensor)| {
                    Machine::of_words(&words.to_vec::<f64>()?).map_err(|_| {
                        let given = format!("others of rank {rank}");
                        Error::invalid("machine", "a rate is a finite number above 0", given, "")
                    })
                };
                // The own rates as well are those that the others read: a limit may be rounded on the way.
                let all: Vec<Machine> = all.into_iter().enumerate().map(read).collect::<Result<_>>()?;
                all.into_iter().reduce(|a, b| a.slower(&b)).expect("a world has a rank")
            }
        };
        Ok(self)
    }

    /// Returns the rank over an engine that passes its calls on to this rank's, with the same device, models and record. Both
    /// have the same groups.
    pub(crate) fn over(&self, engine: Arc<dyn Engine>) -> Result<Rank> {
        let rank = Rank::knowing(engine, self.recorder.clone(), self.known.clone())?
            .on(self.device)
            .with_network(self.network.clone());
        Ok(Rank { timeline: self.timeline.clone(), ..rank.with_common_machine(self.machine.clone()) })
    }

    pub(super) fn with_timeline(mut self, timeline: Timeline) -> Rank {
        self.timeline = Some(timeline);
        self
    }

    /// Returns true if operators are to be timed by [`Rank::compute`]: in a dry run.
    pub(crate) fn has_clock(&self) -> bool {
        self.timeline.is_some()
    }

    /// Adds the modelled time of an operator to the clock of a dry run.
    pub(crate) fn compute(&self, dtype: DType, flops: u64, bytes: u64) {
        if let Some(timeline) = &self.timeline {
            timeline.compute(self.machine.time(dtype, flops, bytes));
        }
    }

    /// Returns the rank with a model that is the same on all ranks.
    pub(super) fn with_common_machine(mut self, machine: Machine) -> Rank {
        self.machine = machine;
        self
    }

    /// Returns the model of the processor by which plans are chosen.
    ///
    /// ```
    /// use isoshard::comm::{Machine, spmd};
    /// assert_eq!(spmd(2, |rank| Ok(*rank.machine() == Machine::default()))?, [true, true]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns this rank's number in the world.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::spmd(3, |rank| Ok(rank.rank()))?, [0, 1, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Returns the number of ranks in the world.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::spmd(3, |rank| Ok(rank.world_len()))?, [3, 3, 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn world_len(&self) -> usize {
        self.engine.world_len()
    }

    /// Returns the group of all ranks in order, named `world`.
    ///
    /// ```
    /// let names = isoshard::comm::spmd(2, |rank| Ok(rank.world().to_string()))?;
    /// assert_eq!(names[0], "world{0, 1}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn world(&self) -> Group {
        self.world.clone()
    }

    /// Makes the group of `ranks`, numbered in the world, in this order. All members call this with the same ranks
    /// and name; members that share several groups make them in the same order. Making the same group again continues
    /// its numbering of calls. With threads this communicates nothing.
    ///
    /// ```
    /// use isoshard::comm::spmd;
    /// use isoshard::tensor::{ReduceOp, Tensor};
    /// let sums = spmd(4, |rank| {
    ///     let ranks = if rank.rank() % 2 == 0 { [0, 2] } else { [1, 3] };
    ///     let half = rank.group(&ranks, "half")?;
    ///     half.all_reduce(&Tensor::scalar(rank.rank() as i64), ReduceOp::Sum)?.item()
    /// })?;
    /// assert_eq!(sums, [2.0, 4.0, 2.0, 4.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a list that lacks this rank, names a rank twice, or names one outside the world, and a name of more
    /// than 256 bytes.
    pub fn group(&self, ranks: &[usize], name: &str) -> Result<Group> {
        let refuse = |rule: &str, remedy: String| {
            Err(Error::invalid("group", rule, format!("{name}{ranks:?} on rank {}", self.rank()), remedy))
        };
        if !ranks.contains(&self.rank()) {
            return refuse("a rank can only make groups that it belongs to", String::new());
        }
        if ranks.iter().any(|&r| r >= self.world_len()) {
            return refuse("no such rank", format!("ranks are 0 to {}", self.world_len() - 1));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return refuse("a rank is named twice", "name each rank once".into());
        }
        self.open(ranks, name)
    }

    pub(super) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Group> {
        check_name(name)?;
        let channel = self.engine.open(ranks, name)?;
        Ok(Group::over(channel, self.rank(), ranks.into(), name, &self.recorder, &self.known))
    }

    /// Makes a new group of the ranks that remain after a failure, in ascending order: those that call this before
    /// the deadline, counted from the first call. All of them give the same name.
    ///
    /// If a rank's program fails, all collectives of the world fail; if a call fails, only its group does. The
    /// remaining ranks can then meet here and continue with the new group and with groups that [`Rank::group`] makes
    /// from now on; only failures of their own members affect those. Earlier groups stay failed, and tensors stay
    /// valid. Works with threads only; the ranks exchange nothing but who is there.
    ///
    /// ```
    /// use isoshard::{comm::Spmd, tensor::{ReduceOp, Tensor}};
    /// let ends = Spmd::new(3).run_each(|rank| {
    ///     if rank.rank() == 1 {
    ///         return Err(isoshard::Error::invalid("step", "went wrong", "", ""));
    ///     }
    ///     // The other ranks get an error, and continue without rank 1.
    ///     assert!(rank.world().barrier().is_err());
    ///     rank.survivors("rest")?.all_reduce(&Tensor::scalar(1i64), ReduceOp::Sum)?.item()
    /// })?;
    /// assert_eq!([ends[0].as_ref().ok(), ends[2].as_ref().ok()], [Some(&2.0), Some(&2.0)]);
    /// assert_eq!(ends[1].as_ref().unwrap_err().to_string(), "step: went wrong");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rank that comes after the others have continued, and engines whose transport does not survive the
    /// loss of a rank.
    pub fn survivors(&self, name: &str) -> Result<Group> {
        let ranks = self.engine.survivors()?;
        self.recorder.begin_generation();
        self.open(&ranks, name)
    }

    /// Divides the world into `parts` and returns the group of the part that this rank belongs to. All ranks of the
    /// world call this at once with the same parts; each rank is in exactly one. Equivalent to [`Rank::group`] by
    /// each member, but faster over NCCL.
    ///
    /// ```
    /// let groups = isoshard::comm::spmd(3, |rank| {
    ///     let part = rank.split(&[vec![0, 2], vec![1]], "part")?;
    ///     Ok(part.to_string())
    /// })?;
    /// assert_eq!(groups, ["part{0, 2}", "part{1}", "part{0, 2}"]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses parts that share a rank or do not cover the world. Returns [`CommFault`](crate::CommFault)s.
    pub fn split(&self, parts: &[Vec<usize>], name: &str) -> Result<Group> {
        let refuse = |rule: &str, remedy: String| {
            Err(Error::invalid(
                "split",
                rule,
                format!("{name}{parts:?} for {} rank(s)", self.world_len()),
                remedy,
            ))
        };
        let mut all: Vec<usize> = parts.iter().flatten().copied().collect();
        all.sort_unstable();
        if let Some(pair) = all.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("the parts overlap", format!("name rank {} once", pair[0]));
        }
        if !all.iter().copied().eq(0..self.world_len()) {
            return refuse("the parts do not cover the world", "name each rank once".into());
        }
        let mine = parts.iter().position(|part| part.contains(&self.rank())).expect("every rank is named");
        if parts.iter().all(|part| part.len() == 1) {
            return self.open(&parts[mine], name);
        }
        self.part(&parts[mine], mine, name)
    }

    /// Opens the group of this rank's part when all ranks divide the world at once. Parts have different `color`s,
    /// and at least one part has several ranks.
    pub(crate) fn part(&self, part: &[usize], color: usize, name: &str) -> Result<Group> {
        check_name(name)?;
        let channel = self.engine.split(part, color, name)?;
        Ok(Group::over(channel, self.rank(), part.into(), name, &self.recorder, &self.known))
    }

    /// Returns the engine that carries this rank's collectives.
    ///
    /// ```
    /// let lens = isoshard::comm::spmd(2, |rank| Ok(rank.engine().world_len()))?;
    /// assert_eq!(lens, [2, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }
}

/// Returns the list of all ranks. Ranks of one process share it: with a list each, those of a world of 10,000 ranks would take
/// 800 MB.
fn everyone(world_len: usize) -> Arc<[usize]> {
    static LAST: Mutex<Option<Weak<[usize]>>> = Mutex::new(None);
    let mut last = lock(&LAST);
    let known = last.as_ref().and_then(Weak::upgrade).filter(|known| known.len() == world_len);
    known.unwrap_or_else(|| {
        let new: Arc<[usize]> = (0..world_len).collect();
        *last = Some(Arc::downgrade(&new));
        new
    })
}

fn check_name(name: &str) -> Result<()> {
    if name.len() <= NAME_BYTES {
        return Ok(());
    }
    let given = format!("{} bytes", name.len());
    Err(Error::invalid("group", format!("a group's name has at most {NAME_BYTES} bytes"), given, ""))
}
