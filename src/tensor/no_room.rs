//! Memory that does not suffice, as an error of the kernel in which it happens.
//!
//! Kernels allocate results in the middle of loops and closures, without a `Result`. If there is no room, the stack is
//! unwound up to [`catch_no_room`], which stands around every kernel and every program that `comm` runs, and returns the
//! error. Unwinding drops the kernel's tensors. Outside of it, and on threads that a program starts itself, the
//! allocation panics with the error's text.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{Error, Result};

thread_local!(static IS_CAUGHT: Cell<bool> = const { Cell::new(false) });

/// The payload of an unwinding that ends in [`catch_no_room`].
struct UnwindingError(Error);

/// Runs `f`, and returns the error by which an allocation in it has unwound the stack. `verb` names the kernel in an
/// error for lack of memory; it may be empty.
///
/// # Errors
/// Returns the errors of `f`.
#[inline]
pub(crate) fn catch_no_room<T>(verb: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let outer = IS_CAUGHT.replace(true);
    let ended = catch_unwind(AssertUnwindSafe(f));
    IS_CAUGHT.set(outer);
    ended.unwrap_or_else(|payload| Err(caught(payload))).map_err(|mut error| {
        error.name_kernel(verb);
        error
    })
}

/// Returns the error that has unwound the stack; continues another panic.
#[cold]
fn caught(payload: Box<dyn Any + Send>) -> Error {
    match payload.downcast::<UnwindingError>() {
        Ok(unwinding) => unwinding.0,
        Err(other) => resume_unwind(other),
    }
}

/// Returns true if an allocation without room unwinds the stack up to a [`catch_no_room`].
pub(super) fn is_caught() -> bool {
    IS_CAUGHT.get()
}

/// Runs `f`, a part of a kernel of another thread for which [`is_caught`] was `caught`, and which passes an unwinding on.
pub(super) fn with_caught(caught: bool, f: impl FnOnce()) {
    let outer = IS_CAUGHT.replace(caught);
    f();
    IS_CAUGHT.set(outer);
}

/// Continues the unwinding of a thread that helped this one. An error for lack of memory gets this thread's numbers.
pub(super) fn resume_of_helper(payload: Box<dyn Any + Send>) -> ! {
    match payload.downcast::<UnwindingError>() {
        Ok(unwinding) => match unwinding.0 {
            Error::OutOfMemory(fault) => unwind(super::pool::no_room(fault.wanted, fault.wanted_bytes)),
            other => unwind(other),
        },
        Err(other) => resume_unwind(other),
    }
}

/// Ends an allocation that has no `Result` to return `error` in.
#[cold]
pub(super) fn unwind(error: Error) -> ! {
    if IS_CAUGHT.get() {
        // Not a bug of the program: no message is printed, and no backtrace taken.
        resume_unwind(Box::new(UnwindingError(error)));
    }
    panic!("{error}")
}

#[cfg(test)]
mod tests {
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
        assert!(!IS_CAUGHT.get());
    }
}
