//! The module on whose behalf a thread calls operators and communicates. Explanations, tallies and spans name it.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::str::Split;
use std::sync::Mutex;

use rustc_hash::FxHashSet;

use crate::base::lock;

/// The largest number of paths that a process keeps.
const PATHS_LEN: usize = 1 << 16;

/// The paths that have been named. They are kept until the process ends.
static KNOWN: Mutex<Option<FxHashSet<&'static str>>> = Mutex::new(None);

thread_local!(
    static CURRENT: Cell<(ModulePath, Phase)> = const { Cell::new((ModulePath::NONE, Phase::Forward)) }
);

/// The path of a module within its model, such as `h.3.attn`. Copying and comparing it is cheap.
///
/// A module enters its path while it runs ([`ModulePath::enter`]). Every operator and collective that the thread calls
/// until then belongs to the module: [`DeviceMesh::explain`](crate::dtensor::DeviceMesh::explain) groups plans by path,
/// [`Tally::by_module`](crate::comm::Tally::by_module) counts calls and bytes by path, and `tracing` spans have the
/// path as a field. The tape keeps the path, so the backward pass and recomputation of a call have it too. The modules
/// of [`nn`](crate::nn) enter their paths.
///
/// ```
/// use isoshard::{Result, comm::{ModulePath, spmd}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// use isoshard::nn::{Forward, Linear, Module, Params, Plan, Scope};
/// use isoshard::{placement::Layout, rng::Init};
///
/// struct Doubled {
///     path: ModulePath,
///     map: Linear,
/// }
///
/// impl Doubled {
///     fn new(mut scope: Scope<'_>) -> Result<Doubled> {
///         let map = Linear::without_bias(scope.child("map"), 3, 3, Init::Ones)?;
///         Ok(Doubled { path: scope.module_path(), map })
///     }
/// }
///
/// impl Module for Doubled {
///     fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
///         let _scope = self.path.enter();
///         self.map.forward(cx, x)?.mul_scalar(2.0)
///     }
/// }
///
/// spmd(1, |rank| {
///     let mesh = DeviceMesh::parse(&rank, "1")?;
///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
///     let model = Doubled::new(params.root().child("h").child(0))?;
///     let x = DTensor::full(&mesh, DType::F32, [2, 3], Layout::replicated(0), 1.0)?;
///     let cx = Forward::eval(&params);
///     let (_, explanation) = mesh.explain(|| model.forward(&cx, &x))?;
///     let paths: Vec<&str> = explanation.plans.iter().map(|plan| plan.path.as_str()).collect();
///     assert_eq!(paths, ["h.0.map", "h.0"]); // the product, then the multiplication
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModulePath(&'static str);

/// The part of a training step in which a call is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The forward pass, and everything outside of a backward pass.
    #[default]
    Forward,
    /// The backward pass.
    Backward,
    /// The second run of a recomputed function, within a backward pass.
    Recomputation,
}

/// The guard of [`ModulePath::enter`]. Guards are dropped in the reverse order.
#[must_use = "the module is left when the guard is dropped"]
pub struct ModuleScope {
    outer: (ModulePath, Phase),
    /// The guard stays on its thread.
    thread: PhantomData<*const ()>,
}

impl ModulePath {
    /// The path of calls outside of all modules.
    const NONE: ModulePath = ModulePath("");

    /// Returns the path with this text. The first use of a text keeps it until the process ends; after 65,536 different
    /// texts a new one stands for its nearest known parent.
    ///
    /// ```
    /// use isoshard::comm::ModulePath;
    /// let path = ModulePath::new("h.3.attn");
    /// assert_eq!(path, ModulePath::new(&format!("h.{}.attn", 3)));
    /// assert_eq!(path.to_string(), "h.3.attn");
    /// ```
    pub fn new(path: &str) -> ModulePath {
        let mut known = lock(&KNOWN);
        intern(known.get_or_insert_default(), path, PATHS_LEN)
    }

    /// Returns the text, which is empty outside of all modules.
    ///
    /// ```
    /// use isoshard::comm::ModulePath;
    /// assert_eq!(ModulePath::new("h.3.attn").as_str(), "h.3.attn");
    /// ```
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Returns the path of the innermost module that this thread has entered.
    ///
    /// ```
    /// use isoshard::comm::ModulePath;
    /// let outer = ModulePath::new("h.0").enter();
    /// let inner = ModulePath::new("h.0.mlp").enter();
    /// assert_eq!(ModulePath::current().as_str(), "h.0.mlp");
    /// drop(inner);
    /// assert_eq!(ModulePath::current().as_str(), "h.0");
    /// drop(outer);
    /// assert_eq!(ModulePath::current().as_str(), "");
    /// ```
    pub fn current() -> ModulePath {
        CURRENT.get().0
    }

    /// Enters the module: this thread's calls belong to it until the returned guard is dropped, except those of modules
    /// that are entered meanwhile. Costs a few nanoseconds.
    ///
    /// ```
    /// use isoshard::{comm::{ModulePath, spmd}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "dp=2")?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?.requires_grad()?;
    ///     let mut loss = {
    ///         let _scope = ModulePath::new("head").enter();
    ///         x.exp()?.sum_all()?
    ///     };
    ///     let (_, explanation) = mesh.explain(|| loss.backward())?;
    ///     assert!(explanation.plans.iter().all(|plan| plan.path.as_str() == "head"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn enter(self) -> ModuleScope {
        self.enter_in(CURRENT.get().1)
    }

    /// Returns the path of the innermost module that holds both.
    pub(crate) fn common(self, other: ModulePath) -> ModulePath {
        if self == other {
            return self;
        }
        let parts = self.0.split('.').zip(other.0.split('.'));
        let len = parts.take_while(|(a, b)| a == b).map(|(part, _)| part.len() + 1).sum::<usize>();
        ModulePath::new(&self.0[..len.saturating_sub(1)])
    }

    /// Enters the module in a phase of the step.
    pub(crate) fn enter_in(self, phase: Phase) -> ModuleScope {
        ModuleScope { outer: CURRENT.replace((self, phase)), thread: PhantomData }
    }
}

impl Phase {
    /// Returns the phase of this thread's calls.
    pub(crate) fn current() -> Phase {
        CURRENT.get().1
    }
}

impl Drop for ModuleScope {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

impl fmt::Display for ModulePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

impl fmt::Debug for ModulePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}

/// Prints `forward`, `backward` or `recomputation`.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recomputation => "recomputation",
        })
    }
}

/// Returns `true` if `pattern` matches `path` part by part; `*` stands for any one part, and `**` for any number of
/// parts.
pub(crate) fn path_matches(pattern: &str, path: &str) -> bool {
    matches_parts(pattern.split('.'), path.split('.'))
}

fn matches_parts(mut pattern: Split<'_, char>, mut path: Split<'_, char>) -> bool {
    loop {
        match pattern.next() {
            None => return path.next().is_none(),
            Some("**") => {
                // Each try leaves out one part more.
                while !matches_parts(pattern.clone(), path.clone()) {
                    if path.next().is_none() {
                        return false;
                    }
                }
                return true;
            }
            Some(part) => match path.next() {
                Some(own) if part == "*" || part == own => {}
                _ => return false,
            },
        }
    }
}

/// Returns the kept copy of a path, or of its nearest known parent if `most` paths are known.
fn intern(known: &mut FxHashSet<&'static str>, path: &str, most: usize) -> ModulePath {
    if let Some(kept) = known.get(path) {
        return ModulePath(kept);
    }
    if known.len() < most {
        let kept: &'static str = Box::leak(path.into());
        known.insert(kept);
        return ModulePath(kept);
    }
    let parents = path.rmatch_indices('.').map(|(end, _)| &path[..end]);
    parents.filter_map(|parent| known.get(parent)).next().map_or(ModulePath::NONE, |kept| ModulePath(kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_beyond_the_limit_stand_for_their_parents() {
        let mut known = FxHashSet::default();
        let mut path = |path: &str| intern(&mut known, path, 3).as_str();
        assert_eq!(["h", "h.0", "h.0.attn"].map(&mut path), ["h", "h.0", "h.0.attn"]);
        assert_eq!(["h.0.attn.q", "h.1", "h.0", "norm"].map(path), ["h.0.attn", "h", "h.0", ""]);
    }

    #[test]
    fn a_scope_keeps_the_phase_and_ends_with_its_guard() {
        let state = || (ModulePath::current().as_str(), Phase::current());
        {
            let _node = ModulePath::new("h.0").enter_in(Phase::Backward);
            let _module = ModulePath::new("h.0.mlp").enter();
            assert_eq!(state(), ("h.0.mlp", Phase::Backward));
        }
        let unwound = std::panic::catch_unwind(|| {
            let _scope = ModulePath::new("h.1").enter();
            panic!("a module fails");
        });
        assert!(unwound.is_err());
        assert_eq!(state(), ("", Phase::Forward));
    }
}
