//! The origin of a call: operator, module and phase. A call that starts later than it was asked for takes it along.

use super::module_path::{ModulePath, ModuleScope, Phase};
use super::operator::{OperatorScope, current_operator, operator_scope};

/// The operator, module and phase on whose behalf a thread communicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallOrigin {
    pub operator: &'static str,
    pub path: ModulePath,
    pub phase: Phase,
}

impl CallOrigin {
    /// Returns the origin of this thread's calls.
    pub fn current() -> CallOrigin {
        CallOrigin { operator: current_operator(), path: ModulePath::current(), phase: Phase::current() }
    }

    /// Gives this thread's calls this origin until the guards are dropped.
    pub fn enter(self) -> (OperatorScope, ModuleScope) {
        (operator_scope(self.operator), self.path.enter_in(self.phase))
    }
}
