//! Gradient norms, and clipping by them.

use super::groups::{expect_reduced, group_of_each};
use crate::dtensor::{DTensor, Gradients, Reduction};
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::ops::{Bits, InversePowerOfTwo, Max, SumTerm, TermSum};
use crate::placement::Layout;
use crate::tensor::{DType, Dims, Shape};

/// The limits of an optimizer's gradients.
#[derive(Debug, Default)]
pub(super) struct Clipping {
    /// The limit of single elements.
    pub value: Option<f64>,
    /// Patterns of parameters whose gradients have a norm and a limit of their own.
    pub groups: Vec<(String, f64)>,
    /// The order of the norm of all other gradients, and its limit.
    pub norm: Option<(f64, f64)>,
}

/// A model's parameters by the limit of their gradients' norm.
struct ClippedParams {
    /// The parameters of each group, with its limit.
    groups: Vec<(Vec<ParamId>, f64)>,
    /// The parameters of no group.
    rest: Vec<ParamId>,
}

impl Clipping {
    /// Limits elements and groups in place. Returns the norm of the other gradients, if it has a limit, and their scale.
    ///
    /// # Errors
    /// Refuses limits, patterns and gradients that are not reduced before it changes a gradient.
    pub fn apply(
        &self,
        params: &Params,
        grads: &mut Gradients,
        dtype: DType,
    ) -> Result<(Option<DTensor>, DTensor)> {
        let ClippedParams { groups, rest } = self.groups(params)?;
        if self.value.is_some() || !groups.is_empty() {
            expect_reduced("clip", params, grads)?;
        }
        if let Some(limit) = self.value {
            grads.map_of(params.values(), |grad| grad.clamp(-limit, limit))?;
        }
        for (ids, limit) in groups {
            scale_down(params, grads, &ids, |own| clip_scale(&global_norm(own.iter().copied())?, limit))?;
        }
        let others: Vec<&DTensor> = rest.iter().filter_map(|&id| grads.get(params.value(id))).collect();
        let Some((order, limit)) = self.norm.filter(|_| !others.is_empty()) else {
            return Ok((None, one(params, dtype)?));
        };
        let norm = norm_of_order(&others, order)?;
        let scale = clip_scale(&norm, limit)?;
        if self.groups.is_empty() {
            return Ok((Some(norm), scale));
        }
        // The rule's scale is that of all gradients.
        scale_down(params, grads, &rest, |_| Ok(scale.clone()))?;
        Ok((Some(norm), one(params, dtype)?))
    }

    fn groups(&self, params: &Params) -> Result<ClippedParams> {
        if let Some(limit) = self.value.filter(|limit| limit.is_nan() || *limit <= 0.0) {
            return Err(Error::invalid("clip", "a limit of elements is above 0", limit.to_string(), ""));
        }
        let limits = self.groups.iter().map(|(_, limit)| *limit).chain(self.norm.map(|(_, limit)| limit));
        limits.into_iter().try_for_each(expect_limit)?;
        let group_of = group_of_each("clip", params, &self.groups, "a parameter is in two groups", "")?;
        let members = |group: Option<usize>| {
            params.ids().zip(&group_of).filter(|(_, of)| **of == group).map(|(id, _)| id).collect()
        };
        let groups = self.groups.iter().enumerate().map(|(k, (_, limit))| (members(Some(k)), *limit));
        Ok(ClippedParams { groups: groups.collect(), rest: members(None) })
    }
}

/// Multiplies the gradients of some parameters by the scale that `scale` makes of them.
fn scale_down(
    params: &Params,
    grads: &mut Gradients,
    ids: &[ParamId],
    scale: impl FnOnce(&[&DTensor]) -> Result<DTensor>,
) -> Result<()> {
    let values = || ids.iter().map(|&id| params.value(id));
    let own: Vec<&DTensor> = values().filter_map(|value| grads.get(value)).collect();
    if own.is_empty() {
        return Ok(());
    }
    let scale = scale(&own)?;
    grads.map_of(values(), |grad| grad.mul(&scale.cast(grad.dtype())?))
}

/// Refuses a limit of a norm that is not above 0.
fn expect_limit(limit: f64) -> Result<()> {
    if limit.is_nan() || limit <= 0.0 {
        let remedy = "pass f64::INFINITY for no limit";
        return Err(Error::invalid("clip", "a limit of the norm is above 0", limit.to_string(), remedy));
    }
    Ok(())
}

fn one(params: &Params, dtype: DType) -> Result<DTensor> {
    DTensor::full(params.mesh(), dtype, [], Layout::replicated(params.mesh().mesh().ndim()), 1.0)
}

/// Returns the norm of this order of all gradients together, the norm of their norms.
fn norm_of_order(grads: &[&DTensor], order: f64) -> Result<DTensor> {
    if order == 2.0 {
        return global_norm(grads.iter().copied());
    }
    let _guard = grads[0].mesh().no_grad();
    let everywhere = Layout::replicated(grads[0].mesh().mesh().ndim());
    let norm = |grad: &&DTensor| {
        let wide = if grad.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let dims: Vec<isize> = (0..grad.shape().len() as isize).collect();
        grad.cast(wide)?.norm(order, &dims, false)?.redistribute(&everywhere)?.cast(DType::F64)
    };
    let norms = grads.iter().map(norm).collect::<Result<Vec<_>>>()?;
    let all = DTensor::stack(&norms.iter().collect::<Vec<_>>(), 0)?.norm(order, &[0], false)?;
    let wide = grads.iter().any(|grad| grad.dtype() == DType::F64);
    all.cast(if wide { DType::F64 } else { DType::F32 })
}

impl Params {
    /// Returns the Euclidean norm of all gradients of these parameters together: an f32 (f64 if a gradient is) of shape `[]`, on
    /// every rank.
    /// Parameters without a gradient count as zero.
    ///
    /// Communicates as [`global_norm`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let norms = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [4, 4], Init::Ones)?;
    ///     let gradients = params.value(w).sum_all()?.backward()?; // 16 ones
    ///     params.grad_norm(&gradients)?.item()
    /// })?;
    /// assert_eq!(norms, [4.0; 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses gradients if none belongs to these parameters; returns an error if a rank fails.
    pub fn grad_norm(&self, grads: &Gradients) -> Result<DTensor> {
        let own: Vec<&DTensor> = self.values().filter_map(|value| grads.get(value)).collect();
        if own.is_empty() {
            return Err(Error::invalid(
                "grad_norm",
                "no parameter has a gradient",
                format!("{} parameter(s)", self.len()),
                "compute the loss from these parameters after the last step",
            ));
        }
        global_norm(own)
    }
}

/// Returns the Euclidean norm of all gradients together: a tensor of shape `[]`, on every rank.
///
/// It sums the squares of each gradient in f64, whose range holds the squares of narrower dtypes, and adds these sums in
/// the order of `grads`. The result is f32, or f64 if a gradient is. f64 gradients are first scaled by a power of two of the
/// largest, so that no square overflows or underflows.
///
/// Each set of mesh axes that shards some gradient takes one message: in exact mode one f64 per node of the gradients'
/// reduction trees, in fast mode one per layout. With f64 gradients, the maxima take one message more.
/// [`Params::grad_norm`] is the norm of a model's gradients.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, optim::global_norm, placement::Layout, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let full = |n: usize, value| DTensor::full(&mesh, DType::F32, [n], Layout::replicated(1), value);
///     let norm = global_norm([&full(1, 3.0)?, &full(4, 2.0)?])?;
///     assert_eq!(norm.item()?, 5.0); // sqrt(3² + 4 · 2²)
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses an empty list; returns an error if a rank fails.
pub fn global_norm<'a>(grads: impl IntoIterator<Item = &'a DTensor>) -> Result<DTensor> {
    let grads: Vec<&DTensor> = grads.into_iter().collect();
    let first = grads.first().ok_or_else(|| Error::invalid("global_norm", "wants gradients", "none", ""))?;
    let wide = grads.iter().any(|g| g.dtype() == DType::F64);
    let scale = match wide {
        true => scale_of(&grads)?,
        false => {
            let everywhere = Layout::replicated(first.mesh().mesh().ndim());
            DTensor::full(first.mesh(), DType::F64, [], everywhere, 1.0)?
        }
    };
    let square = |g: &&DTensor| {
        let dims: Dims = (0..g.shape().len()).collect();
        let one = scale.reshape(dims.iter().map(|_| 1).collect::<Shape>())?;
        DTensor::apply_one(&TermSum { term: SumTerm::Power(Bits(2.0)), dims }, &[g, &one])
    };
    let squares = grads.iter().map(square).collect::<Result<Vec<DTensor>>>()?;
    let sums = match first.mesh().reduction() {
        Reduction::Exact | Reduction::Grouped(_) => DTensor::reduce_partials(&squares)?,
        Reduction::Fast => DTensor::reduce_partials(&sums_by_layout(&squares)?)?,
    };
    let mut sums = sums.iter().map(|sum| sum.reshape(Shape::from([])));
    let first = sums.next().expect("there is a first square")?;
    let all = sums.try_fold(first, |a, b| a.add(&b?))?;
    all.sqrt()?.div(&scale)?.cast(if wide { DType::F64 } else { DType::F32 })
}

/// Returns the factor that brings the largest element of all gradients near 1: a power of two, in f64.
fn scale_of(grads: &[&DTensor]) -> Result<DTensor> {
    let _guard = grads[0].mesh().no_grad();
    let largest = |g: &&&DTensor| {
        let dims = (0..g.shape().len()).collect();
        DTensor::apply_one(&Max { dims, keep: false }, &[&g.abs()?])?.cast(DType::F64)
    };
    let some = grads.iter().filter(|g| g.shape().numel() > 0);
    let maxima = some.map(|g| largest(&g)).collect::<Result<Vec<DTensor>>>()?;
    let everywhere = Layout::replicated(grads[0].mesh().mesh().ndim());
    let zero = DTensor::full(grads[0].mesh(), DType::F64, [], everywhere, 0.0)?;
    let all = DTensor::reduce_partials(&maxima)?;
    let largest = all.iter().try_fold(zero, |a, b| a.maximum(b))?;
    DTensor::apply_one(&InversePowerOfTwo, &[&largest])
}

/// Returns one sum per layout, partial ones included.
fn sums_by_layout(squares: &[DTensor]) -> Result<Vec<DTensor>> {
    let mut sums: Vec<DTensor> = Vec::new();
    for square in squares {
        let square = &square.reshape(Shape::from([]))?;
        match sums.iter_mut().find(|s| s.layout() == square.layout()) {
            Some(sum) => *sum = sum.add(square)?,
            None => sums.push(square.clone()),
        }
    }
    Ok(sums)
}

/// Returns the factor that limits gradients of norm `norm` to the norm `limit`: `min(1, limit / norm)`, of shape `[]`.
/// Communicates nothing.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, optim::clip_scale, placement::Layout, tensor::DType};
/// let factors = spmd(1, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[])?;
///     let norm = DTensor::full(&mesh, DType::F64, [], Layout::replicated(0), 4.0)?;
///     let factor = |limit| clip_scale(&norm, limit)?.item();
///     Ok([factor(1.0)?, factor(5.0)?])
/// })?;
/// assert!((factors[0][0] - 0.25).abs() < 1e-6 && factors[0][1] == 1.0);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a limit that is not above 0 (`f64::INFINITY` is no limit); returns an error if the device has no memory left.
pub fn clip_scale(norm: &DTensor, limit: f64) -> Result<DTensor> {
    expect_limit(limit)?;
    let one = DTensor::full(norm.mesh(), norm.dtype(), norm.shape(), norm.layout().clone(), 1.0)?;
    if limit == f64::INFINITY {
        return Ok(one);
    }
    // The 1e-6 keeps a norm of zero from dividing, as in PyTorch.
    one.mul_scalar(limit)?.div(&norm.add_scalar(1e-6)?)?.minimum(&one)
}
