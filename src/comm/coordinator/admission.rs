//! Admission of connections that have not yet proved that they know the secret.
//!
//! The caller's thread serves a limited number of them, each with a limit of bytes and time. If there are too many,
//! or the system has no file descriptors left, one is closed: the oldest of the address with most connections.
//! Invalid input costs a connection nothing but itself.
//!
//! Missing: a longer queue of connections before they are accepted (the system's holds 128). If many thousands
//! connect at once, they succeed only by their systems' retries, seconds apart.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::auth::{Greeting, Keys, VERSION};
use super::connection::Connection;
use super::frame::{FrameHead, HEAD_BYTES, REJECTED};
use super::message::JoinRequest;
use crate::comm::launch::Secret;
use crate::error::Result;

/// The time limit for a connection to prove that it knows the secret.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// The largest number of unauthenticated connections at a time, of about a kilobyte each.
const UNAUTHENTICATED: usize = 256;
/// The minimal age of a connection that is closed to make room: a rank proves itself within a round trip.
const EVICTION_GRACE: Duration = Duration::from_millis(50);
/// The number of rejected addresses that errors list.
const REMEMBERED: usize = 8;

/// Listeners and their unauthenticated connections.
pub(super) struct Admission {
    listeners: Vec<TcpListener>,
    secret: Option<Secret>,
    waiting: VecDeque<UnauthenticatedConnection>,
    rejected: RejectedPeers,
    /// The listener that is asked first, in rotation.
    first: usize,
}

/// A process that has proved that it knows the secret.
pub(super) struct AuthenticatedPeer {
    pub connection: Connection,
    pub from: SocketAddr,
    pub join: JoinRequest,
}

struct UnauthenticatedConnection {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    hello: ClientHello,
}

/// The rejected connections, for the error about missing ranks.
#[derive(Default)]
pub(super) struct RejectedPeers {
    first: Vec<String>,
    more: usize,
    /// The system's last error from accepting connections.
    trouble: Option<String>,
}

impl Admission {
    /// # Errors
    /// Returns an error of the listeners.
    pub fn new(listeners: Vec<TcpListener>, secret: Option<Secret>) -> io::Result<Admission> {
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        Ok(Admission {
            listeners,
            secret,
            waiting: VecDeque::new(),
            rejected: RejectedPeers::default(),
            first: 0,
        })
    }

    /// Accepts and reads without waiting, and returns the peers that have now proved that they know the secret.
    pub fn poll(&mut self) -> Vec<AuthenticatedPeer> {
        // Bounded, so that the call ends even if connections keep coming.
        for _ in 0..2 * UNAUTHENTICATED {
            let crowded = self.waiting.len() >= UNAUTHENTICATED && !self.evict_one(EVICTION_GRACE);
            let Some((stream, from)) = (if crowded { None } else { self.accept() }) else { break };
            if let Ok(hello) = ClientHello::new()
                && greet(&stream, &hello).is_ok()
            {
                self.waiting.push_back(UnauthenticatedConnection {
                    stream,
                    from,
                    since: Instant::now(),
                    hello,
                });
            }
        }
        let mut authenticated = Vec::new();
        for mut peer in std::mem::take(&mut self.waiting) {
            match peer.read(self.secret.as_ref()) {
                HelloState::Incomplete if peer.since.elapsed() < HELLO_DEADLINE => {
                    self.waiting.push_back(peer)
                }
                HelloState::Incomplete => self.rejected.add(peer.from, "sent nothing in time"),
                HelloState::Closed => {}
                HelloState::Rejected(why) => self.rejected.add(peer.from, why),
                HelloState::Authenticated(join, keys) => {
                    let UnauthenticatedConnection { stream, from, .. } = peer;
                    let connection = Connection { stream: stream.into(), keys: *keys };
                    authenticated.push(AuthenticatedPeer { connection, from, join });
                }
            }
        }
        authenticated
    }

    pub fn rejected(&mut self) -> &mut RejectedPeers {
        &mut self.rejected
    }

    /// Closes the oldest connection of the address with most connections, unless it is younger than `grace`.
    fn evict_one(&mut self, grace: Duration) -> bool {
        let mut from: HashMap<IpAddr, usize> = HashMap::new();
        self.waiting.iter().for_each(|peer| *from.entry(peer.from.ip()).or_default() += 1);
        let most = from.iter().max_by_key(|(_, len)| **len).map(|(ip, _)| *ip);
        let oldest = self.waiting.iter().position(|peer| Some(peer.from.ip()) == most);
        let gone = oldest.filter(|&at| self.waiting[at].since.elapsed() >= grace);
        let gone = gone.and_then(|at| self.waiting.remove(at));
        gone.is_some_and(|peer| {
            self.rejected.add(peer.from, "was closed to make room");
            true
        })
    }

    /// Accepts a connection, if there is one.
    fn accept(&mut self) -> Option<(TcpStream, SocketAddr)> {
        self.first = (self.first + 1) % self.listeners.len();
        for k in 0..self.listeners.len() {
            match self.listeners[(self.first + k) % self.listeners.len()].accept() {
                Ok(accepted) => return Some(accepted),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // It was closed before it was accepted.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                // Most likely no file descriptor is left; the next call has one.
                Err(e) => {
                    self.rejected.trouble = Some(e.to_string());
                    self.evict_one(Duration::ZERO);
                }
            }
        }
        None
    }
}

/// Sends the greeting. It fits into an empty send buffer; otherwise the connection is dropped.
fn greet(stream: &TcpStream, hello: &ClientHello) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let greeting = hello.greeting.encode();
    let sent = (&*stream).write(&greeting)?;
    if sent == greeting.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl UnauthenticatedConnection {
    fn read(&mut self, secret: Option<&Secret>) -> HelloState {
        let mut room = [0; ClientHello::BYTES + 1];
        loop {
            match (&self.stream).read(&mut room) {
                Ok(0) => return HelloState::Closed,
                Ok(n) => match self.hello.receive(&room[..n], secret) {
                    HelloState::Incomplete => {}
                    HelloState::Rejected(why) => {
                        self.reject();
                        return HelloState::Rejected(why);
                    }
                    heard => return heard,
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return HelloState::Incomplete,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return HelloState::Closed,
            }
        }
    }

    /// Tells a rank with another secret that waiting is useless.
    fn reject(&self) {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&REJECTED.to_le_bytes());
        let _ = (&self.stream).write(&head);
    }
}

impl RejectedPeers {
    pub fn add(&mut self, from: SocketAddr, why: &str) {
        if self.first.len() < REMEMBERED {
            self.first.push(format!("{from} ({why})"));
        } else {
            self.more += 1;
        }
    }

    /// Returns `, where it turned away 10.0.0.7:41234 (another secret) and 3 more`, or "" if no connection was
    /// rejected.
    pub fn text(&self) -> String {
        let RejectedPeers { first, more, trouble } = self;
        let more = if *more == 0 { String::new() } else { format!(" and {more} more") };
        let mut text = match first.is_empty() {
            true => String::new(),
            false => format!(", where it turned away {}{more}", first.join(", ")),
        };
        if let Some(trouble) = trouble {
            text.push_str(&format!(", where the system refused connections for a while: {trouble}"));
        }
        text
    }
}

/// The bytes received from an unauthenticated connection: a greeting, then a [`JoinRequest`] under the keys that
/// follow from it.
pub(super) struct ClientHello {
    pub greeting: Greeting,
    received: Vec<u8>,
}

/// The conclusion from the bytes so far.
pub(super) enum HelloState {
    /// Valid so far, more is needed.
    Incomplete,
    /// The peer knows the secret.
    Authenticated(JoinRequest, Box<Keys>),
    /// The peer does not know the secret, or uses another protocol.
    Rejected(&'static str),
    /// The peer has closed the connection.
    Closed,
}

impl ClientHello {
    /// The largest number of bytes.
    pub const BYTES: usize = Greeting::BYTES + HEAD_BYTES + JoinRequest::BYTES;

    /// # Errors
    /// Returns an error if the system has no random numbers.
    pub fn new() -> Result<ClientHello> {
        Ok(ClientHello { greeting: Greeting::fresh()?, received: Vec::new() })
    }

    /// Adds received bytes.
    pub fn receive(&mut self, bytes: &[u8], secret: Option<&Secret>) -> HelloState {
        const OTHER: &str = "uses another protocol";
        if self.received.len() + bytes.len() > ClientHello::BYTES {
            return HelloState::Rejected("sends too many bytes");
        }
        self.received.extend_from_slice(bytes);
        let Some((greeting, rest)) = self.received.split_first_chunk() else { return HelloState::Incomplete };
        let Some(greeting) = Greeting::decode(greeting) else { return HelloState::Rejected(OTHER) };
        if greeting.version != VERSION {
            return HelloState::Rejected("another version of this library");
        }
        let Some((head, body)) = rest.split_first_chunk() else { return HelloState::Incomplete };
        let Ok(head) = FrameHead::decode(head, JoinRequest::BYTES) else {
            return HelloState::Rejected(OTHER);
        };
        if body.len() < head.len {
            return HelloState::Incomplete;
        }
        if body.len() > head.len {
            return HelloState::Rejected("sends too many bytes");
        }
        let mut keys = Keys::of(secret, &self.greeting, &greeting);
        match head.open(body, &mut keys.to_coordinator) {
            Ok(join) => HelloState::Authenticated(join, Box::new(keys)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => HelloState::Rejected("another secret"),
            Err(_) => HelloState::Rejected(OTHER),
        }
    }
}
