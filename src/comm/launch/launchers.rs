//! The variables of each launcher.

use super::description::Launch;
use super::hosts::first_host;
use super::secret::SecretSource;
use super::vars::{Vars, refused};
use crate::base::Fnv1a;
use crate::error::Result;

/// Rank 0's port if neither the launcher nor the job's number gives one.
const PORT: u16 = 29_500;
/// Slurm's step numbers from here on are scripts and daemons, not ranks.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// Returns the launch that the variables describe, or `None`.
pub(super) fn read(vars: &Vars) -> Result<Option<Launch>> {
    let launchers = [torchrun, open_mpi, pmi, slurm];
    for launcher in launchers {
        if let Some(launch) = launcher(vars)? {
            check(&launch)?;
            let (bind, secret) = (vars.address("ISOSHARD_BIND")?, SecretSource::from_vars(vars)?);
            return Ok(Some(Launch { bind, secret, ..launch }));
        }
    }
    Ok(None)
}

/// The numbers that a launcher gives.
struct LauncherNumbers {
    rank: usize,
    world_len: usize,
    local_rank: usize,
    local_len: Option<usize>,
}

fn torchrun(vars: &Vars) -> Result<Option<Launch>> {
    let all = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];
    if !all.iter().any(|name| vars.has(name)) {
        return Ok(None);
    }
    let given = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
    let numbers = LauncherNumbers {
        rank: vars.needed("RANK", &given)?,
        world_len: vars.needed("WORLD_SIZE", &given)?,
        local_rank: vars.needed("LOCAL_RANK", &given)?,
        local_len: vars.number("LOCAL_WORLD_SIZE")?,
    };
    let alone = numbers.world_len == 1;
    // `torchrun --standalone` gives the machine's name, and its address may be open to other machines. Ranks of one
    // machine need only the loopback address.
    let one_machine = numbers.local_len == Some(numbers.world_len) && !vars.has("ISOSHARD_BIND");
    let host = match vars.text("MASTER_ADDR") {
        Some(host) if !one_machine => host,
        None if !alone && !one_machine => return Err(vars.absent("MASTER_ADDR", &given)),
        _ => LOCAL.into(),
    };
    let port = match (vars.port("ISOSHARD_PORT")?, vars.port("MASTER_PORT")?) {
        (Some(ours), _) => ours,
        // The launcher's own store listens at that port, so the ranks use the next one.
        (None, Some(port)) if vars.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True") => {
            port.checked_add(1).unwrap_or(port - 1)
        }
        (None, Some(port)) => port,
        (None, None) if alone => PORT,
        (None, None) => return Err(vars.absent("MASTER_PORT", &given)),
    };
    Ok(Some(numbers.launch("torchrun", Some(host), port)))
}

fn open_mpi(vars: &Vars) -> Result<Option<Launch>> {
    let [rank, size, local_rank, local_len] = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ];
    let given = [rank, size, local_rank];
    if !given.iter().any(|name| vars.has(name)) {
        return Ok(None);
    }
    let numbers = LauncherNumbers {
        rank: vars.needed(rank, &given)?,
        world_len: vars.needed(size, &given)?,
        local_rank: vars.needed(local_rank, &given)?,
        local_len: vars.number(local_len)?,
    };
    if let Some(other) = vars.number("PMI_RANK")?
        && other != numbers.rank
    {
        return Err(refused(
            "two launchers contradict each other",
            format!("{rank}={}, PMI_RANK={other}", numbers.rank),
            "start all ranks by one launcher, or unset what is left over",
        ));
    }
    let (host, port) = meeting(vars, &numbers, "Open MPI", &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?;
    Ok(Some(numbers.launch("Open MPI", host, port)))
}

fn pmi(vars: &Vars) -> Result<Option<Launch>> {
    let given = ["PMI_RANK", "PMI_SIZE"];
    if !given.iter().any(|name| vars.has(name)) {
        return Ok(None);
    }
    let (rank, world_len) = (vars.needed("PMI_RANK", &given)?, vars.needed("PMI_SIZE", &given)?);
    let names = ["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"];
    let local_rank = match vars.first_number(&names)? {
        Some((_, local)) => local,
        None if world_len == 1 => 0,
        None => return Err(vars.absent(names[0], &given)),
    };
    let local_len = vars.first_number(&["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"])?.map(|(_, n)| n);
    let numbers = LauncherNumbers { rank, world_len, local_rank, local_len };
    let (host, port) = meeting(vars, &numbers, "PMI", &["PMI_JOBID", "SLURM_JOB_ID"])?;
    Ok(Some(numbers.launch("PMI", host, port)))
}

fn slurm(vars: &Vars) -> Result<Option<Launch>> {
    // `salloc` and `sbatch` set only SLURM_NTASKS, and a script's step has a special number.
    let in_script = vars.number("SLURM_STEP_ID")?.is_some_and(|step| step >= FIRST_SPECIAL_STEP);
    if !vars.has("SLURM_PROCID") || in_script {
        return Ok(None);
    }
    let given = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"];
    let tasks = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
    let world_len = vars.first_number(&tasks)?.ok_or_else(|| vars.absent("SLURM_NTASKS", &given))?.1;
    let numbers = LauncherNumbers {
        rank: vars.needed("SLURM_PROCID", &given)?,
        world_len,
        local_rank: vars.needed("SLURM_LOCALID", &given)?,
        local_len: vars.number("SLURM_NTASKS_PER_NODE")?.filter(|&n| n <= world_len),
    };
    let (host, port) = meeting(vars, &numbers, "Slurm", &["SLURM_JOB_ID", "SLURM_JOBID"])?;
    Ok(Some(numbers.launch("Slurm", host, port)))
}

impl LauncherNumbers {
    fn launch(self, by: &'static str, host: Option<String>, port: u16) -> Launch {
        let LauncherNumbers { rank, world_len, local_rank, local_len } = self;
        let (bind, secret) = (None, SecretSource::None);
        Launch { by, rank, world_len, local_rank, local_len, host, port, bind, secret }
    }
}

const LOCAL: &str = "127.0.0.1";

/// Returns the host at which the ranks meet, if known, and the port: those of the variables, else those that follow
/// from the job.
fn meeting(vars: &Vars, numbers: &LauncherNumbers, by: &str, jobs: &[&str]) -> Result<(Option<String>, u16)> {
    let nodes = vars.first_number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?.map(|(_, n)| n);
    let one_node = numbers.world_len == 1
        || numbers.local_len == Some(numbers.world_len)
        || (by == "Slurm" && nodes == Some(1));
    // Rank 0 runs on the first node of the step. The node that launched the step may be a login node.
    let lists = ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"];
    let listed = || lists.iter().find_map(|name| first_host(&vars.text(name)?));
    let host = match vars.text("MASTER_ADDR") {
        Some(host) => Some(host),
        None if one_node => Some(LOCAL.into()),
        None if by == "Slurm" => listed().or_else(|| vars.text("SLURM_LAUNCH_NODE_IPADDR")),
        None => None,
    };
    let job = jobs.iter().find_map(|name| vars.text(name));
    let port = match (vars.port("ISOSHARD_PORT")?, vars.port("MASTER_PORT")?) {
        (Some(port), _) | (None, Some(port)) => port,
        (None, None) => job.map_or(PORT, |job| port_of(&job)),
    };
    Ok((host, port))
}

/// Returns a port from 20000 to 29999 that two jobs seldom share.
fn port_of(job: &str) -> u16 {
    20_000 + (Fnv1a::of(job.bytes()) % 10_000) as u16
}

/// The most ranks of a world of processes: lists of all ranks are made before the first of them is heard of.
const MOST_RANKS: usize = 1 << 20;

/// Refuses contradictory numbers, and absurd ones.
fn check(launch: &Launch) -> Result<()> {
    let Launch { by, rank, world_len, local_rank, local_len, .. } = launch;
    if *world_len > MOST_RANKS {
        let rule = format!("a world has at most {MOST_RANKS} ranks");
        return Err(refused(&rule, format!("{world_len} by {by}"), names(by)));
    }
    let contradiction = if rank >= world_len {
        format!("rank {rank} of a world of {world_len}")
    } else if local_rank >= world_len {
        format!("local rank {local_rank} in a world of {world_len}")
    } else if let Some(n) = local_len.filter(|n| local_rank >= n) {
        format!("local rank {local_rank} of {n} on the node")
    } else if let Some(n) = local_len.filter(|n| n > world_len) {
        format!("{n} ranks on the node in a world of {world_len}")
    } else {
        return Ok(());
    };
    Err(refused("the variables contradict each other", format!("{contradiction} by {by}"), names(by)))
}

/// Returns the remedy for contradictions: the variables to look at.
fn names(by: &str) -> &'static str {
    match by {
        "torchrun" => "look at RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE",
        "Open MPI" => "look at OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE",
        "PMI" => "look at PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS",
        _ => "look at SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and SLURM_NTASKS_PER_NODE",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(table: &str) -> Result<Option<Launch>> {
        let get = |name: &str| {
            let mut vars = table.split_whitespace().map(|v| v.split_once('=').expect("NAME=value"));
            vars.find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        };
        Launch::from_vars(get)
    }

    fn text(table: &str) -> String {
        match of(table) {
            Ok(Some(launch)) => launch.to_string(),
            Ok(None) => "none".into(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn every_launcher_is_understood() {
        let torchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29400";
        assert_eq!(text(torchrun), "rank 5 of 8 (1 on its node), started by torchrun, meeting at n1:29400");
        let launch = of(torchrun).unwrap().unwrap();
        assert_eq!((launch.rank(), launch.world_len(), launch.local_rank()), (5, 8, 1));
        assert_eq!((launch.local_len(), launch.address()), (Some(4), Ok(("n1", 29_400))));
        for (table, want) in [
            (
                "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0",
                "rank 0 of 1 (0 on its node), started by torchrun, meeting at 127.0.0.1:29500",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=7 TORCHELASTIC_USE_AGENT_STORE=True",
                "rank 0 of 2 (0 on its node), started by torchrun, meeting at a:8",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=7 TORCHELASTIC_USE_AGENT_STORE=True ISOSHARD_PORT=9",
                "rank 0 of 2 (0 on its node), started by torchrun, meeting at a:9",
            ),
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=this.machine MASTER_PORT=7",
                "rank 1 of 2 (1 on its node), started by torchrun, meeting at 127.0.0.1:7",
            ),
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=this.machine MASTER_PORT=7 ISOSHARD_BIND=0.0.0.0",
                "rank 1 of 2 (1 on its node), started by torchrun, meeting at this.machine:7",
            ),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "rank 1 of 2 (1 on its node), started by Open MPI, meeting at 127.0.0.1:29500",
            ),
            (
                "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
                 MASTER_ADDR=n0 MASTER_PORT=12000 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
                "rank 3 of 4 (1 on its node), started by Open MPI, meeting at n0:12000",
            ),
            (
                "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4 MASTER_PORT=5",
                "rank 2 of 4 (2 on its node), started by PMI, meeting at 127.0.0.1:5",
            ),
            (
                "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_NNODES=2 SLURM_NODELIST=gpu[07-08] \
                 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1 MASTER_PORT=5 SLURM_STEP_ID=0",
                "rank 9 of 16 (1 on its node), started by Slurm, meeting at gpu07:5",
            ),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1",
                "rank 0 of 2 (0 on its node), started by Slurm, meeting at 10.0.0.1:29500",
            ),
            (
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 SLURM_NODELIST=gpu7",
                "rank 1 of 2 (1 on its node), started by Slurm, meeting at 127.0.0.1:29500",
            ),
        ] {
            assert_eq!(text(table), want, "{table}");
        }
    }

    #[test]
    fn what_is_no_launch() {
        for table in [
            "",
            "MASTER_ADDR=a MASTER_PORT=1",
            "RANK= WORLD_SIZE=",
            "SLURM_NTASKS=4 SLURM_NODELIST=a",
            "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODELIST=a SLURM_STEP_ID=4294967291",
        ] {
            assert_eq!(text(table), "none", "{table}");
        }
    }

    #[test]
    fn jobs_of_one_machine_meet_apart() {
        let port = |job: &str| {
            let table =
                format!("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_JOB_ID={job}");
            of(&table).unwrap().unwrap().port
        };
        assert_eq!(port("4711"), port("4711"));
        assert_ne!(port("4711"), port("4712"));
        assert!((20_000..30_000).contains(&port("4711")));
    }

    #[test]
    fn halves_and_contradictions_are_named() {
        for (table, want) in [
            (
                "WORLD_SIZE=2",
                "launch: a variable is missing next to those that are set; got WORLD_SIZE=2 without RANK;",
            ),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "MASTER_PORT=1 without LOCAL_RANK"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT=1", "without MASTER_ADDR"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a", "without MASTER_PORT"),
            ("RANK=x WORLD_SIZE=2 LOCAL_RANK=0", "launch: a variable is not a number; got RANK=x;"),
            ("RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0", "got RANK=-1;"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=70000", "got MASTER_PORT=70000;"),
            (
                "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
                "got rank 2 of a world of 2 by torchrun;",
            ),
            ("RANK=0 WORLD_SIZE=0 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1", "rank 0 of a world of 0"),
            (
                "RANK=1 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
                "got local rank 3 of 2 on the node by torchrun; look at RANK,",
            ),
            (
                "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1",
                "got 8 ranks on the node in a world of 4",
            ),
            (
                "RANK=0 WORLD_SIZE=1000000000000000 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
                "a world has at most 1048576 ranks; got 1000000000000000 by torchrun",
            ),
            ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "without OMPI_COMM_WORLD_LOCAL_RANK"),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 PMI_RANK=1 PMI_SIZE=2",
                "two launchers contradict each other; got OMPI_COMM_WORLD_RANK=0, PMI_RANK=1;",
            ),
            ("PMI_RANK=0", "got PMI_RANK=0 without PMI_SIZE"),
            ("PMI_RANK=0 PMI_SIZE=2", "without MPI_LOCALRANKID"),
            ("SLURM_PROCID=0 SLURM_LOCALID=0", "got SLURM_PROCID=0, SLURM_LOCALID=0 without SLURM_NTASKS"),
            ("SLURM_PROCID=0 SLURM_NTASKS=2", "without SLURM_LOCALID"),
        ] {
            assert!(text(table).contains(want), "{table}: {}", text(table));
        }
    }

    #[test]
    fn only_who_needs_the_meeting_place_misses_it() {
        for (table, by) in [
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "rank 0 of 4 by Open MPI",
            ),
            ("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0", "rank 0 of 2 by Slurm"),
        ] {
            let error = of(table).unwrap().unwrap().address().unwrap_err().to_string();
            let want = format!(
                "launch: the address at which the ranks meet is not known; got {by} on several nodes, without MASTER_ADDR; set"
            );
            assert!(error.starts_with(&want), "{error}");
        }
    }
}
