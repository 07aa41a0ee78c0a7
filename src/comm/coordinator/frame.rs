//! Frames: a length, a tag, and a body that is believed once the tag is right.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | the body's length, at most the reader's limit; [`REJECTED`] where the connection is turned away |
//! | 32 | the tag ([`super::auth`]) |
//! | length | the body: one value of [`super::message`], by postcard; many messages in one where a rank has many to send |

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::auth::{FrameKey, TAG_BYTES};

pub(super) const HEAD_BYTES: usize = 4 + TAG_BYTES;

/// The room that a reader keeps between frames.
const KEPT_BYTES: usize = 64 << 10;

/// In the place of a length: whoever sends this does not know the secret that the other end used. It has no tag, and ends nothing
/// but the attempt to connect.
pub(super) const REJECTED: u32 = u32::MAX;

/// The largest message of an admitted rank: the shapes of a call among so many.
pub(super) fn message_limit(world_len: usize) -> usize {
    (64 << 10) + world_len.saturating_mul(128).min(16 << 20)
}

/// The largest notice: what so many completed last.
pub(super) fn notice_limit(world_len: usize) -> usize {
    (64 << 10) + world_len.saturating_mul(4 << 10).min(128 << 20)
}

/// Puts the frame of a value after what is in `out`.
///
/// # Errors
/// A value of more bytes than `limit`; nothing is put then.
pub(super) fn seal(
    value: &impl Serialize,
    key: &mut FrameKey,
    limit: usize,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    seal_body(&encode(value, limit)?, key, out);
    Ok(())
}

/// The body that a value is.
///
/// # Errors
/// A value of more bytes than `limit`.
pub(super) fn encode(value: &impl Serialize, limit: usize) -> io::Result<Vec<u8>> {
    match postcard::to_stdvec(value) {
        Ok(body) if body.len() <= limit => Ok(body),
        Ok(body) => Err(invalid(format!("a message of {} bytes where {limit} may be sent", body.len()))),
        Err(e) => Err(invalid(e.to_string())),
    }
}

/// Puts the frame of a body after what is in `out`.
pub(super) fn seal_body(body: &[u8], key: &mut FrameKey, out: &mut Vec<u8>) {
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&key.tag(body));
    out.extend_from_slice(body);
}

/// The beginning of a frame.
#[derive(Clone, Copy)]
pub(super) struct FrameHead {
    pub len: usize,
    tag: [u8; TAG_BYTES],
}

impl FrameHead {
    /// # Errors
    /// A length beyond `limit`, and a rejection.
    pub fn decode(bytes: &[u8; HEAD_BYTES], limit: usize) -> io::Result<FrameHead> {
        let (len, tag) = bytes.split_first_chunk().expect("a head holds a length");
        let len = u32::from_le_bytes(*len);
        match len {
            REJECTED => Err(io::Error::new(io::ErrorKind::PermissionDenied, "turned away")),
            _ if len as usize > limit => Err(invalid(format!("a frame of {len} bytes"))),
            _ => {
                Ok(FrameHead { len: len as usize, tag: tag.try_into().expect("the rest of a head is a tag") })
            }
        }
    }

    /// The value in the body.
    ///
    /// # Errors
    /// A wrong tag; a body that is no such value, or more.
    pub fn open<T: DeserializeOwned>(&self, body: &[u8], key: &mut FrameKey) -> io::Result<T> {
        self.check(body, key)?;
        decode(body)
    }

    fn check(&self, body: &[u8], key: &mut FrameKey) -> io::Result<()> {
        match key.is_tag(body, &self.tag) {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "a frame that it did not send")),
        }
    }
}

/// The value that a body is.
///
/// # Errors
/// A body that is no such value, or more.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(invalid("a message with something behind it".into())),
        Err(e) => Err(invalid(format!("no message of this version ({e})"))),
    }
}

/// Gives `take` the values that a body is, one after the other.
///
/// # Errors
/// As [`decode`]; what stands before has been taken.
pub(super) fn decode_each<T: DeserializeOwned>(mut body: &[u8], mut take: impl FnMut(T)) -> io::Result<()> {
    while !body.is_empty() {
        let (value, rest) = postcard::take_from_bytes(body)
            .map_err(|e| invalid(format!("no message of this version ({e})")))?;
        take(value);
        body = rest;
    }
    Ok(())
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads the next frame's value; `body` is room that is used again.
///
/// # Errors
/// Those of the connection and of [`FrameHead`].
pub(super) fn receive<T: DeserializeOwned>(
    from: impl Read,
    key: &mut FrameKey,
    limit: usize,
    body: &mut Vec<u8>,
) -> io::Result<T> {
    receive_body(from, key, limit, body)?;
    decode(body)
}

/// Reads the next frame's body.
///
/// # Errors
/// As [`receive`].
pub(super) fn receive_body(
    mut from: impl Read,
    key: &mut FrameKey,
    limit: usize,
    body: &mut Vec<u8>,
) -> io::Result<()> {
    let mut head = [0; HEAD_BYTES];
    from.read_exact(&mut head)?;
    let head = FrameHead::decode(&head, limit)?;
    // Room for what has come, not for what is announced; and none is kept for a rare long one.
    body.clear();
    body.shrink_to(KEPT_BYTES);
    if from.take(head.len as u64).read_to_end(body)? < head.len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    head.check(body, key)
}

/// A connection on which an exchange has until `end`, however its bytes are cut up: every read and write may only take what
/// is left.
pub(super) struct DeadlineStream<'a> {
    pub stream: &'a TcpStream,
    pub end: Instant,
}

impl DeadlineStream<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(to).map_err(timed_out)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(from).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A socket's timeout shows as one of two kinds.
fn timed_out(e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { e }
}
