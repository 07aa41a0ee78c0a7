//! Loss scaling for training in f16.

use super::groups::expect_reduced;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::Params;

/// The factor of a loss in f16, whose small gradients would otherwise be rounded to zero (Micikevicius et al. 2018). It is a power
/// of two, halved if a gradient overflows and doubled after many steps without. bf16 has the range of f32 and needs none.
///
/// ```
/// use isoshard::prelude::*;
/// use isoshard::optim::LossScale;
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     params.compute_in(DType::F16)?;
///     let w = params.root().param("w", [4], Init::Ones)?;
///     let (mut scale, mut optimizer) = (LossScale::new(), Sgd::new().rate(0.5));
///     for _ in 0..3 {
///         let w = Forward::train_without_dropout(&params).param(w)?;
///         let loss = w.mul_scalar(2.0)?.sum_all()?;
///         let mut grads = scale.scale(&loss)?.backward()?;
///         if scale.unscale(&params, &mut grads)? {
///             optimizer.step(&mut params, &mut grads)?;
///         }
///     }
///     // 65536 is above f16's largest number, 65504, so the steps with the factors 65536 and 32768 were left out.
///     assert_eq!((scale.factor(), optimizer.steps()), (16384.0, 1));
///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LossScale {
    factor: f64,
    /// The steps without an overflow after which the factor is doubled.
    interval: u64,
    /// The steps since the factor changed.
    good_steps: u64,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale::new()
    }
}

impl LossScale {
    /// Returns the factor 2^16, which is doubled after 2,000 steps: PyTorch's defaults.
    ///
    /// ```
    /// assert_eq!(isoshard::optim::LossScale::new().factor(), 65536.0);
    /// ```
    pub fn new() -> LossScale {
        LossScale { factor: 65536.0, interval: 2000, good_steps: 0 }
    }

    /// Doubles the factor after another number of steps without an overflow.
    ///
    /// ```
    /// use isoshard::optim::LossScale;
    /// assert_ne!(LossScale::new().interval(100), LossScale::new());
    /// ```
    pub fn interval(self, steps: u64) -> LossScale {
        LossScale { interval: steps.max(1), ..self }
    }

    /// Returns the factor.
    ///
    /// ```
    /// assert_eq!(isoshard::optim::LossScale::new().factor(), 65536.0);
    /// ```
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Returns a loss times the factor, for the backward pass. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{optim::LossScale, prelude::*};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let loss = DTensor::full(&mesh, DType::F32, [], "()", 0.5)?;
    ///     assert_eq!(LossScale::new().scale(&loss)?.item()?, 32768.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::mul_scalar`].
    pub fn scale(&self, loss: &DTensor) -> Result<DTensor> {
        loss.mul_scalar(self.factor)
    }

    /// Divides gradients by the factor, which is exact, and returns true. If one of them is infinite or NaN, returns false instead and
    /// halves the factor: the step is to be left out. Sends 24 bytes to each rank ([`Params::check_gradients`]); all ranks get
    /// the same answer.
    ///
    /// [`LossScale`] has an example.
    ///
    /// ```
    /// use isoshard::{optim::LossScale, prelude::*};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Zeros)?;
    ///     let mut scale = LossScale::new();
    ///     let mut grads = params.value(w).sqrt()?.sum_all()?.backward()?; // the derivative at 0 is infinite
    ///     assert!(!scale.unscale(&params, &mut grads)?);
    ///     assert_eq!(scale.factor(), 32768.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses gradients that are not reduced; returns an error if a rank fails.
    pub fn unscale(&mut self, params: &Params, grads: &mut Gradients) -> Result<bool> {
        expect_reduced("loss_scale", params, grads)?;
        match params.check_gradients(grads, 0) {
            Err(Error::NotFinite(_)) => {
                self.factor = (self.factor / 2.0).max(f64::MIN_POSITIVE);
                self.good_steps = 0;
                return Ok(false);
            }
            checked => checked?,
        }
        let inverse = 1.0 / self.factor;
        grads.map_of(params.values(), |grad| grad.mul_scalar(inverse))?;
        self.good_steps += 1;
        if self.good_steps >= self.interval && self.factor < 1e30 {
            (self.factor, self.good_steps) = (self.factor * 2.0, 0);
        }
        Ok(true)
    }

    /// Returns the factor and the steps since it changed, for a checkpoint.
    ///
    /// ```
    /// use isoshard::optim::LossScale;
    /// assert_eq!(LossScale::new().state()?.value("factor").expect("it is there"), 65536.0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`StateTree::insert_value`].
    pub fn state(&self) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_value("factor", self.factor)?;
        state.insert_value("good_steps", self.good_steps)?;
        Ok(state)
    }

    /// Goes on from a saved state.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint}, optim::LossScale, prelude::*};
    /// let dir = std::env::temp_dir().join(format!("isoshard-loss-scale-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mut scale = LossScale::new();
    ///     checkpoint::save(&DeviceMesh::new(&rank, &[])?, &dir, &scale.state()?)?;
    ///     scale.load_state(&Checkpoint::open(&dir)?)
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a state without these values, and a factor that is no positive number; nothing changes then.
    pub fn load_state(&mut self, saved: &Checkpoint) -> Result<()> {
        let factor = saved.value("factor").and_then(|value| value.as_f64());
        let good_steps = saved.value("good_steps").and_then(|value| value.as_u64());
        let (Some(factor), Some(good_steps)) = (factor.filter(|f| f.is_finite() && *f > 0.0), good_steps)
        else {
            let rule = "a loss's scale has a positive factor and a number of steps";
            return Err(Error::invalid("load_state", rule, saved.dir().display().to_string(), ""));
        };
        (self.factor, self.good_steps) = (factor, good_steps);
        Ok(())
    }
}
