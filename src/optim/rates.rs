//! The learning rates of one step.

use crate::nn::ParamId;

/// The learning rate of one step, and those of parameters that have schedules of their own
/// ([`Optimizer::group_schedule`](super::Optimizer::group_schedule)). A number is the rate of all parameters.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Rates, rng::Init};
/// spmd(1, |rank| {
///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
///     let (w, head) = (params.root().param("w", [2], Init::Ones)?, params.root().param("head", [2], Init::Ones)?);
///     let rates = Rates::from(0.5).with([head], 0.25);
///     assert_eq!((rates.base(), rates.of(w), rates.of(head)), (0.5, 0.5, 0.25));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    base: f64,
    /// The rates of parameters with their own schedule, by the number of the parameter.
    own: Vec<Option<f64>>,
}

impl From<f64> for Rates {
    fn from(base: f64) -> Rates {
        Rates { base, own: Vec::new() }
    }
}

impl Rates {
    /// Returns the rates with another one for some parameters; [`Rates`] has an example.
    ///
    /// ```
    /// use isoshard::optim::Rates;
    /// assert_eq!(Rates::from(0.5).with([], 0.25), Rates::from(0.5));
    /// ```
    pub fn with(mut self, params: impl IntoIterator<Item = ParamId>, rate: f64) -> Rates {
        for id in params {
            if self.own.len() <= id.index() {
                self.own.resize(id.index() + 1, None);
            }
            self.own[id.index()] = Some(rate);
        }
        self
    }

    /// Returns the rate of parameters without a schedule of their own.
    ///
    /// ```
    /// use isoshard::optim::Rates;
    /// assert_eq!(Rates::from(0.5).base(), 0.5);
    /// ```
    pub fn base(&self) -> f64 {
        self.base
    }

    /// Returns the rate of a parameter, before the factor of its [group](super::ParamGroup::rate).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Rates, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     assert_eq!(Rates::from(0.5).of(w), 0.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn of(&self, id: ParamId) -> f64 {
        self.own.get(id.index()).copied().flatten().unwrap_or(self.base)
    }
}
