//! Authentication of connections: a challenge, an answer, and a tag on every frame.
//!
//! Both ends of a connection know the job's secret, or use an empty one. The coordinator sends a [`Greeting`] with a
//! nonce, the client answers with its own, and both derive two keys from the secret and the nonces:
//!
//! ```text
//! session   = HMAC(secret, "isoshard session" | coordinator's greeting | client's greeting)
//! to        = HMAC(session, "to the coordinator")
//! from      = HMAC(session, "from the coordinator")
//! tag(i, b) = HMAC(to or from, i as 8 bytes | length of b as 4 bytes | b)     of frame number i with body b
//! ```
//!
//! HMAC is HMAC-SHA-256 (RFC 2104, FIPS 180-4), and numbers are little-endian. A frame that was changed, repeated,
//! dropped, reordered or reflected has a wrong tag. Frames are not encrypted.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::comm::launch::Secret;
use crate::error::{Error, Result};

/// The first bytes of a greeting.
const MAGIC: [u8; 8] = *b"isoshard";
/// The version of the protocol: greetings, frames, and messages.
pub(super) const VERSION: u32 = 2;
pub(super) const TAG_BYTES: usize = 32;
const NONCE_BYTES: usize = 32;

type Nonce = [u8; NONCE_BYTES];

/// The first bytes that each end sends: magic, version, nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub version: u32,
    nonce: Nonce,
}

impl Greeting {
    pub const BYTES: usize = MAGIC.len() + 4 + NONCE_BYTES;

    /// Returns a greeting with a new nonce.
    ///
    /// # Errors
    /// Returns an error if the system has no random numbers.
    pub fn fresh() -> Result<Greeting> {
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|e| {
            Error::unsupported("rendezvous", "the system has no random numbers", e.to_string(), "")
        })?;
        Ok(Greeting { version: VERSION, nonce })
    }

    pub fn encode(&self) -> [u8; Greeting::BYTES] {
        let mut bytes = [0; Greeting::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Returns the greeting in the bytes, of any version, or `None`.
    pub fn decode(bytes: &[u8; Greeting::BYTES]) -> Option<Greeting> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let greeting = Greeting { version: u32::from_le_bytes(*version), nonce: rest.try_into().ok()? };
        (*magic == MAGIC).then_some(greeting)
    }
}

/// The keys of one connection.
pub(super) struct Keys {
    pub to_coordinator: FrameKey,
    pub from_coordinator: FrameKey,
}

impl Keys {
    pub fn of(secret: Option<&Secret>, coordinator: &Greeting, client: &Greeting) -> Keys {
        let secret = secret.map_or(&[][..], Secret::bytes);
        let session = code(&keyed(secret), &[b"isoshard session", &coordinator.encode(), &client.encode()]);
        let of = |direction: &[u8]| FrameKey { mac: keyed(&code(&keyed(&session), &[direction])), frames: 0 };
        Keys { to_coordinator: of(b"to the coordinator"), from_coordinator: of(b"from the coordinator") }
    }
}

/// The key of one direction of a connection, and the number of frames sent in it.
#[cfg_attr(test, derive(Clone))]
pub(super) struct FrameKey {
    mac: Hmac<Sha256>,
    frames: u64,
}

impl FrameKey {
    /// Returns the tag of the next frame to be sent.
    pub fn tag(&mut self, body: &[u8]) -> [u8; TAG_BYTES] {
        self.next(body).finalize().into_bytes().into()
    }

    /// Returns true if `tag` is that of the next received frame. The time is the same for every wrong tag.
    pub fn is_tag(&mut self, body: &[u8], tag: &[u8; TAG_BYTES]) -> bool {
        self.next(body).verify_slice(tag).is_ok()
    }

    fn next(&mut self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        mac.update(&self.frames.to_le_bytes());
        mac.update(&(body.len() as u32).to_le_bytes());
        mac.update(body);
        self.frames += 1;
        mac
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

fn code(mac: &Hmac<Sha256>, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
    let mut mac = mac.clone();
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected tags come from Python's `hmac` and `hashlib`, by the definition above.
    #[test]
    fn tags_are_those_of_another_implementation() {
        let greeting = |byte: u8| Greeting { version: VERSION, nonce: [byte; NONCE_BYTES] };
        let secret = Secret::from_text("a secret of the job", "test").unwrap();
        let mut keys = Keys::of(Some(&secret), &greeting(1), &greeting(2));
        let hex = |tag: [u8; TAG_BYTES]| tag.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(
            hex(keys.to_coordinator.tag(b"")),
            "d2460ff3f04e10830cc0d00609d3acab81190aa70bc74c800a854f218afad598"
        );
        assert_eq!(
            hex(keys.to_coordinator.tag(b"body")),
            "7bd1eb210c96189d24a793f1c42e3ddb357a224c4511897fe79a35eade0c9abb"
        );
        assert_eq!(
            hex(keys.from_coordinator.tag(b"")),
            "a4a9e98d968d2bba74e3efa0f91c773a42eb416021f54003189c6675328196ea"
        );
        assert_eq!(
            hex(Keys::of(None, &greeting(1), &greeting(2)).to_coordinator.tag(b"")),
            "3caf27794ced4e4d755baa84055152f34c8431df59fa97eb14f993a7c34f1899"
        );
    }

    #[test]
    fn a_tag_holds_for_one_frame_at_one_place_in_one_direction() {
        let (here, there) = (Greeting::fresh().unwrap(), Greeting::fresh().unwrap());
        assert_ne!(here, there);
        assert_eq!(Greeting::decode(&here.encode()), Some(here));
        assert_eq!(Greeting::decode(&[0; Greeting::BYTES]), None);
        let secret = Secret::draw().unwrap();
        let keys = || Keys::of(Some(&secret), &here, &there);
        let tags = [0, 1].map({
            let mut sent = keys();
            move |_| sent.to_coordinator.tag(b"body")
        });
        let mut received = keys();
        assert!(
            received.to_coordinator.is_tag(b"body", &tags[0])
                && received.to_coordinator.is_tag(b"body", &tags[1])
        );
        for (what, mut key, body) in [
            ("changed", keys().to_coordinator, &b"bode"[..]),
            ("cut", keys().to_coordinator, b"bod"),
            ("sent back", keys().from_coordinator, b"body"),
            ("of other nonces", Keys::of(Some(&secret), &there, &here).to_coordinator, b"body"),
            ("of no secret", Keys::of(None, &here, &there).to_coordinator, b"body"),
            (
                "of another secret",
                Keys::of(Some(&Secret::draw().unwrap()), &here, &there).to_coordinator,
                b"body",
            ),
        ] {
            assert!(!key.is_tag(body, &tags[0]), "{what}");
        }
        assert!(!keys().to_coordinator.is_tag(b"body", &tags[1]), "out of its turn");
        let mut replayed = keys().to_coordinator;
        assert!(replayed.is_tag(b"body", &tags[0]) && !replayed.is_tag(b"body", &tags[0]), "repeated");
    }
}
