//! Panics of a program's own functions and values, as texts.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Drops a value. Returns the message of a panic in its `Drop`, whose own payload is leaked if it panics as well.
pub(super) fn drop_caught<T>(value: T) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(|| drop(value))).err()?;
    let text = message(&*payload);
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
    Some(text)
}

/// Returns the message of a panic and drops its payload, whose `Drop` may panic.
pub(super) fn take_message(payload: Box<dyn Any + Send>) -> String {
    let text = message(&*payload);
    drop_caught(payload);
    text
}

/// Returns the message of a panic.
pub(super) fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}
