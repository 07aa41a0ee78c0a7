//! Lists whose lengths come from files or settings: if there is no room for one, the caller gets an error.

use crate::error::Result;
use crate::tensor::no_room;

/// Appends an element to a list, which `called` names in an error.
///
/// # Errors
/// Returns an error if there is no room.
pub(crate) fn try_push<T>(list: &mut Vec<T>, element: T, called: &str) -> Result<()> {
    if list.try_reserve(1).is_err() {
        let bytes = (2 * list.len()).saturating_mul(size_of::<T>());
        return Err(no_room(format!("a list of {}", called), bytes));
    }
    list.push(element);
    Ok(())
}

/// Returns a list of `len` equal elements, which `called` names in an error.
///
/// # Errors
/// Returns an error if there is no room.
pub(crate) fn try_filled<T: Clone>(element: T, len: usize, called: &str) -> Result<Vec<T>> {
    let mut list = Vec::new();
    if list.try_reserve_exact(len).is_err() {
        return Err(no_room(format!("a list of {called}"), len.saturating_mul(size_of::<T>())));
    }
    list.resize(len, element);
    Ok(list)
}

/// Refuses work that takes about `bytes` in small pieces, whose lack would end the process, if the system has no such
/// room now. `called` names it in an error.
///
/// # Errors
/// Returns an error if there is no room.
pub(crate) fn expect_room(bytes: usize, called: &str) -> Result<()> {
    match Vec::<u8>::new().try_reserve_exact(bytes) {
        Ok(()) => Ok(()),
        Err(_) => Err(no_room(called.into(), bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn lists_without_room_are_errors() {
        let Err(Error::OutOfMemory(fault)) = try_filled(0u64, 1 << 58, "documents") else {
            panic!("there is no such room")
        };
        assert_eq!((&*fault.wanted, fault.wanted_bytes), ("a list of documents", 1 << 61));
        assert!(try_filled(0u64, usize::MAX, "documents").is_err());
        let said = expect_room(1 << 61, "the header of a file").unwrap_err().to_string();
        assert!(said.starts_with("memory: cpu has no room; got the header of a file of "), "{said}");
        let mut list = try_filled(7u8, 3, "numbers").unwrap();
        try_push(&mut list, 8, "numbers").unwrap();
        assert_eq!(list, [7, 7, 7, 8]);
    }
}
