//! The file of a checkpoint's index, taken apart and put together again: the tests change an index under a right checksum.

use sha2::{Digest, Sha256};

/// Returns the index of a file: what stands behind the format's name and the checksum.
///
/// # Panics
/// Panics if it is no such file.
#[allow(dead_code, reason = "not every test program uses all")]
pub fn body_of(text: &str) -> &str {
    let (_, body) = text.split_once("\"index\":").expect("a file with a checksum");
    body.strip_suffix('}').expect("an object")
}

/// Returns the file of an index, with its checksum.
pub fn summed(body: &str) -> String {
    let digits: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{{\"format\":\"isoshard checkpoint 2\",\"sha256\":\"{digits}\",\"index\":{body}}}")
}
