//! Finds out which rank this process is and where the ranks meet, from the variables that a launcher sets.
//!
//! [`Launch::from_env`] understands `torchrun`, Open MPI's `mpirun`, PMI launchers (MPICH, Intel MPI, Cray) and
//! Slurm's `srun`. Contradictory or incomplete variables are refused by name, because a rank with a wrong guess makes
//! all others wait.

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
    /// Returns the launch that the environment variables describe, or `None` if no launcher started this process.
    ///
    /// ```
    /// match isoshard::comm::Launch::from_env()? {
    ///     Some(launch) => println!("{launch}"),
    ///     None => println!("not started by a launcher"),
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// The launchers are tried in this order, and the first match counts, because a launcher may run inside another
    /// one's job:
    ///
    /// | launcher | variables |
    /// |---|---|
    /// | `torchrun` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (may be absent), `MASTER_ADDR`, `MASTER_PORT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    /// | PMI | `PMI_RANK`, `PMI_SIZE`; `MPI_LOCALRANKID`, `PMI_LOCAL_RANK` or `PALS_LOCAL_RANKID`; `MPI_LOCALNRANKS` |
    /// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` |
    ///
    /// The ranks meet at `MASTER_ADDR` and `MASTER_PORT` if these are set, as `torchrun` always does. If all of
    /// `torchrun`'s ranks are on one machine and `ISOSHARD_BIND` is not set, they meet at 127.0.0.1. If the variables
    /// are not set, the address is this machine for jobs on one node, or the first node of the step under Slurm, and
    /// the port is computed from the job's number, between 20000 and 29999. Open MPI and PMI on several nodes need
    /// `MASTER_ADDR`, except over the MPI engine, which finds rank 0 by itself. `ISOSHARD_PORT` overrides the port.
    /// If `torchrun`'s own store listens at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE`), the next port is used.
    /// Rank 0 listens at this address only, or at `ISOSHARD_BIND` if it is set on rank 0.
    ///
    /// The ranks' shared secret is `ISOSHARD_TOKEN` (16 bytes or more) or the content of the file that
    /// `ISOSHARD_TOKEN_FILE` names: a regular file of this process's user or of root that only its owner can read.
    /// Rank 0 creates the file if it does not exist. Processes without the secret are not admitted
    /// (`docs/clusters.md`). Ranks of one machine may meet without one; MPI's ranks then use a secret that rank 0
    /// draws and sends by MPI.
    ///
    /// The shell of a batch script (`sbatch` without `srun`) is no rank.
    ///
    /// # Errors
    /// Refuses, by name, incomplete sets of variables, values that are no numbers or addresses, contradictions, and a
    /// secret that is too short, empty or not UTF-8.
    pub fn from_env() -> Result<Option<Launch>> {
        let launch = Launch::from_vars(|name| std::env::var(name).ok())?;
        if launch.is_some() {
            secret::check_encoding(|name| std::env::var_os(name))?;
        }
        Ok(launch)
    }

    /// Like [`Launch::from_env`], with variables that `get` returns.
    ///
    /// ```
    /// use isoshard::comm::Launch;
    /// assert_eq!(Launch::from_vars(|_| None)?, None);
    /// let half = Launch::from_vars(|name| (name == "WORLD_SIZE").then(|| "2".to_string()));
    /// assert!(half.unwrap_err().to_string().contains("got WORLD_SIZE=2 without RANK"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Launch::from_env`].
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
        launchers::read(&Vars::new(&get))
    }
}
