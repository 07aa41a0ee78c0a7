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
use super::frame::{HEAD_BYTES, Head, REJECTED};
use super::message::JoinRequest;
use crate::comm::launch::Secret;
use crate::error::Result;

/// The time that somebody who connects has to say who it is.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// So many strangers are heard at a time, of about a kilobyte each.
const STRANGERS: usize = 256;
/// Nobody is sent away earlier for want of room: a rank answers within a round trip.
const GRACE: Duration = Duration::from_millis(50);
/// So many who were turned away are remembered.
const REMEMBERED: usize = 8;

/// Listeners, and who waits at them.
pub(super) struct Door {
    listeners: Vec<TcpListener>,
    secret: Option<Secret>,
    strangers: VecDeque<Stranger>,
    turned_away: TurnedAway,
    /// The listener that is asked first, each in turn.
    first: usize,
}

/// Somebody who has shown that it knows the secret.
pub(super) struct Arrival {
    pub connection: Connection,
    pub from: SocketAddr,
    pub join: JoinRequest,
}

struct Stranger {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    hello: Hello,
}

/// Those who were turned away, for whoever wonders where a rank is.
#[derive(Default)]
pub(super) struct TurnedAway {
    first: Vec<String>,
    more: usize,
    /// The last thing that kept the system from letting anybody in.
    trouble: Option<String>,
}

impl Door {
    /// # Errors
    /// Those of the listeners.
    pub fn new(listeners: Vec<TcpListener>, secret: Option<Secret>) -> io::Result<Door> {
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        Ok(Door {
            listeners,
            secret,
            strangers: VecDeque::new(),
            turned_away: TurnedAway::default(),
            first: 0,
        })
    }

    /// Hears whoever is there, and returns those who have shown that they know the secret. Never waits.
    ///
    pub fn turn(&mut self) -> Vec<Arrival> {
        // A turn has an end, however many come.
        for _ in 0..2 * STRANGERS {
            let crowded = self.strangers.len() >= STRANGERS && !self.drop_one(GRACE);
            let Some((stream, from)) = (if crowded { None } else { self.accept() }) else { break };
            if let Ok(hello) = Hello::new()
                && greet(&stream, &hello).is_ok()
            {
                self.strangers.push_back(Stranger { stream, from, since: Instant::now(), hello });
            }
        }
        let mut arrivals = Vec::new();
        for mut stranger in std::mem::take(&mut self.strangers) {
            match stranger.hear(self.secret.as_ref()) {
                Heard::Part if stranger.since.elapsed() < HELLO_DEADLINE => {
                    self.strangers.push_back(stranger)
                }
                Heard::Part => self.turned_away.add(stranger.from, "said nothing in time"),
                Heard::Gone => {}
                Heard::Stranger(why) => self.turned_away.add(stranger.from, why),
                Heard::Joined(join, keys) => {
                    let Stranger { stream, from, .. } = stranger;
                    let connection = Connection { stream: stream.into(), keys: *keys };
                    arrivals.push(Arrival { connection, from, join });
                }
            }
        }
        arrivals
    }

    pub fn turned_away(&mut self) -> &mut TurnedAway {
        &mut self.turned_away
    }

    /// Sends one away: of those from the address with most, the one that has been there longest, unless it came a moment ago.
    fn drop_one(&mut self, grace: Duration) -> bool {
        let mut from: HashMap<IpAddr, usize> = HashMap::new();
        self.strangers.iter().for_each(|stranger| *from.entry(stranger.from.ip()).or_default() += 1);
        let most = from.iter().max_by_key(|(_, len)| **len).map(|(ip, _)| *ip);
        let oldest = self.strangers.iter().position(|stranger| Some(stranger.from.ip()) == most);
        let gone = oldest.filter(|&at| self.strangers[at].since.elapsed() >= grace);
        let gone = gone.and_then(|at| self.strangers.remove(at));
        gone.is_some_and(|stranger| {
            self.turned_away.add(stranger.from, "had to give way");
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
                    self.turned_away.trouble = Some(e.to_string());
                    self.drop_one(Duration::ZERO);
                }
            }
        }
        None
    }
}

/// The first words to somebody new. They fit into an empty buffer, or the connection is none.
fn greet(stream: &TcpStream, hello: &Hello) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let greeting = hello.greeting.encode();
    let sent = (&*stream).write(&greeting)?;
    if sent == greeting.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl Stranger {
    fn hear(&mut self, secret: Option<&Secret>) -> Heard {
        let mut room = [0; Hello::BYTES + 1];
        loop {
            match (&self.stream).read(&mut room) {
                Ok(0) => return Heard::Gone,
                Ok(n) => match self.hello.hear(&room[..n], secret) {
                    Heard::Part => {}
                    Heard::Stranger(why) => {
                        self.reject();
                        return Heard::Stranger(why);
                    }
                    heard => return heard,
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Heard::Part,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Heard::Gone,
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

impl TurnedAway {
    pub fn add(&mut self, from: SocketAddr, why: &str) {
        if self.first.len() < REMEMBERED {
            self.first.push(format!("{from} ({why})"));
        } else {
            self.more += 1;
        }
    }

    /// `, where it turned away 10.0.0.7:41234 (another secret) and 3 more`; nothing where nobody was.
    pub fn text(&self) -> String {
        let TurnedAway { first, more, trouble } = self;
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
pub(super) struct Hello {
    pub greeting: Greeting,
    said: Vec<u8>,
}

/// The knowledge of a stranger by its words.
pub(super) enum Heard {
    /// Nothing wrong yet.
    Part,
    /// It knows the secret.
    Joined(JoinRequest, Box<Keys>),
    /// It does not, or speaks otherwise.
    Stranger(&'static str),
    /// It has hung up.
    Gone,
}

impl Hello {
    /// The most that anybody may say.
    pub const BYTES: usize = Greeting::BYTES + HEAD_BYTES + JoinRequest::BYTES;

    /// # Errors
    /// A system without random numbers.
    pub fn new() -> Result<Hello> {
        Ok(Hello { greeting: Greeting::fresh()?, said: Vec::new() })
    }

    /// Hears some bytes more.
    pub fn hear(&mut self, bytes: &[u8], secret: Option<&Secret>) -> Heard {
        const OTHER: &str = "speaks another language";
        if self.said.len() + bytes.len() > Hello::BYTES {
            return Heard::Stranger("says too much");
        }
        self.said.extend_from_slice(bytes);
        let Some((greeting, rest)) = self.said.split_first_chunk() else { return Heard::Part };
        let Some(greeting) = Greeting::decode(greeting) else { return Heard::Stranger(OTHER) };
        if greeting.version != VERSION {
            return Heard::Stranger("another version of this library");
        }
        let Some((head, body)) = rest.split_first_chunk() else { return Heard::Part };
        let Ok(head) = Head::decode(head, JoinRequest::BYTES) else { return Heard::Stranger(OTHER) };
        if body.len() < head.len {
            return Heard::Part;
        }
        if body.len() > head.len {
            return Heard::Stranger("says too much");
        }
        let mut keys = Keys::of(secret, &self.greeting, &greeting);
        match head.open(body, &mut keys.to_coordinator) {
            Ok(join) => Heard::Joined(join, Box::new(keys)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Heard::Stranger("another secret"),
            Err(_) => Heard::Stranger(OTHER),
        }
    }
}
