//! Parameters, addressed by path and sharded from the start.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::plan::Plan;
use crate::dtensor::{DTensor, DTensors, DeviceMesh, TensorMeta, Transfer};
use crate::error::{Error, Result};
use crate::ops::Batched;
use crate::placement::{Layout, Mesh};
use crate::rng::{Generator, Init};
use crate::tensor::{DType, Device, Shape};

/// One parameter of one [`Params`]; another's refuse it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    index: usize,
    owner: Owner,
}

/// The number of a [`Params`] in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Owner(u64);

impl Owner {
    fn next() -> Owner {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Owner(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl ParamId {
    /// The number of parameters declared before this one.
    pub fn index(self) -> usize {
        self.index
    }
}

/// The number of parameters declared before, as [`ParamId::index`]: the same on every rank.
impl fmt::Debug for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamId({})", self.index)
    }
}

/// A model's parameters on a mesh: each lies as the plan says, and no rank ever holds more of one than its part.
pub struct Params {
    owner: Owner,
    mesh: DeviceMesh,
    plan: Plan,
    generator: Generator,
    dtype: DType,
    /// What modules compute with.
    compute: DType,
    list: Vec<Param>,
    units: Vec<Unit>,
    /// The paths at which activations may change layout.
    sites: BTreeSet<String>,
    /// The number of parameters and of sites that there were when the plan was last compared with them.
    checked: Cell<Option<(usize, usize)>>,
}

struct Param {
    path: String,
    value: DTensor,
    /// The layout in which the model computes with it.
    used: Layout,
    unit: usize,
}

/// Parameters that are gathered together, a block ahead of their use.
pub(super) struct Unit {
    name: String,
    pub members: Vec<ParamId>,
}

/// One update of a parameter: an optimizer's operator, and its operands after the parameter itself.
#[derive(Debug)]
pub struct Update<O> {
    /// The parameter.
    pub param: ParamId,
    /// The operator.
    pub op: O,
    /// The operator's operands after the parameter: its gradient, what the optimizer keeps of it. None once the update is made.
    pub operands: DTensors,
    /// The operator's results after the new value, once the update is made.
    pub results: Option<DTensors>,
}

impl<O> Update<O> {
    /// An update to be made by [`Params::update`].
    pub fn new(param: ParamId, op: O, operands: impl IntoIterator<Item = DTensor>) -> Update<O> {
        Update { param, op, operands: operands.into_iter().collect(), results: None }
    }
}

/// Where a module declares its parameters: a path and the parameters it leads to.
pub struct Scope<'a> {
    params: &'a mut Params,
    path: String,
}

impl Params {
    /// No parameters yet. Values will be drawn from `seed` in the order of declaration, equally on every mesh.
    ///
    /// # Errors
    /// Refuses a plan that names axes the mesh lacks.
    pub fn new(mesh: &DeviceMesh, plan: Plan, seed: u64) -> Result<Params> {
        plan.check(mesh.mesh())?;
        let generator = Generator::new(seed).child("params");
        Ok(Params {
            owner: Owner::next(),
            mesh: mesh.clone(),
            plan,
            generator,
            dtype: DType::F32,
            compute: DType::F32,
            list: Vec::new(),
            units: Vec::new(),
            sites: BTreeSet::new(),
            checked: Cell::new(None),
        })
    }

    /// From now on modules compute with the parameters rounded to `dtype`, bf16 say, and so do activations: what is kept,
    /// updated and saved stays f32, and so do gradients when they arrive there. Under FSDP what travels is rounded
    /// before (Micikevicius et al., *Mixed precision training*, 2018).
    ///
    /// # Errors
    /// Refuses dtypes that are not floating.
    pub fn compute_in(&mut self, dtype: DType) -> Result<()> {
        dtype.expect_float("compute_in")?;
        self.compute = dtype;
        Ok(())
    }

    /// The dtype that modules compute in.
    pub fn compute_dtype(&self) -> DType {
        self.compute
    }

    /// Where a model's own declarations begin.
    pub fn root(&mut self) -> Scope<'_> {
        Scope { params: self, path: String::new() }
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Compares the plan with what was declared: a typing error in a pattern would otherwise leave parameters replicated and
    /// activations where they are. A forward pass does so before anything else. Communicates nothing.
    ///
    /// # Errors
    /// Refuses, with the nearest names, a plan's pattern that matches no parameter, or no site.
    pub fn check_plan(&self) -> Result<()> {
        let declared = Some((self.list.len(), self.sites.len()));
        if self.checked.get() == declared {
            return Ok(());
        }
        self.expect_matches(&self.plan)?;
        self.checked.set(declared);
        Ok(())
    }

    fn expect_matches(&self, plan: &Plan) -> Result<()> {
        let paths: Vec<&str> = self.list.iter().map(|p| &p.path[..]).collect();
        let sites: Vec<&str> = self.sites.iter().map(|s| &s[..]).collect();
        plan.expect_matches(&paths, &sites)
    }

    /// True if a module declared the site.
    pub(super) fn has_site(&self, path: &str) -> bool {
        self.sites.contains(path)
    }

    /// All sites that modules declared.
    pub(super) fn sites(&self) -> impl Iterator<Item = &str> {
        self.sites.iter().map(|s| &s[..])
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The global number of elements of all parameters.
    pub fn numel(&self) -> usize {
        self.list.iter().map(|p| p.value.shape().numel()).sum()
    }

    /// All parameters in the order of declaration.
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        let owner = self.owner;
        (0..self.list.len()).map(move |index| ParamId { index, owner })
    }

    /// A parameter's path, e.g. `h.0.attn.qkv.weight`.
    ///
    /// # Panics
    /// On another model's parameter, as a slice on an index that it does not have.
    pub fn path(&self, id: ParamId) -> &str {
        &self.at(id).path
    }

    /// A parameter as it lies at rest: the leaf that gradients arrive at.
    ///
    /// # Panics
    /// On another model's parameter, as a slice on an index that it does not have.
    pub fn value(&self, id: ParamId) -> &DTensor {
        &self.at(id).value
    }

    /// Refuses, in the name of `verb`, another model's parameter.
    pub(super) fn expect_own(&self, verb: &str, id: ParamId) -> Result<()> {
        if id.owner == self.owner {
            return Ok(());
        }
        let given = format!("{id:?} of another, this one has {} parameter(s)", self.list.len());
        Err(Error::invalid(verb, "the parameter is another model's", given, "pass an id of Params::ids"))
    }

    fn at(&self, id: ParamId) -> &Param {
        self.expect_own("params", id).unwrap_or_else(|e| panic!("{e}"));
        &self.list[id.index]
    }

    /// All parameters' values, in the order of declaration.
    pub fn values(&self) -> impl Iterator<Item = &DTensor> {
        self.list.iter().map(|p| &p.value)
    }

    /// How these parameters go from one mesh and plan to another: what a [`Bridge`](crate::dtensor::Bridge) wants to know.
    /// The same from any mesh, where the same model was declared. Communicates nothing.
    ///
    /// # Errors
    /// Refuses plans that name axes their mesh lacks, cannot split a parameter, or have a pattern that matches nothing.
    pub fn transfers(&self, from: (&Mesh, &Plan), to: (&Mesh, &Plan)) -> Result<Vec<Transfer>> {
        [from, to].iter().try_for_each(|(_, plan)| self.expect_matches(plan))?;
        let at_rest = |p: &Param, (mesh, plan): (&Mesh, &Plan)| {
            let used = plan.used_layout(mesh, &p.path, p.value.shape())?;
            plan.rest_layout(mesh, self.dtype, p.value.shape(), &used).map_err(|e| e.at(&p.path))
        };
        let cross =
            |p: &Param| Ok(Transfer::new(self.dtype, p.value.shape(), at_rest(p, from)?, at_rest(p, to)?));
        self.list.iter().map(cross).collect()
    }

    /// The parameter at a path.
    pub fn find(&self, path: &str) -> Option<ParamId> {
        let index = self.list.iter().position(|p| p.path == path)?;
        Some(ParamId { index, owner: self.owner })
    }

    /// Replaces a parameter's value.
    ///
    /// # Errors
    /// Refuses another model's parameter, and another dtype, shape or layout.
    pub fn set(&mut self, id: ParamId, value: DTensor) -> Result<()> {
        self.expect_own("set", id)?;
        let old = &self.list[id.index].value;
        if old.tensor_meta() != value.tensor_meta() {
            return Err(Error::invalid(
                "set",
                format!("parameter {} has another dtype, shape or layout", self.path(id)),
                format!("{}, not {}", value.spec(), old.spec()),
                "redistribute it first",
            ));
        }
        self.list[id.index].value = value.requires_grad()?;
        Ok(())
    }

    /// Makes an optimizer's updates, in place where buffers have no other owner.
    ///
    /// Parameters' values are given up to the operators, each as its call's first operand, before [`Update::operands`]; a
    /// first result is the new value, and the others become [`Update::results`]. On a CUDA device all updates take as few
    /// launches as the operator needs ([`Batched`]). Communicates what the operators' operands have to move: nothing, if
    /// all of a parameter lies as it does.
    ///
    /// `examples/07_own_optimizer.rs` is an optimizer written with it.
    ///
    /// # Errors
    /// Refuses, before anything has changed, another model's parameter, one that is named twice, and what the operators
    /// refuse; also an operator whose first result is not of the parameter's dtype, shape and layout. After a fault, of
    /// communication or of a device, the updates before it are made and have results; the others hold the operands that they
    /// held, except that a kernel which fails halfway may have written to them.
    pub fn update<O: Batched>(&mut self, updates: &mut [Update<O>]) -> Result<()> {
        self.check_plan()?;
        let mut named = vec![false; self.list.len()];
        for id in updates.iter().map(|u| u.param) {
            self.expect_own("update", id)?;
            if std::mem::replace(&mut named[id.index], true) {
                let given = self.path(id).to_string();
                return Err(Error::invalid("update", "a parameter is named twice", given, ""));
            }
        }
        let meta: Vec<Rc<TensorMeta>> =
            updates.iter().map(|u| self.value(u.param).tensor_meta().clone()).collect();
        let accept = |k: usize, outs: &[Rc<TensorMeta>]| {
            let (update, first): (&Rc<TensorMeta>, _) = (&meta[k], outs.first());
            if first == Some(update) {
                return Ok(());
            }
            let rule = "the first result is the parameter's new value, of its dtype, shape and layout";
            let given = first.map_or_else(|| "no result".to_string(), |first| first.spec().to_string());
            Err(Error::invalid("update", rule, format!("{given} for {}", update.spec()), ""))
        };
        for update in updates.iter_mut() {
            update.operands.insert(0, self.list[update.param.index].value.take_value());
        }
        let mut calls: Vec<_> = updates.iter_mut().map(|u| (&u.op, &mut u.operands)).collect();
        let (outs, mut result) = DTensor::apply_owned_if(&mut calls, accept);
        let mut outs = outs.into_iter();
        for update in updates {
            match outs.next() {
                Some(mut outs) => {
                    result = self.set(update.param, outs.remove(0)).and(result);
                    update.results = Some(outs);
                }
                None => self.list[update.param.index].value.put_back(update.operands.remove(0)),
            }
        }
        result
    }

    /// Zeros of a parameter's dtype and shape that lie as it does: what an optimizer keeps of it begins so.
    ///
    /// # Errors
    /// Refuses another model's parameter; a device without room.
    pub fn zeros_like(&self, id: ParamId) -> Result<DTensor> {
        self.expect_own("zeros_like", id)?;
        let value = self.value(id);
        DTensor::zeros(&self.mesh, value.dtype(), value.shape(), value.layout().clone())
    }

    /// A hash (FNV-1a, 64 bits) over all parameters' global values in the order of their paths: equal training gives
    /// equal digests on any mesh. Gathers one parameter after the other on every rank.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn digest(&self) -> Result<u64> {
        let mut order: Vec<&Param> = self.list.iter().collect();
        order.sort_by(|a, b| a.path.cmp(&b.path));
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for p in order {
            for &byte in p.value.full_tensor()?.to_device(Device::Cpu)?.contiguous()?.as_bytes()? {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        Ok(hash)
    }

    pub(super) fn used_layout(&self, id: ParamId) -> &Layout {
        &self.at(id).used
    }

    /// True where a parameter is used as it lies at rest.
    pub(super) fn is_used_as_stored(&self, id: ParamId) -> bool {
        let Param { value, used, .. } = self.at(id);
        value.layout() == used && value.dtype() == self.compute
    }

    pub(super) fn unit_of(&self, id: ParamId) -> usize {
        self.at(id).unit
    }

    pub(super) fn units(&self) -> &[Unit] {
        &self.units
    }

    fn declare(&mut self, path: String, shape: Shape, init: Init) -> Result<ParamId> {
        if self.find(&path).is_some() {
            return Err(Error::invalid(
                "param",
                "two parameters share a path",
                path,
                "name one of them otherwise",
            ));
        }
        let mesh = self.mesh.mesh();
        let used = self.plan.used_layout(mesh, &path, &shape)?;
        let rest = self.plan.rest_layout(mesh, self.dtype, &shape, &used);
        let value = rest
            .and_then(|rest| DTensor::init(&self.mesh, self.dtype, shape, rest, init, &mut self.generator));
        let value = value.map_err(|e| e.at(&path))?.requires_grad()?;
        let id = ParamId { index: self.list.len(), owner: self.owner };
        let unit = self.unit_for(&path, id);
        self.list.push(Param { path, value, used, unit });
        Ok(id)
    }

    /// The unit of a path is its part up to the first number (`h.0`); parameters without one form the root unit.
    fn unit_for(&mut self, path: &str, id: ParamId) -> usize {
        let number =
            path.split('.').position(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        let name =
            number.map(|n| path.split('.').take(n + 1).collect::<Vec<_>>().join(".")).unwrap_or_default();
        let at = self.units.iter().position(|u| u.name == name).unwrap_or_else(|| {
            self.units.push(Unit { name, members: Vec::new() });
            self.units.len() - 1
        });
        self.units[at].members.push(id);
        at
    }
}

impl Unit {
    /// The root unit, whose parameters are used at both ends of the model, stays gathered throughout.
    pub(super) fn is_root(&self) -> bool {
        self.name.is_empty()
    }
}

impl Scope<'_> {
    /// A deeper path.
    pub fn child(&mut self, name: impl fmt::Display) -> Scope<'_> {
        let path = self.join(&name);
        Scope { params: self.params, path }
    }

    /// The path so far.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Declares a parameter of a global shape. Communicates nothing, but for a comparison of the seeds with the first one.
    ///
    /// # Errors
    /// Refuses a path that is taken, a plan that cannot split this shape, and ranks that have different seeds.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<ParamId> {
        self.params.declare(self.join(&name), shape.into(), init)
    }

    /// Declares a place at which a plan may change how activations lie, and gives its path, for
    /// [`Forward::site`](super::Forward::site).
    pub fn site(&mut self, name: &str) -> String {
        let path = self.join(&name);
        self.params.sites.insert(path.clone());
        path
    }

    /// Declares this scope's own path as a [site](Scope::site): that of the module's result.
    pub fn site_here(&mut self) -> String {
        self.params.sites.insert(self.path.clone());
        self.path.clone()
    }

    fn join(&self, name: &dyn fmt::Display) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}

/// One line a parameter: path and facts.
impl fmt::Debug for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.list.iter().map(|p| (&p.path, p.value.spec().to_string()))).finish()
    }
}
