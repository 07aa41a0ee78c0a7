//! The rendezvous: rank 0 listens, every other rank proves that it belongs to the job, and all start together.
//!
//! ```text
//! rank k                                   rank 0
//!        -- connects ------------------->
//!        <- greeting, nonce -------------
//!        -- greeting, nonce, JoinRequest ------>   the first frame with a tag
//!        <- Admitted --------------------   rank 0 knows the secret as well
//!        <- Complete --------------------   when all have come
//! ```
//!
//! A connection that does not prove that it knows the secret is closed, without effect on other ranks. Every exchange
//! has one deadline as a whole.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::admission::{Admission, AuthenticatedPeer, HELLO_DEADLINE};
use super::auth::{Greeting, Keys, VERSION};
use super::client::Client;
use super::connection::{self, ANSWER_DEADLINE, Connection, ServedConnections};
use super::frame::{self, DeadlineStream};
use super::message::{Answer, JoinRequest, Message};
use crate::comm::calls::label;
use crate::comm::deadline;
use crate::comm::launch::{Launch, Secret};
use crate::error::{CallId, CommFault, Error, Result};

const VERB: &str = "rendezvous";

/// The parameters of a rendezvous.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Rendezvous<'a> {
    pub launch: &'a Launch,
    /// The library that carries tensors; the same on all ranks.
    pub library: &'a str,
    /// The time that ranks wait for each other.
    pub deadline: Duration,
    /// Allows meeting without a secret at an address that other machines can reach.
    pub insecure: bool,
}

/// The address at which the ranks meet.
#[derive(Debug)]
pub(in crate::comm) struct RendezvousPoint {
    /// Names or addresses of rank 0's machine; one reachable address is enough.
    pub hosts: Vec<String>,
    pub port: u16,
    /// At rank 0, listeners that are already open; empty otherwise.
    pub listeners: Vec<TcpListener>,
    pub secret: Option<Secret>,
}

impl Rendezvous<'_> {
    /// Meets all ranks of the launch.
    ///
    /// # Errors
    /// Returns an error with the missing ranks after the deadline. Refuses an address that other machines can reach
    /// without a secret. On all ranks that share a secret, refuses two processes with one rank, different sizes of
    /// the world, and different libraries.
    pub fn meet(self) -> Result<Client> {
        let end = deadline::end_after(self.deadline);
        let Launch { rank, world_len, ref secret, .. } = *self.launch;
        if world_len == 1 {
            return Ok(single_rank_client(self.deadline));
        }
        let (host, port) = self.launch.address()?;
        let secret = secret.read(rank == 0, end)?;
        self.meet_by(end, RendezvousPoint { hosts: vec![host.into()], port, listeners: vec![], secret })
    }

    /// Like [`Rendezvous::meet`], at a given address.
    ///
    /// # Errors
    /// Same as [`Rendezvous::meet`].
    #[cfg(feature = "mpi")]
    pub fn meet_at(self, place: RendezvousPoint) -> Result<Client> {
        if self.launch.world_len == 1 {
            return Ok(single_rank_client(self.deadline));
        }
        self.meet_by(deadline::end_after(self.deadline), place)
    }

    fn meet_by(self, end: Instant, place: RendezvousPoint) -> Result<Client> {
        let resolved = RefCell::new((Instant::now(), vec![]));
        let run = RendezvousRun { setup: self, point: place, end, resolved };
        match self.launch.rank {
            0 => run.serve(),
            _ => run.join(),
        }
    }
}

/// Returns the client of a world of one rank.
fn single_rank_client(deadline: Duration) -> Client {
    Client::of_threads(1, deadline).pop().expect("one was asked for")
}

struct RendezvousRun<'a> {
    setup: Rendezvous<'a>,
    point: RendezvousPoint,
    end: Instant,
    /// The resolved addresses, and the time of the lookup.
    resolved: RefCell<(Instant, Vec<SocketAddr>)>,
}

/// The admitted peers by rank.
type AdmittedPeers = BTreeMap<usize, AuthenticatedPeer>;

impl RendezvousRun<'_> {
    /// Refuses an address that other machines can reach if there is no secret.
    fn check_secret(&self, address: SocketAddr) -> Result<()> {
        if address.ip().is_loopback() || self.point.secret.is_some() || self.setup.insecure {
            return Ok(());
        }
        let Launch { rank, world_len, .. } = self.setup.launch;
        Err(Error::invalid(
            VERB,
            "ranks that other machines can reach need a shared secret",
            format!(
                "rank {rank} of {world_len} at {address}, and neither ISOSHARD_TOKEN nor ISOSHARD_TOKEN_FILE"
            ),
            "set one of them, the same on all ranks (docs/clusters.md says how); --insecure-rendezvous or \
             Process::insecure_rendezvous meets without",
        ))
    }

    fn serve(&self) -> Result<Client> {
        let mut admitted = AdmittedPeers::new();
        if let Err(error) = self.admit_all(&mut admitted) {
            self.answer_all(admitted.into_values(), &error);
            return Err(error);
        }
        let connections = admitted.into_values().map(|arrival| arrival.connection).collect();
        let serving = ServedConnections::new(connections, self.setup.deadline)
            .map_err(|e| self.broken(e.to_string()))?;
        let n = self.setup.launch.world_len;
        for rank in 1..n {
            let sent = serving.coordinator.send(rank, &Answer::Complete, self.answer_end());
            if let Err(e) = sent {
                let error = self.broken(format!("rank {rank} cannot be told that all have come: {e}"));
                let (answer, end) = (Answer::of(&error), self.answer_end());
                for later in rank + 1..n {
                    let _ = serving.coordinator.send(later, &answer, end);
                }
                serving.coordinator.take(0, Message::Failed { cause: error.to_string() });
                serving.coordinator.hang_up();
                serving.start_readers(false);
                return Err(error);
            }
        }
        serving.start_readers(true);
        Ok(serving.client)
    }

    /// Waits until every other rank has come.
    fn admit_all(&self, admitted: &mut AdmittedPeers) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(2);
        let n = self.setup.launch.world_len;
        let listeners = self.listen()?;
        let mut admission =
            Admission::new(listeners, self.point.secret.clone()).map_err(|e| self.broken(e.to_string()))?;
        while admitted.len() < n - 1 {
            if Instant::now() >= self.end {
                let missing = (1..n).filter(|rank| !admitted.contains_key(rank)).collect();
                return Err(self.missing(missing, &admission.rejected().text()));
            }
            let arrivals = admission.poll();
            if arrivals.is_empty() {
                thread::sleep(PAUSE);
            }
            for mut arrival in arrivals {
                let Some(error) = self.refusal_of(&arrival, admitted) else {
                    // The rank counts as admitted only if it can be told.
                    if arrival.connection.answer(&Answer::Admitted, self.answer_end()).is_ok() {
                        admitted.insert(arrival.join.rank, arrival);
                    }
                    continue;
                };
                let from = arrival.from;
                self.answer_all([arrival], &error);
                // A process with the secret belongs to the job, so the job is set up wrongly.
                if self.point.secret.is_some() {
                    return Err(error);
                }
                admission.rejected().add(from, &error.to_string());
            }
        }
        Ok(())
    }

    fn answer_end(&self) -> Instant {
        Instant::now() + ANSWER_DEADLINE
    }

    /// Sends an error to peers; those that have left are ignored.
    fn answer_all(&self, arrivals: impl IntoIterator<Item = AuthenticatedPeer>, error: &Error) {
        let (answer, end) = (Answer::of(error), self.answer_end());
        for mut arrival in arrivals {
            let _ = arrival.connection.answer(&answer, end.max(Instant::now() + Duration::from_millis(1)));
        }
    }

    /// Returns the reason why an authenticated peer is refused, if there is one.
    fn refusal_of(&self, arrival: &AuthenticatedPeer, admitted: &AdmittedPeers) -> Option<Error> {
        let AuthenticatedPeer { from, join: JoinRequest { rank, world_len, process, library }, .. } = arrival;
        let (rank, n) = (*rank, self.setup.launch.world_len);
        let refuse =
            |rule: &str, given: String, remedy: &str| Some(Error::invalid(VERB, rule, given, remedy));
        let remedy = "start every rank once, by one launcher";
        if *world_len != n {
            let given = format!("rank {rank} at {from} counts {world_len} ranks, rank 0 counts {n}");
            return refuse("the ranks have different world sizes", given, remedy);
        }
        if rank == 0 || rank >= n {
            return refuse("a rank is outside the world", format!("rank {rank} of {n} from {from}"), remedy);
        }
        if library != self.setup.library {
            return refuse(
                "the ranks run different libraries",
                format!("{} at rank 0, {library} at rank {rank}", self.setup.library),
                "install one version on all nodes",
            );
        }
        let first = admitted.get(&rank)?;
        // The rank's connection broke, and it connects again.
        if first.join.process == *process || first.connection.is_gone() {
            return None;
        }
        let given = format!("rank {rank} from {} and from {from}", first.from);
        refuse("two processes claim one rank", given, remedy)
    }

    /// Listens at the launch's address or at the given listeners.
    fn listen(&self) -> Result<Vec<TcpListener>> {
        let launch = self.setup.launch;
        if !self.point.listeners.is_empty() {
            let again = |listener: &TcpListener| listener.try_clone();
            return self
                .point
                .listeners
                .iter()
                .map(again)
                .collect::<io::Result<_>>()
                .map_err(|e| self.broken(e.to_string()));
        }
        let refuse = |reason: &str, remedy: &str| {
            Err(Error::invalid(VERB, "rank 0 cannot listen", format!("{}: {reason}", self.address()), remedy))
        };
        let addresses: Vec<SocketAddr> = match launch.bind {
            Some(ip) => vec![SocketAddr::new(ip, self.point.port)],
            None => self.addresses(),
        };
        let ips: Vec<_> = addresses.iter().map(SocketAddr::ip).collect();
        if self.point.hosts.iter().any(|host| launch.is_found_only_here(host, &ips)) {
            let reason =
                format!("on this machine it is {}, which other machines cannot reach", addresses[0].ip());
            return refuse(
                &reason,
                "set ISOSHARD_BIND on rank 0 to the address that other machines reach, or to 0.0.0.0",
            );
        }
        let mut last = "the name is unknown on this machine".to_string();
        for address in addresses {
            self.check_secret(address)?;
            match TcpListener::bind(address) {
                Ok(listener) => return Ok(vec![listener]),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    let remedy = "end the other rank 0, or set ISOSHARD_PORT to a free port on all ranks";
                    return refuse(&e.to_string(), remedy);
                }
                Err(e) => last = e.to_string(),
            }
        }
        refuse(
            &last,
            "if the address is not this machine's own (a service, a gateway), set ISOSHARD_BIND on rank 0 to one that is, \
             or to 0.0.0.0",
        )
    }

    fn join(&self) -> Result<Client> {
        const PAUSE: Duration = Duration::from_millis(50);
        /// The number of wrong answers after which an address counts as wrong.
        const DOUBTS: usize = 3;
        let process = random()?;
        let mut pause = Duration::from_millis(2);
        // The listener has proved nothing: it may be another process that uses this address for a moment.
        let mut doubts: HashMap<SocketAddr, usize> = HashMap::new();
        let mut last = None;
        while Instant::now() < self.end {
            let addresses = self.addresses();
            for &address in &addresses {
                self.check_secret(address)?;
                let Some(stream) = self.connect(address) else { continue };
                match self.handshake(&stream, process) {
                    JoinAttempt::Admitted(keys) => {
                        return self.wait_until_complete(Connection { stream: stream.into(), keys: *keys });
                    }
                    JoinAttempt::Refused(error) => return Err(error),
                    JoinAttempt::Doubted(error) => {
                        *doubts.entry(address).or_default() += 1;
                        last = Some(error);
                    }
                    JoinAttempt::NoAnswer => {}
                }
            }
            let doubtful = |address: &SocketAddr| doubts.get(address).is_some_and(|&times| times >= DOUBTS);
            if !addresses.is_empty() && addresses.iter().all(doubtful) {
                break;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
        Err(last.unwrap_or_else(|| self.missing(vec![0], "")))
    }

    fn connect(&self, address: SocketAddr) -> Option<TcpStream> {
        let left = self.end.saturating_duration_since(Instant::now()).min(HELLO_DEADLINE);
        let stream = if left.is_zero() { None } else { TcpStream::connect_timeout(&address, left).ok() }?;
        // Without a listener at a port of this machine, a TCP connection may connect to itself.
        (stream.local_addr().ok() != stream.peer_addr().ok()).then_some(stream)
    }

    /// Sends this rank's join request and checks that rank 0 knows the secret as well.
    fn handshake(&self, stream: &TcpStream, process: u64) -> JoinAttempt {
        let Launch { rank, world_len, .. } = *self.launch();
        let _ = stream.set_nodelay(true);
        let end = self.end.min(Instant::now() + HELLO_DEADLINE);
        let mut until = DeadlineStream { stream, end };
        let mut theirs = [0; Greeting::BYTES];
        if io::Read::read_exact(&mut until, &mut theirs).is_err() {
            return JoinAttempt::NoAnswer;
        }
        let theirs = match Greeting::decode(&theirs) {
            Some(greeting) if greeting.version == VERSION => greeting,
            Some(Greeting { version, .. }) => {
                return JoinAttempt::Doubted(Error::invalid(
                    VERB,
                    "the ranks run incompatible versions of this library",
                    format!("version {version} at {}, {VERSION} at rank {rank}", self.address()),
                    "build all ranks from one version",
                ));
            }
            None => return JoinAttempt::Doubted(self.foreign_server()),
        };
        let ours = match Greeting::fresh() {
            Ok(greeting) => greeting,
            Err(error) => return JoinAttempt::Refused(error),
        };
        let mut keys = Keys::of(self.point.secret.as_ref(), &theirs, &ours);
        let mut hello = ours.encode().to_vec();
        let join = JoinRequest { rank, world_len, process, library: self.setup.library.into() };
        let sealed = frame::seal(&join, &mut keys.to_coordinator, JoinRequest::BYTES, &mut hello);
        if let Err(e) = sealed {
            return JoinAttempt::Refused(self.broken(e.to_string()));
        }
        if until.write_all(&hello).is_err() {
            return JoinAttempt::NoAnswer;
        }
        let limit = frame::notice_limit(world_len);
        match frame::receive(&mut until, &mut keys.from_coordinator, limit, &mut vec![]) {
            Ok(Answer::Admitted) => JoinAttempt::Admitted(keys.into()),
            Ok(answer) => JoinAttempt::Refused(self.refusal(answer)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => JoinAttempt::Doubted(Error::invalid(
                VERB,
                "rank 0 and this rank do not have the same secret",
                format!("rank {rank} of {world_len} at {}", self.address()),
                "set ISOSHARD_TOKEN or ISOSHARD_TOKEN_FILE to the same on all ranks",
            )),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => JoinAttempt::Doubted(self.foreign_server()),
            // Rank 0 had too many connections, or is not ready yet.
            Err(_) => JoinAttempt::NoAnswer,
        }
    }

    /// Waits until rank 0 reports that all ranks have come.
    fn wait_until_complete(&self, Connection { stream, mut keys }: Connection) -> Result<Client> {
        let Launch { rank, world_len, .. } = *self.launch();
        // Rank 0 may have started to wait only now, and answers at its own deadline.
        let end = deadline::end_after(self.setup.deadline.saturating_add(HELLO_DEADLINE));
        let limit = frame::notice_limit(world_len);
        let mut until = DeadlineStream { stream: &stream, end };
        let answer = frame::receive(&mut until, &mut keys.from_coordinator, limit, &mut vec![]);
        let fail = |e: io::Error| self.broken(format!("rank 0 at {}: {e}", self.address()));
        match answer.map_err(fail)? {
            Answer::Complete => {
                connection::client(rank, world_len, Connection { stream, keys }).map_err(fail)
            }
            answer => Err(self.refusal(answer)),
        }
    }

    /// Returns the error that an answer describes.
    fn refusal(&self, answer: Answer) -> Error {
        match answer {
            Answer::Refused { verb, rule, given, remedy } => Error::invalid(verb, rule, given, remedy),
            Answer::Missing(missing) => self.missing(missing, ""),
            Answer::Admitted | Answer::Complete => self.broken("rank 0 answers out of turn".into()),
        }
    }

    fn foreign_server(&self) -> Error {
        let given = format!("an answer from {} that is not of this library", self.address());
        let remedy = "set ISOSHARD_PORT to a free port on all ranks";
        Error::invalid(VERB, "another program listens at rank 0's address", given, remedy)
    }

    fn missing(&self, missing: Vec<usize>, more: &str) -> Error {
        CommFault::Missing {
            id: self.id(),
            rank: self.launch().rank,
            brought: format!("the address {}{more}", self.address()),
            missing,
            ended: false,
            deadline_s: self.setup.deadline.as_secs_f64(),
            elsewhere: vec![],
            busy: vec![],
            last: vec![],
        }
        .into()
    }

    fn broken(&self, reason: String) -> Error {
        CommFault::Transport { id: self.id(), rank: self.launch().rank, reason }.into()
    }

    fn id(&self) -> CallId {
        let everyone: Vec<usize> = (0..self.launch().world_len).collect();
        CallId::new(VERB, 0, label("world", &everyone))
    }

    fn launch(&self) -> &Launch {
        self.setup.launch
    }

    /// Returns the addresses of rank 0, looked up at most once per second.
    fn addresses(&self) -> Vec<SocketAddr> {
        const KEPT: Duration = Duration::from_secs(1);
        let mut known = self.resolved.borrow_mut();
        if known.1.is_empty() || known.0.elapsed() > KEPT {
            let of = |host: &String| (host.as_str(), self.point.port).to_socket_addrs().into_iter().flatten();
            *known = (Instant::now(), self.point.hosts.iter().flat_map(of).collect());
        }
        known.1.clone()
    }

    fn address(&self) -> String {
        format!("{}:{}", self.point.hosts.join("|"), self.point.port)
    }
}

/// The outcome of an attempt to join.
enum JoinAttempt {
    Admitted(Box<Keys>),
    /// Refused by rank 0, which has proved that it knows the secret.
    Refused(Error),
    /// A wrong answer from a listener that has proved nothing.
    Doubted(Error),
    NoAnswer,
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::unsupported(VERB, "the system has no random numbers", e.to_string(), ""))?;
    Ok(u64::from_le_bytes(bytes))
}
