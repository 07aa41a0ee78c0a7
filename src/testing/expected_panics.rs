//! Panics that a test expects print no message.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local!(static IS_QUIET: Cell<bool> = const { Cell::new(false) });

/// Runs `f`, and returns the message of its panic if it panics.
pub(super) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_QUIET.replace(install());
    let result = catch_unwind(AssertUnwindSafe(f));
    IS_QUIET.set(before);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
    })
}

/// Silences panics of this thread until it ends.
pub(super) fn quiet_panics_here() {
    IS_QUIET.set(install());
}

fn install() -> bool {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = take_hook();
        set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                loud(info);
            }
        }));
    });
    true
}
