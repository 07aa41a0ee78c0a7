//! Where processes find each other: rank 0 listens, everybody comes, and all get what each brought.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::client::Client;
use super::link;
use super::wire::{self, Reader, Writer};
use crate::comm::calls::label;
use crate::comm::launch::Launch;
use crate::error::{CallId, CommFault, Error, Refusal, Result};

/// What a rank says first, before anything else is read.
const MAGIC: &str = "isoshard meets";
const VERSION: u64 = 1;
/// A stranger's first frame is not read beyond this.
const HELLO_BYTES: usize = 1 << 20;
/// How long somebody who connects has to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
const VERB: &str = "rendezvous";

/// What all know after they have met.
#[derive(Debug)]
pub(in crate::comm) struct Meeting {
    /// What each rank brought.
    pub brought: Vec<Vec<u8>>,
    /// This rank's end of the coordinator.
    pub client: Client,
}

/// Meets all ranks of the launch; each brings some bytes.
///
/// # Errors
/// Names the ranks that have not come within `deadline`; refuses processes that claim the same rank, or a world of another
/// size, on all ranks.
pub(in crate::comm) fn meet(launch: &Launch, payload: &[u8], deadline: Duration) -> Result<Meeting> {
    let (host, port) = launch.address()?;
    let place = Place { hosts: vec![host.into()], port, listener: None };
    meet_at(place, launch, payload, deadline)
}

/// Where the ranks meet.
#[derive(Debug)]
pub(in crate::comm) struct Place {
    /// Names or addresses of rank 0's machine: one that a rank reaches is enough.
    pub hosts: Vec<String>,
    pub port: u16,
    /// At rank 0, where somebody listens there already.
    pub listener: Option<TcpListener>,
}

/// As [`meet`], at a place of one's own.
///
/// # Errors
/// As [`meet`].
pub(in crate::comm) fn meet_at(
    place: Place,
    launch: &Launch,
    payload: &[u8],
    deadline: Duration,
) -> Result<Meeting> {
    let whole = Instant::now() + deadline;
    let table = Table { launch, deadline, place };
    match launch.rank {
        0 => table.host(payload, whole),
        _ => table.join(payload, whole),
    }
}

struct Table<'a> {
    launch: &'a Launch,
    deadline: Duration,
    place: Place,
}

/// Somebody who came.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    hello: Option<Hello>,
}

struct Hello {
    version: u64,
    world_len: usize,
    rank: usize,
    payload: Vec<u8>,
}

impl Table<'_> {
    fn host(&self, payload: &[u8], end: Instant) -> Result<Meeting> {
        let n = self.launch.world_len;
        let mut guests: BTreeMap<usize, (Guest, Vec<u8>)> = BTreeMap::new();
        if n > 1 {
            let outcome = self.gather(&mut guests, end);
            let streams = || guests.values().map(|(guest, _)| &guest.stream);
            if let Err(error) = outcome {
                // Those who came hear why; whoever has gone meanwhile need not.
                streams().for_each(|stream| drop(wire::send(&mut &*stream, &refusal(&error))));
                return Err(error);
            }
            let mut all = Writer::default();
            all.u8(2).usize(n).bytes(payload);
            for (_, payload) in guests.values() {
                all.bytes(payload);
            }
            for (&rank, (guest, _)) in &guests {
                wire::send(&mut &guest.stream, &all.0)
                    .map_err(|e| self.broken(format!("rank {rank}: {e}")))?;
            }
        }
        let (streams, payloads): (Vec<_>, Vec<_>) =
            guests.into_values().map(|(guest, payload)| (guest.stream, payload)).unzip();
        let brought = std::iter::once(payload.to_vec()).chain(payloads).collect();
        let client = link::coordinator(streams, self.deadline).map_err(|e| self.broken(e.to_string()))?;
        Ok(Meeting { brought, client })
    }

    /// Waits until every rank but this one has come.
    fn gather(&self, guests: &mut BTreeMap<usize, (Guest, Vec<u8>)>, end: Instant) -> Result<()> {
        let listener = self.listen()?;
        listener.set_nonblocking(true).map_err(|e| self.broken(e.to_string()))?;
        let (door, arrivals) = channel();
        let closed = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| keep_door(&listener, &door, &closed));
            let all_here = self.welcome(guests, &arrivals, end);
            closed.store(true, Ordering::Release);
            all_here
        })
    }

    fn welcome(
        &self,
        guests: &mut BTreeMap<usize, (Guest, Vec<u8>)>,
        arrivals: &Receiver<Guest>,
        end: Instant,
    ) -> Result<()> {
        let n = self.launch.world_len;
        while guests.len() < n - 1 {
            let Ok(guest) = arrivals.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                return Err(self.missing((1..n).filter(|r| !guests.contains_key(r)).collect()));
            };
            // Who does not speak our language is none of us.
            let Some(hello) = &guest.hello else { continue };
            if let Some((rule, given)) = self.objection(hello, guest.from, guests) {
                let error = Error::invalid(VERB, rule, given, "start every rank once, by one launcher");
                drop(wire::send(&mut &guest.stream, &refusal(&error)));
                return Err(error);
            }
            let (rank, payload) = (hello.rank, hello.payload.clone());
            guests.insert(rank, (guest, payload));
        }
        Ok(())
    }

    /// Why somebody may not come in.
    fn objection(
        &self,
        hello: &Hello,
        from: SocketAddr,
        guests: &BTreeMap<usize, (Guest, Vec<u8>)>,
    ) -> Option<(&'static str, String)> {
        let (n, rank) = (self.launch.world_len, hello.rank);
        if hello.version != VERSION {
            let given = format!("{} at {from}, {VERSION} here", hello.version);
            return Some(("the ranks run versions of this library that do not talk", given));
        }
        if hello.world_len != n {
            let given = format!("rank {rank} at {from} counts {} ranks, rank 0 counts {n}", hello.world_len);
            return Some(("the ranks differ about the size of the world", given));
        }
        if rank == 0 || rank >= n {
            return Some(("a rank is not in the world", format!("rank {rank} of {n} from {from}")));
        }
        let (first, _) = guests.get(&rank)?;
        Some(("two processes claim one rank", format!("rank {rank} from {} and from {from}", first.from)))
    }

    /// Listens where the launch says, or, where that address is not this machine's own, at all of its addresses.
    fn listen(&self) -> Result<TcpListener> {
        if let Some(listener) = &self.place.listener {
            return listener.try_clone().map_err(|e| self.broken(e.to_string()));
        }
        let port = self.place.port;
        let mut last = None;
        let own = self.addresses();
        let any = [IpAddr::from([0u8; 16]), IpAddr::from([0u8; 4])].map(|ip| SocketAddr::new(ip, port));
        for address in own.chain(any) {
            match TcpListener::bind(address) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    last = Some(e);
                    break;
                }
                Err(e) => last = Some(e),
            }
        }
        let reason = last.map_or_else(String::new, |e| e.to_string());
        Err(Error::invalid(
            VERB,
            "rank 0 cannot listen",
            format!("{}: {reason}", self.address()),
            "end the other rank 0, or set ISOSHARD_PORT to a free port on all ranks",
        ))
    }

    fn join(&self, payload: &[u8], end: Instant) -> Result<Meeting> {
        let mut stream = self.connect(end)?;
        let mut hello = Writer::default();
        hello.text(MAGIC).u64(VERSION).usize(self.launch.world_len).usize(self.launch.rank).bytes(payload);
        let fail = |e: io::Error| self.broken(format!("rank 0 at {}: {e}", self.address()));
        wire::send(&mut stream, &hello.0).map_err(fail)?;
        // Rank 0 may have begun to wait only now, and answers at its own deadline.
        stream.set_read_timeout(Some(self.deadline + HELLO_TIMEOUT)).map_err(fail)?;
        let answer = wire::receive(&mut stream).map_err(fail)?;
        let brought = self.understand(&answer)?;
        let client = link::client(self.launch.rank, stream).map_err(fail)?;
        Ok(Meeting { brought, client })
    }

    fn connect(&self, end: Instant) -> Result<TcpStream> {
        const PAUSE: Duration = Duration::from_millis(50);
        let mut pause = Duration::from_millis(2);
        loop {
            for address in self.addresses() {
                let left = end.saturating_duration_since(Instant::now()).min(HELLO_TIMEOUT);
                if !left.is_zero()
                    && let Ok(stream) = TcpStream::connect_timeout(&address, left)
                {
                    return Ok(stream);
                }
            }
            if Instant::now() >= end {
                return Err(self.missing(vec![0]));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
    }

    /// What rank 0 answered: what everybody brought, or why nothing comes of it.
    fn understand(&self, answer: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut r = Reader(answer);
        let understood = match r.u8() {
            Some(0) => (|| {
                let mut text = || r.text();
                Some(Err(Error::invalid(text()?, text()?, text()?, text()?)))
            })(),
            Some(1) => r.ranks().map(|missing| Err(self.missing(missing))),
            Some(2) => r.list(Reader::bytes).map(Ok),
            _ => None,
        };
        understood.unwrap_or_else(|| {
            let given = format!("an answer from {} that is not of this library", self.address());
            let remedy = "set ISOSHARD_PORT to a free port on all ranks";
            Err(Error::invalid(VERB, "somebody else listens at the meeting place", given, remedy))
        })
    }

    fn missing(&self, missing: Vec<usize>) -> Error {
        CommFault::Missing {
            id: self.id(),
            rank: self.launch.rank,
            brought: format!("the address {}", self.address()),
            missing,
            ended: false,
            deadline_s: self.deadline.as_secs_f64(),
            elsewhere: vec![],
            last: vec![],
        }
        .into()
    }

    fn broken(&self, reason: String) -> Error {
        CommFault::Transport { id: self.id(), rank: self.launch.rank, reason }.into()
    }

    fn id(&self) -> CallId {
        let everyone: Vec<usize> = (0..self.launch.world_len).collect();
        CallId::new(VERB, 0, label("world", &everyone))
    }

    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let of = |host: &String| (host.as_str(), self.place.port).to_socket_addrs().into_iter().flatten();
        self.place.hosts.iter().flat_map(of)
    }

    fn address(&self) -> String {
        format!("{}:{}", self.place.hosts.join("|"), self.place.port)
    }
}

/// Lets people in until nobody waits for them any more.
fn keep_door(listener: &TcpListener, door: &Sender<Guest>, closed: &AtomicBool) {
    const GLANCE: Duration = Duration::from_millis(2);
    while !closed.load(Ordering::Acquire) {
        let Ok((stream, from)) = listener.accept() else {
            thread::sleep(GLANCE);
            continue;
        };
        let door = door.clone();
        // Each by itself: one who says nothing must not keep the others waiting.
        let greeted = thread::Builder::new().name("rendezvous".into()).spawn(move || {
            let hello = greet(&stream).ok().flatten();
            // Where nobody waits any more, nobody misses it.
            let _ = door.send(Guest { stream, from, hello });
        });
        if greeted.is_err() {
            return;
        }
    }
}

fn greet(mut stream: &TcpStream) -> io::Result<Option<Hello>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    let frame = wire::receive_within(&mut stream, HELLO_BYTES)?;
    let mut r = Reader(&frame);
    let hello = || {
        let magic = r.text()?;
        let (version, world_len, rank, payload) = (r.u64()?, r.usize()?, r.usize()?, r.bytes()?);
        (magic == MAGIC).then_some(Hello { version, world_len, rank, payload })
    };
    Ok({ hello }())
}

/// An error, as the others read it.
fn refusal(error: &Error) -> Vec<u8> {
    let mut w = Writer::default();
    match error {
        Error::Invalid(refusal) => {
            let Refusal { verb, rule, given, remedy } = &**refusal;
            w.u8(0).text(verb).text(rule).text(given).text(remedy);
        }
        Error::Comm(fault) if matches!(**fault, CommFault::Missing { .. }) => {
            let CommFault::Missing { missing, .. } = &**fault else { unreachable!("matched above") };
            w.u8(1).ranks(missing);
        }
        other => {
            w.u8(0).text(VERB).text("rank 0 failed").text(&other.to_string()).text("");
        }
    }
    w.0
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::comm::coordinator::{FirstFault, Message};

    fn launch(rank: usize, world_len: usize, port: u16) -> Launch {
        Launch {
            by: "test",
            rank,
            world_len,
            local_rank: rank,
            local_len: None,
            host: Some("127.0.0.1".into()),
            port,
        }
    }

    /// A port that was free a moment ago.
    fn port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn meet_all(launches: &[Launch], deadline: Duration) -> Vec<Result<Meeting>> {
        thread::scope(|s| {
            let one = |launch| s.spawn(move || meet(launch, &[launch.rank as u8; 3], deadline));
            let all: Vec<_> = launches.iter().map(one).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn texts(met: Vec<Result<Meeting>>) -> Vec<String> {
        met.into_iter().map(|m| m.unwrap_err().to_string()).collect()
    }

    const SHORT: Duration = Duration::from_millis(400);
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn all_get_what_each_brought_and_hear_each_other() {
        for n in [1, 2, 5] {
            let port = port();
            let launches: Vec<Launch> = (0..n).map(|rank| launch(rank, n, port)).collect();
            let met: Vec<Meeting> = meet_all(&launches, LONG).into_iter().map(Result::unwrap).collect();
            for meeting in &met {
                assert_eq!(meeting.brought, (0..n).map(|r| vec![r as u8; 3]).collect::<Vec<_>>());
            }
            met[n - 1].client.put("key".into(), vec![7]);
            met.iter().for_each(|m| assert_eq!(m.client.get("key", LONG), Some(vec![7])));
            met[n / 2].client.tell(Message::Failed { cause: "boom".into() });
            for meeting in &met {
                let want = FirstFault::Failed { rank: n / 2, cause: "boom".into() };
                assert_eq!(meeting.client.wait_for_fault(LONG), Some(want));
                assert_eq!(meeting.client.get("nothing", LONG), None, "a first_fault ends all waiting");
            }
        }
    }

    #[test]
    fn a_process_that_is_gone_is_named() {
        for gone in [0, 2] {
            let port = port();
            let launches: Vec<Launch> = (0..3).map(|rank| launch(rank, 3, port)).collect();
            let mut met: Vec<Meeting> = meet_all(&launches, LONG).into_iter().map(Result::unwrap).collect();
            let Meeting { client, .. } = met.remove(gone);
            if gone == 0 {
                // As at a process's end: the connections close, and nothing was said.
                client.hang_up();
            }
            drop(client);
            for meeting in &met {
                let cause = "its process ended without a word".to_string();
                let want = FirstFault::Failed { rank: gone, cause };
                assert_eq!(meeting.client.wait_for_fault(LONG), Some(want));
            }
        }
    }

    #[test]
    fn all_leave_without_a_verdict() {
        let port = port();
        let launches: Vec<Launch> = (0..3).map(|rank| launch(rank, 3, port)).collect();
        let met: Vec<Meeting> = meet_all(&launches, LONG).into_iter().map(Result::unwrap).collect();
        thread::scope(|s| met.iter().for_each(|m| drop(s.spawn(|| m.client.leave(LONG)))));
        thread::sleep(Duration::from_millis(30));
        met.iter().for_each(|m| assert_eq!(m.client.first_fault(), None));
    }

    #[test]
    fn who_does_not_come_is_named_by_all() {
        let p = port();
        let got = texts(meet_all(&[launch(0, 4, p), launch(2, 4, p)], SHORT));
        let want = |rank: usize| {
            format!(
                "rendezvous #0 on group world{{0, 1, 2, 3}}: rank(s) [1, 3] did not come within 0.4 s; rank {rank} waited \
                 with the address 127.0.0.1:{p}"
            )
        };
        assert_eq!(got, [want(0), want(2)]);
        let p = port();
        assert!(
            texts(meet_all(&[launch(1, 2, p)], SHORT))[0]
                .contains("rank(s) [0] did not come within 0.4 s; rank 1")
        );
    }

    #[test]
    fn who_does_not_belong_is_refused_by_name() {
        let p = port();
        let got = texts(meet_all(&[launch(0, 2, p), launch(1, 3, p)], LONG));
        for text in got {
            assert!(text.contains("differ about the size of the world; got rank 1 at 127.0.0.1:"), "{text}");
            assert!(text.contains("counts 3 ranks, rank 0 counts 2; start every rank once"), "{text}");
        }
        let p = port();
        let got = texts(meet_all(&[launch(0, 3, p), launch(1, 3, p), launch(1, 3, p)], LONG));
        for text in got {
            assert!(text.contains("two processes claim one rank; got rank 1 from 127.0.0.1:"), "{text}");
        }
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let p = taken.local_addr().unwrap().port();
        let text = &texts(meet_all(&[launch(0, 2, p)], SHORT))[0];
        assert!(
            text.starts_with(&format!("rendezvous: rank 0 cannot listen; got 127.0.0.1:{p}: ")),
            "{text}"
        );
    }

    #[test]
    fn strangers_disturb_nobody() {
        let port = port();
        let strange = thread::spawn(move || {
            let connect = || loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stream) => return stream,
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            };
            // One who says nothing, one who speaks another language, one who announces more than there is.
            let silent = connect();
            connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            connect().write_all(&[255; 64]).unwrap();
            silent
        });
        let host = thread::spawn(move || meet(&launch(0, 2, port), b"host", LONG));
        let silent = strange.join().unwrap();
        let guest = meet(&launch(1, 2, port), b"guest", LONG).unwrap();
        assert_eq!(guest.brought, [b"host".to_vec(), b"guest".to_vec()]);
        host.join().unwrap().unwrap();
        drop(silent);
        // And one who answers in another language at the meeting place.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(&[3, 0, 0, 0, 9, 9, 9]).unwrap();
            let _ = stream.read(&mut [0; 256]);
        });
        let text = &texts(meet_all(&[launch(1, 2, port)], LONG))[0];
        assert!(
            text.starts_with("rendezvous: somebody else listens at the meeting place; got an answer"),
            "{text}"
        );
    }
}
