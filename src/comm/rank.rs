//! The handle of one rank.

use std::sync::Arc;

use super::{Engine, Group, Network};
use crate::error::{Error, Result};
use crate::tensor::Device;

/// One rank of an SPMD program: who it is, and the groups it can make.
#[derive(Clone, Debug)]
pub struct Rank {
    engine: Arc<dyn Engine>,
    world: Group,
    device: Device,
    network: Network,
}

impl Rank {
    /// The rank at this end of `engine`.
    ///
    /// # Errors
    /// Those of opening the world's group.
    pub fn new(engine: Arc<dyn Engine>) -> Result<Rank> {
        let everyone: Vec<usize> = (0..engine.world_len()).collect();
        let world = Group::open(&*engine, &everyone, "world")?;
        Ok(Rank { engine, world, device: Device::Cpu, network: Network::default() })
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
    pub fn over(mut self, network: Network) -> Rank {
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
    /// Refuses a list without this rank, with a rank twice, or with one that is not in the world.
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
        Group::open(&*self.engine, ranks, name)
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
            return Group::open(&*self.engine, &parts[mine], name);
        }
        self.part(&parts[mine], mine, name)
    }

    /// This rank's part of the world, which all ranks share out at once; parts differ in `color`, and some part has more
    /// ranks than one.
    pub(crate) fn part(&self, part: &[usize], color: usize, name: &str) -> Result<Group> {
        let channel = self.engine.split(part, color, name)?;
        Ok(Group::over(channel, self.rank(), part, name))
    }

    /// The engine below.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }
}
