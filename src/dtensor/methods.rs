//! Operators as methods; those that change the shape alone stand in `shapes.rs`.
//!
//! Binary operators broadcast by NumPy's rule; a negative dim counts from the back. What an operator communicates
//! depends on the layouts: nothing if one of its rows fits them, else the moves that its plan found cheapest.

use smallvec::SmallVec;

use super::into_draw::IntoDraw;
use super::tensor::DTensor;
use crate::error::Result;
use crate::ops::{
    self, Argmax, Attention, Bits, Cast, Compare, CompareKind, CrossEntropy, Dropout, Embedding, Gather,
    LayerNorm, LogSoftmax, Matmul, Max, Min, Op, PowScalar, RmsNorm, Rotary, ScatterAdd, Select, Softmax,
    Sum, SumExp, Unkeyed, pointwise_table, signatures,
};
use crate::rng::Draw;
use crate::tensor::{DType, Dims};

macro_rules! relations {
    ($($(#[$doc:meta])* $name:ident = $kind:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and what the operator refuses.
        pub fn $name(&self, other: &DTensor) -> Result<DTensor> {
            self.broadcast_apply(&Compare { kind: CompareKind::$kind }, other)
        }
    )*};
}

/// The methods of the pointwise operators' table.
macro_rules! methods {
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident)?);)*) => {
        /// Pointwise operators: a row of the table in `ops::pointwise` each.
        impl DTensor {
            $(method! { $(#[$doc])* $Type $name ($($y)*) ($($s)?) })*
        }
    };
}
macro_rules! method {
    ($(#[$doc:meta])* $Type:ident $name:ident () ()) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// Passes on refusals of the operator.
        pub fn $name(&self) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type, &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident () ($s:ident)) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// Passes on refusals of the operator.
        pub fn $name(&self, $s: f64) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type::by($s), &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident ($y:ident) ()) => {
        $(#[$doc])*
        ///
        /// `self` is the first operand; shapes broadcast.
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and what the operator refuses.
        pub fn $name(&self, $y: &DTensor) -> Result<DTensor> {
            self.broadcast_apply(&ops::$Type, $y)
        }
    };
}
macro_rules! table_methods {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        signatures! { methods: $($method)* }
    };
}
pointwise_table!(table_methods);

/// Comparisons, choices, powers and casts.
impl DTensor {
    relations! {
        /// `self == other`, as bool.
        eq = Eq;
        /// `self != other`, as bool.
        ne = Ne;
        /// `self < other`, as bool.
        lt = Lt;
        /// `self <= other`, as bool.
        le = Le;
        /// `self > other`, as bool.
        gt = Gt;
        /// `self >= other`, as bool.
        ge = Ge;
    }

    /// Raises every element to the power of a constant.
    ///
    /// # Errors
    /// Passes on refusals of the operator.
    pub fn pow_scalar(&self, exponent: f64) -> Result<DTensor> {
        DTensor::apply_one(&PowScalar { exponent: Bits(exponent) }, &[self])
    }

    /// `yes` where `self`, a bool tensor, is true, else `no`.
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast.
    pub fn select(&self, yes: &DTensor, no: &DTensor) -> Result<DTensor> {
        let shape = self.shape().broadcast("select", yes.shape())?.broadcast("select", no.shape())?;
        DTensor::apply_one(&Select, &[&self.expand(&shape)?, &yes.expand(&shape)?, &no.expand(&shape)?])
    }

    /// The same values as another dtype.
    ///
    /// # Errors
    /// None for the dtypes there are.
    pub fn cast(&self, dtype: DType) -> Result<DTensor> {
        if dtype == self.dtype() { Ok(self.clone()) } else { DTensor::apply_one(&Cast { dtype }, &[self]) }
    }

    fn broadcast_apply(&self, op: &dyn Op, other: &DTensor) -> Result<DTensor> {
        if self.shape() == other.shape() {
            return DTensor::apply_one(op, &[self, other]);
        }
        let shape = self.shape().broadcast(op.name(), other.shape())?;
        DTensor::apply_one(op, &[&self.expand(&shape)?, &other.expand(&shape)?])
    }
}

/// Products and reductions.
impl DTensor {
    /// The matrix product over the last two dims; the others are batch dims, which a two-dim operand lacks.
    ///
    /// # Errors
    /// Refuses operands whose extents do not fit.
    pub fn matmul(&self, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::for_dims(self.shape().len(), other.shape().len())?, &[self, other])
    }

    /// The product over named dims, e.g. `x.einsum("b t k, n k -> b t n", &w)`.
    ///
    /// # Errors
    /// Refuses a signature or extents that do not fit.
    pub fn einsum(&self, signature: &str, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::new(signature)?, &[self, other])
    }

    /// The sum over `dims`; `keep` leaves them with extent 1.
    ///
    /// # Errors
    /// Refuses dims that are not there.
    pub fn sum(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: self.dims("sum", dims)?, keep }, &[self])
    }

    /// The sum of all elements, shape `[]`.
    ///
    /// # Errors
    /// None for a valid tensor.
    pub fn sum_all(&self) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: (0..self.shape().len()).collect(), keep: false }, &[self])
    }

    /// The mean over `dims`, by the global number of elements.
    ///
    /// # Errors
    /// Refuses dims that are not there.
    pub fn mean(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        let count: usize = self.dims("mean", dims)?.iter().map(|&d| self.shape()[d]).product();
        self.sum(dims, keep)?.mul_scalar(1.0 / count as f64)
    }

    /// The mean of all elements, shape `[]`.
    ///
    /// # Errors
    /// None for a valid tensor.
    pub fn mean_all(&self) -> Result<DTensor> {
        self.sum_all()?.mul_scalar(1.0 / self.shape().numel() as f64)
    }

    /// The maximum over `dims`; NaN wins. Ties share the gradient evenly.
    ///
    /// # Errors
    /// Refuses dims that are not there.
    pub fn max(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Max { dims: self.dims("max", dims)?, keep }, &[self])
    }

    /// The minimum over `dims`; NaN wins. Ties share the gradient evenly.
    ///
    /// # Errors
    /// Refuses dims that are not there.
    pub fn min(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Min { dims: self.dims("min", dims)?, keep }, &[self])
    }

    /// The first index of the maximum along `dim`, as i64.
    ///
    /// # Errors
    /// Refuses a dim that is not there.
    pub fn argmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Argmax { dim: self.shape().dim("argmax", dim)? }, &[self])
    }

    fn dims(&self, verb: &str, dims: &[isize]) -> Result<Dims> {
        let mut dims: Dims = dims.iter().map(|&d| self.shape().dim(verb, d)).collect::<Result<_>>()?;
        dims.sort_unstable();
        Ok(dims)
    }
}

/// What networks are made of.
impl DTensor {
    /// `exp(x) / sum(exp(x))` along `dim`.
    ///
    /// # Errors
    /// Refuses a dim that is not there.
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Softmax { dim: self.shape().dim("softmax", dim)? }, &[self])
    }

    /// The logarithm of [`DTensor::softmax`].
    ///
    /// # Errors
    /// Refuses a dim that is not there.
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&LogSoftmax { dim: self.shape().dim("log_softmax", dim)? }, &[self])
    }

    /// Layer normalisation over the last dim (Ba et al. 2016), scaled by `weight` and shifted by `bias`.
    ///
    /// # Errors
    /// Refuses weights that do not fit the last dim.
    pub fn layer_norm(&self, weight: &DTensor, bias: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let op = LayerNorm { eps: Bits(eps), bias: bias.is_some() };
        let ins: SmallVec<[&DTensor; 3]> = [self, weight].into_iter().chain(bias).collect();
        Ok(DTensor::apply(&op, &ins)?.remove(0))
    }

    /// Root-mean-square normalisation over the last dim (Zhang & Sennrich 2019), scaled by `weight`.
    ///
    /// # Errors
    /// Refuses a weight that does not fit the last dim.
    pub fn rms_norm(&self, weight: &DTensor, eps: f64) -> Result<DTensor> {
        Ok(DTensor::apply(&RmsNorm { eps: Bits(eps) }, &[self, weight])?.remove(0))
    }

    /// Rotary position embedding (Su et al. 2021) of vectors `[.., time, width]`: at position `p = offset + t`, elements `i`
    /// and `i + width/2` turn as a pair by `p · base^(-2i/width)`.
    ///
    /// # Errors
    /// Refuses an odd width, and a base that is not positive.
    pub fn rotary(&self, base: f64, offset: usize) -> Result<DTensor> {
        DTensor::apply_one(&Rotary { base: Bits(base), offset, inverse: false }, &[self])
    }

    /// The rows of this table `[rows, width]` that `index` (i64) names: shape `[.., width]`.
    ///
    /// # Errors
    /// Refuses indices outside the table.
    pub fn embedding(&self, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Embedding, &[self, index])
    }

    /// The elements along `dim` that `index` (i64) names; the other extents agree.
    ///
    /// # Errors
    /// Refuses indices outside the dim.
    pub fn gather(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Gather { dim: self.shape().dim("gather", dim)? }, &[self, index])
    }

    /// Zeros of extent `extent` along `dim`, plus these elements at the places that `index` names.
    ///
    /// # Errors
    /// Refuses indices outside `extent`.
    pub fn scatter_add(&self, dim: isize, index: &DTensor, extent: usize) -> Result<DTensor> {
        DTensor::apply_one(&ScatterAdd { dim: self.shape().dim("scatter_add", dim)?, extent }, &[index, self])
    }

    /// `-log softmax(self)[target]` over the last dim, for each of the other dims' elements.
    ///
    /// Where the classes are sharded they are not gathered: a maximum and two sums, one element a row each, cross.
    ///
    /// # Errors
    /// Refuses targets that are not i64 classes of the other dims' shape.
    pub fn cross_entropy(&self, target: &DTensor) -> Result<DTensor> {
        let (m, s) = {
            let _guard = self.mesh.no_grad();
            let max = Max { dims: self.dims("cross_entropy", &[-1])?, keep: true };
            let m = DTensor::apply_one(&max, &[self])?.reduce_partial()?;
            let s = DTensor::apply_one(&SumExp, &[self, &m])?.reduce_partial()?;
            (m, s)
        };
        DTensor::apply_one(&CrossEntropy, &[self, target, &m, &s])
    }

    /// Causal attention of queries, keys and values `[batch, heads, time, width]`:
    /// `softmax(scale · q kᵀ) v`, each query seeing the keys up to its own time. There are as many queries as keys.
    ///
    /// # Errors
    /// Refuses shapes that do not fit, and other numbers of queries than of keys: see [`DTensor::attention_at`].
    pub fn attention(&self, k: &DTensor, v: &DTensor, scale: f64) -> Result<DTensor> {
        self.attention_dropout(k, v, scale, 0.0, Draw { seed: 0, number: 0 })
    }

    /// As [`DTensor::attention`] of queries that follow after keys of earlier times, as in decoding with a cache: query i
    /// stands at time `q_offset + i` and sees the keys up to that time; key j stands at time j.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = Tensor::from_vec((0..16).map(|i| (i as f32 * 0.7).sin()).collect(), [1, 1, 8, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, Layout::replicated(1))?;
    ///     let whole = x.attention(&x, &x, 0.5)?;
    ///     let last = x.slice(2, 6, 2)?.attention_at(&x, &x, 0.5, 6)?;
    ///     assert_eq!(
    ///         last.full_tensor()?.to_vec::<f32>()?,
    ///         whole.slice(2, 6, 2)?.full_tensor()?.to_vec::<f32>()?
    ///     );
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not fit, and queries at times that no key has.
    pub fn attention_at(&self, k: &DTensor, v: &DTensor, scale: f64, q_offset: usize) -> Result<DTensor> {
        let draw = Unkeyed(Draw { seed: 0, number: 0 });
        let op = Attention { scale: Bits(scale), p: Bits(0.0), q_offset: Some(q_offset), draw };
        Ok(DTensor::apply(&op, &[self, k, v])?.remove(0))
    }

    /// As [`DTensor::attention`], dropping probabilities with probability `p`; `from` is a `&mut Generator` or a draw.
    ///
    /// # Errors
    /// Refuses shapes that do not fit, a `p` outside `[0, 1]`, and generators that differ from rank to rank.
    pub fn attention_dropout(
        &self,
        k: &DTensor,
        v: &DTensor,
        scale: f64,
        p: f64,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let draw = from.into_draw("attention", &self.mesh)?;
        let op = Attention { scale: Bits(scale), p: Bits(p), q_offset: None, draw: Unkeyed(draw) };
        Ok(DTensor::apply(&op, &[self, k, v])?.remove(0))
    }

    /// Zeroes each element with probability `p` and scales the others by `1 / (1 - p)`. The mask is a function of
    /// the draw and the element's global index: equal on every layout. `from` is a `&mut Generator` or a draw.
    ///
    /// # Errors
    /// Refuses a `p` outside `[0, 1]`, and generators that differ from rank to rank.
    pub fn dropout(&self, p: f64, from: impl IntoDraw) -> Result<DTensor> {
        let draw = from.into_draw("dropout", &self.mesh)?;
        DTensor::apply_one(&Dropout { p: Bits(p), draw: Unkeyed(draw) }, &[self])
    }
}
