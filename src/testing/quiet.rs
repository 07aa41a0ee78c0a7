//! Panics that a test expects print no message.

use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

thread_local!(static IS_QUIET: Cell<bool> = const { Cell::new(false) });

/// Runs `f`, which catches its panics, without their messages.
pub(super) fn quietly<T>(f: impl FnOnce() -> T) -> T {
    let before = IS_QUIET.replace(install());
    let result = f();
    IS_QUIET.set(before);
    result
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
