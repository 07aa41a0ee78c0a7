//! The threads that read and write the connections between the coordinator and other processes.

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
use super::inbox::NoticeInbox;
use super::message::{Answer, FirstFault, Message, Notice};
use super::server::{Coordinator, FrameSender, RankLink};

/// The time limit for the coordinator's process to read one frame.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// The time limit for a rank to read an answer to its join request.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// The approximate size of a frame that holds many messages.
const BATCH_BYTES: usize = 64 << 10;

/// A connection whose other end has proved that it knows the secret.
pub(super) struct Connection {
    pub stream: Arc<TcpStream>,
    pub keys: Keys,
}

impl Connection {
    /// Answers a rank's join request.
    ///
    /// # Errors
    /// Returns the connection's error.
    pub fn answer(&mut self, answer: &Answer, end: Instant) -> io::Result<()> {
        let mut frame = Vec::new();
        frame::seal(answer, &mut self.keys.from_coordinator, usize::MAX, &mut frame)?;
        self.stream.set_nonblocking(false)?;
        (DeadlineStream { stream: &self.stream, end }).write_all(&frame)
    }

    /// Returns true if the other end has closed the connection.
    pub fn is_gone(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        !looked.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    }
}

/// The coordinator with the connections of ranks 1, 2, .... One thread per connection reads messages after
/// [`ServedConnections::start_readers`].
pub(super) struct ServedConnections {
    pub coordinator: Arc<Coordinator>,
    pub client: Client,
    readers: Arc<OnceLock<bool>>,
}

impl ServedConnections {
    /// # Errors
    /// Returns an error of a connection, or if the system refuses a thread; the other ranks are told, and no message
    /// is read.
    pub fn new(connections: Vec<Connection>, deadline: Duration) -> io::Result<ServedConnections> {
        let world_len = connections.len() + 1;
        let (inbox, readers) = (Arc::<NoticeInbox>::default(), Arc::new(OnceLock::new()));
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

    /// Lets the reading threads start, or end without reading.
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
        // A bug of ours. The rank whose message led to it is named.
        Err(_) => coordinator.lost(rank, "the coordinator panicked at its message"),
    }
}

/// Returns the failure of a process whose connection ended with this error.
fn loss(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData => {
            format!("its connection carried {e}: another process may have written to it")
        }
        _ => "its process ended without a word".into(),
    }
}

/// Makes the client of a rank whose coordinator is in another process.
///
/// # Errors
/// Returns an error of the connection, or if the system refuses a thread.
pub(super) fn client(rank: usize, world_len: usize, connection: Connection) -> io::Result<Client> {
    let Connection { stream, keys } = connection;
    stream.set_read_timeout(None)?;
    stream.set_nodelay(true)?;
    let inbox = Arc::<NoticeInbox>::default();
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

/// Sends queued messages, several per frame if possible, until the client is dropped.
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
    // The coordinator sees the end of the stream. If the connection is closed already, nothing is left to do.
    let _ = stream.shutdown(Shutdown::Write);
}

/// Returns the encoded message, or if that is too long, a failure that says so.
fn encoded(message: &Message, limit: usize) -> Vec<u8> {
    frame::encode(message, limit).unwrap_or_else(|e| {
        let failed = Message::Failed { cause: e.to_string() };
        frame::encode(&failed, limit).expect("a short message is short")
    })
}
