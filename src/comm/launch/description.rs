//! The result of reading a launcher's variables.

use std::fmt;
use std::net::IpAddr;

use super::secret::SecretSource;
use super::vars;
use crate::error::Result;

/// The information of a launcher for this process: its rank, and the address at which the ranks meet.
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
    pub(in crate::comm) by: &'static str,
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) world_len: usize,
    pub(in crate::comm) local_rank: usize,
    pub(in crate::comm) local_len: Option<usize>,
    /// The host at which the ranks meet, if known.
    pub(in crate::comm) host: Option<String>,
    pub(in crate::comm) port: u16,
    /// The address at which rank 0 listens, if it differs from the host's.
    pub(in crate::comm) bind: Option<IpAddr>,
    pub(in crate::comm) secret: SecretSource,
}

impl Launch {
    /// Returns this process's rank.
    ///
    /// ```
    /// use isoshard::comm::Launch;
    /// let launch = Launch::from_vars(|name| match name {
    ///     "PMI_RANK" | "MPI_LOCALRANKID" => Some("1".into()),
    ///     "PMI_SIZE" | "MPI_LOCALNRANKS" => Some("2".into()),
    ///     _ => None,
    /// })?.expect("a PMI launcher's variables");
    /// assert_eq!((launch.rank(), launch.world_len()), (1, 2));
    /// assert_eq!((launch.local_rank(), launch.local_len()), (1, Some(2)));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// # use isoshard::comm::Launch;
    /// let vars = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    /// let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    /// assert_eq!(Launch::from_vars(get)?.expect("PMI's variables").world_len(), 1);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn world_len(&self) -> usize {
        self.world_len
    }

    /// Returns this rank's number among the ranks of its machine, which is also the number of its GPU.
    ///
    /// ```
    /// # use isoshard::comm::Launch;
    /// let vars = [("SLURM_PROCID", "9"), ("SLURM_NTASKS", "16"), ("SLURM_LOCALID", "1")];
    /// let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    /// assert_eq!(Launch::from_vars(get)?.expect("Slurm's variables").local_rank(), 1);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the number of ranks on this machine, if the launcher says.
    ///
    /// ```
    /// # use isoshard::comm::Launch;
    /// let vars = [("PMI_RANK", "0"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];
    /// let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    /// assert_eq!(Launch::from_vars(get)?.expect("PMI's variables").local_len(), Some(2));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_len(&self) -> Option<usize> {
        self.local_len
    }

    /// Returns the host and port at which rank 0 listens. The MPI engine finds them by itself.
    ///
    /// # Errors
    /// Refuses a job on several nodes if the launcher does not say where rank 0 is.
    pub(crate) fn address(&self) -> Result<(&str, u16)> {
        let Launch { by, rank, world_len, port, .. } = self;
        match &self.host {
            Some(host) => Ok((host, *port)),
            None => Err(vars::refused(
                "the address at which the ranks meet is not known",
                format!("rank {rank} of {world_len} by {by} on several nodes, without MASTER_ADDR"),
                "set MASTER_ADDR to rank 0's machine on all ranks",
            )),
        }
    }

    /// Returns true if `host`, which resolves to `ips`, unintentionally means this machine only, as a machine's own
    /// name does in Debian's `/etc/hosts`. A loopback address is intended if it is written as such, if
    /// `ISOSHARD_BIND` is set, or if all ranks are on this machine.
    pub(in crate::comm) fn is_found_only_here(&self, host: &str, ips: &[IpAddr]) -> bool {
        let written =
            host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let meant = written || self.bind.is_some() || self.local_len == Some(self.world_len);
        !meant && !ips.is_empty() && ips.iter().all(IpAddr::is_loopback)
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch { by, rank, world_len, local_rank, host, port, .. } = self;
        write!(f, "rank {rank} of {world_len} ({local_rank} on its node), started by {by}")?;
        host.as_ref().map_or(Ok(()), |host| write!(f, ", meeting at {host}:{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_refused_only_if_nobody_meant_it() {
        let launch = |local_len, bind| Launch {
            by: "a test",
            rank: 0,
            world_len: 4,
            local_rank: 0,
            local_len,
            host: None,
            port: 1,
            bind,
            secret: SecretSource::None,
        };
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (debian, real) = (ip("127.0.1.1"), ip("10.0.0.1"));
        for (host, local_len, bind, ips, only_here) in [
            ("node1", None, None, vec![debian], true),
            ("node1", Some(2), None, vec![debian, ip("::1")], true),
            ("node1", Some(4), None, vec![debian], false),
            ("node1", None, Some(real), vec![debian], false),
            ("node1", None, None, vec![debian, real], false),
            ("node1", None, None, vec![], false),
            ("127.0.0.1", Some(2), None, vec![ip("127.0.0.1")], false),
            ("::1", None, None, vec![ip("::1")], false),
            ("LocalHost", Some(2), None, vec![ip("127.0.0.1")], false),
        ] {
            let launch = launch(local_len, bind);
            assert_eq!(launch.is_found_only_here(host, &ips), only_here, "{host} {local_len:?} {bind:?}");
        }
    }
}
