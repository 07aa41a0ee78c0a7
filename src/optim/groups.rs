//! Settings of groups of parameters, by path pattern.

use crate::dtensor::Gradients;
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};

/// The settings of one parameter that differ from its optimizer's own.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupSettings {
    pub rate_factor: Option<f64>,
    pub weight_decay: Option<f64>,
    pub betas: Option<(f64, f64)>,
}

/// An optimizer's groups. The last group that matches a path decides each of its settings.
#[derive(Clone, Debug, Default)]
pub(super) struct ParamGroups {
    groups: Vec<(String, GroupSettings)>,
    resolved: Option<ResolvedGroups>,
}

/// The settings of each parameter of one model.
#[derive(Clone, Debug)]
struct ResolvedGroups {
    /// The model's first parameter and the number of its parameters.
    model: (Option<ParamId>, usize),
    settings: Vec<GroupSettings>,
}

/// Returns an error of `verb` if a rate or a decay is negative or not finite, or a moment's decay is outside [0, 1).
pub(super) fn expect_sound(verb: &str, rate: f64, weight_decay: f64, betas: &[f64]) -> Result<()> {
    let (rule, given) = if !(rate.is_finite() && rate >= 0.0) {
        ("a learning rate is finite and at least 0", rate)
    } else if !(weight_decay.is_finite() && weight_decay >= 0.0) {
        ("a weight decay is finite and at least 0", weight_decay)
    } else if let Some(&beta) = betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
        ("a momentum or a beta is at least 0 and below 1", beta)
    } else {
        return Ok(());
    };
    Err(Error::invalid(verb, rule, given.to_string(), ""))
}

/// Refuses, in the name of `verb`, gradients that are not in their parameters' layouts.
pub(super) fn expect_reduced(verb: &str, params: &Params, grads: &Gradients) -> Result<()> {
    for id in params.ids() {
        let value = params.value(id);
        if grads.has_parts(value) {
            let given = format!("parts of the gradient of {} at {}", value.spec(), params.path(id));
            let remedy = "run the last backward_into outside no_sync";
            return Err(Error::invalid(verb, "a gradient is reduced", given, remedy));
        }
        if let Some(grad) = grads.get(value)
            && grad.tensor_meta() != value.tensor_meta()
            && !params.expects_gradient(id, grad)
        {
            let given = format!("{} for {} at {}", grad.spec(), value.spec(), params.path(id));
            let remedy = "run the last backward_into outside no_sync";
            return Err(Error::invalid(verb, "a gradient has its parameter's layout", given, remedy));
        }
    }
    Ok(())
}

impl ParamGroups {
    pub(super) fn push(&mut self, pattern: &str, settings: GroupSettings) {
        self.groups.push((pattern.into(), settings));
        self.resolved = None;
    }

    /// Returns the settings of each parameter, in the order of declaration.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, a pattern that matches no parameter.
    pub(super) fn settings(&mut self, verb: &str, params: &Params) -> Result<&[GroupSettings]> {
        let model = (params.ids().next(), params.len());
        let resolved = match self.resolved.take().filter(|resolved| resolved.model == model) {
            Some(resolved) => resolved,
            None => ResolvedGroups { model, settings: self.resolve(verb, params)? },
        };
        Ok(&self.resolved.insert(resolved).settings)
    }

    fn resolve(&self, verb: &str, params: &Params) -> Result<Vec<GroupSettings>> {
        let mut settings = vec![GroupSettings::default(); params.len()];
        for (pattern, group) in &self.groups {
            for id in params.matching_for(verb, pattern)? {
                let own = &mut settings[id.index()];
                own.rate_factor = group.rate_factor.or(own.rate_factor);
                own.weight_decay = group.weight_decay.or(own.weight_decay);
                own.betas = group.betas.or(own.betas);
            }
        }
        Ok(settings)
    }
}

impl GroupSettings {
    /// Returns the learning rate of a step at rate `lr`.
    pub(super) fn rate(&self, lr: f64) -> f64 {
        self.rate_factor.map_or(lr, |factor| factor * lr)
    }

    /// Returns a key that is equal for settings that one kernel launch can take.
    pub(super) fn launch_key(&self) -> [Option<u64>; 4] {
        let (beta1, beta2) = self.betas.unzip();
        [self.rate_factor, self.weight_decay, beta1, beta2].map(|value| value.map(f64::to_bits))
    }
}
