//! Losses of classifiers.

use super::loss_reduction::LossReduction;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Bits, CrossEntropy, CrossEntropyTerms, Mask, Max, Permute, SoftCrossEntropy, SumExp};
use crate::placement::Layout;
use crate::tensor::{DType, Scalar};

/// The options of [`DTensor::cross_entropy_with`]. The default is the mean of the plain loss over the last dim.
///
/// ```
/// use isoshard::dtensor::CrossEntropyOptions;
/// let padded = CrossEntropyOptions { ignore_index: Some(-100), label_smoothing: 0.1, ..Default::default() };
/// assert_eq!(padded.class_dim, -1);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// The dim of the classes; a negative one counts from the last. PyTorch's is 1.
    pub class_dim: isize,
    /// The reduction over rows.
    pub reduction: LossReduction,
    /// The target of rows that are left out, such as padding: their loss and gradient are 0, and they do not count in
    /// the mean. It need not be a class.
    pub ignore_index: Option<i64>,
    /// A weight per class, `[classes]`, by which the loss of a target of that class is multiplied.
    pub class_weights: Option<&'a DTensor>,
    /// The share of the target probability that is spread evenly over all classes (Szegedy et al. 2016).
    pub label_smoothing: f64,
    /// The factor of the squared logarithm of the softmax's denominator, which is added to each row's loss and keeps
    /// logits from drifting (*z-loss*; Chowdhery et al., *PaLM*, 2022). It is multiplied by the weight of the target's
    /// class.
    pub z_loss: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            class_dim: -1,
            reduction: LossReduction::Mean,
            ignore_index: None,
            class_weights: None,
            label_smoothing: 0.0,
            z_loss: 0.0,
        }
    }
}

impl CrossEntropyOptions<'_> {
    /// Refuses class weights that are not floating-point numbers, one for each of the classes of `x`.
    fn expect_weights(&self, verb: &str, x: &DTensor, classes: usize) -> Result<()> {
        match self.class_weights {
            Some(w) if w.shape()[..] != [classes] || !w.dtype().is_float() => {
                let given = format!("{} for {}", w.spec(), x.spec());
                Err(Error::invalid(verb, "wants a floating-point weight per class", given, ""))
            }
            _ => Ok(()),
        }
    }
}

/// The weights of rows whose target is a class.
struct TargetWeights {
    /// False for rows that are ignored; `None` if none is.
    kept: Option<DTensor>,
    /// The weight of each row's target, 0 for rows that are ignored; `None` without class weights.
    weights: Option<DTensor>,
}

impl TargetWeights {
    /// Looks up the weights of the targets, in `dtype`.
    fn new(target: &DTensor, options: &CrossEntropyOptions, dtype: DType) -> Result<TargetWeights> {
        let kept = match options.ignore_index {
            Some(index) => Some(target.ne(&target.number_like(index)?)?),
            None => None,
        };
        let mut rows = TargetWeights { kept, weights: None };
        if let Some(w) = options.class_weights {
            let index = rows.keep(target.clone())?;
            let found = w.cast(dtype)?.unsqueeze(1)?.embedding(&index)?.squeeze(-1)?;
            rows.weights = Some(rows.keep(found)?);
        }
        Ok(rows)
    }

    /// Replaces the elements of rows that are ignored by 0.
    fn keep(&self, x: DTensor) -> Result<DTensor> {
        match &self.kept {
            Some(kept) => DTensor::apply_one(&Mask { on: true }, &[kept, &x]),
            None => Ok(x),
        }
    }

    /// Multiplies losses by the weights.
    fn weigh(&self, losses: DTensor) -> Result<DTensor> {
        if let Some(weights) = &self.weights { losses.mul(weights) } else { Ok(losses) }
    }

    /// Reduces losses that are multiplied by the weights.
    fn reduce(&self, losses: &DTensor, reduction: LossReduction) -> Result<DTensor> {
        let count = match (reduction, &self.weights, &self.kept) {
            (LossReduction::Mean, Some(weights), _) => weights.sum_all()?,
            // A sum of integers: an f32 would round it above 2^24.
            (LossReduction::Mean, None, Some(kept)) => {
                kept.cast(DType::I64)?.sum_all()?.cast(losses.dtype())?
            }
            _ => return reduction.apply(losses),
        };
        losses.sum_all()?.div(&count)
    }
}

/// Losses of classifiers.
impl DTensor {
    /// Returns `-log(softmax(self)[target])` over the last dim: logits `[.., classes]` and targets `[..]` (i64) give
    /// losses `[..]`. [`DTensor::cross_entropy_with`] has options.
    ///
    /// If the classes are sharded they are not gathered: per row, the ranks reduce one maximum and two sums.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = DTensor::zeros(&mesh, DType::F32, [2, 4], "(S1)")?; // a sharded vocabulary
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3i64, 0], [2])?, "(R)")?;
    ///     let loss = logits.cross_entropy(&target)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(loss.iter().all(|l| (l - 4f32.ln()).abs() < 1e-6)); // four equal classes
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `target` that is not i64 or has another shape, and classes that do not exist.
    pub fn cross_entropy(&self, target: &DTensor) -> Result<DTensor> {
        let [m, s] = self.softmax_statistics("cross_entropy")?;
        DTensor::apply_one(&CrossEntropy::default(), &[self, target, &m, &s])
    }

    /// Returns the cross entropy between `softmax(self)` and `target`, with [options](CrossEntropyOptions).
    ///
    /// An i64 `target` has the logits' shape without the dim of classes and names a class per row. A floating-point
    /// `target` has the logits' shape and holds probabilities; it may have a gradient. Losses are f32 (f64 for f64).
    ///
    /// The mean divides by the number of rows that are not ignored, over all ranks; with class weights and classes as
    /// target, by the sum of these rows' weights. If all rows are ignored the mean is NaN, as in PyTorch; the sum is 0.
    ///
    /// Sharded classes are not gathered: per row, the ranks reduce one maximum and two sums, and one more sum each for
    /// label smoothing and for probabilities (two with their backward pass).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{CrossEntropyOptions, DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = DTensor::zeros(&mesh, DType::F32, [3, 4], "(S0)")?;
    ///     let target = Tensor::from_vec(vec![3i64, -100, 0], [3])?; // the second row is padding
    ///     let target = DTensor::distribute(&mesh, &target, "(S0)")?;
    ///     let options = CrossEntropyOptions { ignore_index: Some(-100), ..Default::default() };
    ///     let loss = logits.cross_entropy_with(&target, &options)?.item()?;
    ///     assert!((loss - 4f64.ln()).abs() < 1e-6); // the mean over two rows
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses targets and weights whose shape or dtype do not fit, classes that do not exist, a smoothing outside
    /// `[0, 1]`, a z-loss that is negative or not finite, and an ignored class beside probabilities.
    pub fn cross_entropy_with(&self, target: &DTensor, options: &CrossEntropyOptions) -> Result<DTensor> {
        const VERB: &str = "cross_entropy";
        let CrossEntropyOptions { label_smoothing: smoothing, z_loss, .. } = *options;
        let refused = |rule: &str, given: String| Err(Error::invalid(VERB, rule, given, ""));
        if !(0.0..=1.0).contains(&smoothing) {
            return refused("label smoothing lies in [0, 1]", smoothing.to_string());
        }
        if !(z_loss >= 0.0 && z_loss.is_finite()) {
            return refused("the factor of the z-loss is finite and not negative", z_loss.to_string());
        }
        let dim = self.shape().dim(VERB, options.class_dim)?;
        let classes = self.shape()[dim];
        options.expect_weights(VERB, self, classes)?;
        let logits = self.with_last(dim)?;
        if target.dtype().is_float() {
            if options.ignore_index.is_some() {
                return refused("probabilities have no class to ignore", target.spec().to_string());
            }
            if target.shape() != self.shape() {
                let given = format!("{} for {}", target.spec(), self.spec());
                return refused("wants probabilities of the logits' shape", given);
            }
            return logits.soft_cross_entropy(&target.with_last(dim)?, options);
        }
        let [m, s] = logits.softmax_statistics(VERB)?;
        let factors = (Bits(1.0 - smoothing), Bits(z_loss));
        let terms = CrossEntropyTerms {
            ignore_index: options.ignore_index,
            nll_factor: factors.0,
            z_factor: factors.1,
        };
        let losses = DTensor::apply_one(&CrossEntropy { terms }, &[&logits, target, &m, &s])?;
        let rows = TargetWeights::new(target, options, s.dtype())?;
        let mut losses = rows.weigh(losses)?;
        if smoothing > 0.0 {
            let share = smoothing / classes as f64;
            let (q, row_sum) = match options.class_weights {
                Some(w) => (w.cast(s.dtype())?.mul_scalar(share)?, None),
                None => (s.number_like(share)?, Some(Bits(smoothing))),
            };
            let q = q.expand(logits.shape().clone())?;
            let spread = DTensor::apply_one(&SoftCrossEntropy { row_sum }, &[&logits, &q, &m, &s])?;
            losses = losses.add(&rows.keep(spread)?)?;
        }
        rows.reduce(&losses, options.reduction)
    }

    /// Returns the negative of the log-probability of each row's target: log-probabilities `[.., classes]`, such as
    /// those of [`DTensor::log_softmax`], and targets `[..]` (i64) give losses `[..]`, reduced as the options say.
    ///
    /// Rows that are ignored, class weights, the dim of classes and the mean are those of
    /// [`DTensor::cross_entropy_with`]. If the classes are sharded the ranks reduce one number per row.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{CrossEntropyOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logp = Tensor::from_vec(vec![-0.5f32, -1.0, -2.0, -0.25], [2, 2])?;
    ///     let logp = DTensor::distribute(&mesh, &logp, "(S1)")?;
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, 0], [2])?, "(R)")?;
    ///     let loss = logp.nll_loss(&target, &CrossEntropyOptions::default())?;
    ///     assert_eq!(loss.item()?, 1.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses targets and weights whose shape or dtype do not fit, classes that do not exist, label smoothing and a
    /// z-loss.
    pub fn nll_loss(&self, target: &DTensor, options: &CrossEntropyOptions) -> Result<DTensor> {
        let refused = |rule: &str, given: String| Err(Error::invalid("nll_loss", rule, given, ""));
        if options.label_smoothing != 0.0 || options.z_loss != 0.0 {
            let given = format!("{} and {}", options.label_smoothing, options.z_loss);
            return refused("log-probabilities have no label smoothing and no z-loss", given);
        }
        let dim = self.shape().dim("nll_loss", options.class_dim)?;
        options.expect_weights("nll_loss", self, self.shape()[dim])?;
        let logp = self.with_last(dim)?;
        let outer = &logp.shape()[..logp.shape().len() - 1];
        if target.shape()[..] != *outer || target.dtype() != DType::I64 {
            let given = format!("{} for {}", target.spec(), self.spec());
            return refused("wants one i64 target for each row", given);
        }
        let rows = TargetWeights::new(target, options, logp.dtype())?;
        let index = rows.keep(target.clone())?.unsqueeze(outer.len() as isize)?;
        let losses = rows.keep(logp.gather(-1, &index)?.squeeze(-1)?.neg()?)?;
        rows.reduce(&rows.weigh(losses)?, options.reduction)
    }

    /// Returns the cross entropy with probabilities over the last dim.
    fn soft_cross_entropy(&self, target: &DTensor, options: &CrossEntropyOptions) -> Result<DTensor> {
        let [m, s] = self.softmax_statistics("cross_entropy")?;
        let classes = self.shape().last().map_or(1, |&n| n);
        let mut q = target.cast(s.dtype())?;
        if options.label_smoothing > 0.0 {
            let share = options.label_smoothing / classes as f64;
            q = q.mul_scalar(1.0 - options.label_smoothing)?.add_scalar(share)?;
        }
        if let Some(w) = options.class_weights {
            q = q.mul(&w.cast(s.dtype())?)?;
        }
        let mut losses = DTensor::apply_one(&SoftCrossEntropy { row_sum: None }, &[self, &q, &m, &s])?;
        if options.z_loss > 0.0 {
            // The z-loss alone does not depend on the target.
            let terms = CrossEntropyTerms {
                nll_factor: Bits(0.0),
                z_factor: Bits(options.z_loss),
                ..Default::default()
            };
            let any = self.number_as(DType::I64, 0.0)?.expand(losses.shape().clone())?;
            let z = DTensor::apply_one(&CrossEntropy { terms }, &[self, &any, &m, &s])?;
            losses = losses.add(&z)?;
        }
        options.reduction.apply(&losses)
    }

    /// Returns the maximum of each row of the last dim, and the sum of the exponentials of the distances to it, both
    /// reduced and without a history.
    fn softmax_statistics(&self, verb: &str) -> Result<[DTensor; 2]> {
        let _guard = self.mesh.no_grad();
        let max = Max { dims: [self.shape().dim(verb, -1)?].into_iter().collect(), keep: true };
        let m = DTensor::apply_one(&max, &[self])?.reduce_partial()?;
        let s = DTensor::apply_one(&SumExp, &[self, &m])?.reduce_partial()?;
        Ok([m, s])
    }

    /// Moves `dim` behind all others, as a view.
    fn with_last(&self, dim: usize) -> Result<DTensor> {
        let last = self.shape().len() - 1;
        if dim == last {
            return Ok(self.clone());
        }
        let order = (0..=last).filter(|&d| d != dim).chain([dim]).collect();
        DTensor::apply_one(&Permute { order }, &[self])
    }

    /// Returns a number on this tensor's mesh, in its dtype, as a replicated tensor without dims.
    pub(in crate::dtensor::methods) fn number_like(&self, value: impl Into<Scalar>) -> Result<DTensor> {
        self.number_as(self.dtype(), value)
    }

    /// Returns a number on this tensor's mesh as a replicated tensor without dims.
    fn number_as(&self, dtype: DType, value: impl Into<Scalar>) -> Result<DTensor> {
        DTensor::full(&self.mesh, dtype, [], Layout::replicated(self.mesh.mesh().ndim()), value)
    }
}
