//! The origin of a call: operator, module and phase. A call that starts later than it was asked for takes it along.

use super::lineage::{Lineage, LineageScope};
use super::operator::{OperatorScope, current_operator, operator_scope};
use crate::module_path::{ModulePath, ModuleScope, Phase};

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

/// Everything that a call takes along: its origin, and the lineage of the tensors that it moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallContext {
    origin: CallOrigin,
    lineage: Lineage,
}

impl CallContext {
    /// Returns the context of this thread's calls.
    pub fn current() -> CallContext {
        CallContext { origin: CallOrigin::current(), lineage: Lineage::current() }
    }

    /// Gives this thread's calls this context until the guards are dropped.
    pub fn enter(self) -> (OperatorScope, ModuleScope, LineageScope) {
        let (operator, module) = self.origin.enter();
        (operator, module, self.lineage.enter())
    }
}
