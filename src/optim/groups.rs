//! Settings of groups of parameters, by path pattern.

use crate::dtensor::Gradients;
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};

/// The settings of a group of parameters that differ from their optimizer's own.
///
/// ```
/// use isoshard::optim::ParamGroup;
/// let slow = ParamGroup::new().rate(0.1).decay(0.0);
/// assert_eq!((slow.rate_at(0.5), slow.decay_or(0.3), slow.betas_or((0.9, 0.95))), (0.05, 0.0, (0.9, 0.95)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ParamGroup {
    rate_factor: Option<f64>,
    weight_decay: Option<f64>,
    betas: Option<(f64, f64)>,
}

/// The groups of parameters of an update rule, by path pattern: those of [`AdamW`](super::AdamW) and [`Sgd`](super::Sgd),
/// and of a rule of your own.
///
/// A pattern is a path whose parts may be `*` or `**`, as in [`Params::matching`]. A parameter is in one group at most;
/// [`ParamGroups::adjust`] changes single settings of parameters, whatever groups they are in.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
/// use isoshard::optim::{ParamGroup, ParamGroups};
/// spmd(1, |rank| {
///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
///     for name in ["weight", "bias"] {
///         params.root().child("h").child(0).param(name, [2], Init::Ones)?;
///     }
///     let mut groups = ParamGroups::default();
///     groups.add("h.**", ParamGroup::new().rate(0.5).decay(0.1));
///     groups.adjust("**.bias", ParamGroup::new().decay(0.0));
///     let settings = groups.settings("lion", &params)?;
///     assert_eq!(settings[0], ParamGroup::new().rate(0.5).decay(0.1));
///     assert_eq!(settings[1], ParamGroup::new().rate(0.5).decay(0.0));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ParamGroups {
    groups: Vec<(String, ParamGroup)>,
    adjustments: Vec<(String, ParamGroup)>,
    resolved: Option<ResolvedGroups>,
}

/// The settings of each parameter of one model.
#[derive(Clone, Debug)]
struct ResolvedGroups {
    /// The model's first parameter and the number of its parameters.
    model: (Option<ParamId>, usize),
    settings: Vec<ParamGroup>,
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

/// Returns the group of each parameter, in the order of declaration: the number of the pattern that its path matches. Refuses,
/// in the name of `verb`, a pattern that matches no parameter, and by `rule` a parameter that two patterns match.
pub(super) fn group_of_each<T>(
    verb: &str,
    params: &Params,
    groups: &[(String, T)],
    rule: &str,
    remedy: &str,
) -> Result<Vec<Option<usize>>> {
    let mut group_of = vec![None; params.len()];
    for (group, (pattern, _)) in groups.iter().enumerate() {
        for id in params.matching_for(verb, pattern)? {
            if let Some(other) = group_of[id.index()].replace(group) {
                let given = format!("{} in {:?} and {pattern:?}", params.path(id), groups[other].0);
                return Err(Error::invalid(verb, rule, given, remedy));
            }
        }
    }
    Ok(group_of)
}

impl ParamGroups {
    /// Adds a group: the parameters whose path matches `pattern`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::optim::{ParamGroup, ParamGroups};
    /// let error = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     params.root().child("head").param("bias", [2], Init::Ones)?;
    ///     let mut groups = ParamGroups::default();
    ///     groups.add("head.**", ParamGroup::new().rate(0.5));
    ///     groups.add("**.bias", ParamGroup::new().decay(0.0));
    ///     groups.settings("lion", &params).map(drop)
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("lion: a parameter is in two groups; got head.bias in \"head.**\" and \"**.bias\""), "{text}");
    /// ```
    pub fn add(&mut self, pattern: &str, group: ParamGroup) {
        self.groups.push((pattern.into(), group));
        self.resolved = None;
    }

    /// Changes the settings that `group` has, and no others, for parameters whose path matches `pattern`. Later adjustments
    /// override earlier ones.
    ///
    /// ```
    /// use isoshard::optim::{ParamGroup, ParamGroups};
    /// let mut groups = ParamGroups::default();
    /// groups.adjust("**", ParamGroup::new().decay(0.1));
    /// groups.adjust("**.bias", ParamGroup::new().decay(0.0)); // biases match both: 0.0
    /// ```
    pub fn adjust(&mut self, pattern: &str, group: ParamGroup) {
        self.adjustments.push((pattern.into(), group));
        self.resolved = None;
    }

    /// Returns the settings of each parameter, in the order of declaration.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::optim::{ParamGroup, ParamGroups};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     params.root().param("w", [2], Init::Ones)?;
    ///     assert_eq!(ParamGroups::default().settings("lion", &params)?, [ParamGroup::new()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, a pattern that matches no parameter, and a parameter in two groups.
    pub fn settings(&mut self, verb: &str, params: &Params) -> Result<&[ParamGroup]> {
        let model = (params.ids().next(), params.len());
        let resolved = match self.resolved.take().filter(|resolved| resolved.model == model) {
            Some(resolved) => resolved,
            None => ResolvedGroups { model, settings: self.resolve(verb, params)? },
        };
        Ok(&self.resolved.insert(resolved).settings)
    }

    fn resolve(&self, verb: &str, params: &Params) -> Result<Vec<ParamGroup>> {
        let mut settings = vec![ParamGroup::default(); params.len()];
        let remedy = "change single settings of some of a group by an adjustment, such as group_decay";
        let group_of = group_of_each(verb, params, &self.groups, "a parameter is in two groups", remedy)?;
        for (own, group) in settings.iter_mut().zip(group_of) {
            *own = group.map_or(*own, |group| self.groups[group].1);
        }
        for (pattern, group) in &self.adjustments {
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

impl ParamGroup {
    /// Returns a group with all settings of its optimizer.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().rate_at(0.5), 0.5);
    /// ```
    pub fn new() -> ParamGroup {
        ParamGroup::default()
    }

    /// Multiplies the learning rate by `factor`.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().rate(0.5).rate_at(3.0), 1.5);
    /// ```
    pub fn rate(self, factor: f64) -> ParamGroup {
        ParamGroup { rate_factor: Some(factor), ..self }
    }

    /// Sets the weight decay, however many dims a parameter has.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().decay(0.0).weight_decay(), Some(0.0));
    /// ```
    pub fn decay(self, weight_decay: f64) -> ParamGroup {
        ParamGroup { weight_decay: Some(weight_decay), ..self }
    }

    /// Sets the decay rates of moments. A rule without moments, such as [`Sgd`](super::Sgd), refuses them.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().betas(0.8, 0.9).betas_or((0.9, 0.95)), (0.8, 0.9));
    /// ```
    pub fn betas(self, first: f64, second: f64) -> ParamGroup {
        ParamGroup { betas: Some((first, second)), ..self }
    }

    /// Returns the learning rate of a step at rate `lr`.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().rate(2.0).rate_at(0.5), 1.0);
    /// ```
    pub fn rate_at(&self, lr: f64) -> f64 {
        self.rate_factor.map_or(lr, |factor| factor * lr)
    }

    /// Returns the weight decay, if the group has one of its own.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().weight_decay(), None);
    /// ```
    pub fn weight_decay(&self) -> Option<f64> {
        self.weight_decay
    }

    /// Returns the weight decay, given the optimizer's.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!((ParamGroup::new().decay_or(0.1), ParamGroup::new().decay(0.0).decay_or(0.1)), (0.1, 0.0));
    /// ```
    pub fn decay_or(&self, optimizers: f64) -> f64 {
        self.weight_decay.unwrap_or(optimizers)
    }

    /// Returns the decay rates of moments, given the optimizer's.
    ///
    /// ```
    /// use isoshard::optim::ParamGroup;
    /// assert_eq!(ParamGroup::new().betas_or((0.9, 0.95)), (0.9, 0.95));
    /// ```
    pub fn betas_or(&self, optimizers: (f64, f64)) -> (f64, f64) {
        self.betas.unwrap_or(optimizers)
    }

    /// Returns true if the group has decay rates of moments of its own.
    pub(super) fn has_betas(&self) -> bool {
        self.betas.is_some()
    }

    /// Returns a key that is equal for settings that one kernel launch can take.
    pub(super) fn launch_key(&self) -> [Option<u64>; 4] {
        let (beta1, beta2) = self.betas.unzip();
        [self.rate_factor, self.weight_decay, beta1, beta2].map(|value| value.map(f64::to_bits))
    }
}
