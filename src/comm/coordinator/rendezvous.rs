//! The rendezvous: rank 0 listens, every rank shows that it is one of the job's, and all go on together.
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
//! Whoever cannot show that it knows the secret loses its connection, and nobody else anything. Every exchange has a deadline for
//! the whole of it, however its bytes are cut up.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::auth::{Greeting, Keys, VERSION};
use super::client::Client;
use super::connection::{self, ANSWER_DEADLINE, Connection, Serving};
use super::door::{Arrival, Door, HELLO_DEADLINE};
use super::frame::{self, Until};
use super::message::{Answer, JoinRequest, Message};
use crate::comm::calls::label;
use crate::comm::launch::{Launch, Secret};
use crate::error::{CallId, CommFault, Error, Result};

const VERB: &str = "rendezvous";

/// A world's meeting, as its launch and its engine have it.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Rendezvous<'a> {
    pub launch: &'a Launch,
    /// What carries this rank's tensors: the same on all ranks.
    pub library: &'a str,
    /// How long the ranks wait for each other.
    pub deadline: Duration,
    /// Meet without a secret on addresses that others can reach.
    pub insecure: bool,
}

/// Where the ranks meet.
#[derive(Debug)]
pub(in crate::comm) struct MeetingPlace {
    /// Names or addresses of rank 0's machine: one that a rank reaches is enough.
    pub hosts: Vec<String>,
    pub port: u16,
    /// At rank 0, where somebody listens there already.
    pub listeners: Vec<TcpListener>,
    pub secret: Option<Secret>,
}

impl Rendezvous<'_> {
    /// Meets all ranks of the launch.
    ///
    /// # Errors
    /// Names the ranks that have not come within the deadline. Refuses: a meeting place that others can reach, without a
    /// secret; and, on all ranks where they share one, processes that claim the same rank, a world of another size, or bring
    /// another library.
    pub fn meet(self) -> Result<Client> {
        let end = Instant::now() + self.deadline;
        let Launch { rank, world_len, ref secret, .. } = *self.launch;
        if world_len == 1 {
            return Ok(alone(self.deadline));
        }
        let (host, port) = self.launch.address()?;
        let secret = secret.read(rank == 0, end)?;
        self.meet_at(MeetingPlace { hosts: vec![host.into()], port, listeners: vec![], secret })
    }

    /// As [`Rendezvous::meet`], at a place of one's own.
    ///
    /// # Errors
    /// As [`Rendezvous::meet`].
    pub fn meet_at(self, place: MeetingPlace) -> Result<Client> {
        let end = Instant::now() + self.deadline;
        if self.launch.world_len == 1 {
            return Ok(alone(self.deadline));
        }
        let table = Meeting { what: self, place, end };
        table.check_secret()?;
        match self.launch.rank {
            0 => table.host(),
            _ => table.join(),
        }
    }
}

/// The client of a rank without others.
fn alone(deadline: Duration) -> Client {
    Client::of_threads(1, deadline).pop().expect("one was asked for")
}

struct Meeting<'a> {
    what: Rendezvous<'a>,
    place: MeetingPlace,
    end: Instant,
}

/// The ranks that have come, with the addresses they came from.
type Admitted = BTreeMap<usize, (Connection, SocketAddr)>;

impl Meeting<'_> {
    /// Refuses a place that others can reach, without a secret to tell them from the ranks.
    fn check_secret(&self) -> Result<()> {
        let Launch { rank, world_len, bind, .. } = self.what.launch;
        let open = bind.filter(|ip| !ip.is_loopback()).map(|ip| SocketAddr::new(ip, self.place.port));
        let open = open.or_else(|| self.addresses().find(|address| !address.ip().is_loopback()));
        match open {
            Some(address) if self.place.secret.is_none() && !self.what.insecure => Err(Error::invalid(
                VERB,
                "ranks that others can reach need a shared secret",
                format!(
                    "rank {rank} of {world_len} at {address}, and neither ISOSHARD_TOKEN nor ISOSHARD_TOKEN_FILE"
                ),
                "set one of them, the same on all ranks (docs/clusters.md says how); --insecure-rendezvous or \
                 Process::insecure_rendezvous meets without",
            )),
            _ => Ok(()),
        }
    }

    fn host(&self) -> Result<Client> {
        let mut admitted = Admitted::new();
        if let Err(error) = self.gather(&mut admitted) {
            self.dismiss(admitted, &error);
            return Err(error);
        }
        let connections = admitted.into_values().map(|(connection, _)| connection).collect();
        let serving =
            Serving::new(connections, self.what.deadline).map_err(|e| self.broken(e.to_string()))?;
        for rank in 1..self.what.launch.world_len {
            let sent = serving.coordinator.send(rank, &Answer::Complete, Instant::now() + ANSWER_DEADLINE);
            if let Err(e) = sent {
                let error = self.broken(format!("rank {rank} does not hear that all have come: {e}"));
                serving.coordinator.take(0, Message::Failed { cause: error.to_string() });
                serving.coordinator.hang_up();
                serving.go(false);
                return Err(error);
            }
        }
        serving.go(true);
        Ok(serving.client)
    }

    /// Waits until every rank but this one has come.
    fn gather(&self, admitted: &mut Admitted) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(2);
        let n = self.what.launch.world_len;
        let listeners = self.listen()?;
        let mut door =
            Door::new(listeners, self.place.secret.clone()).map_err(|e| self.broken(e.to_string()))?;
        while admitted.len() < n - 1 {
            let arrivals = door.turn()?;
            if arrivals.is_empty() {
                if Instant::now() >= self.end {
                    let missing = (1..n).filter(|rank| !admitted.contains_key(rank)).collect();
                    return Err(self.missing(missing, &door.turned_away().text()));
                }
                thread::sleep(PAUSE);
            }
            for arrival in arrivals {
                let Some(error) = self.objection(&arrival, admitted) else {
                    self.admit(arrival, admitted);
                    continue;
                };
                let Arrival { connection, from, join } = arrival;
                self.dismiss(BTreeMap::from([(join.rank, (connection, from))]), &error);
                // It has the job's secret: it is one of the job's, and the job is wrong.
                if self.place.secret.is_some() {
                    return Err(error);
                }
                door.turned_away().add(from, &error.to_string());
            }
        }
        Ok(())
    }

    /// Lets a rank in, if it is still there to hear so.
    fn admit(&self, Arrival { mut connection, from, join }: Arrival, admitted: &mut Admitted) {
        if connection.answer(&Answer::Admitted).is_ok() {
            admitted.insert(join.rank, (connection, from));
        }
    }

    /// Tells those who came why nothing comes of it; whoever has gone meanwhile need not hear.
    fn dismiss(&self, admitted: Admitted, error: &Error) {
        let answer = Answer::of(error);
        for (mut connection, _) in admitted.into_values() {
            let _ = connection.answer(&answer);
        }
    }

    /// Why somebody who knows the secret may not come in.
    fn objection(&self, arrival: &Arrival, admitted: &Admitted) -> Option<Error> {
        let Arrival { from, join: JoinRequest { rank, world_len, library }, .. } = arrival;
        let (rank, n) = (*rank, self.what.launch.world_len);
        let refuse =
            |rule: &str, given: String, remedy: &str| Some(Error::invalid(VERB, rule, given, remedy));
        let remedy = "start every rank once, by one launcher";
        if *world_len != n {
            let given = format!("rank {rank} at {from} counts {world_len} ranks, rank 0 counts {n}");
            return refuse("the ranks differ about the size of the world", given, remedy);
        }
        if rank == 0 || rank >= n {
            return refuse("a rank is not in the world", format!("rank {rank} of {n} from {from}"), remedy);
        }
        if library != self.what.library {
            return refuse(
                "the ranks run different libraries",
                format!("{} at rank 0, {library} at rank {rank}", self.what.library),
                "install one version on all nodes",
            );
        }
        let (first, address) = admitted.get(&rank)?;
        // A rank whose connection broke comes again.
        if first.is_gone() {
            return None;
        }
        refuse("two processes claim one rank", format!("rank {rank} from {address} and from {from}"), remedy)
    }

    /// Listens at the launch's address, or at the one that is said instead.
    fn listen(&self) -> Result<Vec<TcpListener>> {
        let launch = self.what.launch;
        if !self.place.listeners.is_empty() {
            let again = |listener: &TcpListener| listener.try_clone();
            return self
                .place
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
            Some(ip) => vec![SocketAddr::new(ip, self.place.port)],
            None => self.addresses().collect(),
        };
        let ips: Vec<_> = addresses.iter().map(SocketAddr::ip).collect();
        if self.place.hosts.iter().any(|host| launch.is_found_only_here(host, &ips)) {
            let reason = format!("here this is {}, which other machines cannot reach", addresses[0].ip());
            return refuse(
                &reason,
                "set ISOSHARD_BIND on rank 0 to the address that the others reach, or to 0.0.0.0",
            );
        }
        let mut last = "the name is not known here".to_string();
        for address in addresses {
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
            "where the address is not this machine's own (a service, a gateway), set ISOSHARD_BIND on rank 0 to one that is, \
             or to 0.0.0.0",
        )
    }

    fn join(&self) -> Result<Client> {
        const PAUSE: Duration = Duration::from_millis(50);
        loop {
            let stream = self.connect()?;
            match self.introduce(&stream) {
                Ok(Some(keys)) => return self.await_the_others(Connection { stream, keys }),
                // Rank 0's door was crowded, or its process is not ready yet.
                Ok(None) => thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
    }

    fn connect(&self) -> Result<TcpStream> {
        const PAUSE: Duration = Duration::from_millis(50);
        let mut pause = Duration::from_millis(2);
        loop {
            for address in self.addresses() {
                let left = self.end.saturating_duration_since(Instant::now()).min(HELLO_DEADLINE);
                if !left.is_zero()
                    && let Ok(stream) = TcpStream::connect_timeout(&address, left)
                {
                    return Ok(stream);
                }
            }
            if Instant::now() >= self.end {
                return Err(self.missing(vec![0], ""));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
    }

    /// Says who this is, and hears that rank 0 knows the secret as well; none where it must be tried again.
    fn introduce(&self, stream: &TcpStream) -> Result<Option<Keys>> {
        let Launch { rank, world_len, .. } = *self.launch();
        let _ = stream.set_nodelay(true);
        let mut until = Until { stream, end: self.end };
        let mut theirs = [0; Greeting::BYTES];
        if let Err(e) = io::Read::read_exact(&mut until, &mut theirs) {
            return self.again(&e);
        }
        let theirs = match Greeting::decode(&theirs) {
            Some(greeting) if greeting.version == VERSION => greeting,
            Some(Greeting { version, .. }) => {
                return Err(Error::invalid(
                    VERB,
                    "the ranks run versions of this library that do not talk",
                    format!("version {version} at {}, {VERSION} at rank {rank}", self.address()),
                    "build all ranks alike",
                ));
            }
            None => return Err(self.somebody_else()),
        };
        let ours = Greeting::fresh()?;
        let mut keys = Keys::of(self.place.secret.as_ref(), &theirs, &ours);
        let mut hello = ours.encode().to_vec();
        let join = JoinRequest { rank, world_len, library: self.what.library.into() };
        frame::seal(&join, &mut keys.to_coordinator, JoinRequest::BYTES, &mut hello)
            .map_err(|e| self.broken(e.to_string()))?;
        if let Err(e) = until.write_all(&hello) {
            return self.again(&e);
        }
        let limit = frame::limit(world_len);
        match frame::receive(&mut until, &mut keys.from_coordinator, limit, &mut vec![]) {
            Ok(Answer::Admitted) => Ok(Some(keys)),
            Ok(answer) => Err(self.refusal(answer)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(Error::invalid(
                VERB,
                "rank 0 and this rank do not have the same secret",
                format!("rank {rank} of {world_len} at {}", self.address()),
                "set ISOSHARD_TOKEN or ISOSHARD_TOKEN_FILE to the same on all ranks",
            )),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => Err(self.somebody_else()),
            Err(e) => self.again(&e),
        }
    }

    /// Nothing came of a connection: there may be another, before the deadline.
    fn again<T>(&self, e: &io::Error) -> Result<Option<T>> {
        if Instant::now() < self.end {
            return Ok(None);
        }
        Err(self.missing(vec![0], &format!(", where nothing is said: {e}")))
    }

    /// Waits for the others, who are there when rank 0 says so.
    fn await_the_others(&self, Connection { stream, mut keys }: Connection) -> Result<Client> {
        let Launch { rank, world_len, .. } = *self.launch();
        // Rank 0 may have begun to wait only now, and answers at its own deadline.
        let end = Instant::now() + self.what.deadline + HELLO_DEADLINE;
        let limit = frame::limit(world_len);
        let mut until = Until { stream: &stream, end };
        let answer = frame::receive(&mut until, &mut keys.from_coordinator, limit, &mut vec![]);
        let fail = |e: io::Error| self.broken(format!("rank 0 at {}: {e}", self.address()));
        match answer.map_err(fail)? {
            Answer::Complete => {
                connection::client(rank, world_len, Connection { stream, keys }).map_err(fail)
            }
            answer => Err(self.refusal(answer)),
        }
    }

    /// The error that an answer is.
    fn refusal(&self, answer: Answer) -> Error {
        match answer {
            Answer::Refused { verb, rule, given, remedy } => Error::invalid(verb, rule, given, remedy),
            Answer::Missing(missing) => self.missing(missing, ""),
            Answer::Admitted | Answer::Complete => self.broken("rank 0 answers out of turn".into()),
        }
    }

    fn somebody_else(&self) -> Error {
        let given = format!("an answer from {} that is not of this library", self.address());
        let remedy = "set ISOSHARD_PORT to a free port on all ranks";
        Error::invalid(VERB, "somebody else listens at the meeting place", given, remedy)
    }

    fn missing(&self, missing: Vec<usize>, more: &str) -> Error {
        CommFault::Missing {
            id: self.id(),
            rank: self.launch().rank,
            brought: format!("the address {}{more}", self.address()),
            missing,
            ended: false,
            deadline_s: self.what.deadline.as_secs_f64(),
            elsewhere: vec![],
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
        self.what.launch
    }

    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let of = |host: &String| (host.as_str(), self.place.port).to_socket_addrs().into_iter().flatten();
        self.place.hosts.iter().flat_map(of)
    }

    fn address(&self) -> String {
        format!("{}:{}", self.place.hosts.join("|"), self.place.port)
    }
}
