//! Operators on lists of tensors, such as all parameters of a model, under one dispatch.

use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::list::DTensors;
use crate::error::{Error, Result};
use crate::ops::{Add, AddScalar, Addcdiv, Addcmul, Batched, Div, Lerp, Mul, MulScalar, Op, Sub};

/// Operators on lists of tensors.
impl DTensor {
    /// Applies an operator with one result to each list of operands. On a CUDA device all calls are computed in as few
    /// launches as the operator needs ([`Batched`]): one per 48 calls of one dtype for those of the `foreach_` methods.
    ///
    /// The operands are taken over: a result overwrites an operand whose buffer no other tensor shares. If gradients
    /// are wanted, each call is recorded, and made by itself. Operands are redistributed as each call's plan says, in
    /// the order of the list.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DTensors, DeviceMesh}, ops::Mul, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let calls = xs.into_iter().map(|x| DTensors::from([x.clone(), x])).collect();
    ///     let out = DTensor::foreach(&Mul, calls)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [16.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [36.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what the operator refuses, and an operator that does not have exactly one result.
    pub fn foreach<O: Batched>(op: &O, mut calls: Vec<DTensors>) -> Result<Vec<DTensor>> {
        if let Some(recorded) = apply_recorded(op, &calls) {
            return recorded;
        }
        let mut batch: Vec<(&O, &mut DTensors)> = calls.iter_mut().map(|ins| (op, ins)).collect();
        let (outs, end) = DTensor::apply_owned_batch(&mut batch);
        end.and_then(|()| single_results(outs))
    }

    /// Returns the sums of two lists of tensors, pair by pair.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_add(xs, &ys)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [6.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [8.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and pairs that the operator refuses.
    pub fn foreach_add(xs: Vec<DTensor>, ys: &[DTensor]) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Add, lists("foreach_add", xs, [ys])?)
    }

    /// Returns the differences of two lists of tensors, pair by pair.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_sub(xs, &ys)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [2.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [4.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and pairs that the operator refuses.
    pub fn foreach_sub(xs: Vec<DTensor>, ys: &[DTensor]) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Sub, lists("foreach_sub", xs, [ys])?)
    }

    /// Returns the products of two lists of tensors, pair by pair.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_mul(xs, &ys)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [8.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [12.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and pairs that the operator refuses.
    pub fn foreach_mul(xs: Vec<DTensor>, ys: &[DTensor]) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Mul, lists("foreach_mul", xs, [ys])?)
    }

    /// Returns the quotients of two lists of tensors, pair by pair.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_div(xs, &ys)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [2.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [3.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and pairs that the operator refuses.
    pub fn foreach_div(xs: Vec<DTensor>, ys: &[DTensor]) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Div, lists("foreach_div", xs, [ys])?)
    }

    /// Adds a number to every element of each tensor.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing unless a tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let out = DTensor::foreach_add_scalar(xs, 0.5)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [4.5; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [6.5; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool, and for integers numbers that are not whole.
    pub fn foreach_add_scalar(xs: Vec<DTensor>, by: f64) -> Result<Vec<DTensor>> {
        DTensor::foreach(&AddScalar::by(by), lists("foreach_add_scalar", xs, [])?)
    }

    /// Multiplies every element of each tensor by a number.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing unless a tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let out = DTensor::foreach_mul_scalar(xs, 0.5)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [2.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [3.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool, and for integers numbers that are not whole.
    pub fn foreach_mul_scalar(xs: Vec<DTensor>, factor: f64) -> Result<Vec<DTensor>> {
        DTensor::foreach(&MulScalar::by(factor), lists("foreach_mul_scalar", xs, [])?)
    }

    /// Interpolates each tensor towards one of `ends` by one weight, as [`DTensor::lerp`]. An average of parameters
    /// over the steps of a training is such a call.
    ///
    /// See [`DTensor::foreach`] for buffers and launches. If f16 or bf16 would round the weight, each pair is a call of
    /// [`DTensor::lerp_scalar`]. Communicates nothing if the operands of each call have one layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_lerp(xs, &ys, 0.25)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [3.5; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [5.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and pairs that the operator refuses.
    pub fn foreach_lerp(xs: Vec<DTensor>, ends: &[DTensor], weight: f64) -> Result<Vec<DTensor>> {
        if !xs.iter().all(|x| x.has_number(weight.into())) {
            let pairs = lists("foreach_lerp", xs, [ends])?;
            return pairs.iter().map(|pair| pair[0].lerp_scalar(&pair[1], weight)).collect();
        }
        let weight = |x: &DTensor| x.number("foreach_lerp", weight.into())?.expand(x.shape().clone());
        let weights = xs.iter().map(weight).collect::<Result<Vec<_>>>()?;
        DTensor::foreach(&Lerp, lists("foreach_lerp", xs, [ends, &weights])?)
    }

    /// Adds `factor · y · z` to each tensor, as [`DTensor::addcmul`].
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_addcmul(xs, &ys, &ys, 0.5)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [6.0; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [8.0; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and operands that the operator refuses.
    pub fn foreach_addcmul(
        xs: Vec<DTensor>,
        ys: &[DTensor],
        zs: &[DTensor],
        factor: f64,
    ) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Addcmul::by(factor), lists("foreach_addcmul", xs, [ys, zs])?)
    }

    /// Adds `factor · y / z` to each tensor, as [`DTensor::addcdiv`].
    ///
    /// See [`DTensor::foreach`] for buffers and launches. Communicates nothing if the operands of each call have one
    /// layout that is not `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let xs = vec![DTensor::full(&mesh, DType::F32, [2, 3], "(S0)", 4.0)?, DTensor::full(&mesh, DType::F32, [5], "(R)", 6.0)?];
    ///     let ys: Vec<DTensor> = xs.iter().map(|x| x.full_like(2.0)).collect::<isoshard::Result<_>>()?;
    ///     let out = DTensor::foreach_addcdiv(xs, &ys, &ys, 0.5)?;
    ///     assert_eq!(out[0].full_tensor()?.to_vec::<f32>()?, [4.5; 6]);
    ///     assert_eq!(out[1].full_tensor()?.to_vec::<f32>()?, [6.5; 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lists of different lengths, and operands that the operator refuses.
    pub fn foreach_addcdiv(
        xs: Vec<DTensor>,
        ys: &[DTensor],
        zs: &[DTensor],
        factor: f64,
    ) -> Result<Vec<DTensor>> {
        DTensor::foreach(&Addcdiv::by(factor), lists("foreach_addcdiv", xs, [ys, zs])?)
    }
}

/// Makes each call by itself if a gradient is wanted.
fn apply_recorded(op: &dyn Op, calls: &[DTensors]) -> Option<Result<Vec<DTensor>>> {
    let wants_gradient = |ins: &DTensors| ins.iter().any(|x| x.has_history() && x.mesh().grad_enabled());
    let one = |ins: &DTensors| DTensor::apply_one(op, &ins.iter().collect::<Vec<_>>());
    calls.iter().any(wants_gradient).then(|| calls.iter().map(one).collect())
}

/// Returns the results of calls that have one each.
fn single_results(outs: Vec<DTensors>) -> Result<Vec<DTensor>> {
    outs.into_iter().map(|outs| outs.into_array().map(|[out]| out)).collect()
}

/// Returns the operands of each call: element `k` of `xs` and of each list of `others`.
fn lists<const N: usize>(
    verb: &'static str,
    xs: Vec<DTensor>,
    others: [&[DTensor]; N],
) -> Result<Vec<DTensors>> {
    if let Some(other) = others.iter().find(|other| other.len() != xs.len()) {
        let given = format!("{} and {} tensors", xs.len(), other.len());
        return Err(Error::invalid(verb, "the lists have different lengths", given, ""));
    }
    let mut calls: Vec<DTensors> = xs.into_iter().map(|x| DTensors::from([x])).collect();
    for other in others {
        calls.iter_mut().zip(other).for_each(|(ins, y)| ins.push(y.clone()));
    }
    Ok(calls)
}
