//! Linear maps and embeddings.

use crate::comm::ModulePath;
use crate::dtensor::{DTensor, product_over_last};
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::adapter::{AdaptedMap, Adapter, LoraConfig};
use crate::nn::layers::expert_map::ExpertMap;
use crate::nn::layers::module::Module;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::pieces::FusedMaps;
use crate::nn::params::scope::Scope;
use crate::ops::Activation;
use crate::placement::Layout;
use crate::rng::Init;

/// A linear map `x wᵀ + b` over the last dim, with `w` of shape `[outputs, inputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    /// The numbers of outputs and inputs.
    extents: [usize; 2],
    adapter: Option<Adapter>,
    path: ModulePath,
    site: String,
}

impl Linear {
    /// Declares a `weight` `[outputs, inputs]`, filled by `init`, and a `bias` `[outputs]` of zeros.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     // Each rank computes its rows of the weight: outputs 0 and 1, or output 2.
    ///     let mut params = Params::new(&mesh, Plan::default().shard("map.weight", "tp", 0), 7)?;
    ///     let map = Linear::new(params.root().child("map"), 4, 3, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], Layout::replicated(1), 0.5)?;
    ///     let y = map.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 5, 3]@(tp:S2)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0; 30]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(scope: Scope<'_>, inputs: usize, outputs: usize, init: Init) -> Result<Linear> {
        Linear::declare(scope, inputs, outputs, true, init)
    }

    /// Declares a `weight` `[outputs, inputs]`, filled by `init`, and no bias.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::without_bias(params.root().child("map"), 4, 3, Init::Ones)?;
    ///     assert_eq!(params.len(), 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn without_bias(scope: Scope<'_>, inputs: usize, outputs: usize, init: Init) -> Result<Linear> {
        Linear::declare(scope, inputs, outputs, false, init)
    }

    pub(in crate::nn) fn declare(
        mut scope: Scope<'_>,
        inputs: usize,
        outputs: usize,
        bias: bool,
        init: Init,
    ) -> Result<Linear> {
        let weight = scope.param("weight", [outputs, inputs], init)?;
        let bias = if bias { Some(scope.param("bias", [outputs], Init::Zeros)?) } else { None };
        let extents = [outputs, inputs];
        let path = scope.module_path();
        Ok(Linear { weight, bias, extents, adapter: None, path, site: scope.site_here() })
    }

    /// Applies several maps to one input, as their [`Module::forward`] does, and returns the results in order. The
    /// input's gradient is one contraction over the outputs of all maps ([`DTensor::joint_linear`]).
    ///
    /// A layer that keeps several maps apart, such as queries, keys and values, so has one reduction of its input's
    /// gradient under tensor parallelism, as a [`FusedLinear`] has. Shard the rows of all weights alike, along an axis
    /// whose length divides the number of groups.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let plan = Plan::default().shard("gate.*", "tp", 0).shard("up.*", "tp", 0);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let mut map = |name: &str| Linear::new(params.root().child(name), 4, 64, Init::Ones);
    ///     let (gate, up) = (map("gate")?, map("up")?);
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], "(R)", 0.5)?;
    ///     let ys = Linear::forward_joint(&[&gate, &up], &Forward::eval(&params), &x)?;
    ///     assert_eq!(ys[1].spec().to_string(), "f32[2, 5, 64]@(tp:S2)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::joint_linear`] refuses; returns an error if a rank fails.
    pub fn forward_joint(maps: &[&Linear], cx: &Forward, x: &DTensor) -> Result<Vec<DTensor>> {
        Linear::forward_together(maps, cx, x, |weights| x.joint_linear(weights))
    }

    /// Runs [`Linear::forward_joint`] with a number of groups, which divides the outputs of every map
    /// ([`DTensor::joint_linear_in`]).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let mut map = |name: &str, outputs| Linear::without_bias(params.root().child(name), 5, outputs, Init::Ones);
    ///     let (q, k, v) = (map("q", 12)?, map("k", 6)?, map("v", 6)?);
    ///     let x = DTensor::full(&mesh, DType::F32, [4, 5], "(S0)", 1.0)?;
    ///     // Three heads of keys and values, of width 2.
    ///     let qkv = Linear::forward_joint_in(&[&q, &k, &v], 3, &Forward::eval(&params), &x)?;
    ///     assert_eq!(qkv[0].spec().to_string(), "f32[4, 12]@(fsdp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::joint_linear_in`] refuses; returns an error if a rank fails.
    pub fn forward_joint_in(
        maps: &[&Linear],
        groups: usize,
        cx: &Forward,
        x: &DTensor,
    ) -> Result<Vec<DTensor>> {
        Linear::forward_together(maps, cx, x, |weights| x.joint_linear_in(groups, weights))
    }

    fn forward_together(
        maps: &[&Linear],
        cx: &Forward,
        x: &DTensor,
        products: impl FnOnce(&[&DTensor]) -> Result<Vec<DTensor>>,
    ) -> Result<Vec<DTensor>> {
        let weights = maps.iter().map(|map| cx.param(map.weight)).collect::<Result<Vec<_>>>()?;
        let ys = products(&weights.iter().collect::<Vec<_>>()).map_err(|e| {
            let paths: Vec<&str> = maps.iter().map(|map| cx.params().path(map.weight)).collect();
            e.at(&paths.join(", "))
        })?;
        maps.iter().zip(ys).map(|(map, y)| map.complete(cx, x, y)).collect()
    }

    /// Returns a function of the map's result, by one operator if that changes no bit ([`DTensor::linear`]).
    pub(in crate::nn) fn forward_then(
        &self,
        cx: &Forward,
        x: &DTensor,
        f: Option<Activation>,
    ) -> Result<DTensor> {
        let _scope = self.path.enter();
        if self.adapter.is_none() && fuses(cx, &self.site, x)? {
            let y = cx.with_param(self.weight, |weight| match self.bias {
                Some(bias) => x.linear(weight, Some(&cx.param(bias)?), f),
                None => x.linear(weight, None, f),
            });
            return cx.leave(y?);
        }
        let y = self.complete(cx, x, cx.with_param(self.weight, |weight| product_over_last(x, weight))?)?;
        cx.leave(match f {
            Some(f) => f.apply(&y)?,
            None => y,
        })
    }

    /// Returns the map's result, given the product of `x` and the weight.
    fn complete(&self, cx: &Forward, x: &DTensor, product: DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let mut y = cx.site(&self.site, product)?;
        if let Some(adapter) = &self.adapter {
            y = y.add(&adapter.forward(cx, x)?)?;
        }
        match self.bias {
            Some(bias) => cx.with_param(bias, |bias| y.add(bias)),
            None => Ok(y),
        }
    }
}

impl Module for Linear {
    /// Maps `x` `[.., inputs]`, with any number of leading dims, to `[.., outputs]`.
    ///
    /// If the weight is sharded over its inputs, the product is a partial sum, which is reduced at the site of this
    /// module's path before the bias is added.
    ///
    /// # Errors
    /// Refuses an `x` whose last dim is not `inputs`; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.forward_then(cx, x, None)
    }
}

/// Returns true if the product of a map may be finished with its bias and a function by one operator: f16 and bf16 would
/// round less often, and a site may stand between them.
fn fuses(cx: &Forward, site: &str, x: &DTensor) -> Result<bool> {
    cx.params().check_plan()?;
    Ok(!x.dtype().is_half() && cx.params().plan().leaves_site(site))
}

/// Several linear maps of one input whose weights are one parameter ([`FusedMaps`]).
#[derive(Clone, Debug)]
pub struct FusedLinear {
    weight: ParamId,
    bias: Option<ParamId>,
    maps: FusedMaps,
    inputs: usize,
    /// The adapter of each map that has one.
    adapters: Vec<Option<Adapter>>,
    path: ModulePath,
    site: String,
}

impl FusedLinear {
    /// Declares a `weight` `[groups, rows per group, inputs]`, filled by `init`, and a `bias` `[groups · rows per group]` of zeros.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, FusedLinear, FusedMaps, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("gate_up.weight", "tp", 0), 7)?;
    ///     let maps = FusedMaps::new(4, [("gate", 2), ("up", 2)])?;
    ///     let gate_up = FusedLinear::new(params.root().child("gate_up"), 3, &maps, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [5, 3], Layout::replicated(1), 1.0)?;
    ///     // Each rank has two groups, with the rows of both maps.
    ///     assert_eq!(gate_up.forward(&Forward::eval(&params), &x)?.spec().to_string(), "f32[5, 4, 4]@(tp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(scope: Scope<'_>, inputs: usize, maps: &FusedMaps, init: Init) -> Result<FusedLinear> {
        FusedLinear::declare(scope, inputs, maps, true, init)
    }

    /// Declares a `weight` `[groups, rows per group, inputs]`, filled by `init`, and no bias.
    ///
    /// ```
    /// use isoshard::nn::{FusedLinear, FusedMaps};
    /// use isoshard::prelude::*;
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let maps = FusedMaps::new(4, [("gate", 2), ("up", 2)])?;
    ///     FusedLinear::without_bias(params.root().child("gate_up"), 3, &maps, Init::Ones)?;
    ///     assert_eq!(params.numel(), 4 * 4 * 3);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn without_bias(
        scope: Scope<'_>,
        inputs: usize,
        maps: &FusedMaps,
        init: Init,
    ) -> Result<FusedLinear> {
        FusedLinear::declare(scope, inputs, maps, false, init)
    }

    pub(in crate::nn) fn declare(
        mut scope: Scope<'_>,
        inputs: usize,
        maps: &FusedMaps,
        bias: bool,
        init: Init,
    ) -> Result<FusedLinear> {
        let weight = scope.fused_param("weight", maps, &[inputs], init)?;
        let bias = if bias { Some(scope.fused_param("bias", maps, &[], Init::Zeros)?) } else { None };
        let adapters = vec![None; maps.rows().len()];
        let (maps, path) = (maps.clone(), scope.module_path());
        Ok(FusedLinear { weight, bias, maps, inputs, adapters, path, site: scope.site_here() })
    }
}

impl Module for FusedLinear {
    /// Maps `x` `[.., inputs]`, with any number of leading dims, to `[.., groups, rows per group]`.
    ///
    /// # Errors
    /// Refuses an `x` whose last dim is not `inputs`; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let rows = [self.maps.groups(), self.maps.rows_per_group()];
        let y = match self.bias {
            Some(bias) if fuses(cx, &self.site, x)? => cx.with_param(self.weight, |weight| {
                x.linear(weight, Some(&cx.param(bias)?.reshape(rows)?), None)
            })?,
            bias => {
                let product = cx.with_param(self.weight, |weight| product_over_last(x, weight))?;
                let y = cx.site(&self.site, product)?;
                match bias {
                    Some(bias) => cx.with_param(bias, |bias| y.add(&bias.reshape(rows)?))?,
                    None => y,
                }
            }
        };
        if self.adapters.iter().all(Option::is_none) {
            return cx.leave(y);
        }
        let mut parts = y.split(&self.maps.rows(), -1)?;
        for (part, adapter) in parts.iter_mut().zip(&self.adapters) {
            if let Some(adapter) = adapter {
                *part = part.add(&adapter.forward(cx, x)?)?;
            }
        }
        cx.leave(DTensor::cat(&parts.iter().collect::<Vec<_>>(), -1)?)
    }
}

/// A module of linear maps that can have adapters.
pub(in crate::nn) enum AdaptedLinear<'a> {
    One(&'a mut Linear),
    Fused(&'a mut FusedLinear),
    Experts(&'a mut ExpertMap),
}

impl AdaptedLinear<'_> {
    /// Returns the paths of the maps.
    pub(in crate::nn) fn paths(&self) -> Vec<String> {
        match self {
            AdaptedLinear::One(linear) => vec![linear.site.clone()],
            AdaptedLinear::Fused(fused) => fused.maps.paths(&fused.site),
            AdaptedLinear::Experts(map) => vec![map.path.clone()],
        }
    }

    /// Returns `true` if the map `index` of [`AdaptedLinear::paths`] has an adapter.
    pub(in crate::nn) fn has_adapter(&self, index: usize) -> bool {
        match self {
            AdaptedLinear::One(linear) => linear.adapter.is_some(),
            AdaptedLinear::Fused(fused) => fused.adapters[index].is_some(),
            AdaptedLinear::Experts(map) => map.adapter.is_some(),
        }
    }

    /// Declares the adapter of the map `index` of [`AdaptedLinear::paths`].
    pub(in crate::nn) fn adapt(
        &mut self,
        params: &mut Params,
        index: usize,
        config: LoraConfig,
    ) -> Result<()> {
        let path = &self.paths()[index];
        match self {
            AdaptedLinear::One(linear) => {
                let [outputs, inputs] = linear.extents;
                let map = AdaptedMap { path, inputs, outputs, groups: None };
                linear.adapter = Some(Adapter::new(params, map, config)?);
            }
            AdaptedLinear::Fused(fused) => {
                let (groups, inputs) = (fused.maps.groups(), fused.inputs);
                let outputs = groups * fused.maps.rows()[index];
                let map = AdaptedMap { path, inputs, outputs, groups: Some(groups) };
                fused.adapters[index] = Some(Adapter::new(params, map, config)?);
            }
            AdaptedLinear::Experts(map) => map.adapt(params, config)?,
        }
        Ok(())
    }

    /// Returns the parameter of the maps' weights.
    pub(in crate::nn) fn weight(&self) -> ParamId {
        match self {
            AdaptedLinear::One(linear) => linear.weight,
            AdaptedLinear::Fused(fused) => fused.weight,
            AdaptedLinear::Experts(map) => map.weight,
        }
    }

    /// Returns the matrix that the adapters add to the weight, in the weight's shape, if there are adapters.
    pub(in crate::nn) fn matrix(&self, params: &Params) -> Result<Option<DTensor>> {
        match self {
            AdaptedLinear::One(linear) => linear.adapter.as_ref().map(|a| a.matrix(params)).transpose(),
            AdaptedLinear::Experts(map) => map.adapter.as_ref().map(|a| a.matrix(params)).transpose(),
            AdaptedLinear::Fused(fused) if fused.adapters.iter().all(Option::is_none) => Ok(None),
            AdaptedLinear::Fused(fused) => {
                let (mesh, dtype) = (params.mesh(), params.value(fused.weight).dtype());
                let replicated = Layout::replicated(mesh.mesh().ndim());
                let of_map = |(adapter, &rows): (&Option<Adapter>, &usize)| match adapter {
                    Some(adapter) => adapter.matrix(params),
                    None => {
                        let shape = [fused.maps.groups(), rows, fused.inputs];
                        DTensor::zeros(mesh, dtype, shape, replicated.clone())
                    }
                };
                let rows = fused.maps.rows();
                let parts: Vec<DTensor> =
                    fused.adapters.iter().zip(&rows).map(of_map).collect::<Result<_>>()?;
                DTensor::cat(&parts.iter().collect::<Vec<_>>(), 1).map(Some)
            }
        }
    }
}

/// A table of vectors, one per index.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: ParamId,
    path: ModulePath,
}

impl Embedding {
    /// Declares a `weight` `[rows, width]`, filled by `init`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::Tensor};
    /// use isoshard::nn::{Embedding, Forward, Module, Params, Plan};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let table = Embedding::new(params.root().child("wte"), 11, 4, Init::Ones)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_slice(&[3i64, 10], [2])?, Layout::replicated(1))?;
    ///     assert_eq!(table.forward(&Forward::eval(&params), &index)?.shape()[..], [2, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(mut scope: Scope<'_>, rows: usize, width: usize, init: Init) -> Result<Embedding> {
        Ok(Embedding { weight: scope.param("weight", [rows, width], init)?, path: scope.module_path() })
    }

    /// Returns the products of `x` `[.., width]`, with any number of leading dims, with every row: scores `[.., rows]`.
    /// The head of a model with tied weights.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Embedding, Forward, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let table = Embedding::new(params.root().child("wte"), 3, 2, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2], Layout::replicated(0), 0.25)?;
    ///     let scores = table.scores(&Forward::eval(&params), &x)?;
    ///     assert_eq!(scores.full_tensor()?.to_vec::<f32>()?, [0.5; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `x` whose last dim is not `width`; returns an error if a rank fails.
    pub fn scores(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        cx.with_param(self.weight, |table| product_over_last(x, table))
    }
}

impl Module for Embedding {
    /// Returns the row of each index: `index` (i64) of any shape gives `[.., width]`.
    ///
    /// # Errors
    /// Refuses indices outside the table; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, index: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        cx.leave(cx.with_param(self.weight, |table| table.embedding(index))?)
    }
}
