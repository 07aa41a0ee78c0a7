//! Memory that does not suffice, and the unwinding of a kernel in which that happens.
//!
//! Kernels allocate lists and results in the middle of loops and closures, without a `Result`. If there is no room, the stack is
//! unwound up to [`catch`], whose caller makes an error of the [`MemoryFault`]. Unwinding drops what the kernel holds. Outside
//! of it, and on threads that a program starts itself, the allocation panics with the fault's text.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::fault::MemoryFault;
use super::pool::no_room;

thread_local!(static IS_CAUGHT: Cell<bool> = const { Cell::new(false) });

/// The payload of an unwinding that ends in [`catch`].
struct Unwinding(MemoryFault);

/// Runs `f`, and returns the payload by which it has unwound the stack. An allocation in it that finds no room unwinds;
/// [`fault_of`] knows its payload.
///
/// ```
/// use isoshard_kernels::memory::{KernelList, catch, fault_of};
/// let payload = catch(|| KernelList::<u64>::new().resize(1 << 50)).unwrap_err();
/// assert_eq!(fault_of(payload).unwrap().wanted_bytes, 1 << 53);
/// ```
///
/// # Errors
/// Returns the payload.
#[inline]
pub fn catch<T>(f: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    let outer = IS_CAUGHT.replace(true);
    let ended = catch_unwind(AssertUnwindSafe(f));
    IS_CAUGHT.set(outer);
    ended
}

/// Returns the fault of an allocation that has unwound the stack.
///
/// # Errors
/// Returns the payload of anything else.
#[cold]
pub fn fault_of(payload: Box<dyn Any + Send>) -> Result<MemoryFault, Box<dyn Any + Send>> {
    payload.downcast::<Unwinding>().map(|unwinding| unwinding.0)
}

/// Returns true if an allocation without room unwinds the stack up to a [`catch`].
pub fn is_caught() -> bool {
    IS_CAUGHT.get()
}

/// Runs `f`, a part of a kernel of another thread for which [`is_caught`] was `caught`, and which passes an unwinding on.
pub(crate) fn with_caught(caught: bool, f: impl FnOnce()) {
    let outer = IS_CAUGHT.replace(caught);
    f();
    IS_CAUGHT.set(outer);
}

/// Continues the unwinding of a thread that helped this one. A fault gets this thread's numbers.
pub(crate) fn resume_of_helper(payload: Box<dyn Any + Send>) -> ! {
    match fault_of(payload) {
        Ok(fault) => unwind(no_room(fault.wanted, fault.wanted_bytes)),
        Err(other) => resume_unwind(other),
    }
}

/// Ends an allocation that has no `Result` to return the fault in.
#[cold]
pub fn unwind(fault: MemoryFault) -> ! {
    if IS_CAUGHT.get() {
        // Not a bug of the program: no message is printed, and no backtrace taken.
        resume_unwind(Box::new(Unwinding(fault)));
    }
    panic!("{fault}")
}
