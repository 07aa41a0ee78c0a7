//! The connections between the coordinator and the ranks of other processes.

use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use super::client::{Client, Coordinator, Inbox, Peer};
use super::message::{FirstFault, Message, Notice};
use super::wire;

/// How long writing to a rank that does not read may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Rank 0's client, in the coordinator, with the connections of all others by rank.
pub(super) fn coordinator(streams: Vec<TcpStream>, deadline: Duration) -> std::io::Result<Client> {
    let inbox = Arc::<Inbox>::default();
    let mut peers = vec![Peer::Here(inbox.clone())];
    let mut readers = Vec::new();
    for stream in streams {
        prepare(&stream)?;
        readers.push(stream.try_clone()?);
        peers.push(Peer::There(stream.into()));
    }
    let coordinator = Coordinator::new(peers, deadline);
    for (i, stream) in readers.into_iter().enumerate() {
        let (rank, coordinator) = (i + 1, coordinator.clone());
        thread::Builder::new().name(format!("from rank {rank}")).spawn(move || {
            let mut stream = BufReader::new(stream);
            while let Ok(frame) = wire::receive(&mut stream) {
                match Message::decode(&frame) {
                    Some(note) => coordinator.take(rank, note),
                    None => break,
                }
            }
            coordinator.lost(rank);
        })?;
    }
    Ok(Client::here(0, inbox, coordinator))
}

/// The client of a rank whose coordinator is at the other end of `stream`.
pub(super) fn client(rank: usize, stream: TcpStream) -> std::io::Result<Client> {
    prepare(&stream)?;
    let inbox = Arc::<Inbox>::default();
    let (letters, reader) = (inbox.clone(), stream.try_clone()?);
    thread::Builder::new().name(format!("news of rank {rank}")).spawn(move || {
        let mut reader = BufReader::new(reader);
        while let Ok(frame) = wire::receive(&mut reader) {
            match Notice::decode(&frame) {
                Some(news) => letters.put(news),
                None => break,
            }
        }
        if !letters.is_closing() {
            let cause = "its process ended without a word".into();
            letters.put(Notice::FirstFault(FirstFault::Failed { rank: 0, cause }));
        }
    })?;
    let (notes, waiting) = channel();
    let name = format!("notes of rank {rank}");
    let sender = thread::Builder::new().name(name).spawn(move || send_all(stream, &waiting))?;
    Ok(Client::there(rank, inbox, notes, sender))
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.set_nodelay(true)
}

/// Sends what is waiting, many notes in one go where there are many, until the client is gone.
fn send_all(stream: TcpStream, waiting: &Receiver<Message>) {
    let mut out = BufWriter::new(&stream);
    'notes: while let Ok(first) = waiting.recv() {
        for note in std::iter::once(first).chain(waiting.try_iter()) {
            if wire::send(&mut out, &note.encode()).is_err() {
                break 'notes;
            }
        }
        if out.flush().is_err() {
            break;
        }
    }
    drop(out);
    // The coordinator reads the end; if it is gone, so much the better.
    let _ = stream.shutdown(Shutdown::Write);
}
