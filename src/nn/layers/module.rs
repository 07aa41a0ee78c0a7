//! The trait of a model and its parts.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::forward::Forward;

/// A model, or a part of one, that maps a tensor to a tensor.
///
/// A module declares its parameters by path in its constructor, through a [`Scope`](crate::nn::Scope), and keeps their ids.
/// The values are in [`Params`](crate::nn::Params), laid out by a [`Plan`](crate::nn::Plan), so a module names neither mesh nor
/// layout. A `Vec` of modules is the module that applies them in turn.
///
/// ```
/// use isoshard::{Result, comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
/// use isoshard::nn::{Forward, Linear, Module, Params, Plan, Scope};
///
/// struct ResidualBlock {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl ResidualBlock {
///     fn new(mut scope: Scope<'_>, width: usize) -> Result<ResidualBlock> {
///         let init = Init::Normal { mean: 0.0, std: 0.1 };
///         Ok(ResidualBlock {
///             up: Linear::new(scope.child("up"), width, 4 * width, init)?,
///             down: Linear::new(scope.child("down"), 4 * width, width, init)?,
///         })
///     }
/// }
///
/// impl Module for ResidualBlock {
///     fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
///         self.down.forward(cx, &self.up.forward(cx, x)?.relu()?)?.add(x)
///     }
/// }
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     let blocks = (0..3).map(|i| ResidualBlock::new(params.root().child("h").child(i), 5));
///     let model: Vec<ResidualBlock> = blocks.collect::<Result<_>>()?;
///     assert!(params.find("h.2.down.bias").is_some());
///     let x = DTensor::full(&mesh, DType::F32, [7, 5], Layout::replicated(1), 1.0)?;
///     assert_eq!(model.forward(&Forward::eval(&params), &x)?.shape()[..], [7, 5]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Module {
    /// Applies the module to `x`. All parameters and all randomness come from `cx`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Linear, Module, Params, Plan}};
    /// use isoshard::{placement::Layout, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let map = Linear::without_bias(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [5, 3], Layout::replicated(1), 1.0)?;
    ///     let y = map.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0; 10]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `x` that does not fit the module; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor>;
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        (**self).forward(cx, x)
    }
}

/// Applies the modules in turn.
impl<M: Module> Module for Vec<M> {
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.iter().try_fold(x.clone(), |x, module| module.forward(cx, &x))
    }
}
