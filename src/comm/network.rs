//! A model of the network between ranks: how long a collective takes.
//!
//! A message of `m` bytes takes `alpha + m * beta` seconds, a latency plus a time per byte (Hockney, *The
//! communication challenge for MPP*, Parallel Computing 20, 1994). A collective takes one latency per step plus the
//! time of the bytes that a rank receives (Thakur, Rabenseifner & Gropp, *Optimization of collective communication
//! operations in MPICH*, IJHPCA 19, 2005). In this model alpha and beta depend on the [`Level`] that connects two
//! ranks.
//!
//! A rank exchanges one message with each peer, and every 64 messages take one latency.
//!
//! Every rank computes the same cost for the same call. Costs are whole picoseconds, and each term is rounded up:
//! sums do not depend on their order, and `cost(x + y) <= cost(x) + cost(y)`.
//!
//! Missing: congestion of links that several messages share; bytes that a rank sends beyond those it receives.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, Result};

/// Number of messages to different peers that take one latency together.
const MESSAGES: usize = 64;

/// The longest modelled time, in picoseconds: longer times count as this.
const LONGEST: u64 = u64::MAX - 1;

/// Picoseconds in a second.
pub(super) const PICO: f64 = 1e12;

/// The links between ranks: which level connects two ranks, with its latency and bandwidth.
///
/// Each [`Level`] joins blocks of consecutive ranks, and blocks of a slower level consist of whole blocks of the
/// faster one: for example 8 ranks per node over NVLink, everything else over the network. Cloning only counts a
/// reference.
///
/// ```
/// use isoshard::comm::{Level, Network};
/// let network = Network::new([
///     Level { ranks: 8, latency_s: 2e-6, bytes_per_s: 400e9 },
///     Level { ranks: usize::MAX, latency_s: 10e-6, bytes_per_s: 50e9 },
/// ])?;
/// assert_eq!(network.levels().len(), 2);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct Network {
    levels: Arc<[Level]>,
}

/// One kind of link. It connects two ranks of a block that no faster level connects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// The length of a block: ranks `k * ranks .. (k + 1) * ranks` form block `k`. The last level always spans all
    /// ranks, whatever this says.
    pub ranks: usize,
    /// Seconds that an empty message takes.
    pub latency_s: f64,
    /// Bytes that one rank receives per second, rounded down to a whole number.
    pub bytes_per_s: f64,
}

/// A modelled time in whole picoseconds, ordered and additive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(u64);

/// A grid of ranks in numbers: coordinates `c` name rank `base + sum(c[k] * stride[k])`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankGrid<'a> {
    /// The rank at the origin.
    pub(crate) base: usize,
    /// The length and stride of each axis.
    pub(crate) axes: &'a [(usize, usize)],
}

/// The members of a group by the level that connects them, from the view of the worst placed member.
/// [`Network::peers`] makes it, and [`Peers::cost`] gives the time of a collective among them.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    network: Network,
    /// Per level, the number of members that a rank reaches by it or a faster one, the rank itself included.
    within: SmallVec<[usize; 4]>,
}

impl Network {
    /// Builds a network from its levels, fastest first.
    ///
    /// ```
    /// use isoshard::comm::{Level, Network};
    /// let node = Level { ranks: 8, latency_s: 2e-6, bytes_per_s: 400e9 };
    /// let rest = Level { ranks: usize::MAX, latency_s: 10e-6, bytes_per_s: 50e9 };
    /// assert!(Network::new([node, rest]).is_ok());
    /// assert!(Network::new([rest, node]).is_err()); // the slow level comes last
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list; blocks that do not consist of several whole blocks of the next faster level; a latency
    /// that is negative or not finite; a bandwidth below 1 byte per second.
    pub fn new(levels: impl IntoIterator<Item = Level>) -> Result<Network> {
        let mut levels: Vec<Level> = levels.into_iter().collect();
        let refuse =
            |rule: &str, given: String, remedy: &str| Err(Error::invalid("network", rule, given, remedy));
        let Some(last) = levels.last_mut() else {
            return refuse("a network has at least one level", "none".into(), "use Network::default()");
        };
        last.ranks = usize::MAX;
        for (k, level) in levels.iter().enumerate() {
            let given = format!("level {k}: {level}");
            if !(level.latency_s >= 0.0 && level.latency_s.is_finite()) {
                return refuse("a latency is a finite number of seconds from 0 up", given, "");
            }
            if level.bytes_per_s.is_nan() || level.bytes_per_s < 1.0 {
                return refuse("a bandwidth is at least 1 byte a second", given, "");
            }
            let inner = if k == 0 { 1 } else { levels[k - 1].ranks };
            let whole = level.ranks > inner && (k + 1 == levels.len() || level.ranks % inner == 0);
            if !whole && levels.len() > 1 {
                let rule = "a level's blocks are several whole blocks of the faster one's";
                return refuse(
                    rule,
                    format!("{given} above blocks of {inner}"),
                    "give levels from fast to slow",
                );
            }
        }
        Ok(Network { levels: levels.into() })
    }

    /// A network in which one level connects all ranks.
    ///
    /// ```
    /// let network = isoshard::comm::Network::uniform(1e-6, 1e9)?;
    /// assert_eq!(network.levels()[0].bytes_per_s, 1e9);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Network::new`].
    pub fn uniform(latency_s: f64, bytes_per_s: f64) -> Result<Network> {
        Network::new([Level { ranks: usize::MAX, latency_s, bytes_per_s }])
    }

    /// Returns the levels, fastest first.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::Network::default().levels().len(), 1);
    /// ```
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Returns the level that connects two ranks: the fastest one with a block that holds both.
    pub(crate) fn level_between(&self, a: usize, b: usize) -> usize {
        let last = self.levels.len() - 1;
        self.levels[..last].iter().position(|l| a / l.ranks == b / l.ranks).unwrap_or(last)
    }

    /// Returns the group of ranks along `axes` of a grid. The time this takes does not grow with the number of ranks:
    /// if blocks cut the groups unevenly, the result is a lower bound on what the worst placed rank reaches by each
    /// level.
    pub(crate) fn peers(&self, grid: &RankGrid<'_>, axes: &[usize]) -> Peers {
        let len: usize = axes.iter().map(|&a| grid.axes[a].0).product();
        let within = (0..self.levels.len()).map(|k| {
            if k + 1 == self.levels.len() {
                len
            } else {
                axes.iter().map(|&a| grid.run(a, self.levels[k].ranks)).product()
            }
        });
        Peers { within: within.collect(), network: self.clone() }
    }

    /// Returns a group of `len` ranks without a known grid, as if the slowest level connected any two of them.
    pub(crate) fn far_peers(&self, len: usize) -> Peers {
        let mut within = SmallVec::from_elem(1, self.levels.len());
        *within.last_mut().expect("a network has a level") = len;
        Peers { within, network: self.clone() }
    }

    /// Returns the time of `calls` latencies of a level.
    pub(crate) fn latency(&self, level: usize, calls: usize) -> Cost {
        Cost(((self.levels[level].latency_s * PICO).round() as u64).saturating_mul(calls as u64).min(LONGEST))
    }

    /// Returns the time in which a rank receives `bytes` by a level, without latency.
    pub(crate) fn transfer(&self, level: usize, bytes: u64) -> Cost {
        let bytes_per_s = self.levels[level].bytes_per_s;
        if bytes_per_s == f64::INFINITY {
            return Cost::default();
        }
        let ps = (u128::from(bytes) * PICO as u128).div_ceil(bytes_per_s as u128);
        Cost(u64::try_from(ps).unwrap_or(LONGEST).min(LONGEST))
    }
}

/// 2 microseconds and 8.192 GB/s between any two ranks, so that a latency equals the time of 16 KiB. About the speed
/// of threads in one process.
impl Default for Network {
    fn default() -> Network {
        Network::uniform(2e-6, 8.192e9).expect("the default is valid")
    }
}

impl RankGrid<'_> {
    /// Returns how many ranks along axis `a` share a block of `block` ranks with any given rank, itself included; at
    /// least that many for every rank.
    fn run(&self, a: usize, block: usize) -> usize {
        let (len, stride) = self.axes[a];
        let top = self.base + self.axes.iter().map(|&(n, s)| (n - 1) * s).sum::<usize>();
        if self.base / block == top / block {
            return len;
        }
        // The groups along the axis begin at multiples of the greatest common divisor of the base and all coarser
        // strides.
        let coarser = self.axes.iter().filter(|&&(n, s)| n > 1 && s > stride).map(|&(_, s)| s);
        let window = coarser.chain([self.base, block]).fold(len * stride, gcd);
        if window % stride == 0 { window / stride } else { 1 }
    }
}

/// Returns the number of latencies of a call in which a rank exchanges messages with `others` peers.
pub(super) fn latencies(others: usize) -> usize {
    others.div_ceil(MESSAGES).max(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Peers {
    /// Returns the number of members.
    pub(crate) fn len(&self) -> usize {
        self.within[self.within.len() - 1]
    }

    /// Returns the slowest level that connects two members.
    pub(crate) fn slowest(&self) -> usize {
        self.within.iter().position(|&n| n == self.len()).expect("the last level has them all")
    }

    /// Splits `bytes`, received in equal parts from all other members, by the level over which they come. The
    /// remainder of the division counts for the slowest level.
    pub(crate) fn split(&self, bytes: u64) -> SmallVec<[u64; 4]> {
        let others = self.len().saturating_sub(1).max(1) as u128;
        let upto = |n: usize| (u128::from(bytes) * (n - 1) as u128 / others) as u64;
        let mut before = 0;
        self.within
            .iter()
            .map(|&n| {
                let here = upto(n) - before;
                before += here;
                here
            })
            .collect()
    }

    /// Returns the modelled time of `calls` steps in which a rank receives `bytes` in equal parts from all other
    /// members; zero if there are none.
    pub(crate) fn cost(&self, calls: usize, bytes: u64) -> Cost {
        if self.len() == 1 {
            return Cost::default();
        }
        let transfers = self.split(bytes).into_iter().enumerate().map(|(k, b)| self.network.transfer(k, b));
        let latencies = calls * latencies(self.len() - 1);
        transfers.fold(self.network.latency(self.slowest(), latencies), std::ops::Add::add)
    }
}

impl Cost {
    /// The cost of the impossible, above all that a network gives.
    pub(crate) const INFINITE: Cost = Cost(u64::MAX);

    /// The least cost above zero: one picosecond.
    pub(crate) const LEAST: Cost = Cost(1);

    /// Rounds to whole picoseconds.
    pub(super) fn of_picoseconds(ps: f64) -> Cost {
        Cost((ps.round() as u64).min(LONGEST))
    }

    /// Returns the time from `earlier` to this one; zero if `earlier` is later.
    pub(super) fn since(self, earlier: Cost) -> Cost {
        Cost(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time in seconds.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / PICO
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        match self == Cost::INFINITE || other == Cost::INFINITE {
            true => Cost::INFINITE,
            false => Cost(self.0.saturating_add(other.0).min(LONGEST)),
        }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), std::ops::Add::add)
    }
}

/// Writes `12.500 us`.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seconds() {
            s if s >= 1.0 => write!(f, "{s:.3} s"),
            s if s >= 1e-3 => write!(f, "{:.3} ms", s * 1e3),
            s => write!(f, "{:.3} us", s * 1e6),
        }
    }
}

/// Writes `8 ranks, 2e-6 s, 4e11 B/s`.
impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranks {
            usize::MAX => f.write_str("all ranks")?,
            n => write!(f, "{n} ranks")?,
        }
        write!(f, ", {:e} s, {:e} B/s", self.latency_s, self.bytes_per_s)
    }
}

/// Writes the levels: `[8 ranks, 2e-6 s, 4e11 B/s; all ranks, 1e-5 s, 5e10 B/s]`.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, level) in self.levels.iter().enumerate() {
            write!(f, "{}{level}", if k == 0 { "[" } else { "; " })?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(ranks: usize) -> Level {
        Level { ranks, latency_s: 1e-6 * ranks.min(100) as f64, bytes_per_s: 1e12 / ranks.min(100) as f64 }
    }

    /// For every rank, counting its near peers one by one gives at least the bound, and exactly the bound if blocks
    /// fit.
    #[test]
    fn peers_are_bounded_by_counting() {
        for blocks in [vec![2], vec![4], vec![2, 4], vec![3, 6], vec![4, 8], vec![5], vec![6], vec![]] {
            let network = Network::new(blocks.iter().map(|&b| level(b)).chain([level(usize::MAX)])).unwrap();
            for (base, axes) in [
                (0, vec![(4, 2), (2, 1)]),
                (0, vec![(2, 6), (3, 2), (2, 1)]),
                (4, vec![(2, 4), (4, 1)]),
                (2, vec![(2, 3), (2, 1)]),
                (0, vec![(3, 1), (4, 3)]),
                (0, vec![(5, 1)]),
                (1, vec![(1, 7), (6, 2)]),
            ] {
                let grid = RankGrid { base, axes: &axes };
                let places = |which: &[usize], at: usize| {
                    which.iter().fold(vec![at], |all, &a| {
                        let (n, s) = axes[a];
                        all.iter().flat_map(|r| (0..n).map(move |i| r + i * s)).collect()
                    })
                };
                for which in (1..1usize << axes.len())
                    .map(|bits| -> Vec<usize> { (0..axes.len()).filter(|a| bits >> a & 1 == 1).collect() })
                {
                    let others: Vec<usize> = (0..axes.len()).filter(|a| !which.contains(a)).collect();
                    let peers = network.peers(&grid, &which);
                    for (k, level) in network.levels().iter().enumerate() {
                        let groups = places(&others, base).into_iter().map(|at| places(&which, at));
                        let worst = groups.flat_map(|group| {
                            let near = |r: &usize| {
                                group.iter().filter(|p| *p / level.ranks == r / level.ranks).count()
                            };
                            group.iter().map(near).collect::<Vec<_>>()
                        });
                        let worst = worst.min().unwrap();
                        assert!(peers.within[k] <= worst, "{network} {grid:?} {which:?} level {k}: {worst}");
                        let nested = base == 0
                            && axes.iter().all(|(n, s)| level.ranks % (n * s) == 0 || s % level.ranks == 0);
                        assert!(
                            !nested || peers.within[k] == worst,
                            "{network} {grid:?} {which:?} level {k}: {worst}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn costs_add_up_and_never_less() {
        let network = Network::new([level(2), level(usize::MAX)]).unwrap();
        let axes = [(4, 2), (2, 1)];
        let peers = network.peers(&RankGrid { base: 0, axes: &axes }, &[0, 1]);
        assert_eq!((peers.len(), peers.slowest(), &peers.split(701)[..]), (8, 1, &[100, 601][..]));
        for (a, b) in [(1, 1), (3, 1000), (701, 13), (0, 5)] {
            assert!(peers.cost(2, a + b) <= peers.cost(1, a) + peers.cost(1, b), "{a} + {b}");
        }
        assert_eq!(network.peers(&RankGrid { base: 0, axes: &axes }, &[]).cost(3, 0), Cost::default());
        assert_eq!(network.far_peers(2).split(10)[..], [0, 10]);
        let many = |len| Network::default().far_peers(len).cost(2, 0).seconds();
        assert_eq!((many(2), many(65), many(66), many(16_384)), (4e-6, 4e-6, 8e-6, 1024e-6));
        assert_eq!(Cost::INFINITE + Cost::LEAST, Cost::INFINITE);
        assert_eq!(Network::default().transfer(0, 16 << 10), Network::default().latency(0, 1));
        assert_eq!(Network::default().transfer(0, 16 << 10).to_string(), "2.000 us");
    }

    #[test]
    fn refusals() {
        let refused = |levels: &[Level]| Network::new(levels.iter().copied()).unwrap_err().to_string();
        assert_eq!(
            refused(&[]),
            "network: a network has at least one level; got none; use Network::default()"
        );
        assert_eq!(
            refused(&[level(4), level(6), level(8)]),
            "network: a level's blocks are several whole blocks of the faster one's; got level 1: 6 ranks, 6e-6 s, \
             1.6666666666666666e11 B/s above blocks of 4; give levels from fast to slow"
        );
        let bad = |latency_s, bytes_per_s| refused(&[Level { ranks: 1, latency_s, bytes_per_s }]);
        assert_eq!(
            bad(-1.0, 1e9),
            "network: a latency is a finite number of seconds from 0 up; got level 0: all ranks, -1e0 s, 1e9 B/s"
        );
        assert!(bad(f64::NAN, 1e9).starts_with("network: a latency"));
        assert!(bad(0.0, 0.0).starts_with("network: a bandwidth is at least 1"));
        assert!(Network::uniform(0.0, f64::INFINITY).is_ok(), "bytes may cost nothing");
    }
}
