//! The threads that serve the connections between the coordinator and the ranks of other processes.

use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::auth::{FrameKey, Keys};
use super::client::Client;
use super::frame::{self, DeadlineStream};
use super::inbox::Inbox;
use super::message::{Answer, FirstFault, Message, Notice};
use super::server::{Coordinator, FrameSender, RankLink};

/// The time that the coordinator's process may take to read what a rank has told it in one go.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// The time that a rank may take to read an answer to its coming.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// About so much is sent in one frame.
const BATCH_BYTES: usize = 64 << 10;

/// A connection whose other end has shown that it knows the secret.
pub(super) struct Connection {
    pub stream: Arc<TcpStream>,
    pub keys: Keys,
}

impl Connection {
    /// Tells a rank what comes of its coming.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn answer(&mut self, answer: &Answer, end: Instant) -> io::Result<()> {
        let mut frame = Vec::new();
        frame::seal(answer, &mut self.keys.from_coordinator, usize::MAX, &mut frame)?;
        self.stream.set_nonblocking(false)?;
        (DeadlineStream { stream: &self.stream, end }).write_all(&frame)
    }

    /// True where the other end has hung up.
    pub fn is_gone(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        !looked.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    }
}

/// The coordinator over the connections of ranks 1, 2, ..., whose messages it reads once they are let go.
pub(super) struct ServedConnections {
    pub coordinator: Arc<Coordinator>,
    pub client: Client,
    readers: Arc<OnceLock<bool>>,
}

impl ServedConnections {
    /// # Errors
    /// Those of the connections, and of a system that refuses a thread for one, of which the others are told; nothing was read
    /// then.
    pub fn new(connections: Vec<Connection>, deadline: Duration) -> io::Result<ServedConnections> {
        let world_len = connections.len() + 1;
        let (inbox, readers) = (Arc::<Inbox>::default(), Arc::new(OnceLock::new()));
        let mut peers = vec![RankLink::Local(inbox.clone())];
        let mut incoming = Vec::new();
        for Connection { stream, keys } in connections {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            incoming.push((stream.clone(), keys.to_coordinator));
            let limit = frame::notice_limit(world_len);
            peers.push(RankLink::Remote(FrameSender::new(stream, keys.from_coordinator, limit).into()));
        }
        let coordinator = Coordinator::new(peers, deadline);
        let serving = ServedConnections {
            client: Client::local(0, inbox, coordinator.clone()),
            coordinator,
            readers: readers.clone(),
        };
        let incoming_len = incoming.len();
        for (i, (stream, key)) in incoming.into_iter().enumerate() {
            let (rank, coordinator, go) = (i + 1, serving.coordinator.clone(), readers.clone());
            let spawned = thread::Builder::new().name(format!("from rank {rank}")).spawn(move || {
                if *go.wait() {
                    read_messages(rank, &stream, key, frame::message_limit(world_len), &coordinator);
                }
            });
            if let Err(e) = spawned {
                serving.start_readers(false);
                let e = io::Error::new(e.kind(), format!("the system refuses a thread: {e}"));
                let (why, end) = (Answer::failed(e.to_string()), Instant::now() + ANSWER_DEADLINE);
                for rank in 1..=incoming_len {
                    let _ = serving.coordinator.send(rank, &why, end);
                }
                return Err(e);
            }
        }
        Ok(serving)
    }

    /// Begins to read, or never does.
    pub fn start_readers(&self, read: bool) {
        let _ = self.readers.set(read);
    }
}

fn read_messages(
    rank: usize,
    stream: &TcpStream,
    mut key: FrameKey,
    limit: usize,
    coordinator: &Coordinator,
) {
    let _ = stream.set_read_timeout(None);
    let (mut stream, mut room) = (BufReader::new(stream), Vec::new());
    let read = AssertUnwindSafe(|| {
        loop {
            let read = frame::receive_body(&mut stream, &mut key, limit, &mut room);
            let taken = read
                .and_then(|()| frame::decode_each(&room, |message: Message| coordinator.take(rank, message)));
            if let Err(e) = taken {
                break e;
            }
        }
    });
    match catch_unwind(read) {
        Ok(end) => coordinator.lost(rank, &loss(&end)),
        // A bug of ours; the rank whose words led there is gone, and named.
        Err(_) => coordinator.lost(rank, "the coordinator panicked over what it said"),
    }
}

/// The reason for which a connection that is over counts as its process's failure.
fn loss(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData => {
            format!("its connection carried {e}: somebody else may have written there")
        }
        _ => "its process ended without a word".into(),
    }
}

/// The client of a rank whose coordinator is at the other end.
///
/// # Errors
/// Those of the connection, and of a system that refuses a thread.
pub(super) fn client(rank: usize, world_len: usize, connection: Connection) -> io::Result<Client> {
    let Connection { stream, keys } = connection;
    stream.set_read_timeout(None)?;
    stream.set_nodelay(true)?;
    let inbox = Arc::<Inbox>::default();
    let (notices, incoming, mut key) = (inbox.clone(), stream.clone(), keys.from_coordinator);
    thread::Builder::new().name(format!("notices of rank {rank}")).spawn(move || {
        let (mut reader, mut room) = (BufReader::new(&*incoming), Vec::new());
        let limit = frame::notice_limit(world_len);
        let end = loop {
            match frame::receive::<Notice>(&mut reader, &mut key, limit, &mut room) {
                Ok(notice) => notices.put(notice),
                Err(e) => break e,
            }
        };
        if !notices.is_closing() {
            notices.put(Notice::FirstFault(FirstFault::Failed { rank: 0, cause: loss(&end) }));
        }
    })?;
    let (messages, waiting) = channel();
    let name = format!("messages of rank {rank}");
    let (key, limit) = (keys.to_coordinator, frame::message_limit(world_len));
    let sender = thread::Builder::new().name(name).spawn(move || send_all(&stream, key, limit, &waiting))?;
    Ok(Client::remote(rank, inbox, messages, sender))
}

/// Sends what is waiting, many messages in one frame where there are many, until the client is gone.
fn send_all(stream: &TcpStream, mut key: FrameKey, limit: usize, waiting: &Receiver<Message>) {
    let mut frame = Vec::new();
    let mut held = None;
    while let Some(first) = held.take().or_else(|| waiting.recv().ok()) {
        let mut body = encoded(&first, limit);
        while body.len() < BATCH_BYTES
            && let Ok(next) = waiting.try_recv()
        {
            let more = encoded(&next, limit);
            if body.len() + more.len() > limit {
                held = Some(next);
                break;
            }
            body.extend_from_slice(&more);
        }
        frame.clear();
        frame::seal_body(&body, &mut key, &mut frame);
        if (DeadlineStream { stream, end: Instant::now() + WRITE_DEADLINE }).write_all(&frame).is_err() {
            break;
        }
    }
    // The coordinator reads the end; if it is gone, so much the better.
    let _ = stream.shutdown(Shutdown::Write);
}

/// A message; where it is too long, the word of that, which the others hear in its place.
fn encoded(message: &Message, limit: usize) -> Vec<u8> {
    frame::encode(message, limit).unwrap_or_else(|e| {
        let failed = Message::Failed { cause: e.to_string() };
        frame::encode(&failed, limit).expect("a short message is short")
    })
}
