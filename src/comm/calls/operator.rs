//! The operator on whose behalf a thread communicates. Errors and flight records name it.

use std::cell::Cell;

thread_local!(static CURRENT: Cell<&'static str> = const { Cell::new("") });

/// Returns the operator on whose behalf this thread communicates, or "" if the program itself does.
pub(crate) fn current_operator() -> &'static str {
    CURRENT.get()
}

/// Names `operator` as the one that this thread communicates for, until the guard is dropped. The innermost scope
/// counts.
pub(crate) fn operator_scope(operator: &'static str) -> OperatorScope {
    OperatorScope(CURRENT.replace(operator))
}

/// Like [`operator_scope`], but an operator that is already named stays.
pub(crate) fn operator_scope_if_none(operator: &'static str) -> OperatorScope {
    let current = current_operator();
    operator_scope(if current.is_empty() { operator } else { current })
}

/// Restores the outer scope's operator when dropped. Made by [`operator_scope`].
pub(crate) struct OperatorScope(&'static str);

impl Drop for OperatorScope {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
