//! Memory that does not suffice, as an error of the kernel in which it happens.
//!
//! Kernels allocate results in the middle of loops and closures, without a `Result`. If there is no room, the stack is
//! unwound up to [`catch_no_room`], which stands around every kernel and every program that `comm` runs, and returns the
//! error. Unwinding drops the kernel's tensors. Outside of it, and on threads that a program starts itself, the
//! allocation panics with the error's text.

use std::any::Any;
use std::panic::resume_unwind;

use isoshard_kernels::memory;

use crate::error::{Error, Result};

/// The payload of an unwinding that ends in [`catch_no_room`], of an error that is no lack of memory.
struct UnwindingError(Error);

/// Runs `f`, and returns the error by which an allocation in it has unwound the stack. `verb` names the kernel in an
/// error for lack of memory; it may be empty.
///
/// # Errors
/// Returns the errors of `f`.
#[inline]
pub(crate) fn catch_no_room<T>(verb: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    memory::catch(f).unwrap_or_else(|payload| Err(caught(payload))).map_err(|error| match error {
        Error::OutOfMemory(fault) => fault.in_kernel(verb).into(),
        other => other,
    })
}

/// Returns the error that has unwound the stack; continues another panic.
#[cold]
fn caught(payload: Box<dyn Any + Send>) -> Error {
    let payload = match memory::fault_of(payload) {
        Ok(fault) => return fault.into(),
        Err(payload) => payload,
    };
    match payload.downcast::<UnwindingError>() {
        Ok(unwinding) => unwinding.0,
        Err(other) => resume_unwind(other),
    }
}

/// Returns the error for a tensor or list of `wanted_bytes` for which the calling thread has no room.
#[cold]
pub(crate) fn no_room(wanted: String, wanted_bytes: usize) -> Error {
    memory::no_room(wanted, wanted_bytes).into()
}

/// Ends an allocation of a tensor, which has no `Result` to return `error` in.
#[cold]
pub(super) fn unwind(error: Error) -> ! {
    match error {
        Error::OutOfMemory(fault) => memory::unwind(*fault),
        // Not a bug of the program: no message is printed, and no backtrace taken.
        other if memory::is_caught() => resume_unwind(Box::new(UnwindingError(other))),
        other => panic!("{other}"),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, resume_unwind};

    use super::*;
    use crate::tensor::{DType, Tensor};

    #[test]
    fn a_kernel_without_room_is_an_error_and_other_panics_stay_panics() {
        let huge = || Ok(Tensor::zeros(DType::F32, [1usize << 50]));
        let Err(Error::OutOfMemory(fault)) = catch_no_room("fill", huge) else {
            panic!("there is no such room")
        };
        assert_eq!((&*fault.wanted, fault.wanted_bytes), ("f32[1125899906842624] for fill", 1 << 52));
        // The inner kernel is named.
        let inner = || catch_no_room("inner", huge);
        assert!(catch_no_room("outer", inner).unwrap_err().to_string().contains(" for inner of "));
        let other = catch_unwind(|| catch_no_room::<()>("fill", || resume_unwind(Box::new("a bug"))));
        assert_eq!(other.unwrap_err().downcast_ref(), Some(&"a bug"));
    }
}
