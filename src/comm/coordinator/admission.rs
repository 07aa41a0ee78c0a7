//! The door: those who have connected and not yet shown that they know the secret.
//!
//! They are served on the caller's thread, a few at a time, each with so many bytes and so much time. Where too many have come,
//! and where the system has no descriptors left, one goes: of the address from which most have come, the one that has been there
//! longest. Whatever a stranger says costs it its connection and nobody else anything.
//!
//! Missing: a queue of its own length before the door (the system's holds 128), so that many thousands who connect in one moment
//! come in by their systems' retries, seconds apart.

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

/// The time that somebody who connects has to say who it is.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// So many waiting are heard at a time, of about a kilobyte each.
const UNAUTHENTICATED: usize = 256;
/// Nobody is sent away earlier for want of room: a rank answers within a round trip.
const EVICTION_GRACE: Duration = Duration::from_millis(50);
/// So many who were turned away are remembered.
const REMEMBERED: usize = 8;

/// Listeners, and who waits at them.
pub(super) struct Admission {
    listeners: Vec<TcpListener>,
    secret: Option<Secret>,
    waiting: VecDeque<UnauthenticatedConnection>,
    rejected: RejectedPeers,
    /// The listener that is asked first, each in turn.
    first: usize,
}

/// Somebody who has shown that it knows the secret.
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

/// Those who were turned away, for whoever wonders where a rank is.
#[derive(Default)]
pub(super) struct RejectedPeers {
    first: Vec<String>,
    more: usize,
    /// The last thing that kept the system from letting anybody in.
    trouble: Option<String>,
}

impl Admission {
    /// # Errors
    /// Those of the listeners.
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

    /// Hears whoever is there, and returns those who have shown that they know the secret. Never waits.
    ///
    pub fn turn(&mut self) -> Vec<AuthenticatedPeer> {
        // A turn has an end, however many come.
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
        let mut arrivals = Vec::new();
        for mut peer in std::mem::take(&mut self.waiting) {
            match peer.hear(self.secret.as_ref()) {
                HelloState::Incomplete if peer.since.elapsed() < HELLO_DEADLINE => {
                    self.waiting.push_back(peer)
                }
                HelloState::Incomplete => self.rejected.add(peer.from, "said nothing in time"),
                HelloState::Closed => {}
                HelloState::Rejected(why) => self.rejected.add(peer.from, why),
                HelloState::Authenticated(join, keys) => {
                    let UnauthenticatedConnection { stream, from, .. } = peer;
                    let connection = Connection { stream: stream.into(), keys: *keys };
                    arrivals.push(AuthenticatedPeer { connection, from, join });
                }
            }
        }
        arrivals
    }

    pub fn rejected(&mut self) -> &mut RejectedPeers {
        &mut self.rejected
    }

    /// Sends one away: of those from the address with most, the one that has been there longest, unless it came a moment ago.
    fn evict_one(&mut self, grace: Duration) -> bool {
        let mut from: HashMap<IpAddr, usize> = HashMap::new();
        self.waiting.iter().for_each(|peer| *from.entry(peer.from.ip()).or_default() += 1);
        let most = from.iter().max_by_key(|(_, len)| **len).map(|(ip, _)| *ip);
        let oldest = self.waiting.iter().position(|peer| Some(peer.from.ip()) == most);
        let gone = oldest.filter(|&at| self.waiting[at].since.elapsed() >= grace);
        let gone = gone.and_then(|at| self.waiting.remove(at));
        gone.is_some_and(|peer| {
            self.rejected.add(peer.from, "had to give way");
            true
        })
    }

    /// Somebody who has connected, if anybody has.
    fn accept(&mut self) -> Option<(TcpStream, SocketAddr)> {
        self.first = (self.first + 1) % self.listeners.len();
        for k in 0..self.listeners.len() {
            match self.listeners[(self.first + k) % self.listeners.len()].accept() {
                Ok(come) => return Some(come),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // Who hung up before its turn.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                // Most likely no descriptor is left: the next turn has one.
                Err(e) => {
                    self.rejected.trouble = Some(e.to_string());
                    self.evict_one(Duration::ZERO);
                }
            }
        }
        None
    }
}

/// The first words to somebody new. They fit into an empty buffer, or the connection is none.
fn greet(stream: &TcpStream, hello: &ClientHello) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let greeting = hello.greeting.encode();
    let sent = (&*stream).write(&greeting)?;
    if sent == greeting.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl UnauthenticatedConnection {
    fn hear(&mut self, secret: Option<&Secret>) -> HelloState {
        let mut room = [0; ClientHello::BYTES + 1];
        loop {
            match (&self.stream).read(&mut room) {
                Ok(0) => return HelloState::Closed,
                Ok(n) => match self.hello.hear(&room[..n], secret) {
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

    /// Tells a rank with another secret that it need not wait.
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

    /// `, where it turned away 10.0.0.7:41234 (another secret) and 3 more`; nothing where nobody was.
    pub fn text(&self) -> String {
        let RejectedPeers { first, more, trouble } = self;
        let more = if *more == 0 { String::new() } else { format!(" and {more} more") };
        let mut text = match first.is_empty() {
            true => String::new(),
            false => format!(", where it turned away {}{more}", first.join(", ")),
        };
        if let Some(trouble) = trouble {
            text.push_str(&format!(", where the system let nobody in for a while: {trouble}"));
        }
        text
    }
}

/// The words of a stranger so far: a greeting, then a [`JoinRequest`] under the keys that follow from it.
pub(super) struct ClientHello {
    pub greeting: Greeting,
    said: Vec<u8>,
}

/// The knowledge of a stranger by its words.
pub(super) enum HelloState {
    /// Nothing wrong yet.
    Incomplete,
    /// It knows the secret.
    Authenticated(JoinRequest, Box<Keys>),
    /// It does not, or speaks otherwise.
    Rejected(&'static str),
    /// It has hung up.
    Closed,
}

impl ClientHello {
    /// The most that anybody may say.
    pub const BYTES: usize = Greeting::BYTES + HEAD_BYTES + JoinRequest::BYTES;

    /// # Errors
    /// A system without random numbers.
    pub fn new() -> Result<ClientHello> {
        Ok(ClientHello { greeting: Greeting::fresh()?, said: Vec::new() })
    }

    /// Hears some bytes more.
    pub fn hear(&mut self, bytes: &[u8], secret: Option<&Secret>) -> HelloState {
        const OTHER: &str = "speaks another language";
        if self.said.len() + bytes.len() > ClientHello::BYTES {
            return HelloState::Rejected("says too much");
        }
        self.said.extend_from_slice(bytes);
        let Some((greeting, rest)) = self.said.split_first_chunk() else { return HelloState::Incomplete };
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
            return HelloState::Rejected("says too much");
        }
        let mut keys = Keys::of(secret, &self.greeting, &greeting);
        match head.open(body, &mut keys.to_coordinator) {
            Ok(join) => HelloState::Authenticated(join, Box::new(keys)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => HelloState::Rejected("another secret"),
            Err(_) => HelloState::Rejected(OTHER),
        }
    }
}
