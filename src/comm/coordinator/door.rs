//! The door: those who have connected and not yet shown that they know the secret.
//!
//! They are served on the caller's thread, a few at a time, each with so many bytes and so much time. Where too many have come,
//! and where the system has no descriptors left, the one that has been there longest goes: it has had its time. Whatever a
//! stranger says costs it its connection and nobody else anything.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::auth::{Greeting, Keys, VERSION};
use super::connection::Connection;
use super::frame::{HEAD_BYTES, Head, REJECTED};
use super::message::JoinRequest;
use crate::comm::launch::Secret;
use crate::error::Result;

/// How long somebody who connects has to say who it is.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// So many strangers are heard at a time.
const STRANGERS: usize = 64;
/// Nobody is sent away earlier for want of room: a rank answers within a round trip.
const GRACE: Duration = Duration::from_millis(250);
/// So many who were turned away are remembered.
const REMEMBERED: usize = 8;

/// Listeners, and who waits at them.
pub(super) struct Door {
    listeners: Vec<TcpListener>,
    secret: Option<Secret>,
    strangers: VecDeque<Stranger>,
    turned_away: TurnedAway,
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
}

impl Door {
    /// # Errors
    /// Those of the listeners.
    pub fn new(listeners: Vec<TcpListener>, secret: Option<Secret>) -> io::Result<Door> {
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        Ok(Door { listeners, secret, strangers: VecDeque::new(), turned_away: TurnedAway::default() })
    }

    /// Hears whoever is there, and returns those who have shown that they know the secret. Never waits.
    ///
    /// # Errors
    /// A system without random numbers.
    pub fn turn(&mut self) -> Result<Vec<Arrival>> {
        while self.has_room()
            && let Some((stream, from)) = self.accept()
        {
            let hello = Hello::new()?;
            if greet(&stream, &hello).is_ok() {
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
                    arrivals.push(Arrival { connection: Connection { stream, keys: *keys }, from, join });
                }
            }
        }
        Ok(arrivals)
    }

    pub fn turned_away(&mut self) -> &mut TurnedAway {
        &mut self.turned_away
    }

    /// True where one more may be heard; who has been there longest goes if need be.
    fn has_room(&mut self) -> bool {
        self.strangers.len() < STRANGERS || self.drop_oldest(GRACE)
    }

    fn drop_oldest(&mut self, grace: Duration) -> bool {
        let is_old = self.strangers.front().is_some_and(|oldest| oldest.since.elapsed() >= grace);
        if is_old && let Some(oldest) = self.strangers.pop_front() {
            self.turned_away.add(oldest.from, "had to give way");
        }
        is_old
    }

    /// Somebody who has connected, if anybody has.
    fn accept(&mut self) -> Option<(TcpStream, SocketAddr)> {
        for at in 0..self.listeners.len() {
            match self.listeners[at].accept() {
                Ok(come) => return Some(come),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // Most likely no descriptor is left: the next turn has one.
                Err(_) => drop(self.drop_oldest(Duration::ZERO)),
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
        let TurnedAway { first, more } = self;
        match (first.is_empty(), more) {
            (true, _) => String::new(),
            (_, 0) => format!(", where it turned away {}", first.join(", ")),
            _ => format!(", where it turned away {} and {more} more", first.join(", ")),
        }
    }
}

/// What a stranger has said so far: a greeting, then a [`JoinRequest`] under the keys that follow from it.
pub(super) struct Hello {
    pub greeting: Greeting,
    said: Vec<u8>,
}

/// What is known of a stranger by what it has said.
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
