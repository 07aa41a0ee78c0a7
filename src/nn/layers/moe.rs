//! Mixture-of-experts layers.
//!
//! Missing: an all-to-all of tokens without a capacity; biases of experts; noise of the router; routers that choose by
//! groups of experts or with a bias per expert. No field of [`MoeConfig`] asks for them.

use crate::comm::ModulePath;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::forward::Forward;
use crate::nn::layers::expert_map::ExpertMap;
use crate::nn::layers::linear::{AdaptedLinear, Linear};
use crate::nn::layers::map_inits::MapInits;
use crate::nn::layers::mlp::{Mlp, MlpConfig};
use crate::nn::layers::module::Module;
use crate::nn::params::scope::Scope;
use crate::ops::{Activation, GroupSizes};
use crate::placement::Placement;

/// The sizes of a mixture-of-experts layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// The width of tokens.
    pub width: usize,
    /// The hidden width of each expert.
    pub hidden: usize,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that each token is sent to.
    pub top_k: usize,
    /// If set, each expert takes at most `ceil(factor * tokens * top_k / experts)` tokens of a batch entry, and later
    /// ones are dropped. If not, no token is dropped.
    pub capacity_factor: Option<f64>,
    /// True for experts `down(f(gate(x)) · up(x))`, false for `down(f(up(x)))`, where `f` is the activation.
    pub gated: bool,
    /// The activation, usually SiLU for gated experts.
    pub activation: Activation,
    /// The weights of the chosen experts' results.
    pub weights: ExpertWeights,
    /// The hidden width of an expert that every token is sent to as well, if there is one.
    pub shared_hidden: Option<usize>,
    /// True if the shared expert's result is multiplied by the sigmoid of a linear map of the token, as in Qwen2-MoE.
    pub shared_gate: bool,
    /// The probability of dropping an element of the result.
    pub dropout: f64,
}

/// Gated experts with SiLU, softmax weights of the chosen, no capacity, no shared expert and no dropout, as in Mixtral. The sizes
/// are 0, which [`Moe::new`] refuses: set them.
///
/// ```
/// use isoshard::nn::MoeConfig;
/// let mixtral = MoeConfig { width: 4096, hidden: 14336, experts: 8, top_k: 2, ..MoeConfig::default() };
/// assert!(mixtral.gated && mixtral.capacity_factor.is_none());
/// ```
impl Default for MoeConfig {
    fn default() -> MoeConfig {
        MoeConfig {
            width: 0,
            hidden: 0,
            experts: 0,
            top_k: 0,
            capacity_factor: None,
            gated: true,
            activation: Activation::Silu,
            weights: ExpertWeights::SoftmaxOfChosen,
            shared_hidden: None,
            shared_gate: false,
            dropout: 0.0,
        }
    }
}

/// The weights by which a [`Moe`] multiplies the results of the experts that a token is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertWeights {
    /// The softmax of the chosen experts' logits, whose sum is 1: Mixtral, and Qwen-MoE with `norm_topk_prob`.
    SoftmaxOfChosen,
    /// The chosen experts' part of the softmax of all logits, whose sum is below 1: Qwen-MoE without
    /// `norm_topk_prob`.
    SoftmaxOfAll,
}

/// A mixture of experts (Shazeer et al. 2017): a router sends each token to the best `top_k` of several feed-forward
/// layers and adds up their results, weighted by a softmax of the logits.
///
/// The experts' weights are stacked: `experts.up` (and `experts.gate`) `[experts, width, hidden]`, `experts.down`
/// `[experts, hidden, width]`. A plan may shard them by experts (dim 0), over an axis that shards the batch too
/// ([`Plan::experts`](crate::nn::Plan::experts)), or by the hidden width.
#[derive(Clone, Debug)]
pub struct Moe {
    config: MoeConfig,
    router: Linear,
    gate: Option<ExpertMap>,
    up: ExpertMap,
    down: ExpertMap,
    shared: Option<Mlp>,
    /// The map to the factor of the shared expert's result.
    shared_gate: Option<Linear>,
    path: ModulePath,
    sites: MoeSites,
}

/// The result of [`Moe::forward_with_losses`].
#[derive(Clone, Debug)]
pub struct MoeOutput {
    /// The layer's result, with the operand's shape.
    pub y: DTensor,
    /// The load-balancing loss ([`DTensor::load_balancing_loss`]) of the router's softmax, shape `[]`.
    pub balance: DTensor,
    /// The router's z-loss ([`DTensor::router_z_loss`]), shape `[]`.
    pub z: DTensor,
}

/// The paths at which activations may change layout.
#[derive(Clone, Debug)]
struct MoeSites {
    input: String,
    dispatch: String,
    down: String,
}

/// The assignments of tokens to experts.
struct RoutedTokens {
    slot: DTensor,
    counts: DTensor,
    weight: DTensor,
    /// The number of slots per expert, or `None` if no token is dropped.
    capacity: Option<usize>,
}

impl Moe {
    /// Declares `router.weight` `[experts, width]`, the experts' stacked weights, and a shared expert `shared` and its
    /// gate `shared_gate.weight` `[1, width]` if the sizes ask for them. Declares the sites `input`, `dispatch` (rows
    /// sorted by expert, `[batch, experts, capacity, width]`, with a capacity only) and `down` (the experts' results).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Moe, MoeConfig, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("ep", 2)])?;
    ///     // Each rank has two of the four experts and half of the batch.
    ///     let mut params = Params::new(&mesh, Plan::default().experts("moe", "ep"), 7)?;
    ///     let config = MoeConfig {
    ///         width: 4, hidden: 6, experts: 4, top_k: 2, capacity_factor: Some(1.25), ..MoeConfig::default()
    ///     };
    ///     let init = Init::Normal { mean: 0.0, std: 0.5 };
    ///     let moe = Moe::new(params.root().child("moe"), config, init)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], params.batch_layout(), 1.0)?;
    ///     let y = moe.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 5, 4]@(ep:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `top_k` of 0 or above the number of experts, a capacity factor that is not positive and finite, and a
    /// gate without a shared expert. Refuses what [`Scope::param`] refuses.
    pub fn new(scope: Scope<'_>, config: MoeConfig, inits: impl Into<MapInits>) -> Result<Moe> {
        Moe::declare(scope, config, inits.into())
    }

    fn declare(mut scope: Scope<'_>, config: MoeConfig, inits: MapInits) -> Result<Moe> {
        let init = inits.inner;
        let MoeConfig { width, hidden, experts, top_k, .. } = config;
        let legal = config.capacity_factor.is_none_or(|f| f > 0.0 && f.is_finite());
        if [width, hidden, experts].contains(&0) || top_k == 0 || top_k > experts || !legal {
            let rule =
                "wants sizes above 0, 1 to `experts` experts per token, and a positive capacity factor";
            return Err(Error::invalid("moe", rule, format!("{config:?}"), ""));
        }
        if config.shared_gate && config.shared_hidden.is_none() {
            let rule = "the gate of a shared expert needs a shared expert";
            return Err(Error::invalid("moe", rule, format!("{config:?}"), "set shared_hidden"));
        }
        let router = Linear::without_bias(scope.child("router"), width, experts, init)?;
        let mut stacked = scope.child("experts");
        let gate = match config.gated {
            true => Some(ExpertMap::new(&mut stacked, "gate", [experts, width, hidden], init)?),
            false => None,
        };
        let up = ExpertMap::new(&mut stacked, "up", [experts, width, hidden], init)?;
        let down = ExpertMap::new(&mut stacked, "down", [experts, hidden, width], inits.out)?;
        let MoeConfig { gated, activation, .. } = config;
        let shared = match config.shared_hidden {
            Some(hidden) => {
                let config = MlpConfig { hidden, gated, activation, bias: false, dropout: 0.0 };
                Some(Mlp::new(scope.child("shared"), width, config, inits)?)
            }
            None => None,
        };
        let shared_gate = match config.shared_gate {
            true => Some(Linear::without_bias(scope.child("shared_gate"), width, 1, init)?),
            false => None,
        };
        let sites = MoeSites {
            input: scope.site("input"),
            dispatch: scope.site("dispatch"),
            down: scope.site("down"),
        };
        let path = scope.module_path();
        Ok(Moe { config, router, gate, up, down, shared, shared_gate, path, sites })
    }

    /// Returns the linear maps that can have adapters: the router, the experts' maps, and those of the shared expert.
    pub(in crate::nn) fn linear_maps(&mut self) -> Vec<AdaptedLinear<'_>> {
        let mut maps = vec![AdaptedLinear::One(&mut self.router)];
        let stacked = self.gate.iter_mut().chain([&mut self.up, &mut self.down]);
        maps.extend(stacked.map(AdaptedLinear::Experts));
        maps.extend(self.shared.iter_mut().flat_map(Mlp::linear_maps));
        maps.extend(self.shared_gate.as_mut().map(AdaptedLinear::One));
        maps
    }

    /// Returns the layer's result for `x` `[tokens, width]` or `[batch, tokens, width]` with the losses of its router,
    /// to be added to the model's loss with small factors.
    ///
    /// Without a capacity, the ranks first agree on the number of rows of each expert: each receives the counts that it
    /// lacks, 8 bytes per batch entry and expert. If the experts are sharded, a capacity makes the exchange of rows an
    /// all-to-all; without one, ranks gather the experts' matrices, or in fast mode the rows if that is cheaper.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Activation, ExpertWeights, Forward, Moe, MoeConfig, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let config = MoeConfig {
    ///         width: 2, hidden: 3, experts: 2, top_k: 2, gated: false, activation: Activation::Gelu,
    ///         weights: ExpertWeights::SoftmaxOfAll, shared_hidden: Some(3), shared_gate: true, ..MoeConfig::default()
    ///     };
    ///     let moe = Moe::new(params.root().child("moe"), config, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [5, 2], Layout::replicated(0), 0.5)?;
    ///     let out = moe.forward_with_losses(&Forward::eval(&params), &x)?;
    ///     assert_eq!(out.balance.item()?, 1.0); // every token goes to both experts
    ///     assert_eq!(out.y.shape()[..], [5, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `x` of another width or number of dims; returns an error if a rank fails. Without a capacity, refuses
    /// [`Device::Meta`](crate::tensor::Device::Meta), where counts have no values.
    pub fn forward_with_losses(&self, cx: &Forward, x: &DTensor) -> Result<MoeOutput> {
        let _scope = self.path.enter();
        let x = cx.site(&self.sites.input, x.clone())?;
        let logits = self.router.forward(cx, &x)?;
        let routing = self.route(&x, &logits)?;
        let y = self.experts(cx, &x, &routing, None)?;
        Ok(MoeOutput {
            y,
            balance: logits.softmax(-1)?.load_balancing_loss(&routing.counts)?,
            z: logits.router_z_loss()?,
        })
    }

    /// Returns the layer's result for `x` as [`Module::forward`] does, with the number of rows of each expert given
    /// instead of read from the router. For dry runs on [`Device::Meta`](crate::tensor::Device::Meta) without a
    /// capacity.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops::GroupSizes, placement::Layout};
    /// use isoshard::nn::{Forward, Moe, MoeConfig, Module, Params, Plan};
    /// use isoshard::{rng::Init, tensor::{DType, Device}};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank.on(Device::Meta), &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let config = MoeConfig { width: 2, hidden: 3, experts: 2, top_k: 1, ..MoeConfig::default() };
    ///     let moe = Moe::new(params.root().child("moe"), config, Init::Ones)?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [6, 2], Layout::replicated(0))?;
    ///     let cx = Forward::eval(&params);
    ///     let refused = moe.forward(&cx, &x).unwrap_err().to_string();
    ///     assert!(refused.starts_with("group_sizes: counts on meta have no values"), "{refused}");
    ///     assert_eq!(moe.forward_with_sizes(&cx, &x, &GroupSizes::new(2, [3, 3])?)?.shape()[..], [6, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses sizes that do not add up to the number of rows, and an `x` that [`Module::forward`] refuses.
    pub fn forward_with_sizes(&self, cx: &Forward, x: &DTensor, sizes: &GroupSizes) -> Result<DTensor> {
        let _scope = self.path.enter();
        let x = cx.site(&self.sites.input, x.clone())?;
        let routing = self.route(&x, &self.router.forward(cx, &x)?)?;
        self.experts(cx, &x, &routing, Some(sizes))
    }

    /// Chooses the experts and slots of each token.
    fn route(&self, x: &DTensor, logits: &DTensor) -> Result<RoutedTokens> {
        let MoeConfig { experts, top_k, capacity_factor, .. } = self.config;
        if !matches!(x.shape().len(), 2 | 3) {
            let rule = "wants tokens [tokens, width] or [batch, tokens, width]";
            return Err(Error::invalid("moe", rule, x.spec().to_string(), "reshape them"));
        }
        let tokens = x.shape()[x.shape().len() - 2];
        let (expert, mut weight) = logits.route_top_k(top_k)?;
        if self.config.weights == ExpertWeights::SoftmaxOfAll {
            weight = logits.softmax(-1)?.gather(-1, &expert)?;
        }
        // No expert is chosen more often than there are assignments.
        let all = tokens * top_k;
        let capacity = capacity_factor.map(|f| ((f * all as f64 / experts as f64).ceil() as usize).min(all));
        let (slot, counts) = expert.expert_slots(experts, capacity)?;
        Ok(RoutedTokens { slot, counts, weight, capacity })
    }

    /// Returns the weighted sum of the results of each token's experts, with the shared expert's result.
    fn experts(
        &self,
        cx: &Forward,
        x: &DTensor,
        routing: &RoutedTokens,
        sizes: Option<&GroupSizes>,
    ) -> Result<DTensor> {
        let RoutedTokens { slot, counts, weight, capacity } = routing;
        let dims = x.shape().len();
        let y = match capacity {
            Some(capacity) => {
                let slots = self.config.experts * capacity;
                let mut apart = x.shape().to_vec();
                apart.splice(dims - 2..dims - 1, [self.config.experts, *capacity]);
                let rows = x.permute_tokens(slot, slots)?.reshape(apart)?;
                let rows = cx.site(&self.sites.dispatch, rows)?;
                let signature = if dims == 3 { "beck, ekn -> becn" } else { "eck, ekn -> ecn" };
                let to_experts = |x: &DTensor, w: &DTensor| move_shards(x, dims - 2, w);
                let y = self.feed_forward(cx, &rows, &to_experts, &|x, w| x.einsum(signature, w))?;
                let mut joined = x.shape().to_vec();
                joined[dims - 2] = slots;
                cx.site(&self.sites.down, y)?.reshape(joined)?
            }
            None => {
                let agreed = if sizes.is_none() { Some(counts.group_sizes()?) } else { None };
                let sizes = sizes.or(agreed.as_ref()).expect("given or agreed");
                let rows = x.permute_tokens(slot, slot.shape()[dims - 2] * slot.shape()[dims - 1])?;
                let stay = |x: &DTensor, _: &DTensor| Ok(x.clone());
                let y = self.feed_forward(cx, &rows, &stay, &|x, w| x.grouped_matmul(w, sizes))?;
                cx.site(&self.sites.down, y)?
            }
        };
        // Rows return to the ranks of their batch entries before they are repeated per choice.
        let y = if dims == 3 { move_shards(&y, 0, slot)? } else { y };
        let chosen = y.unpermute_tokens(slot)?;
        let mut y = chosen.mul(&weight.unsqueeze(-1)?)?.sum(&[-2], false)?;
        if let Some(shared) = &self.shared {
            let mut always = shared.forward(cx, x)?;
            if let Some(gate) = &self.shared_gate {
                always = always.mul(&gate.forward(cx, x)?.sigmoid()?)?;
            }
            y = y.add(&always)?;
        }
        cx.dropout(y, self.config.dropout)
    }

    /// Applies every expert to its rows. `align` moves rows, once, to the ranks of the matrices; `product` multiplies
    /// rows with their experts' matrices.
    fn feed_forward(
        &self,
        cx: &Forward,
        rows: &DTensor,
        align: &dyn Fn(&DTensor, &DTensor) -> Result<DTensor>,
        product: &dyn Fn(&DTensor, &DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        let act = self.config.activation;
        let rows = cx.with_param(self.up.weight, |w| align(rows, w))?;
        let up = self.up.forward(cx, &rows, product)?;
        let hidden = match &self.gate {
            Some(gate) => act.apply(&gate.forward(cx, &rows, product)?)?.mul(&up)?,
            None => act.apply(&up)?,
        };
        self.down.forward(cx, &hidden, product)
    }
}

impl Module for Moe {
    /// Maps `x` `[tokens, width]` or `[batch, tokens, width]` to the same shape; [`Moe::forward_with_losses`] also
    /// returns the router's losses, and its page says what is communicated.
    ///
    /// # Errors
    /// Returns the errors of [`Moe::forward_with_losses`].
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let x = cx.site(&self.sites.input, x.clone())?;
        let routing = self.route(&x, &self.router.forward(cx, &x)?)?;
        cx.leave(self.experts(cx, &x, &routing, None)?)
    }
}

/// Shards dim `dim` of `x` over the axes that shard dim 0 of `like`, in the same order.
fn move_shards(x: &DTensor, dim: usize, like: &DTensor) -> Result<DTensor> {
    let (like, mut layout) = (like.layout(), x.layout().clone());
    let axes: Vec<usize> = (0..like.ndim()).filter(|&a| like.axis(a).shard_dim() == Some(0)).collect();
    if axes.iter().all(|&a| layout.axis(a).shard_dim() == Some(dim)) {
        return Ok(x.clone());
    }
    for a in axes {
        layout = layout.set(a, Placement::Shard(dim));
    }
    x.redistribute(layout.with_order(like.order())?)
}
