//! Counts the calls and bytes that pass through an engine, and the time that a model of the network gives them.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::rank::Rank;
use super::timeline::{TimedRequest, Timeline};
use crate::base::lock;
use crate::comm::calls::{BusyWork, Call, CallOrigin, ModulePath, Phase, Route, label};
use crate::comm::network::{Cost, Network, latencies};
use crate::comm::transport::{Channel, Engine, Reduce, Request};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The number, bytes and modelled time of one rank's collectives. Cloning shares the count.
///
/// Every started call counts, even if it fails. Groups of one rank never call.
///
/// ```
/// use isoshard::comm::{Tally, spmd};
/// use isoshard::tensor::{DType, ReduceOp, Tensor};
/// let received = spmd(3, |rank| {
///     let (rank, tally) = Tally::of(&rank)?;
///     rank.world().all_reduce(&Tensor::zeros(DType::F32, [5]), ReduceOp::Sum)?;
///     assert_eq!(tally.total().calls, 1);
///     Ok(tally.total().received_bytes)
/// })?;
/// assert_eq!(received, [40; 3]); // a small all-reduce: the other two's five floats
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct Tally(Arc<Shared>);

struct Shared {
    network: Network,
    counts: Mutex<Counts>,
    /// The clock of a dry run.
    timeline: Option<Timeline>,
}

#[derive(Default)]
struct Counts {
    rows: Vec<Traffic>,
    /// The parts of the rows, by origin: the number of the row, and the origin.
    parts: Vec<(usize, CallOrigin, Total)>,
    part_of: FxHashMap<(usize, CallOrigin), usize>,
}

/// The calls of one collective on one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// The group, e.g. `dp{0, 4, 8}`.
    pub group: String,
    /// The number of its members.
    pub group_len: usize,
    /// The collective, e.g. `all_gather`.
    pub call: &'static str,
    /// Their number, bytes and modelled time.
    pub total: Total,
}

/// The calls of one collective on one group that an operator made in a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleTraffic {
    /// The module: the innermost that the rank had entered ([`ModulePath::enter`]).
    pub path: ModulePath,
    /// The part of the training step.
    pub phase: Phase,
    /// The operator for which the collective was called, e.g. `matmul`; `redistribute` if the program moved a tensor,
    /// `backward` if a gradient was reduced, and empty if the program called the collective.
    pub operator: &'static str,
    /// The group and the collective, and the number, bytes and modelled time of these calls.
    pub traffic: Traffic,
}

/// Calls, bytes and modelled time. A sum ends at the largest number: in a dry run, tensors may have 2^63 bytes each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// The number of calls.
    pub calls: u64,
    /// Bytes that this rank sent. A broadcast counts once per receiver.
    pub sent_bytes: u64,
    /// Bytes that this rank received from other ranks.
    pub received_bytes: u64,
    /// Modelled time by the [`Network`] if the calls run one after the other: per call one latency of the slowest
    /// link in the group for every 64 peers, plus the time of each received byte on its link.
    pub time: Cost,
}

impl Tally {
    /// Returns the rank over an engine that counts, and the count. Groups made before are not counted.
    ///
    /// ```
    /// use isoshard::comm::{Tally, spmd};
    /// let calls = spmd(2, |rank| {
    ///     let (counted, tally) = Tally::of(&rank)?;
    ///     counted.world().barrier()?;
    ///     rank.world().barrier()?; // not counted
    ///     Ok(tally.total().calls)
    /// })?;
    /// assert_eq!(calls, [1, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the engine cannot open the world's group.
    pub fn of(rank: &Rank) -> Result<(Rank, Tally)> {
        let (engine, tally) = Tally::wrap(rank.engine().clone(), rank.network().clone());
        Ok((rank.over(engine)?, tally))
    }

    /// Wraps an engine in one that counts, and returns it with the count; `network` gives the modelled times.
    pub(crate) fn wrap(engine: Arc<dyn Engine>, network: Network) -> (Arc<dyn Engine>, Tally) {
        Tally::timed(engine, network, None)
    }

    /// Like [`Tally::wrap`], with a clock that the calls advance.
    pub(super) fn timed(
        engine: Arc<dyn Engine>,
        network: Network,
        timeline: Option<Timeline>,
    ) -> (Arc<dyn Engine>, Tally) {
        let tally = Tally(Arc::new(Shared { network, counts: Mutex::default(), timeline }));
        (Arc::new(CountingEngine { engine, tally: tally.clone() }), tally)
    }

    /// Returns the counts by group and collective, in the order of first calls.
    ///
    /// ```
    /// use isoshard::comm::{Tally, spmd};
    /// let rows = spmd(2, |rank| {
    ///     let (rank, tally) = Tally::of(&rank)?;
    ///     (0..3).try_for_each(|_| rank.group(&[0, 1], "dp")?.barrier())?;
    ///     Ok(tally.rows())
    /// })?;
    /// let row = &rows[0][0];
    /// assert_eq!((row.group.as_str(), row.call, row.total.calls), ("dp{0, 1}", "barrier", 3));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rows(&self) -> Vec<Traffic> {
        lock(&self.0.counts).rows.clone()
    }

    /// Returns the counts by module, phase, operator, group and collective, in the order of first calls.
    ///
    /// ```
    /// use isoshard::{comm::{Phase, Tally, spmd}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Module, Params, Plan};
    /// use isoshard::{placement::Placement, rng::Init};
    /// let rows = spmd(2, |rank| {
    ///     let (rank, tally) = Tally::of(&rank)?;
    ///     let mesh = DeviceMesh::parse(&rank, "tp=2")?;
    ///     let plan = Plan::default().shard("h.0.down.weight", "tp", 1).site("h.0.down", "tp", Placement::Replicate);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let down = Linear::without_bias(params.root().child("h").child(0).child("down"), 64, 2, Init::Ones)?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [3, 64], "(S1)")?;
    ///     down.forward(&Forward::eval(&params), &x)?;
    ///     Ok(tally.by_module())
    /// })?;
    /// let sum = rows[0].last().expect("a call"); // the reduction of the product's partial sums
    /// assert_eq!((sum.path.as_str(), sum.phase, sum.operator), ("h.0.down", Phase::Forward, "redistribute"));
    /// assert_eq!((sum.traffic.call, sum.traffic.total.received_bytes), ("all_reduce", 24));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn by_module(&self) -> Vec<ModuleTraffic> {
        let counts = lock(&self.0.counts);
        let of_part = |&(row, CallOrigin { operator, path, phase }, total): &(usize, CallOrigin, Total)| {
            let traffic = Traffic { total, ..counts.rows[row].clone() };
            ModuleTraffic { path, phase, operator, traffic }
        };
        counts.parts.iter().map(of_part).collect()
    }

    /// Returns the sum over all calls.
    ///
    /// ```
    /// use isoshard::comm::{Tally, spmd};
    /// let nothing = spmd(2, |rank| Ok(Tally::of(&rank)?.1.total().calls))?;
    /// assert_eq!(nothing, [0, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn total(&self) -> Total {
        lock(&self.0.counts).rows.iter().map(|row| row.total).sum()
    }
}

impl std::ops::Add for Total {
    type Output = Total;
    fn add(self, other: Total) -> Total {
        Total {
            calls: self.calls.saturating_add(other.calls),
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
            time: self.time + other.time,
        }
    }
}

impl std::iter::Sum for Total {
    fn sum<I: Iterator<Item = Total>>(totals: I) -> Total {
        totals.fold(Total::default(), std::ops::Add::add)
    }
}

/// Prints a table with a row per group and collective.
///
/// ```
/// use isoshard::comm::{Tally, spmd};
/// let tables = spmd(2, |rank| {
///     let (rank, tally) = Tally::of(&rank)?;
///     rank.world().barrier()?;
///     Ok(tally.to_string())
/// })?;
/// assert!(tables[0].contains("barrier") && tables[0].contains("world{0, 1}"));
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_table(f, &self.rows(), self.total())
    }
}

/// Writes a row per group and collective, and a last row with the total.
pub(super) fn write_table(f: &mut fmt::Formatter<'_>, rows: &[Traffic], total: Total) -> fmt::Result {
    writeln!(
        f,
        "{:<16}{:>8}{:>18}{:>18}{:>16}  group",
        "call", "calls", "sent bytes", "received bytes", "time"
    )?;
    let mut line = |call: &str, group: &str, t: Total| {
        let (calls, sent, received, time) = (t.calls, t.sent_bytes, t.received_bytes, t.time.to_string());
        writeln!(f, "{call:<16}{calls:>8}{sent:>18}{received:>18}{time:>16}  {group}")
    };
    rows.iter().try_for_each(|row| line(row.call, &row.group, row.total))?;
    line("all", "", total)
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tally").field(&self.total()).finish()
    }
}

/// An engine that counts its calls.
#[derive(Debug)]
struct CountingEngine {
    engine: Arc<dyn Engine>,
    tally: Tally,
}

impl Engine for CountingEngine {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn world_len(&self) -> usize {
        self.engine.world_len()
    }

    fn deadline(&self) -> Duration {
        self.engine.deadline()
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        let channel = self.engine.open(ranks, name)?;
        Ok(self.counted(channel, ranks, name))
    }

    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        let channel = self.engine.split(part, color, name)?;
        Ok(self.counted(channel, part, name))
    }

    fn announce(&self, work: Option<BusyWork>) {
        self.engine.announce(work);
    }

    fn end(&self) -> Result<()> {
        self.engine.end()
    }

    fn survivors(&self) -> Result<Vec<usize>> {
        self.engine.survivors()
    }

    fn abort(&self, cause: &Error) {
        self.engine.abort(cause);
    }
}

impl CountingEngine {
    fn counted(&self, channel: Arc<dyn Channel>, ranks: &[usize], name: &str) -> Arc<dyn Channel> {
        let me = self.rank();
        let index = ranks.iter().position(|&r| r == me).expect("checked by the caller");
        let group = label(name, ranks);
        let mut near: SmallVec<[(usize, usize); 8]> = SmallVec::new();
        for &rank in ranks {
            let level = self.tally.0.network.level_between(me, rank);
            match near.last_mut() {
                Some((end, last)) if *last == level => *end += 1,
                last => {
                    let before = last.map_or(0, |(end, _)| *end);
                    near.push((before + 1, level));
                }
            }
        }
        let tally = self.tally.clone();
        Arc::new(CountingChannel { channel, tally, index, group, group_len: ranks.len(), near })
    }
}

/// A channel that counts its calls.
struct CountingChannel {
    channel: Arc<dyn Channel>,
    tally: Tally,
    index: usize,
    group: String,
    group_len: usize,
    /// Runs of consecutive members that one level connects with this one: the end of each run, and the level.
    near: SmallVec<[(usize, usize); 8]>,
}

impl CountingChannel {
    /// Counts a call. Returns its end on the clock of a dry run.
    fn count(&self, call: &Call<'_>) -> Option<Cost> {
        let sent_bytes = call.sent_bytes(self.index, self.group_len);
        let mut total = Total { calls: 1, sent_bytes, ..Total::default() };
        let network = &self.tally.0.network;
        let slowest = match call.route {
            Route::Send { to: peer } | Route::Recv { from: peer } => self.level_of(peer),
            _ => self.near.iter().map(|&(_, level)| level).max().unwrap_or(0),
        };
        let peers = match call.route {
            Route::Send { .. } | Route::Recv { .. } => 1,
            _ => self.group_len - 1,
        };
        total.time = network.latency(slowest, latencies(peers));
        let mut come = |level: usize, bytes: u64| {
            total.received_bytes = total.received_bytes.saturating_add(bytes);
            total.time = total.time + network.transfer(level, bytes);
        };
        match call.route {
            Route::Gather | Route::AllToAll => {
                let mut start = 0;
                for &(end, level) in &self.near {
                    let others = (start..end).filter(|&i| i != self.index);
                    let bytes = others.map(|i| call.dtype.bytes_of(call.incoming[i].numel()));
                    come(level, bytes.fold(0, u64::saturating_add));
                    start = end;
                }
            }
            Route::Broadcast { root } if root != self.index => {
                come(self.level_of(root), call.dtype.bytes_of(call.incoming[0].numel()));
            }
            Route::Recv { from } => come(self.level_of(from), call.dtype.bytes_of(call.incoming[0].numel())),
            Route::Broadcast { .. } | Route::Send { .. } | Route::Barrier => {}
        }
        self.add(call.name, total);
        self.tally.0.timeline.as_ref().map(|timeline| timeline.start(slowest, total.time))
    }

    /// Lets a request that ends at `end` advance the clock when it is waited for.
    fn timed(&self, request: Box<dyn Request>, end: Option<Cost>) -> Box<dyn Request> {
        match (&self.tally.0.timeline, end) {
            (Some(timeline), Some(end)) => {
                let (timeline, origin) = (timeline.clone(), CallOrigin::current());
                Box::new(TimedRequest { inner: request, timeline, end, origin })
            }
            _ => request,
        }
    }

    fn add(&self, call: &'static str, total: Total) {
        let Counts { rows, parts, part_of } = &mut *lock(&self.tally.0.counts);
        let row = rows.iter().position(|row| row.call == call && row.group == self.group);
        let row = row.unwrap_or_else(|| {
            let (group, group_len) = (self.group.clone(), self.group_len);
            rows.push(Traffic { group, group_len, call, total: Total::default() });
            rows.len() - 1
        });
        rows[row].total = rows[row].total + total;
        let origin = CallOrigin::current();
        let part = *part_of.entry((row, origin)).or_insert_with(|| {
            parts.push((row, origin, Total::default()));
            parts.len() - 1
        });
        parts[part].2 = parts[part].2 + total;
    }

    fn level_of(&self, member: usize) -> usize {
        self.near.iter().find(|&&(end, _)| member < end).map_or(0, |&(_, level)| level)
    }
}

impl fmt::Debug for CountingChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CountingChannel").field(&self.group).finish()
    }
}

impl Channel for CountingChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        let end = self.count(&call);
        Ok(self.timed(self.channel.start(call)?, end))
    }

    fn gather_into(&self, call: Call<'_>, into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        let end = self.count(&call);
        Ok(self.timed(self.channel.gather_into(call, into)?, end))
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        let end = self.count(&call);
        Ok(self.timed(self.channel.all_reduce(reduce, call)?, end))
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        let end = self.count(&call);
        Ok(self.timed(self.channel.reduce_scatter(reduce, call)?, end))
    }

    fn reduces_well(&self) -> bool {
        self.channel.reduces_well()
    }
}
