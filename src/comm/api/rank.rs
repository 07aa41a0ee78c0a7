//! The handle of one rank.

use std::sync::Arc;

use super::group::Group;
use crate::comm::calls::NAME_BYTES;
use crate::comm::diagnostics::Recorder;
use crate::comm::network::Network;
use crate::comm::transport::Engine;
use crate::error::{Error, Result};
use crate::tensor::Device;

/// One rank of an SPMD program: who it is, and the groups it can make.
#[derive(Clone, Debug)]
pub struct Rank {
    engine: Arc<dyn Engine>,
    world: Group,
    device: Device,
    recorder: Arc<Recorder>,
    network: Network,
}

impl Rank {
    /// The rank at this end of `engine`.
    ///
    /// # Errors
    /// Those of opening the world's group.
    pub fn new(engine: Arc<dyn Engine>) -> Result<Rank> {
        let recorder = Recorder::alone(engine.rank(), engine.world_len());
        Self::recorded(engine, recorder)
    }

    /// As [`Rank::new`], with a record that others may read.
    pub(super) fn recorded(engine: Arc<dyn Engine>, recorder: Arc<Recorder>) -> Result<Rank> {
        let everyone: Vec<usize> = (0..engine.world_len()).collect();
        let channel = engine.open(&everyone, "world")?;
        let world = Group::over(channel, &recorder, engine.rank(), (&everyone, "world"));
        Ok(Rank { engine, world, device: Device::Cpu, recorder, network: Network::default() })
    }

    /// The same rank with its tensors on `device`: meshes made from it put them there. A rank begins on the CPU.
    pub fn on(mut self, device: Device) -> Rank {
        self.device = device;
        self
    }

    /// Where this rank's tensors are.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same rank with this model of the network, by which moves are chosen: the same one on every rank, since ranks
    /// plan from what they share. A rank begins with the default one.
    pub fn with_network(mut self, network: Network) -> Rank {
        self.network = network;
        self
    }

    /// What talking costs, as plans see it.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// The number of ranks in the world.
    pub fn world_len(&self) -> usize {
        self.engine.world_len()
    }

    /// The group of all ranks, in order, named `world`.
    pub fn world(&self) -> Group {
        self.world.clone()
    }

    /// The group of `ranks` (numbered in the world), in this order. On all members the same ranks and name are the
    /// same group, with one count of calls; its members make it in the same order among the groups they share.
    /// Communicates nothing with threads.
    ///
    /// # Errors
    /// Refuses a list without this rank, with a rank twice, or with one that is not in the world, and a name of more than 256
    /// bytes.
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

    fn open(&self, ranks: &[usize], name: &str) -> Result<Group> {
        check_name(name)?;
        Ok(Group::over(self.engine.open(ranks, name)?, &self.recorder, self.rank(), (ranks, name)))
    }

    /// A new group of the ranks that are left where others have failed, in ascending order: of those that call this before
    /// the deadline, counted from the first that does. All of them name it alike.
    ///
    /// A rank whose program fails gives up all collectives of the world, and a call that fails gives up its group. The
    /// survivors of either meet here and go on: with this group, and with those that [`Rank::group`] makes from now on, which
    /// heed failures of their own members alone. What they had before stays given up, and tensors that they hold stay
    /// theirs. With threads; it communicates nothing but who is there.
    ///
    /// ```
    /// use isoshard::{comm::Spmd, tensor::{ReduceOp, Tensor}};
    /// let ends = Spmd::new(3).run_each(|rank| {
    ///     if rank.rank() == 1 {
    ///         return Err(isoshard::Error::invalid("step", "went wrong", "", ""));
    ///     }
    ///     // The others hear of it, and go on without rank 1.
    ///     assert!(rank.world().barrier().is_err());
    ///     rank.survivors("rest")?.all_reduce(&Tensor::scalar(1i64), ReduceOp::Sum)?.item()
    /// })?;
    /// assert_eq!([ends[0].as_ref().ok(), ends[2].as_ref().ok()], [Some(&2.0), Some(&2.0)]);
    /// assert_eq!(ends[1].as_ref().unwrap_err().to_string(), "step: went wrong");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rank that comes after the others have gone on; engines whose transport does not outlive a rank.
    pub fn survivors(&self, name: &str) -> Result<Group> {
        let ranks = self.engine.survivors()?;
        self.recorder.begin_generation();
        self.open(&ranks, name)
    }

    /// The group of `parts` that this rank belongs to. All ranks of the world call this at once, with the same parts, in which
    /// each rank is a member of exactly one. As [`Rank::group`] by each member, but faster over NCCL.
    ///
    /// # Errors
    /// Refuses parts that share a rank or do not share out the world; [`CommFault`](crate::CommFault)s.
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
            return refuse("the parts do not share out the world", "name each rank once".into());
        }
        let mine = parts.iter().position(|part| part.contains(&self.rank())).expect("every rank is named");
        if parts.iter().all(|part| part.len() == 1) {
            return self.open(&parts[mine], name);
        }
        self.part(&parts[mine], mine, name)
    }

    /// This rank's part of the world, which all ranks share out at once; parts differ in `color`, and some part has more
    /// ranks than one.
    pub(crate) fn part(&self, part: &[usize], color: usize, name: &str) -> Result<Group> {
        check_name(name)?;
        let channel = self.engine.split(part, color, name)?;
        Ok(Group::over(channel, &self.recorder, self.rank(), (part, name)))
    }

    /// The engine below.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }
}

fn check_name(name: &str) -> Result<()> {
    if name.len() <= NAME_BYTES {
        return Ok(());
    }
    let given = format!("{} bytes", name.len());
    Err(Error::invalid("group", format!("a group's name has at most {NAME_BYTES} bytes"), given, ""))
}
