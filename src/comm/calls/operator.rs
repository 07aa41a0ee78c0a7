//! Which operator this thread is moving operands for.

use std::cell::Cell;

thread_local!(static CURRENT: Cell<&'static str> = const { Cell::new("") });

/// The operator on whose behalf this thread communicates; empty where the program itself does.
pub(crate) fn current_operator() -> &'static str {
    CURRENT.get()
}

/// While the guard lives, calls are made for `operator`. An operator within an operator is the inner one.
pub(crate) fn operator_scope(operator: &'static str) -> OperatorScope {
    OperatorScope(CURRENT.replace(operator))
}

/// As [`operator_scope`], unless an operator is at work already.
pub(crate) fn operator_scope_if_none(operator: &'static str) -> OperatorScope {
    let current = current_operator();
    operator_scope(if current.is_empty() { operator } else { current })
}

/// Restores what was. Made by [`operator_scope`].
pub(crate) struct OperatorScope(&'static str);

impl Drop for OperatorScope {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
