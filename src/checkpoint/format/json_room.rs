//! The memory that reading a JSON text takes. `serde_json` ends the process if the system refuses memory, so the system is
//! asked before.

use crate::error::Result;
use crate::tensor::no_room;

/// Bytes per object: a node of a map with room for 11 entries, or an entry of a growing list of pieces.
const PER_OBJECT: usize = 1 << 10;
/// Bytes per list, and per element of a list or an object: four values at the least, or a third of a growing list.
const PER_ELEMENT: usize = 160;

/// Refuses a JSON text for which the system does not have the memory that reading it may take at most.
///
/// Pieces of a tensor take less than a fifth of this. The memory is only reserved, and given back at once.
///
/// # Errors
/// Returns an [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub(in crate::checkpoint) fn expect_json_room(verb: &str, text: &[u8]) -> Result<()> {
    let bytes = most_bytes(text);
    match Vec::<u8>::new().try_reserve_exact(bytes) {
        Ok(()) => Ok(()),
        Err(_) => Err(no_room(format!("a list of {} characters for {verb}", text.len()), bytes)),
    }
}

/// Returns the most bytes that the values of a JSON text take while they are read.
fn most_bytes(text: &[u8]) -> usize {
    let of = |&byte: &u8| match byte {
        b'{' => PER_OBJECT,
        b',' | b'[' => PER_ELEMENT,
        // A text grows as a list does.
        _ => 3,
    };
    text.iter().map(of).fold(0, usize::saturating_add)
}
