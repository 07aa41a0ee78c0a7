//! The connections between the office and the ranks of other processes.

use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use super::desk::{Desk, Mailbox, Office, Post};
use super::note::{News, Note, Verdict};
use super::wire;

/// How long writing to a rank that does not read may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Rank 0's desk, in the office, with the connections of all others by rank.
pub(super) fn office(streams: Vec<TcpStream>, deadline: Duration) -> std::io::Result<Desk> {
    let mailbox = Arc::<Mailbox>::default();
    let mut posts = vec![Post::Here(mailbox.clone())];
    let mut readers = Vec::new();
    for stream in streams {
        prepare(&stream)?;
        readers.push(stream.try_clone()?);
        posts.push(Post::There(stream.into()));
    }
    let office = Office::new(posts, deadline);
    for (i, stream) in readers.into_iter().enumerate() {
        let (rank, office) = (i + 1, office.clone());
        thread::Builder::new().name(format!("from rank {rank}")).spawn(move || {
            let mut stream = BufReader::new(stream);
            while let Ok(frame) = wire::receive(&mut stream) {
                match Note::decode(&frame) {
                    Some(note) => office.take(rank, note),
                    None => break,
                }
            }
            office.lost(rank);
        })?;
    }
    Ok(Desk::here(0, mailbox, office))
}

/// The desk of a rank whose office is at the other end of `stream`.
pub(super) fn desk(rank: usize, stream: TcpStream) -> std::io::Result<Desk> {
    prepare(&stream)?;
    let mailbox = Arc::<Mailbox>::default();
    let (letters, reader) = (mailbox.clone(), stream.try_clone()?);
    thread::Builder::new().name(format!("news of rank {rank}")).spawn(move || {
        let mut reader = BufReader::new(reader);
        while let Ok(frame) = wire::receive(&mut reader) {
            match News::decode(&frame) {
                Some(news) => letters.put(news),
                None => break,
            }
        }
        if !letters.is_closing() {
            let cause = "its process ended without a word".into();
            letters.put(News::Verdict(Verdict::Failed { rank: 0, cause }));
        }
    })?;
    let (notes, waiting) = channel();
    let name = format!("notes of rank {rank}");
    let sender = thread::Builder::new().name(name).spawn(move || send_all(stream, &waiting))?;
    Ok(Desk::there(rank, mailbox, notes, sender))
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.set_nodelay(true)
}

/// Sends what is waiting, many notes in one go where there are many, until the desk is gone.
fn send_all(stream: TcpStream, waiting: &Receiver<Note>) {
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
    // The office reads the end; if it is gone, so much the better.
    let _ = stream.shutdown(Shutdown::Write);
}
