//! Normalisation over groups of elements: several trailing dims, groups of channels, a channel of each sample, a
//! channel of the whole batch; and normalisation of weights.
//!
//! As for [`DTensor::matmul`], exact mode reduces over a sharded dim only if no boundary cuts a leaf of the reduction
//! tree; otherwise the operands are redistributed.

use smallvec::SmallVec;

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Bits, LayerNorm};
use crate::tensor::{Shape, short_list};

/// The statistics of [`DTensor::batch_norm`], with gradients of their own: `[channels]` each.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 3.0], [2, 1])?, "(S0)")?;
///     let (_, statistics) = x.batch_norm(None, 1e-5)?;
///     assert_eq!(statistics.mean.full_tensor()?.to_vec::<f32>()?, [2.0]);
///     assert_eq!(statistics.variance.full_tensor()?.to_vec::<f32>()?, [1.0]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchStatistics {
    /// The mean over all dims but the channels, of the whole batch.
    pub mean: DTensor,
    /// The mean square deviation from it.
    pub variance: DTensor,
}

/// Normalisation over groups of elements.
impl DTensor {
    /// Applies [layer normalisation](DTensor::layer_norm) over the last `trailing` dims together:
    /// `(x - mean) / sqrt(variance + eps)`, then `* weight` and `+ bias` if they are given. `weight` and `bias` have the
    /// shape of these dims. Communicates nothing if the ranks hold these dims whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 3.0, 3.0, 1.0, 0.0, 8.0, 0.0, 8.0], [2, 2, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S0)")?;
    ///     let y = x.layer_norm_over(2, None, None, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `trailing` of 0 or of more dims than the tensor has, a `weight` or `bias` of another shape, and a bias
    /// without a weight.
    pub fn layer_norm_over(
        &self,
        trailing: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        const VERB: &str = "layer_norm_over";
        let refused = |rule: &str, given: String| Err(Error::invalid(VERB, rule, given, ""));
        let Some(leading) = self.shape().len().checked_sub(trailing).filter(|_| trailing > 0) else {
            return refused("has no such trailing dims", format!("{trailing} of {}", self.spec()));
        };
        let (outer, inner) = self.shape().split_at(leading);
        if let Some(other) = [weight, bias].into_iter().flatten().find(|w| w.shape()[..] != *inner) {
            let given = format!("{} for {}", other.spec(), self.spec());
            return refused("weight and bias have the shape of the normalised dims", given);
        }
        let width: usize = inner.iter().product();
        let flat = |w: Option<&DTensor>| w.map(|w| w.reshape([width])).transpose();
        let (weight, bias) = (flat(weight)?, flat(bias)?);
        let x = self.reshape(outer.iter().copied().chain([width]).collect::<Shape>())?;
        normalise(&x, weight.as_ref(), bias.as_ref(), eps)?.reshape(self.shape().clone())
    }

    /// Applies group normalisation (Wu and He, 2018) to `[batch, channels, ..]`: the channels are divided into `groups`
    /// of neighbours, and each group of each sample is normalised over its channels and all further dims. `affine` is a
    /// weight and a bias per channel.
    ///
    /// Communicates nothing if the batch is sharded, or if the channels are sharded into whole groups.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 3.0, 0.0, 8.0], [1, 4, 1])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S1)")?;
    ///     let y = x.group_norm(2, None, 0.0)?; // channels 0 and 1, channels 2 and 3
    ///     assert_eq!(mesh.received_bytes(), 0);
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of fewer than two dims, channels that `groups` does not divide, and weights that are not
    /// `[channels]`.
    pub fn group_norm(
        &self,
        groups: usize,
        affine: Option<(&DTensor, &DTensor)>,
        eps: f64,
    ) -> Result<DTensor> {
        self.grouped("group_norm", Some(groups), affine, eps)
    }

    /// Applies instance normalisation (Ulyanov et al., 2016) to `[batch, channels, ..]`: each channel of each sample is
    /// normalised over the further dims. It is [`DTensor::group_norm`] with one channel per group, and `affine` and the
    /// communication are as there.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 3.0, 10.0, 30.0], [1, 2, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S1)")?;
    ///     assert_eq!(x.instance_norm(None, 0.0)?.full_tensor()?.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of fewer than two dims, and weights that are not `[channels]`.
    pub fn instance_norm(&self, affine: Option<(&DTensor, &DTensor)>, eps: f64) -> Result<DTensor> {
        self.grouped("instance_norm", None, affine, eps)
    }

    /// Applies batch normalisation (Ioffe and Szegedy, 2015) to `[batch, channels, ..]` as in training: each channel is
    /// normalised over all other dims of the global batch. Returns the statistics as well, for running averages.
    /// `affine` is a weight and a bias per channel. [`DTensor::normalise_channels`] applies given statistics.
    ///
    /// If the batch is sharded, the ranks reduce one mean and one variance per channel, and as many numbers in the
    /// backward pass. f16 and bf16 compute in f32 and round once.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 10.0, 3.0, 30.0], [2, 2])?; // one sample per rank
    ///     let x = DTensor::distribute(&mesh, &x, "(S0)")?;
    ///     let (y, _) = x.batch_norm(None, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-1.0, -1.0, 1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of fewer than two dims, dtypes that are not floating-point, a batch without elements, and
    /// weights that are not `[channels]`.
    pub fn batch_norm(
        &self,
        affine: Option<(&DTensor, &DTensor)>,
        eps: f64,
    ) -> Result<(DTensor, BatchStatistics)> {
        const VERB: &str = "batch_norm";
        let x = self.expect_channels(VERB)?;
        let others: SmallVec<[isize; 4]> = short_list((0..self.shape().len() as isize).filter(|&d| d != 1));
        if self.shape().numel() == 0 {
            return Err(Error::invalid(VERB, "wants elements to average", self.spec().to_string(), ""));
        }
        let mean = x.mean(&others, true)?;
        let centred = x.sub(&mean)?;
        let variance = centred.mul(&centred)?.mean(&others, true)?;
        let y = centred.mul(&variance.add_scalar(eps)?.rsqrt()?)?;
        let y = scale_channels(VERB, &y, affine)?.cast(self.dtype())?;
        let channels = [self.shape()[1]];
        let statistics =
            BatchStatistics { mean: mean.reshape(channels)?, variance: variance.reshape(channels)? };
        Ok((y, statistics))
    }

    /// Normalises the channels of `[batch, channels, ..]` by given statistics, as [`DTensor::batch_norm`] does in
    /// evaluation: `(x - mean) / sqrt(variance + eps)`, with a weight and a bias per channel if `affine` is given.
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{BatchStatistics, DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 1, 3], "(S0)", 5.0)?;
    ///     let channel = |value| DTensor::full(&mesh, DType::F32, [1], "(R)", value);
    ///     let running = BatchStatistics { mean: channel(1.0)?, variance: channel(4.0)? };
    ///     assert_eq!(x.normalise_channels(&running, None, 0.0)?.full_tensor()?.to_vec::<f32>()?, [2.0; 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of fewer than two dims, dtypes that are not floating-point, and statistics or weights that are
    /// not `[channels]`.
    pub fn normalise_channels(
        &self,
        statistics: &BatchStatistics,
        affine: Option<(&DTensor, &DTensor)>,
        eps: f64,
    ) -> Result<DTensor> {
        const VERB: &str = "normalise_channels";
        let x = self.expect_channels(VERB)?;
        let mean = per_channel(VERB, &x, &statistics.mean)?;
        let rstd = per_channel(VERB, &x, &statistics.variance)?.add_scalar(eps)?.rsqrt()?;
        scale_channels(VERB, &x.sub(&mean)?.mul(&rstd)?, affine)?.cast(self.dtype())
    }

    /// Returns these weights with each slice along `dim` scaled to a given Euclidean norm: `v / |v| * norms`
    /// (Salimans and Kingma, *Weight Normalization*, 2016). `norms` has the extent of `dim`.
    ///
    /// If other dims are sharded, the ranks reduce one number per slice and gather nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let v = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3.0f64, 4.0, 0.0, 2.0], [2, 2])?, "(S1)")?;
    ///     let norms = DTensor::full(&mesh, v.dtype(), [2], "(R)", 10.0)?;
    ///     assert_eq!(v.weight_norm(&norms, 0)?.full_tensor()?.to_f64_vec(), [6.0, 8.0, 0.0, 10.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, `norms` of another shape, and dtypes that differ or are not
    /// floating-point.
    pub fn weight_norm(&self, norms: &DTensor, dim: isize) -> Result<DTensor> {
        const VERB: &str = "weight_norm";
        self.dtype().expect_float(VERB)?;
        let dim = self.shape().dim(VERB, dim)?;
        if norms.shape()[..] != [self.shape()[dim]] || norms.dtype() != self.dtype() {
            let given = format!("{} for dim {dim} of {}", norms.spec(), self.spec());
            return Err(Error::invalid(VERB, "wants one norm per index, of the weights' dtype", given, ""));
        }
        let rank = self.shape().len();
        let others: SmallVec<[isize; 4]> = short_list((0..rank as isize).filter(|&d| d != dim as isize));
        let mut shape = vec![1; rank];
        shape[dim] = self.shape()[dim];
        let lengths = self.norm(2.0, &others, true)?;
        // The quotient of two norms may overflow; an element is at most as long as its slice.
        self.div(&lengths)?.mul(&norms.reshape(shape)?)
    }

    /// Normalises groups of channels; `None` stands for groups of one channel.
    fn grouped(
        &self,
        verb: &str,
        groups: Option<usize>,
        affine: Option<(&DTensor, &DTensor)>,
        eps: f64,
    ) -> Result<DTensor> {
        self.dtype().expect_float(verb)?;
        let &[batch, channels, ref rest @ ..] = &self.shape()[..] else {
            return Err(Error::invalid(verb, "wants [batch, channels, ..]", self.spec().to_string(), ""));
        };
        let groups = groups.unwrap_or(channels);
        if channels.checked_rem(groups).is_none_or(|rest| rest != 0) && channels + groups > 0 {
            let given = format!("{groups} group(s) for {}", self.spec());
            return Err(Error::invalid(verb, "the groups do not divide the channels", given, ""));
        }
        let width = channels.checked_div(groups).unwrap_or(1) * rest.iter().product::<usize>();
        let y = normalise(&self.reshape([batch, groups, width])?, None, None, eps)?;
        scale_channels(verb, &y.reshape(self.shape().clone())?, affine)
    }

    /// Returns this tensor, at least in f32. Refuses one without a dim of channels.
    fn expect_channels(&self, verb: &str) -> Result<DTensor> {
        self.dtype().expect_float(verb)?;
        if self.shape().len() < 2 {
            return Err(Error::invalid(verb, "wants [batch, channels, ..]", self.spec().to_string(), ""));
        }
        self.cast(crate::ops::accumulator(self.dtype()))
    }
}

/// Normalises over the last dim.
fn normalise(x: &DTensor, weight: Option<&DTensor>, bias: Option<&DTensor>, eps: f64) -> Result<DTensor> {
    let op = LayerNorm { eps: Bits(eps), weight: weight.is_some(), bias: bias.is_some() };
    let ins: SmallVec<[&DTensor; 3]> = short_list([x].into_iter().chain(weight).chain(bias));
    Ok(DTensor::apply(&op, &ins)?.remove(0))
}

/// Returns a number per channel, `[channels]`, in the shape that broadcasts over `x` `[batch, channels, ..]` and in the
/// dtype of `x`.
fn per_channel(verb: &str, x: &DTensor, numbers: &DTensor) -> Result<DTensor> {
    let channels = x.shape()[1];
    if numbers.shape()[..] != [channels] {
        let given = format!("{} for {}", numbers.spec(), x.spec());
        return Err(Error::invalid(verb, "wants one number per channel", given, ""));
    }
    let mut shape = vec![1; x.shape().len() - 1];
    shape[0] = channels;
    numbers.reshape(shape)?.cast(x.dtype())
}

/// Multiplies by a weight per channel and adds a bias per channel.
fn scale_channels(verb: &str, x: &DTensor, affine: Option<(&DTensor, &DTensor)>) -> Result<DTensor> {
    match affine {
        Some((weight, bias)) => x.mul(&per_channel(verb, x, weight)?)?.add(&per_channel(verb, x, bias)?),
        None => Ok(x.clone()),
    }
}
