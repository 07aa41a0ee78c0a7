//! Parameters, addressed by path and sharded from the start.

mod batch;
pub(in crate::nn) mod check;
mod declared;
pub(in crate::nn) mod freeze;
pub(in crate::nn) mod fused_param;
mod gathered;
mod names;
mod offload;
pub(in crate::nn) mod param_id;
pub(in crate::nn) mod param_state;
pub(in crate::nn) mod param_unit;
pub(in crate::nn) mod pieces;
mod placed;
mod report;
mod rounded;
pub(in crate::nn) mod scope;
mod snapshot;
pub(in crate::nn) mod update;

pub(crate) use placed::{ParamPlacement, PlacedUnit};
pub use report::PlanWarning;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use names::{Declaring, ParamNames};

use crate::comm::ModulePath;
use crate::dtensor::{CountedList, DTensor, DeviceMesh, visit};
use crate::error::{Error, Result};
use crate::nn::params::param_id::{ModelNumber, ParamId};
use crate::nn::params::param_unit::ParamUnit;
use crate::nn::params::pieces::ParamPiece;
use crate::nn::plan::foreign_names::own_pattern;
use crate::nn::plan::pattern;
use crate::nn::plan::rules::Plan;
use crate::placement::Layout;
use crate::rng::{Generator, Init};
use crate::tensor::{DType, MappedFile, Shape};

/// A model's parameters on a mesh, each in the layout of the plan. A rank never holds more of a parameter than its
/// shard, also while values are initialised.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
/// let digests = |mesh: &'static str, ranks| spmd(ranks, move |rank| {
///     let mesh = DeviceMesh::parse(&rank, mesh)?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     params.root().param("wte.weight", [11, 4], Init::Normal { mean: 0.0, std: 0.02 })?;
///     params.digest()
/// });
/// // The same values on one rank and on three.
/// assert_eq!(digests("fsdp=1", 1)?[0], digests("fsdp=3", 3)?[2]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Params {
    number: ModelNumber,
    mesh: DeviceMesh,
    plan: Plan,
    generator: Generator,
    dtype: DType,
    /// The dtype that modules compute in.
    compute: DType,
    list: CountedList<Param>,
    units: CountedList<ParamUnit>,
    names: ParamNames,
    /// The bytes that gathered units take at most, if the program says so.
    gather_limit: Option<usize>,
    /// The elements of the units that stay gathered throughout, set when units are placed.
    throughout_len: usize,
    /// The paths where activations may change layout.
    sites: BTreeSet<String>,
    /// The paths of the parts whose activations may be dropped.
    blocks: BTreeMap<String, ModulePath>,
    declaring: Declaring,
    /// `true` if new parameters are zeros, which are replaced by loaded values.
    blank: bool,
    /// `true` if the layouts are not the plan's.
    is_placed: bool,
    /// The file that has the values, if they are not in memory.
    mapped: Option<MappedFile>,
    /// The numbers of parameters, sites and blocks, and strict mode, when the plan was last checked.
    checked: Cell<Option<[usize; 4]>>,
}

#[derive(Clone)]
struct Param {
    path: String,
    /// The path of the module that declared it.
    module: ModulePath,
    value: DTensor,
    /// The layout that the model computes in.
    used: Layout,
    /// The layout in which its gradient arrives.
    gradient: Layout,
    /// The layout in which its rounded value is held from one update to the next, if that is not the value's own.
    held: Option<Layout>,
    held_value: RefCell<Option<DTensor>>,
    /// The value in the dtype that modules compute in, if the last update rounded it.
    rounded: Option<DTensor>,
    unit: usize,
    pieces: Vec<ParamPiece>,
}

impl Params {
    /// Returns an empty set of parameters. Values will be drawn from `seed`, in the order of declaration, with the same
    /// bits on every mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// let error = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     Params::new(&mesh, Plan::default().fsdp("fsdp"), 7).map(drop)
    /// });
    /// assert!(error.unwrap_err().to_string().contains("no such axis; got \"fsdp\" of (dp=2)"));
    /// ```
    ///
    /// # Errors
    /// Refuses a plan that names axes that the mesh lacks.
    pub fn new(mesh: &DeviceMesh, plan: Plan, seed: u64) -> Result<Params> {
        plan.check(mesh.mesh())?;
        let generator = param_generator(seed);
        Ok(Params {
            number: ModelNumber::next(),
            mesh: mesh.clone(),
            plan,
            generator,
            dtype: DType::F32,
            compute: DType::F32,
            list: CountedList::default(),
            units: CountedList::default(),
            names: ParamNames::default(),
            gather_limit: None,
            throughout_len: 0,
            sites: BTreeSet::new(),
            blocks: BTreeMap::new(),
            declaring: Declaring::default(),
            blank: false,
            is_placed: false,
            mapped: None,
            checked: Cell::new(None),
        })
    }

    /// Returns an empty set of parameters that are declared as zeros: for models whose values are loaded. Nothing is
    /// drawn, and declarations communicate nothing.
    pub(crate) fn blank(mesh: &DeviceMesh, plan: Plan) -> Result<Params> {
        Ok(Params { blank: true, ..Params::new(mesh, plan, 0)? })
    }

    /// Draws the values of parameters that are declared from now on from `seed`, as [`Params::new`] does: for parts
    /// that are added to a model whose values are loaded, such as adapters. Parameters that are declared keep their
    /// values. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let init = Init::Normal { mean: 0.0, std: 1.0 };
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let drawn: Vec<f64> = (["a", "b"].into_iter().map(|name| {
    ///         params.reseed(8);
    ///         let id = params.root().param(name, [], init)?;
    ///         params.value(id).item()
    ///     })).collect::<isoshard::Result<_>>()?;
    ///     assert_eq!(drawn[0], drawn[1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn reseed(&mut self, seed: u64) {
        self.generator = param_generator(seed);
        self.blank = false;
    }

    /// Makes modules compute with parameters rounded to `dtype`, such as bf16, so activations have that dtype too
    /// (Micikevicius et al., *Mixed precision training*, 2018). Parameters, optimizer state and arriving gradients stay
    /// f32: the gradient of each use of a parameter has `dtype`, and they are added in f32. FSDP gathers the rounded values, at
    /// half the bytes, and the optimizer's step rounds them for the next passes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     params.compute_in(DType::BF16)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     assert_eq!(params.value(w).dtype(), DType::F32);
    ///     assert_eq!(Forward::eval(&params).param(w)?.dtype(), DType::BF16);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating, and one in which gathered units take more bytes than
    /// [`Sharding::gather_at_most`](crate::fsdp::Sharding::gather_at_most) says.
    pub fn compute_in(&mut self, dtype: DType) -> Result<()> {
        dtype.expect_float("compute_in")?;
        self.expect_gathers_fit("compute_in", &self.units, self.gather_limit, dtype)?;
        self.compute = dtype;
        Ok(())
    }

    /// Returns the dtype that modules compute in.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(params.compute_dtype(), DType::F32);
    ///     params.compute_in(DType::F16)?;
    ///     assert_eq!(params.compute_dtype(), DType::F16);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn compute_dtype(&self) -> DType {
        self.compute
    }

    /// Returns the mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(2, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[("dp", 2)])?, Plan::default(), 7)?;
    ///     assert_eq!(params.mesh().mesh().to_string(), "(dp=2)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the plan.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(2, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[("dp", 2)])?, Plan::default().batch("dp"), 7)?;
    ///     let layout = params.batch_layout();
    ///     assert_eq!(layout, "(S0)".parse()?); // the batch is sharded over dp
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Checks that every pattern of the plan matches a declared parameter, site or block: a typing error would otherwise
    /// leave parameters replicated. Each forward pass does this first. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let error = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("head.wieght", "tp", 0), 7)?;
    ///     params.root().child("head").param("weight", [4, 4], Init::Ones)?;
    ///     params.check_plan()
    /// });
    /// assert!(error.unwrap_err().to_string().ends_with("the nearest are head.weight"));
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no parameter, no site or no block, and names the nearest paths; in strict mode, a plan with
    /// [warnings](Params::warnings).
    pub fn check_plan(&self) -> Result<()> {
        let strict = usize::from(self.mesh.is_strict());
        let declared = Some([self.list.len(), self.sites.len(), self.blocks.len(), strict]);
        if self.checked.get() == declared {
            return Ok(());
        }
        // The plan is that of the whole model, whichever module runs.
        let _scope = ModulePath::new("").enter();
        self.expect_matches(&self.plan)?;
        self.expect_no_warnings()?;
        self.checked.set(declared);
        Ok(())
    }

    fn expect_matches(&self, plan: &Plan) -> Result<()> {
        plan.expect_matches(
            &self.paths(),
            &self.sites().collect::<Vec<_>>(),
            &self.blocks().collect::<Vec<_>>(),
        )
    }

    fn paths(&self) -> Vec<&str> {
        self.list.iter().map(|p| &p.path[..]).collect()
    }

    /// Returns the number of parameters.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::new(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     assert_eq!(params.len(), 2); // a weight and a bias
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns `true` if no parameter is declared.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert!(params.is_empty());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the number of elements of all parameters, counted globally.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     Linear::new(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     assert_eq!(params.numel(), 8);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn numel(&self) -> usize {
        self.list.iter().map(|p| p.value.shape().numel()).sum()
    }

    /// Returns the ids of all parameters, in the order of declaration.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::new(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     let shapes: Vec<_> = params.ids().map(|id| params.value(id).shape().to_string()).collect();
    ///     assert_eq!(shapes, ["[2, 3]", "[2]"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        let model = self.number;
        (0..self.list.len()).map(move |index| {
            visit();
            ParamId { index, model }
        })
    }

    /// Returns a parameter's path, e.g. `h.0.attn.qkv.weight`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::new(params.root().child("h").child(0), 3, 2, Init::Ones)?;
    ///     let last = params.ids().last().expect("a bias");
    ///     assert_eq!(params.path(last), "h.0.bias");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the parameter is another model's.
    pub fn path(&self, id: ParamId) -> &str {
        &self.at(id).path
    }

    /// Returns a parameter's value in the layout in which it is stored: the leaf tensor whose gradient a backward pass
    /// gives.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("w", "tp", 0), 7)?;
    ///     let w = params.root().param("w", [4], Init::Ones)?;
    ///     let grads = params.value(w).mul_scalar(3.0)?.sum_all()?.backward()?;
    ///     let grad = grads.get(params.value(w)).expect("w was used");
    ///     assert_eq!(grad.spec().to_string(), "f32[4]@(tp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the parameter is another model's.
    pub fn value(&self, id: ParamId) -> &DTensor {
        &self.at(id).value
    }

    pub(in crate::nn) fn value_mut(&mut self, id: ParamId) -> &mut DTensor {
        let param = &mut self.list[id.index];
        (*param.held_value.get_mut(), param.rounded) = (None, None);
        &mut param.value
    }

    /// Refuses, in the name of `verb`, another model's parameter.
    pub(crate) fn expect_own(&self, verb: &str, id: ParamId) -> Result<()> {
        if id.model == self.number {
            return Ok(());
        }
        let given = format!("{id:?} of another, this one has {} parameter(s)", self.list.len());
        Err(Error::invalid(verb, "the parameter is another model's", given, "pass an id of Params::ids"))
    }

    fn at(&self, id: ParamId) -> &Param {
        self.expect_own("params", id).unwrap_or_else(|e| panic!("{e}"));
        &self.list[id.index]
    }

    /// Returns the values of all parameters, in the order of declaration.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// let bytes = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     Linear::new(params.root().child("map"), 8, 2, Init::Ones)?;
    ///     Ok(params.values().map(|value| 4 * value.local().shape().numel()).sum::<usize>())
    /// })?;
    /// assert_eq!(bytes, [36, 36]); // half of 18 f32 elements on each rank
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn values(&self) -> impl Iterator<Item = &DTensor> {
        self.list.iter().map(|p| &p.value)
    }

    /// Returns the parameter at a path, or `None`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::without_bias(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     assert!(params.find("map.weight").is_some() && params.find("map.bias").is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn find(&self, path: &str) -> Option<ParamId> {
        let index = self.names.param(path)?;
        Some(ParamId { index, model: self.number })
    }

    /// Returns the parameters whose paths match a pattern, as in a [`Plan`]: a path whose parts may be `*`, for any one
    /// part, or `**`, for any number of parts. Names of Hugging Face's decoders, such as `model.layers.0.**`, are understood if
    /// nothing has the name itself.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     for i in 0..3 {
    ///         Linear::new(params.root().child("h").child(i), 4, 4, Init::Ones)?;
    ///     }
    ///     let biases = params.matching("h.*.bias")?;
    ///     assert_eq!(params.path(biases[2]), "h.2.bias");
    ///     let refused = params.matching("h.*.bais").unwrap_err().to_string();
    ///     assert!(refused.ends_with("the nearest are h.*.bias, h.*.weight"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no parameter, and names the nearest paths.
    pub fn matching(&self, pattern: &str) -> Result<Vec<ParamId>> {
        self.matching_for("params", pattern)
    }

    /// Returns [`Params::matching`], with refusals in the name of `verb`.
    pub(crate) fn matching_for(&self, verb: &str, pattern: &str) -> Result<Vec<ParamId>> {
        let matching = |pattern: &str| -> Vec<ParamId> {
            self.ids().filter(|id| pattern::matches(pattern, &self.list[id.index].path)).collect()
        };
        let mut found = matching(pattern);
        if found.is_empty() {
            found = own_pattern(pattern).map(|own| matching(&own)).unwrap_or_default();
        }
        if found.is_empty() {
            return Err(pattern::no_match(verb, pattern, &self.paths(), "parameter"));
        }
        Ok(found)
    }

    /// Replaces a parameter's value.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     params.set(w, params.value(w).mul_scalar(2.0)?)?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [2.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameter, and a value of another dtype, shape or layout. Returns an error if the value goes to
    /// a file ([`Params::offload`]) and the disk is full.
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
        let _scope = self.module_of(id).enter();
        // A value for which the disk has no room stays in memory.
        let (value, placed) = match self.placed_in_file(&value) {
            Ok(there) => (there.unwrap_or(value), Ok(())),
            Err(fault) => (value, Err(fault)),
        };
        // A value in its unit's block stays there, so that gathers send the block as it is.
        let stays = self.mapped.is_none() && self.value_mut(id).overwrite_part(&value)?;
        let value = if stays { self.value(id).detach() } else { value };
        let old = &self.list[id.index].value;
        let value = if old.has_history() { self.as_leaf(id, &value)? } else { value.detach() };
        let lineage = self.value(id).lineage();
        *self.value_mut(id) = value.with_lineage(lineage);
        placed
    }

    /// Declares a parameter, of one piece if none are given.
    pub(in crate::nn) fn declare(
        &mut self,
        path: String,
        shape: Shape,
        init: Init,
        pieces: Option<Vec<ParamPiece>>,
    ) -> Result<ParamId> {
        let pieces = pieces.unwrap_or_else(|| vec![ParamPiece::whole(&path, &shape)]);
        self.names.expect_free(&path, &pieces)?;
        let module = ModulePath::new(path.rsplit_once('.').map_or("", |(module, _)| module));
        let mesh = self.mesh.mesh();
        let used = self.plan.used_layout(mesh, &path, &shape)?;
        let stored = self.plan.stored_layout(mesh, self.dtype, &shape, &used);
        let value = stored.and_then(|stored| match self.blank {
            true => DTensor::zeros(&self.mesh, self.dtype, shape, stored),
            false => DTensor::init(&self.mesh, self.dtype, shape, stored, init, &mut self.generator),
        });
        let _scope = module.enter();
        let value = value.map_err(|e| e.at(&path))?;
        let id = ParamId { index: self.list.len(), model: self.number };
        let unit = self.unit_for(&path, id);
        let (gradient, held_value) = (value.layout().clone(), RefCell::default());
        let leaf = value.requires_grad_in(gradient.clone(), self.units[unit].gradients, self.list.len())?;
        let leaf = leaf.of_parameter(&path);
        let param = Param {
            path,
            module,
            value: leaf,
            used,
            gradient,
            held: None,
            held_value,
            rounded: None,
            unit,
            pieces,
        };
        self.names.add(self.list.len(), &param.path, &param.pieces);
        self.list.push(param);
        Ok(id)
    }
}

/// Returns the generator of the values of parameters.
fn param_generator(seed: u64) -> Generator {
    Generator::new(seed).child("params")
}
