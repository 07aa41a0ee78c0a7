//! Which operator this thread is moving operands for.

use std::cell::Cell;

thread_local!(static CURRENT: Cell<&'static str> = const { Cell::new("") });

/// The operator on whose behalf this thread communicates; empty where the program itself does.
pub(crate) fn current_operator() -> &'static str {
    CURRENT.get()
}

/// While the guard lives, calls are made for `operator`. An operator within an operator is the inner one.
pub(crate) fn during(operator: &'static str) -> During {
    During(CURRENT.replace(operator))
}

/// As [`during`], unless an operator is at work already.
pub(crate) fn during_at_least(operator: &'static str) -> During {
    let current = current_operator();
    during(if current.is_empty() { operator } else { current })
}

/// Restores what was. Made by [`during`].
pub(crate) struct During(&'static str);

impl Drop for During {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
