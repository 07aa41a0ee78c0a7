//! Low-rank adapters of a decoder (LoRA): their declaration, and the model with adapters merged.

use crate::error::{Error, Result};
use crate::nn::decoder::model::Decoder;
use crate::nn::layers::adapter::LoraConfig;
use crate::nn::params::Params;
use crate::nn::plan::foreign_names::own_pattern;
use crate::nn::plan::pattern::{matches, no_match};
use crate::nn::plan::rules::Plan;

impl Decoder {
    /// Adds an adapter to each linear map whose path matches `pattern`, such as `h.*.attn.q`, `h.*.mlp.up` or `head`, or
    /// Hugging Face's name of it, such as `q_proj` or `model.layers.*.mlp.up_proj`, and freezes all parameters that are no adapters. Returns the number of maps that match.
    ///
    /// A map's result becomes `x wᵀ + alpha / rank · (x aᵀ) bᵀ`. The parameters are `h.0.attn.q.lora_a` `[rank, inputs]`,
    /// which is normal with standard deviation `1 / sqrt(inputs)`, and `h.0.attn.q.lora_b` `[outputs, rank]`, which is
    /// zero; so the model's results do not change at first. The experts of a mixture have an adapter each: those of
    /// `h.0.moe.experts.up` are `h.0.moe.experts.up.lora_a` `[experts, inputs, rank]` and `lora_b`
    /// `[experts, rank, outputs]`, which [`Plan::experts`] shards as it shards the experts.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{Activation, Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, MlpConfig, NormConfig};
    /// use isoshard::nn::{Forward, LoraConfig, Params, Plan, SelfAttentionConfig};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let mlp = MlpConfig { hidden: 6, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 };
    ///     let attention = SelfAttentionConfig::new(2, 1, 4);
    ///     let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
    ///     let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    ///     let mut model = Decoder::new(&mut params, DecoderConfig::new(11, 6, 8, norm, vec![layer; 2]))?;
    ///     let lora = LoraConfig { rank: 2, alpha: 4.0, dropout: 0.0 };
    ///     assert_eq!(model.add_lora(&mut params, "q_proj", lora)?, 2); // h.0.attn.q and h.1.attn.q
    ///     let tokens = DTensor::zeros(&mesh, DType::I64, [2, 6], "(S0)")?;
    ///     let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
    ///     let gradients = loss.backward()?;
    ///     let trained = params.ids().filter(|&id| gradients.get(params.value(id)).is_some());
    ///     assert_eq!(trained.map(|id| params.path(id)).next(), Some("h.0.attn.q.lora_a"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no linear map, and names the nearest; a rank of 0; a map that has an adapter; and a
    /// plan that cannot shard the adapters. A refusal leaves model and parameters as they were.
    pub fn add_lora(&mut self, params: &mut Params, pattern: &str, config: LoraConfig) -> Result<usize> {
        config.check()?;
        let chosen = self.chosen_maps(pattern)?;
        let before = self.clone();
        let mut maps = self.linear_maps();
        let adapt = |params: &mut Params| {
            chosen.iter().try_for_each(|&(module, map)| maps[module].adapt(params, map, config))
        };
        if let Err(e) = params.all_or_none(adapt) {
            *self = before;
            return Err(e);
        }
        for id in params.ids() {
            if !params.path(id).ends_with(".lora_a") && !params.path(id).ends_with(".lora_b") {
                *params.value_mut(id) = params.value(id).detach();
            }
        }
        Ok(chosen.len())
    }

    /// Returns the paths of the linear maps that a pattern matches.
    ///
    /// # Errors
    /// Refuses a pattern that matches no map.
    pub(crate) fn matching_maps(&self, pattern: &str) -> Result<Vec<String>> {
        let mut model = self.clone();
        let chosen = model.chosen_maps(pattern)?;
        let maps = model.linear_maps();
        Ok(chosen.into_iter().map(|(module, map)| maps[module].paths().swap_remove(map)).collect())
    }

    /// Returns the linear maps without adapters that a pattern matches: the number of the module, and of the map in it.
    ///
    /// # Errors
    /// Refuses a pattern that matches no map, or one that has an adapter.
    fn chosen_maps(&mut self, pattern: &str) -> Result<Vec<(usize, usize)>> {
        let theirs = own_pattern(pattern).filter(|_| {
            let maps = self.linear_maps();
            !maps.iter().any(|maps| maps.paths().iter().any(|path| matches(pattern, path)))
        });
        let pattern = theirs.as_deref().unwrap_or(pattern);
        let (mut chosen, mut paths) = (Vec::new(), Vec::new());
        for (module, maps) in self.linear_maps().iter().enumerate() {
            for (map, path) in maps.paths().into_iter().enumerate() {
                if matches(pattern, &path) {
                    if maps.has_adapter(map) {
                        let remedy = "match other maps, or merge the adapters first";
                        return Err(Error::invalid("lora", "a map has an adapter", path, remedy));
                    }
                    chosen.push((module, map));
                }
                paths.push(path);
            }
        }
        if chosen.is_empty() {
            let paths: Vec<&str> = paths.iter().map(|path| &path[..]).collect();
            return Err(no_match("lora", pattern, &paths, "linear map"));
        }
        Ok(chosen)
    }

    /// Returns a model without adapters, whose weights are the sums of the weights and of the adapters' matrices, and its
    /// parameters, laid out by `plan`: the form in which other libraries know it. Ranks receive what they lack of weights
    /// and of the adapters' matrices. All parameters learn.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Decoder, DecoderConfig, LoraConfig, NormConfig, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    ///     let mut model = Decoder::new(&mut params, DecoderConfig::new(11, 6, 8, norm, Vec::new()))?;
    ///     let before = params.digest()?;
    ///     model.add_lora(&mut params, "head", LoraConfig { rank: 2, alpha: 4.0, dropout: 0.0 })?;
    ///     let (_, merged) = model.merge_lora(&params, Plan::default())?;
    ///     assert_eq!(merged.digest()?, before); // the adapters are zero
    ///     assert!(merged.find("head.lora_a").is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameters; returns an error if a rank fails.
    pub fn merge_lora(&self, params: &Params, plan: Plan) -> Result<(Decoder, Params)> {
        let mut merged = Params::new(params.mesh(), plan, 0)?;
        merged.compute_in(params.compute_dtype())?;
        let model = Decoder::new(&mut merged, self.config().clone())?;
        for id in merged.ids() {
            let Some(old) = params.find(merged.path(id)) else {
                let given = format!("no parameter {}", merged.path(id));
                let rule = "the parameters are another model's";
                return Err(Error::invalid("merge_lora", rule, given, "pass those that have the adapters"));
            };
            let layout = merged.value(id).layout().clone();
            merged.set(id, params.value(old).detach().redistribute(layout)?)?;
        }
        for map in self.clone().linear_maps() {
            if let Some(matrix) = map.matrix(params)? {
                let id = merged.find(params.path(map.weight())).expect("declared by the same configuration");
                let old = merged.value(id).detach();
                let sum = old.add(&matrix.redistribute(old.layout().clone())?)?;
                merged.set(id, sum.redistribute(old.layout().clone())?)?;
            }
        }
        Ok((model, merged))
    }
}
