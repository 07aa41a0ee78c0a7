//! Binary cross entropy.

use super::loss_reduction::LossReduction;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Mask;
use crate::tensor::DType;

/// The least logarithm of a probability, as in PyTorch.
const FLOOR: f64 = -100.0;

/// The options of [`DTensor::bce_loss`] and [`DTensor::bce_with_logits_loss`]. The default is the mean without weights.
///
/// ```
/// use isoshard::dtensor::{BinaryLossOptions, LossReduction};
/// let options = BinaryLossOptions { reduction: LossReduction::Sum, ..Default::default() };
/// assert!(options.weight.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct BinaryLossOptions<'a> {
    /// The reduction over elements. The mean divides by the number of elements, also if there are weights.
    pub reduction: LossReduction,
    /// A factor of each element's loss; it broadcasts.
    pub weight: Option<&'a DTensor>,
    /// A factor of the positive term, for instance the ratio of negative to positive examples per class; it broadcasts.
    pub pos_weight: Option<&'a DTensor>,
}

impl BinaryLossOptions<'_> {
    /// Joins the losses of positive and negative examples by the probabilities of the target.
    fn join(&self, positive: &DTensor, negative: &DTensor, target: &DTensor) -> Result<DTensor> {
        let positive = match self.pos_weight {
            Some(weight) => positive.mul(weight)?,
            None => positive.clone(),
        };
        let others = target.neg()?.add_scalar(1.0)?;
        let mut losses = positive.mul(target)?.add(&negative.mul(&others)?)?;
        if let Some(weight) = self.weight {
            losses = losses.mul(weight)?;
        }
        self.reduction.apply(&losses)
    }
}

/// Binary cross entropy.
impl DTensor {
    /// Returns the binary cross entropy between these probabilities and `target`:
    /// `-(w target ln(p) + (1 - target) ln(1 - p))` with [weights](BinaryLossOptions) `w`. Logarithms are at least -100,
    /// as in PyTorch, and have gradient 0 below. Shapes broadcast. Communicates nothing unless it reduces.
    ///
    /// The slope of `ln(p)` is `1 / max(p, e)` with `e = 2^-100` in f32 and bf16 and `2^-14` in f16, so the gradient by `p` is
    /// finite for every `p`: at most 1.3e30 and 16384 times the incoming gradient and the weights, and at most 2.7e43 times
    /// in f64, where logarithms end before. (PyTorch's bound is 1e12, and infinite in f16.) A model with logits calls
    /// [`DTensor::bce_with_logits_loss`]: a probability that is rounded to 0 or 1 has lost its gradient.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let p = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.5f64, 0.0], [2])?, "(S0)")?;
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f64, 1.0], [2])?, "(S0)")?;
    ///     let loss = p.bce_loss(&target, &Default::default())?.item()?;
    ///     assert!((loss - (2f64.ln() + 100.0) / 2.0).abs() < 1e-12);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast, dtypes that differ, and dtypes that are not floating-point.
    pub fn bce_loss(&self, target: &DTensor, options: &BinaryLossOptions) -> Result<DTensor> {
        self.dtype().expect_float("bce_loss")?;
        let [zero, one, floor] = [0.0, 1.0, FLOOR].map(|value| self.number_like(value));
        let (zero, one, floor) = (zero?, one?, floor?);
        // An infinite logarithm is never computed, since its gradient would be NaN.
        let below = self.ne(&one)?;
        let rest = below.select(&below.select(self, &zero)?.neg()?.log1p()?.maximum(&floor)?, &floor)?;
        let log = self.bounded_log()?;
        options.join(&log.neg()?, &rest.neg()?, target)
    }

    /// Returns `ln(self)`, at least -100, with a slope that [`DTensor::bce_loss`] states.
    fn bounded_log(&self) -> Result<DTensor> {
        let least = match self.dtype() {
            DType::F16 => (-14f64).exp2(),
            DType::F64 => f64::MIN_POSITIVE,
            _ => (-100f64).exp2(),
        };
        let forward = |ins: &[DTensor]| {
            let log = ins[0].log()?.maximum(&ins[0].number_like(FLOOR)?)?;
            Ok((vec![log.clone()], vec![ins[0].clone(), log]))
        };
        let backward = move |saved: &[DTensor], grads: &[DTensor]| {
            let [p, log] = saved else { unreachable!("saved above") };
            let slope = grads[0].div(&p.maximum(&p.number_like(least)?)?)?;
            let ended = log.le(&log.number_like(FLOOR)?)?;
            Ok(vec![Some(DTensor::apply_one(&Mask { on: false }, &[&ended, &slope])?)])
        };
        Ok(DTensor::custom_vjp("bce_loss", &[self], forward, backward)?.remove(0))
    }

    /// Returns the binary cross entropy between `sigmoid(self)` and `target`, computed without overflow and without
    /// cancellation: `w target softplus(-x) + (1 - target) softplus(x)` with [weights](BinaryLossOptions) `w`. Shapes
    /// broadcast. Communicates nothing unless it reduces.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction, BinaryLossOptions}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f64, 40.0, -90.0], [3])?, "(S0)")?;
    ///     let target = DTensor::full(&mesh, x.dtype(), [1], "(R)", 1.0)?;
    ///     let options = BinaryLossOptions { reduction: LossReduction::None, ..Default::default() };
    ///     let loss = x.bce_with_logits_loss(&target, &options)?.full_tensor()?.to_f64_vec();
    ///     assert!((loss[0] - 2f64.ln()).abs() < 1e-15 && (loss[1] / (-40f64).exp() - 1.0).abs() < 1e-14);
    ///     assert_eq!(loss[2], 90.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::bce_loss`] refuses.
    pub fn bce_with_logits_loss(&self, target: &DTensor, options: &BinaryLossOptions) -> Result<DTensor> {
        self.dtype().expect_float("bce_with_logits_loss")?;
        options.join(&self.neg()?.softplus()?, &self.softplus()?, target)
    }
}
