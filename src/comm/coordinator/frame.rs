//! Frames: a length, a tag, and a body, which is used only if the tag is right.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | the body's length, at most the reader's limit, or [`REJECTED`] |
//! | 32 | the tag ([`super::auth`]) |
//! | length | the body: one or more values of [`super::message`], encoded by postcard |

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::auth::{FrameKey, TAG_BYTES};

pub(super) const HEAD_BYTES: usize = 4 + TAG_BYTES;

/// The buffer that a reader keeps between frames, in bytes.
const KEPT_BYTES: usize = 64 << 10;

/// Sent instead of a length: the two ends use different secrets. It has no tag, and only ends the attempt to connect.
pub(super) const REJECTED: u32 = u32::MAX;

/// Returns the largest message of an admitted rank: a call's shapes grow with the world.
pub(super) fn message_limit(world_len: usize) -> usize {
    (64 << 10) + world_len.saturating_mul(128).min(16 << 20)
}

/// Returns the largest notice: it lists the last call of every rank.
pub(super) fn notice_limit(world_len: usize) -> usize {
    (64 << 10) + world_len.saturating_mul(4 << 10).min(128 << 20)
}

/// Appends the frame of a value to `out`.
///
/// # Errors
/// Returns an error and appends nothing if the value has more than `limit` bytes.
pub(super) fn seal(
    value: &impl Serialize,
    key: &mut FrameKey,
    limit: usize,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    seal_body(&encode(value, limit)?, key, out);
    Ok(())
}

/// Encodes a value.
///
/// # Errors
/// Returns an error if the value has more than `limit` bytes.
pub(super) fn encode(value: &impl Serialize, limit: usize) -> io::Result<Vec<u8>> {
    match postcard::to_stdvec(value) {
        Ok(body) if body.len() <= limit => Ok(body),
        Ok(body) => {
            Err(invalid(format!("a message of {} bytes, but at most {limit} are allowed", body.len())))
        }
        Err(e) => Err(invalid(e.to_string())),
    }
}

/// Appends the frame of a body to `out`.
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
    /// Returns an error if the length exceeds `limit` or the frame is a rejection.
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

    /// Checks the tag and decodes the body.
    ///
    /// # Errors
    /// Returns an error if the tag is wrong or the body is not exactly one such value.
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

/// Decodes a body.
///
/// # Errors
/// Returns an error if the body is not exactly one such value.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(invalid("a message with extra bytes".into())),
        Err(e) => Err(invalid(format!("no message of this version ({e})"))),
    }
}

/// Decodes the values in a body and passes each to `take`.
///
/// # Errors
/// Returns an error at the first invalid value; `take` has received those before.
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

/// Reads the next frame and decodes its value; `body` is a reusable buffer.
///
/// # Errors
/// Returns errors of the connection and of [`FrameHead`].
pub(super) fn receive<T: DeserializeOwned>(
    from: impl Read,
    key: &mut FrameKey,
    limit: usize,
    body: &mut Vec<u8>,
) -> io::Result<T> {
    receive_body(from, key, limit, body)?;
    decode(body)
}

/// Reads the next frame's body and checks its tag.
///
/// # Errors
/// Same as [`receive`].
pub(super) fn receive_body(
    mut from: impl Read,
    key: &mut FrameKey,
    limit: usize,
    body: &mut Vec<u8>,
) -> io::Result<()> {
    let mut head = [0; HEAD_BYTES];
    from.read_exact(&mut head)?;
    let head = FrameHead::decode(&head, limit)?;
    // Memory grows with the bytes received, not with the announced length, and that of a rare long frame is freed.
    body.clear();
    body.shrink_to(KEPT_BYTES);
    if from.take(head.len as u64).read_to_end(body)? < head.len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    head.check(body, key)
}

/// A connection for one exchange that must end by `end`: each read and write gets the time that is left, so slow
/// senders cannot extend it.
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

/// Maps the two error kinds of a socket's timeout to one.
fn timed_out(e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { e }
}
