//! The stacked maps of a mixture's experts.

use crate::comm::ModulePath;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::adapter::{Adapter, LoraConfig};
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::scope::Scope;
use crate::rng::Init;

/// One map of every expert: a weight `[experts, inputs, outputs]`, and its adapter, if it has one.
#[derive(Clone, Debug)]
pub(in crate::nn) struct ExpertMap {
    pub weight: ParamId,
    /// The weight's path, such as `h.0.moe.experts.up`.
    pub path: String,
    module: ModulePath,
    /// The numbers of experts, inputs and outputs.
    extents: [usize; 3],
    pub adapter: Option<Adapter>,
}

impl ExpertMap {
    /// Declares the weight `name` in the experts' scope.
    pub fn new(scope: &mut Scope<'_>, name: &str, extents: [usize; 3], init: Init) -> Result<ExpertMap> {
        let path = scope.child(name).path().to_string();
        let (weight, module) = (scope.param(name, extents, init)?, scope.module_path());
        Ok(ExpertMap { weight, path, module, extents, adapter: None })
    }

    /// Declares the adapter.
    pub fn adapt(&mut self, params: &mut Params, config: LoraConfig) -> Result<()> {
        self.adapter = Some(Adapter::of_experts(params, &self.path, self.extents, config)?);
        Ok(())
    }

    /// Applies each expert's map to its rows. `product` multiplies rows with their experts' matrices.
    pub fn forward(
        &self,
        cx: &Forward,
        rows: &DTensor,
        product: &dyn Fn(&DTensor, &DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        let _scope = self.module.enter();
        let y = cx.with_param(self.weight, |w| product(rows, w))?;
        match &self.adapter {
            Some(adapter) => y.add(&adapter.forward_by(cx, rows, product)?),
            None => Ok(y),
        }
    }
}
