//! The address of the coordinator, which rank 0 broadcasts by MPI.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::Mpi;
use super::hosts::{addresses, are_near};
use crate::comm::coordinator::{Client, Rendezvous, RendezvousPoint};
use crate::comm::deadline::end_after;
use crate::comm::launch::{Launch, Secret, Vars};
use crate::error::{Error, Result};
use crate::tensor::sort_by_key;

/// The bytes of rank 0's broadcast.
const ROOM: usize = 4096;
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Connects all ranks to the coordinator at the address that rank 0 broadcasts, with the secret that all were given,
/// or one that rank 0 draws.
///
/// # Errors
/// Returns the errors of [`Rendezvous::meet`]; also returns an error if rank 0 cannot listen, if only some ranks
/// were given a secret, or
/// if MPI fails.
pub(in crate::comm) fn meet(mpi: &Mpi, rendezvous: Rendezvous<'_>) -> Result<Client> {
    let Rendezvous { launch, deadline, .. } = rendezvous;
    let end = end_after(deadline);
    if mpi.rank == 0 {
        let given = launch.secret.read(true, end)?;
        let drawn = if given.is_none() { Some(Secret::draw()?) } else { None };
        let (port, listeners) = listen(launch)?;
        let hosts = hosts_of(launch, &listeners, &addresses());
        let text = words(port, &mpi.host, drawn.as_ref(), &hosts);
        let mut said = [0u8; ROOM];
        said[..text.len()].copy_from_slice(text.as_bytes());
        broadcast(mpi, said, deadline)?;
        let place = RendezvousPoint { hosts, port, listeners, secret: given.or(drawn) };
        return rendezvous.meet_at(place);
    }
    let said = broadcast(mpi, [0; ROOM], deadline)?;
    let Some(Directions { hosts, port, drawn }) = understand(&said, &mpi.host, &addresses()) else {
        return Err(Error::invalid(
            "mpi",
            "the broadcast of rank 0 is not understood",
            "text that is no address of the coordinator",
            "run one program on all ranks",
        ));
    };
    // Rank 0 has written the secret's file by now, if it had to.
    let secret = agreed(launch, drawn, launch.secret.read(false, end)?)?;
    rendezvous.meet_at(RendezvousPoint { hosts, port, listeners: vec![], secret: Some(secret) })
}

/// Returns the secret that rank 0 has drawn, or the one that both ranks were given. A given secret is never sent.
fn agreed(launch: &Launch, drawn: Option<Secret>, given: Option<Secret>) -> Result<Secret> {
    let given_to = match (drawn, given) {
        (Some(secret), None) | (None, Some(secret)) => return Ok(secret),
        (None, None) => "rank 0 was given one".to_string(),
        (Some(_), Some(_)) => format!("rank {} was given one", launch.rank()),
    };
    Err(Error::invalid(
        "mpi",
        "rank 0 and this rank do not have the same secret",
        format!("rank {} of {}: only {given_to}", launch.rank(), launch.world_len()),
        "set ISOSHARD_TOKEN or ISOSHARD_TOKEN_FILE on all ranks (`mpirun -x ISOSHARD_TOKEN`), or on none: rank 0 draws one",
    ))
}

/// Returns true if all ranks are on this machine.
fn on_one_machine(launch: &Launch) -> bool {
    launch.local_len() == Some(launch.world_len())
}

/// Listens at one port, that of `ISOSHARD_PORT` or any: on `ISOSHARD_BIND` if it is set; on 127.0.0.1 alone if all
/// ranks are on this machine; else on each of the machine's addresses and 127.0.0.1.
fn listen(launch: &Launch) -> Result<(u16, Vec<TcpListener>)> {
    let get = |name: &str| std::env::var(name).ok();
    let port = Vars::new(&get).port("ISOSHARD_PORT")?.unwrap_or(0);
    let ips: Vec<IpAddr> = match launch.bind {
        Some(ip) => vec![ip],
        None if on_one_machine(launch) => vec![],
        None => named()
            .iter()
            .flat_map(|host| addresses_of(host))
            .chain(addresses().into_iter().map(|(ip, _)| ip))
            .collect(),
    };
    listen_at(&ips, port, launch.bind.is_none()).map_err(|e| {
        Error::invalid(
            "mpi",
            "rank 0 cannot listen",
            format!("port {port}: {e}"),
            "set ISOSHARD_PORT to a free port on all ranks, or to none",
        )
    })
}

/// Listens at one port, any if it is 0, on those of `ips` that are usable, and on 127.0.0.1 if `local`.
///
/// # Errors
/// Returns the last failure if none of `ips` is usable, or if `ips` is empty and 127.0.0.1 is not.
fn listen_at(ips: &[IpAddr], port: u16, local: bool) -> io::Result<(u16, Vec<TcpListener>)> {
    /// The number of attempts: a port that is free on one address may be in use on another.
    const TRIES: usize = 16;
    let mut wanted: Vec<IpAddr> = Vec::new();
    for &ip in ips.iter().chain(local.then_some(&LOCAL)) {
        if !wanted.contains(&ip) {
            wanted.push(ip);
        }
    }
    sort_by_key(&mut wanted, |&ip| ip == LOCAL);
    let mut tries = 1;
    loop {
        let (mut at, mut listeners, mut last, mut crowded) = (port, Vec::new(), None, false);
        for &ip in &wanted {
            // 127.0.0.1 does not replace an address that other machines could have reached.
            if ip == LOCAL && listeners.is_empty() && wanted.len() > 1 && last.is_some() {
                break;
            }
            match TcpListener::bind((ip, at)).and_then(|listener| Ok((listener.local_addr()?, listener))) {
                Ok((address, listener)) => {
                    at = address.port();
                    listeners.push(listener);
                }
                Err(e) => {
                    crowded |= e.kind() == io::ErrorKind::AddrInUse;
                    last = Some(e);
                }
            }
        }
        if crowded && port == 0 && tries < TRIES {
            tries += 1;
        } else if listeners.is_empty() {
            return Err(last.unwrap_or_else(|| io::Error::other("this machine has no address")));
        } else {
            return Ok((at, listeners));
        }
    }
}

/// Returns the host that `MASTER_ADDR` names.
fn named() -> Option<String> {
    std::env::var("MASTER_ADDR").ok().filter(|host| !host.is_empty())
}

fn addresses_of(host: &str) -> Vec<IpAddr> {
    let found = (host, 0).to_socket_addrs().map(|all| all.map(|at| at.ip()).collect());
    found.unwrap_or_default()
}

/// Returns the hosts that rank 0 broadcasts: that of `MASTER_ADDR`, unless all ranks are on this machine, and its
/// own.
fn hosts_of(launch: &Launch, listeners: &[TcpListener], own: &[(IpAddr, u32)]) -> Vec<String> {
    let ips = listeners.iter().filter_map(|listener| Some(listener.local_addr().ok()?.ip()));
    let named = named().filter(|_| !on_one_machine(launch));
    named.into_iter().chain(reached(ips, own)).collect()
}

/// Returns `address/bits` for each address at which listeners on `ips` are reached; `own` are this machine's
/// addresses.
fn reached(ips: impl Iterator<Item = IpAddr>, own: &[(IpAddr, u32)]) -> Vec<String> {
    // A prefix so long that no other address is on the same network.
    const ALL_BITS: u32 = 128;
    let mut found: Vec<(IpAddr, u32)> = Vec::new();
    for ip in ips {
        if ip.is_unspecified() {
            found.extend(own.iter().filter(|(mine, _)| ip.is_ipv6() || mine.is_ipv4()));
            found.push((LOCAL, ALL_BITS));
        } else {
            let bits = own.iter().find(|(mine, _)| *mine == ip).map_or(ALL_BITS, |&(_, bits)| bits);
            found.push((ip, bits));
        }
    }
    found.into_iter().map(|(ip, bits)| format!("{ip}/{bits}")).collect()
}

/// Writes `port;machine;secret;host,address/bits,address/bits`, with an empty secret if all ranks were given one.
fn words(port: u16, machine: &str, drawn: Option<&Secret>, hosts: &[String]) -> String {
    let mut text = format!("{port};{machine};{};{}", drawn.map_or("", Secret::text), hosts.join(","));
    // Further addresses of a machine that has very many are left out.
    while text.len() > ROOM {
        text.truncate(text.rfind(',').unwrap_or(0));
    }
    text
}

/// The content of rank 0's broadcast, as a rank uses it.
struct Directions {
    /// The hosts to try, the best first.
    hosts: Vec<String>,
    port: u16,
    drawn: Option<Secret>,
}

/// Parses rank 0's broadcast for a rank on the machine of that name with those addresses.
fn understand(said: &[u8], here: &str, own: &[(IpAddr, u32)]) -> Option<Directions> {
    let text = std::str::from_utf8(said).ok()?.trim_end_matches('\0');
    let [port, machine, secret, hosts] = text.split(';').collect::<Vec<_>>().try_into().ok()?;
    let mut found: Vec<(u32, String)> = Vec::new();
    for host in hosts.split(',').filter(|host| !host.is_empty()) {
        let (name, bits) = host.split_once('/').map_or((host, None), |(ip, bits)| (ip, bits.parse().ok()));
        found.push((distance(name, bits, own), name.to_string()));
    }
    sort_by_key(&mut found, |&(distance, _)| distance);
    // If rank 0 is on another machine, an address that this machine has as well, as 127.0.0.1 or that of a container
    // bridge, means this machine. Machines that are one may have different names, so such addresses stay if there is
    // no other.
    if machine != here && found.iter().any(|&(distance, _)| distance < OWN) {
        found.retain(|&(distance, _)| distance < OWN);
    }
    let hosts = found.into_iter().map(|(_, host)| host).collect();
    let drawn = if secret.is_empty() { None } else { Some(Secret::from_text(secret, "mpi").ok()?) };
    Some(Directions { hosts, port: port.parse().ok()?, drawn })
}

/// The first rank in [`distance`] of addresses that mean this machine.
const OWN: u32 = 3;

/// Ranks a host among those to try: first the host of `MASTER_ADDR`, then an address on one of this machine's
/// networks, any other address, one that this machine has itself, and last a loopback address.
fn distance(host: &str, bits: Option<u32>, own: &[(IpAddr, u32)]) -> u32 {
    match (host.parse::<IpAddr>(), bits) {
        (Ok(ip), _) if ip.is_loopback() => OWN + 1,
        (Ok(ip), _) if own.iter().any(|&(mine, _)| mine == ip) => OWN,
        (_, None) => 0,
        (Ok(ip), Some(bits)) if own.iter().any(|&(mine, _)| are_near(mine, ip, bits)) => 1,
        _ => 2,
    }
}

fn broadcast(mpi: &Mpi, mut said: [u8; ROOM], deadline: Duration) -> Result<Vec<u8>> {
    let broken = |reason: String| {
        Error::unsupported(
            "mpi",
            "the broadcast of rank 0 did not arrive",
            reason,
            "look at MPI's network on these machines",
        )
    };
    let mut bytes: Box<[u8]> = Box::new(std::mem::replace(&mut said, [0; ROOM]));
    // SAFETY: the block is leaked unless MPI has finished, and not read before.
    let ticket = unsafe { mpi.guard().broadcast(bytes.as_mut_ptr(), ROOM) };
    let mut ticket = ticket.map_err(|e| broken(e.to_string()))?;
    let begun = Instant::now();
    loop {
        match mpi.guard().test(&mut ticket) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::launch::SecretSource;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn own(all: &[(&str, u32)]) -> Vec<(IpAddr, u32)> {
        all.iter().map(|&(text, bits)| (ip(text), bits)).collect()
    }

    fn heard(hosts: &[&str], here: &str, addresses: &[(&str, u32)]) -> Vec<String> {
        let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
        let mut said = words(7, "node0", None, &hosts).into_bytes();
        said.resize(ROOM, 0);
        let heard = understand(&said, here, &own(addresses)).unwrap();
        assert!(heard.port == 7 && heard.drawn.is_none());
        heard.hosts
    }

    #[test]
    fn the_words_name_only_where_somebody_listens() {
        let at = |ips: &[&str], own: &[(IpAddr, u32)]| reached(ips.iter().map(|text| ip(text)), own);
        let mine = own(&[("10.0.0.1", 24), ("172.17.0.1", 16), ("fd00::1", 64)]);
        assert_eq!(at(&["10.0.0.1", "127.0.0.1"], &mine), ["10.0.0.1/24", "127.0.0.1/128"]);
        assert_eq!(at(&["10.9.9.9"], &mine), ["10.9.9.9/128"], "ISOSHARD_BIND's alone");
        assert_eq!(at(&["0.0.0.0"], &mine), ["10.0.0.1/24", "172.17.0.1/16", "127.0.0.1/128"]);
        assert_eq!(at(&["::"], &mine).len(), 4);
        // One address belongs to another machine, one is in use.
        let taken = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let (at_port, listeners) =
            listen_at(&[ip("192.0.2.77"), ip("127.0.0.2"), ip("127.0.0.3")], port, true).unwrap();
        let ips: Vec<IpAddr> = listeners.iter().map(|l| l.local_addr().unwrap().ip()).collect();
        assert_eq!((at_port, ips), (port, vec![ip("127.0.0.3"), LOCAL]));
    }

    #[test]
    fn this_machine_s_ranks_find_rank_0_at_127_0_0_1() {
        // With `lo` alone, and without the number of local ranks.
        let (port, listeners) = listen_at(&[], 0, true).unwrap();
        let ips = listeners.iter().map(|l| l.local_addr().unwrap().ip());
        assert_eq!(reached(ips, &[]), ["127.0.0.1/128"]);
        assert_ne!(port, 0);
        // In addition to other addresses, at their port, and each once.
        let (port, listeners) = listen_at(&[ip("127.0.0.5"), ip("127.0.0.5")], 0, true).unwrap();
        let at: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        assert_eq!(at, [(ip("127.0.0.5"), port).into(), (LOCAL, port).into()]);
        // Not if an address to listen at is given, and not instead of an address that other machines reach.
        assert_eq!(listen_at(&[ip("127.0.0.5")], 0, false).unwrap().1.len(), 1);
        assert!(listen_at(&[ip("192.0.2.77")], 0, true).is_err());
        assert!(listen_at(&[], 0, false).unwrap_err().to_string().contains("no address"));
    }

    #[test]
    fn nobody_takes_its_own_addresses_for_rank_0_s() {
        let said = ["172.17.0.1/16", "10.1.0.1/24", "10.0.0.1/24", "127.0.0.1/128"];
        let other = [("10.0.0.2", 24), ("172.17.0.1", 16)];
        assert_eq!(heard(&said, "node1", &other), ["10.0.0.1", "10.1.0.1"]);
        // Machines may share a name: an address that is certainly another machine's goes first.
        assert_eq!(heard(&said, "node0", &other), ["10.0.0.1", "10.1.0.1", "172.17.0.1", "127.0.0.1"]);
        // The host of `MASTER_ADDR` goes first, unless it is this machine.
        assert_eq!(heard(&["gate", "10.0.0.1/24"], "node1", &other), ["gate", "10.0.0.1"]);
        assert_eq!(heard(&["127.0.0.1", "10.0.0.1/24"], "node1", &other), ["10.0.0.1"]);
        // Containers on one machine have names of their own.
        let same = [("10.0.0.1", 24)];
        assert_eq!(heard(&["10.0.0.1/24", "127.0.0.1/128"], "other", &same), ["10.0.0.1", "127.0.0.1"]);
        assert_eq!(heard(&["127.0.0.1/128"], "node0", &same), ["127.0.0.1"]);
        assert!(understand(b"7;node0;short;10.0.0.1", "node1", &[]).is_none());
    }

    #[test]
    fn a_secret_that_is_given_is_used_and_not_sent() {
        let launch = Launch {
            by: "a test",
            rank: 1,
            world_len: 2,
            local_rank: 1,
            local_len: None,
            host: None,
            port: 1,
            bind: None,
            secret: SecretSource::None,
        };
        let [drawn, given] = [(); 2].map(|()| Secret::draw().unwrap());
        let text = words(7, "node0", Some(&drawn), &["10.0.0.1/24".into()]);
        let heard = understand(text.as_bytes(), "node1", &[]).unwrap().drawn;
        assert_eq!(agreed(&launch, heard, None).unwrap(), drawn);
        assert_eq!(agreed(&launch, None, Some(given.clone())).unwrap(), given);
        for (drawn, given, want) in [
            (None, None, "got rank 1 of 2: only rank 0 was given one; set"),
            (Some(drawn), Some(given), "got rank 1 of 2: only rank 1 was given one; set"),
        ] {
            let text = agreed(&launch, drawn, given).unwrap_err().to_string();
            assert!(text.contains(want), "{text}");
        }
    }
}
