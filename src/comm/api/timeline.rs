//! The clock of a dry run: operators take their time one after another, and collectives run beside them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::base::lock;
use crate::comm::calls::{CallOrigin, ModulePath, Phase};
use crate::comm::network::Cost;
use crate::comm::transport::{CallResults, Request};
use crate::error::Result;

/// A dry run's clock. Cloning shares it.
///
/// An operator advances the clock by its time. A collective begins when it is started, or when its link is free: each
/// level of the network carries one call at a time, in the order of their starts. Waiting for a call advances the clock
/// to the call's end.
#[derive(Clone, Default)]
pub(crate) struct Timeline(Arc<Mutex<TimelineState>>);

#[derive(Default)]
struct TimelineState {
    now: Cost,
    /// The time from which each level of links is free.
    free: SmallVec<[Cost; 4]>,
    modules: Vec<ModuleTime>,
    of_module: FxHashMap<(ModulePath, Phase), usize>,
}

/// The modelled time of a dry run's rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryTime {
    /// The time at which the rank is done: operators, and waiting for collectives.
    pub total: Cost,
    /// The times by module and phase, in the order of first calls.
    pub modules: Vec<ModuleTime>,
}

/// The modelled time of one module in one phase, the modules inside it excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleTime {
    /// The module; empty outside of all modules.
    pub path: ModulePath,
    /// The part of the training step.
    pub phase: Phase,
    /// The time of its operators.
    pub computing: Cost,
    /// The time that its collectives take on their links.
    pub communicating: Cost,
    /// The part of the rank's time that passes in waiting for these collectives. The rest is hidden: the rank computes
    /// meanwhile, or waits for another module's call.
    pub waiting: Cost,
}

impl Timeline {
    /// Adds the time of an operator.
    pub fn compute(&self, time: Cost) {
        let mut state = self.lock();
        state.now = state.now + time;
        let module = state.module(CallOrigin::current());
        module.computing = module.computing + time;
    }

    /// Starts a call on the links of a level. Returns its end.
    pub(super) fn start(&self, level: usize, time: Cost) -> Cost {
        let mut state = self.lock();
        if state.free.len() <= level {
            state.free.resize(level + 1, Cost::default());
        }
        let end = state.free[level].max(state.now) + time;
        state.free[level] = end;
        let module = state.module(CallOrigin::current());
        module.communicating = module.communicating + time;
        end
    }

    fn wait_until(&self, end: Cost, origin: CallOrigin) {
        let mut state = self.lock();
        let waited = end.since(state.now);
        state.now = state.now + waited;
        let module = state.module(origin);
        module.waiting = module.waiting + waited;
    }

    pub(super) fn times(&self) -> DryTime {
        let state = self.lock();
        DryTime { total: state.now, modules: state.modules.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, TimelineState> {
        lock(&self.0)
    }
}

impl TimelineState {
    fn module(&mut self, CallOrigin { path, phase, .. }: CallOrigin) -> &mut ModuleTime {
        let TimelineState { modules, of_module, .. } = self;
        let at = *of_module.entry((path, phase)).or_insert_with(|| {
            let [computing, communicating, waiting] = Default::default();
            modules.push(ModuleTime { path, phase, computing, communicating, waiting });
            modules.len() - 1
        });
        &mut modules[at]
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Timeline").field(&self.lock().now).finish()
    }
}

/// A call whose end the clock knows.
pub(super) struct TimedRequest {
    pub inner: Box<dyn Request>,
    pub timeline: Timeline,
    pub end: Cost,
    pub origin: CallOrigin,
}

impl Request for TimedRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        let results = self.inner.wait()?;
        self.timeline.wait_until(self.end, self.origin);
        Ok(results)
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}
