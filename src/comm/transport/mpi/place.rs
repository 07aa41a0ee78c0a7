//! Where the coordinator is: rank 0 says it by MPI.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use super::Mpi;
use super::hosts::{addresses, are_near};
use crate::comm::coordinator::{Meeting, Place, meet_at};
use crate::comm::launch::Launch;
use crate::comm::launch::Vars;
use crate::error::{Error, Result};

/// Room for what rank 0 says.
const ROOM: usize = 4096;
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Meets all ranks where rank 0 says; each brings some bytes.
///
/// # Errors
/// Names the ranks that have not come within `deadline`; a rank 0 that cannot listen, and what MPI says.
pub(in crate::comm) fn meet(
    mpi: &Mpi,
    launch: &Launch,
    payload: &[u8],
    deadline: Duration,
) -> Result<Meeting> {
    let mut said = [0u8; ROOM];
    let mut listener = None;
    if mpi.rank == 0 {
        let open = listen(launch)?;
        let text = words(mpi, launch, open.1);
        said[..text.len()].copy_from_slice(text.as_bytes());
        listener = Some(open.0);
    }
    let said = broadcast(mpi, said, deadline)?;
    let Some((hosts, port)) = understand(mpi, &said) else {
        let given = String::from_utf8_lossy(&said).trim_end_matches('\0').to_string();
        return Err(Error::invalid(
            "mpi",
            "rank 0 speaks another language",
            given,
            "run one program on all ranks",
        ));
    };
    meet_at(Place { hosts, port, listener }, launch, payload, deadline)
}

/// True where all ranks are on this machine.
fn on_one_machine(launch: &Launch) -> bool {
    launch.local_len() == Some(launch.world_len())
}

/// A listener at the port that `ISOSHARD_PORT` asks for, or any: on all addresses where ranks come from other machines.
fn listen(launch: &Launch) -> Result<(TcpListener, u16)> {
    let get = |name: &str| std::env::var(name).ok();
    let port = Vars::new(&get).port("ISOSHARD_PORT")?.unwrap_or(0);
    let any = [IpAddr::from([0u8; 16]), IpAddr::from([0u8; 4])];
    let mut last = String::new();
    for ip in if on_one_machine(launch) { &[LOCAL][..] } else { &any } {
        match TcpListener::bind((*ip, port)).and_then(|l| l.local_addr().map(|at| (l, at.port()))) {
            Ok(open) => return Ok(open),
            Err(e) => last = e.to_string(),
        }
    }
    Err(Error::invalid(
        "mpi",
        "rank 0 cannot listen",
        format!("port {port}: {last}"),
        "set ISOSHARD_PORT to a free port on all ranks, or to none",
    ))
}

/// `port;machine;address/bits,address/bits`, with the host that `MASTER_ADDR` names before the addresses.
fn words(mpi: &Mpi, launch: &Launch, port: u16) -> String {
    let named = std::env::var("MASTER_ADDR").ok().filter(|host| !host.is_empty());
    let own = addresses().into_iter().map(|(ip, bits)| format!("{ip}/{bits}"));
    let hosts: Vec<String> =
        if on_one_machine(launch) { vec![LOCAL.to_string()] } else { named.into_iter().chain(own).collect() };
    let mut text = format!("{port};{};{}", mpi.host, hosts.join(","));
    // A machine with so many addresses is reached by its first ones.
    while text.len() > ROOM {
        text.truncate(text.rfind(',').unwrap_or(0));
    }
    text
}

/// The hosts to try, the likeliest first, and the port.
fn understand(mpi: &Mpi, said: &[u8]) -> Option<(Vec<String>, u16)> {
    let text = std::str::from_utf8(said).ok()?.trim_end_matches('\0');
    let [port, machine, hosts] = text.split(';').collect::<Vec<_>>().try_into().ok()?;
    let own = addresses();
    let distance = |host: &&str| match host.split_once('/').map(|(ip, bits)| (ip.parse(), bits.parse())) {
        Some((Ok(ip), Ok(bits))) if own.iter().any(|&(mine, _)| are_near(mine, ip, bits)) => 0,
        _ => 1,
    };
    let mut hosts: Vec<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
    hosts.sort_by_key(distance);
    let bare = |host: &str| host.split('/').next().unwrap_or(host).to_string();
    let mut hosts: Vec<String> = hosts.into_iter().map(bare).collect();
    if machine == mpi.host {
        // What needs no network; after the others, since machines may share a name.
        hosts.push(LOCAL.to_string());
    }
    Some((hosts, port.parse().ok()?))
}

fn broadcast(mpi: &Mpi, mut said: [u8; ROOM], deadline: Duration) -> Result<Vec<u8>> {
    let broken = |reason: String| {
        Error::unsupported("mpi", "rank 0 cannot be heard", reason, "look at MPI's network on these machines")
    };
    let mut bytes: Box<[u8]> = Box::new(std::mem::replace(&mut said, [0; ROOM]));
    // SAFETY: the block is leaked unless MPI is through with it, and not looked at before.
    let ticket = unsafe { mpi.port().broadcast(bytes.as_mut_ptr(), ROOM) };
    let mut ticket = ticket.map_err(|e| broken(e.to_string()))?;
    let begun = Instant::now();
    loop {
        match mpi.port().test(&mut ticket) {
            Ok(Some(_)) => return Ok(bytes.into_vec()),
            Ok(None) if begun.elapsed() < deadline => thread::sleep(Duration::from_micros(200)),
            Ok(None) => {
                std::mem::forget(bytes);
                return Err(broken(format!("nothing within {:.1} s", deadline.as_secs_f64())));
            }
            Err(e) => {
                std::mem::forget(bytes);
                return Err(broken(e.to_string()));
            }
        }
    }
}
