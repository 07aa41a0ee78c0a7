//! Ranks that a launcher starts as processes: who am I, and where do we meet?
//!
//! [`Launch::from_env`] reads what `torchrun`, Open MPI's `mpirun`, PMI launchers (MPICH, Intel MPI, Cray) and Slurm's
//! `srun` tell their processes. Variables that contradict each other, or of which half is missing, are refused by name: a rank
//! that guesses hangs all the others.

mod description;
mod hosts;
mod launchers;
mod secret;
mod vars;

pub use description::Launch;
pub(super) use secret::Secret;
#[cfg(test)]
pub(super) use secret::SecretSource;
pub(super) use vars::Vars;

use crate::error::Result;

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
    /// The meeting place is `MASTER_ADDR` and `MASTER_PORT` where they are set, which `torchrun`'s always are; if all of
    /// `torchrun`'s ranks are on one machine and `ISOSHARD_BIND` is not set, it is 127.0.0.1. Otherwise it is this machine
    /// where the job has one node, the first of the step's nodes under Slurm, and a port between 20000 and 29999 made from the
    /// job's number; Open MPI and PMI on several nodes want `MASTER_ADDR`, unless the engine is MPI's, which finds rank 0 by
    /// itself. `ISOSHARD_PORT` overrides the port. Under `torchrun`, whose own store may listen at `MASTER_PORT`
    /// (`TORCHELASTIC_USE_AGENT_STORE`), the next port is taken. Rank 0 listens at that address alone, or at `ISOSHARD_BIND`
    /// where it is set on rank 0.
    ///
    /// The ranks' shared secret is `ISOSHARD_TOKEN` (16 bytes or more), or what stands in the file that `ISOSHARD_TOKEN_FILE`
    /// names: a plain file of this process's user or of root, which its owner alone may read; rank 0 makes it where it is not
    /// there. Who does not know it is not heard (`docs/clusters.md`). Ranks of one machine may meet without; if none is given,
    /// MPI's have one that rank 0 draws and hands out by MPI.
    ///
    /// A batch script's own shell (`sbatch` without `srun`) is no rank.
    ///
    /// # Errors
    /// Names variables that are missing beside those that are set, are no numbers or addresses, or contradict each other, and a
    /// secret that is too short, empty or not UTF-8.
    pub fn from_env() -> Result<Option<Launch>> {
        let launch = Launch::from_vars(|name| std::env::var(name).ok())?;
        if launch.is_some() {
            secret::check_encoding(|name| std::env::var_os(name))?;
        }
        Ok(launch)
    }

    /// As [`Launch::from_env`], from variables that `get` looks up.
    ///
    /// # Errors
    /// As [`Launch::from_env`].
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
        launchers::read(&Vars::new(&get))
    }
}
