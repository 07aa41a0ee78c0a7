//! Normalisation over groups of channels and over the batch.

use std::cell::RefCell;

use crate::comm::ModulePath;
use crate::dtensor::{BatchStatistics, DTensor};
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::module::Module;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::scope::Scope;
use crate::rng::Init;

/// A weight and a bias per channel.
#[derive(Clone, Debug)]
struct ChannelAffine {
    weight: ParamId,
    bias: ParamId,
    path: ModulePath,
}

impl ChannelAffine {
    fn new(scope: &mut Scope<'_>, channels: usize) -> Result<ChannelAffine> {
        let weight = scope.param("weight", [channels], Init::Ones)?;
        let bias = scope.param("bias", [channels], Init::Zeros)?;
        Ok(ChannelAffine { weight, bias, path: scope.module_path() })
    }

    fn values(&self, cx: &Forward) -> Result<[DTensor; 2]> {
        Ok([cx.param(self.weight)?, cx.param(self.bias)?])
    }
}

/// Group normalisation of `[batch, channels, ..]`, with eps 1e-5 (Wu and He 2018); with one channel per group, instance
/// normalisation (Ulyanov et al. 2016).
#[derive(Clone, Debug)]
pub struct GroupNorm {
    affine: ChannelAffine,
    groups: usize,
}

impl GroupNorm {
    /// Declares a `weight` `[channels]` of ones and a `bias` `[channels]` of zeros.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Forward, GroupNorm, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let norm = GroupNorm::new(params.root().child("norm"), 2, 4)?;
    ///     let x = Tensor::from_vec(vec![100.0f32, 300.0, 0.0, 800.0], [1, 4, 1])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(R)")?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(y.iter().zip([-1.0, 1.0, -1.0, 1.0]).all(|(y, want)| (y - want).abs() < 1e-5));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(mut scope: Scope<'_>, groups: usize, channels: usize) -> Result<GroupNorm> {
        Ok(GroupNorm { affine: ChannelAffine::new(&mut scope, channels)?, groups })
    }
}

impl Module for GroupNorm {
    /// Normalises each group of channels of each sample.
    ///
    /// # Errors
    /// Refuses an `x` of other channels, and channels that the groups do not divide; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.affine.path.enter();
        let [weight, bias] = self.affine.values(cx)?;
        cx.leave(x.group_norm(self.groups, Some((&weight, &bias)), 1e-5)?)
    }
}

/// Batch normalisation of `[batch, channels, ..]`, with eps 1e-5 (Ioffe and Szegedy 2015).
///
/// A training pass normalises by the statistics of the global batch, over all ranks, and updates running averages; a
/// pass for evaluation uses the averages. They begin as mean 0 and variance 1, and are not parameters: save and restore
/// them with [`BatchNorm::running`] and [`BatchNorm::set_running`]. The second run of a recomputed function
/// ([`recompute`](crate::nn::recompute())) leaves them as they are. A clone has averages of its own: a recomputed function
/// that captures a clone moves the clone's, so it captures an [`Rc`](std::rc::Rc) of the module instead.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    affine: ChannelAffine,
    momentum: f64,
    running: RefCell<Option<BatchStatistics>>,
}

impl BatchNorm {
    /// Declares a `weight` `[channels]` of ones and a `bias` `[channels]` of zeros. `momentum` is the weight of a new
    /// batch in the running averages, usually 0.1.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{BatchNorm, Forward, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = BatchNorm::new(params.root().child("norm"), 1, 0.5)?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![100.0f32, 300.0], [2, 1])?, "(S0)")?;
    ///     let y = norm.forward(&Forward::train_without_dropout(&params), &x)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((y[0] + 1.0).abs() < 1e-5 && (y[1] - 1.0).abs() < 1e-5);
    ///     assert_eq!(norm.running().expect("trained").mean.full_tensor()?.to_vec::<f32>()?, [100.0]); // half of 0 and 200
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(mut scope: Scope<'_>, channels: usize, momentum: f64) -> Result<BatchNorm> {
        let affine = ChannelAffine::new(&mut scope, channels)?;
        Ok(BatchNorm { affine, momentum, running: RefCell::new(None) })
    }

    /// Returns the running averages, or `None` before the first pass. The variance is the unbiased one.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{BatchNorm, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert!(BatchNorm::new(params.root().child("norm"), 3, 0.1)?.running().is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn running(&self) -> Option<BatchStatistics> {
        self.running.borrow().clone()
    }

    /// Replaces the running averages, for example by saved ones.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{BatchStatistics, DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{BatchNorm, Forward, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = BatchNorm::new(params.root().child("norm"), 1, 0.1)?;
    ///     let channel = |value| DTensor::full(&mesh, DType::F32, [1], "(R)", value);
    ///     norm.set_running(BatchStatistics { mean: channel(5.0)?, variance: channel(4.0)? });
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 1], "(S0)", 9.0)?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((y[0] - 2.0).abs() < 1e-5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn set_running(&self, averages: BatchStatistics) {
        self.running.replace(Some(averages));
    }

    /// Returns the running averages; before the first pass, mean 0 and variance 1 like `x`.
    fn averages(&self, x: &DTensor, channels: usize) -> Result<BatchStatistics> {
        if let Some(averages) = self.running() {
            return Ok(averages);
        }
        let full = |value| {
            let layout = crate::placement::Layout::replicated(x.mesh().mesh().ndim());
            DTensor::full(x.mesh(), crate::tensor::DType::F32, [channels], layout, value)
        };
        Ok(BatchStatistics { mean: full(0.0)?, variance: full(1.0)? })
    }

    /// Moves the averages towards the statistics of a batch of `count` elements per channel.
    fn update(&self, x: &DTensor, batch: &BatchStatistics, count: usize) -> Result<()> {
        let _guard = x.mesh().no_grad();
        let old = self.averages(x, batch.mean.shape()[0])?;
        let towards = |old: &DTensor, new: &DTensor, factor: f64| {
            let new = new.reduce_partial()?.cast(old.dtype())?.redistribute(old.layout().clone())?;
            old.mul_scalar(1.0 - self.momentum)?.add(&new.mul_scalar(self.momentum * factor)?)
        };
        let unbiased = count as f64 / count.saturating_sub(1).max(1) as f64;
        let mean = towards(&old.mean, &batch.mean, 1.0)?;
        let variance = towards(&old.variance, &batch.variance, unbiased)?;
        self.set_running(BatchStatistics { mean, variance });
        Ok(())
    }
}

impl Module for BatchNorm {
    /// Normalises each channel: by the batch in training, by the running averages in evaluation.
    ///
    /// # Errors
    /// Refuses an `x` of other channels, and a batch without elements in training; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.affine.path.enter();
        let [weight, bias] = self.affine.values(cx)?;
        let affine = Some((&weight, &bias));
        if cx.is_eval() {
            let averages = self.averages(x, weight.shape()[0])?;
            return x.normalise_channels(&averages, affine, 1e-5);
        }
        let (y, statistics) = x.batch_norm(affine, 1e-5)?;
        if !cx.is_second_run() {
            self.update(x, &statistics, x.shape().numel() / x.shape()[1])?;
        }
        cx.leave(y)
    }
}
