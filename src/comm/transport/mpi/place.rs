//! Where the coordinator is: rank 0 says it by MPI.

use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::Mpi;
use super::hosts::{addresses, are_near};
use crate::comm::coordinator::{Client, MeetingPlace, Rendezvous};
use crate::comm::launch::{Launch, Secret, Vars};
use crate::error::{Error, Result};

/// Room for what rank 0 says.
const ROOM: usize = 4096;
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Meets all ranks where rank 0 says, with a secret that it draws for them.
///
/// # Errors
/// As [`Rendezvous::meet`]; a rank 0 that cannot listen, and what MPI says.
pub(in crate::comm) fn meet(mpi: &Mpi, rendezvous: Rendezvous<'_>) -> Result<Client> {
    let mut said = [0u8; ROOM];
    let mut listeners = Vec::new();
    if mpi.rank == 0 {
        listeners = listen(rendezvous.launch)?;
        let text = words(mpi, rendezvous.launch, &listeners, &Secret::draw()?);
        said[..text.len()].copy_from_slice(text.as_bytes());
    }
    let said = broadcast(mpi, said, rendezvous.deadline)?;
    let Some((hosts, port, secret)) = understand(mpi, &said) else {
        return Err(Error::invalid(
            "mpi",
            "rank 0 speaks another language",
            "what it says is no meeting place",
            "run one program on all ranks",
        ));
    };
    rendezvous.meet_at(MeetingPlace { hosts, port, listeners, secret: Some(secret) })
}

/// True where all ranks are on this machine.
fn on_one_machine(launch: &Launch) -> bool {
    launch.local_len() == Some(launch.world_len())
}

/// Listeners at the port that `ISOSHARD_PORT` asks for, or any: on `ISOSHARD_BIND`, on this machine alone where all ranks are, or
/// on each address that the others are told.
fn listen(launch: &Launch) -> Result<Vec<TcpListener>> {
    let get = |name: &str| std::env::var(name).ok();
    let mut port = Vars::new(&get).port("ISOSHARD_PORT")?.unwrap_or(0);
    let ips: Vec<IpAddr> = match launch.bind {
        Some(ip) => vec![ip],
        None if on_one_machine(launch) => vec![LOCAL],
        None => named()
            .iter()
            .flat_map(|host| addresses_of(host))
            .chain(addresses().into_iter().map(|(ip, _)| ip))
            .collect(),
    };
    let (mut listeners, mut last) = (Vec::new(), "this machine has no address".to_string());
    for ip in ips {
        match TcpListener::bind((ip, port)).and_then(|listener| Ok((listener.local_addr()?, listener))) {
            // All of them at the port that the first one was given.
            Ok((at, listener)) => {
                port = at.port();
                listeners.push(listener);
            }
            Err(e) => last = e.to_string(),
        }
    }
    if listeners.is_empty() {
        return Err(Error::invalid(
            "mpi",
            "rank 0 cannot listen",
            format!("port {port}: {last}"),
            "set ISOSHARD_PORT to a free port on all ranks, or to none",
        ));
    }
    Ok(listeners)
}

/// The host that `MASTER_ADDR` names.
fn named() -> Option<String> {
    std::env::var("MASTER_ADDR").ok().filter(|host| !host.is_empty())
}

fn addresses_of(host: &str) -> Vec<IpAddr> {
    let found = (host, 0).to_socket_addrs().map(|all| all.map(|at| at.ip()).collect());
    found.unwrap_or_default()
}

/// `port;machine;secret;address/bits,address/bits`, with the host that `MASTER_ADDR` names before the addresses.
fn words(mpi: &Mpi, launch: &Launch, listeners: &[TcpListener], secret: &Secret) -> String {
    let port = listeners.iter().find_map(|listener| Some(listener.local_addr().ok()?.port())).unwrap_or(0);
    let own = addresses().into_iter().map(|(ip, bits)| format!("{ip}/{bits}"));
    let hosts: Vec<String> = if on_one_machine(launch) {
        vec![LOCAL.to_string()]
    } else {
        named().into_iter().chain(own).collect()
    };
    let mut text = format!("{port};{};{};{}", mpi.host, secret.text(), hosts.join(","));
    // A machine with so many addresses is reached by its first ones.
    while text.len() > ROOM {
        text.truncate(text.rfind(',').unwrap_or(0));
    }
    text
}

/// The hosts to try, the likeliest first, the port, and the secret.
fn understand(mpi: &Mpi, said: &[u8]) -> Option<(Vec<String>, u16, Secret)> {
    let text = std::str::from_utf8(said).ok()?.trim_end_matches('\0');
    let [port, machine, secret, hosts] = text.split(';').collect::<Vec<_>>().try_into().ok()?;
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
    Some((hosts, port.parse().ok()?, Secret::from_text(secret, "mpi").ok()?))
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
