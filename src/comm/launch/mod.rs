//! Ranks that a launcher starts as processes: who am I, and where do we meet?
//!
//! [`Launch::from_env`] reads what `torchrun`, Open MPI's `mpirun`, PMI launchers (MPICH, Intel MPI, Cray) and Slurm's
//! `srun` tell their processes. Variables that contradict each other, or of which half is missing, are refused by name: a rank
//! that guesses hangs all the others.

mod families;
mod hosts;
mod vars;

use std::fmt;

pub(super) use families::read;
pub(super) use vars::Vars;

use crate::error::Result;

/// What a launcher told this process: its rank, and where the ranks meet.
///
/// ```
/// use isoshard::comm::Launch;
/// let vars = [("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500")];
/// let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
/// let launch = Launch::from_vars(get)?.expect("these are torchrun's");
/// assert_eq!(launch.to_string(), "rank 3 of 8 (1 on its node), started by torchrun, meeting at node7:29500");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub(super) by: &'static str,
    pub(super) rank: usize,
    pub(super) world_len: usize,
    pub(super) local_rank: usize,
    pub(super) local_len: Option<usize>,
    /// None where it is not said.
    pub(super) host: Option<String>,
    pub(super) port: u16,
}

impl Launch {
    /// What the environment says, or none where no launcher started this process.
    ///
    /// Looked for in this order; the first that is there counts, because a launcher may run inside another one's job:
    ///
    /// | launcher | variables |
    /// |---|---|
    /// | `torchrun` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (may be absent), `MASTER_ADDR`, `MASTER_PORT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | PMI | `PMI_RANK`, `PMI_SIZE`; `MPI_LOCALRANKID`, `PMI_LOCAL_RANK` or `PALS_LOCAL_RANKID`; `MPI_LOCALNRANKS` |
    /// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` |
    ///
    /// The meeting place is `MASTER_ADDR` and `MASTER_PORT` where they are set, which `torchrun`'s always are. Otherwise it is
    /// this machine where the job has one node, the first of the step's nodes under Slurm, and a port between 20000 and
    /// 29999 made from the job's number; Open MPI and PMI on several nodes want `MASTER_ADDR`, unless the engine is MPI's, which
    /// finds rank 0 by itself. `ISOSHARD_PORT` overrides
    /// the port. Under `torchrun`, whose own store may listen at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE`), the next
    /// port is taken.
    ///
    /// A batch script's own shell (`sbatch` without `srun`) is no rank.
    ///
    /// # Errors
    /// Names variables that are missing beside those that are set, are no numbers, or contradict each other.
    pub fn from_env() -> Result<Option<Launch>> {
        Launch::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`Launch::from_env`], from variables that `get` looks up.
    ///
    /// # Errors
    /// As [`Launch::from_env`].
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
        read(&Vars::new(&get))
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_len(&self) -> usize {
        self.world_len
    }

    /// This rank's number among those of its machine: the number of its GPU.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of ranks on this machine, where the launcher says.
    pub fn local_len(&self) -> Option<usize> {
        self.local_len
    }

    /// Where rank 0 listens: host and port. MPI's engine finds that out by itself.
    ///
    /// # Errors
    /// Refuses a job on several nodes whose launcher does not say where rank 0 is.
    pub fn address(&self) -> Result<(&str, u16)> {
        let Launch { by, rank, world_len, port, .. } = self;
        match &self.host {
            Some(host) => Ok((host, *port)),
            None => Err(vars::refused(
                "it is not said where the ranks meet",
                format!("rank {rank} of {world_len} by {by} on several nodes, without MASTER_ADDR"),
                "set MASTER_ADDR to rank 0's machine on all ranks",
            )),
        }
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch { by, rank, world_len, local_rank, host, port, .. } = self;
        write!(f, "rank {rank} of {world_len} ({local_rank} on its node), started by {by}")?;
        host.as_ref().map_or(Ok(()), |host| write!(f, ", meeting at {host}:{port}"))
    }
}
