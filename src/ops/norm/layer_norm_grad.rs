//! `layer_norm_grad`: the derivative of `layer_norm`, in one pass over x and dy.

use smallvec::smallvec;

use super::layer_norm::{expect_norm, unfused};
use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Sum, Tensors, Vjp, Windows, Work,
    accumulator, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::{Shape, Tensor};

/// The derivative of [`LayerNorm`](crate::ops::LayerNorm): `(dy, x[, w], mean, rstd) -> (dx[, dw[, db]])`, each with the shape
/// of its operand.
///
/// Its own derivative treats mean and rstd as functions of x.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerNormGrad {
    /// The number added to the variance in the forward call. Only the derivative of this operator uses it.
    pub eps: Bits,
    /// True if the layer norm has a weight, so that there is an operand w and a result dw.
    pub weight: bool,
    /// True if the layer norm has a bias, so that there is a result db.
    pub bias: bool,
}

impl Op for LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let (dy, x, w, mean, rstd) = if self.weight {
            let [dy, x, w, mean, rstd] = arity(self.name(), ins)?;
            (dy, x, Some(w), mean, rstd)
        } else {
            let [dy, x, mean, rstd] = arity(self.name(), ins)?;
            (dy, x, None, mean, rstd)
        };
        if self.bias && w.is_none() {
            return Err(Error::invalid(self.name(), "has no bias without a weight", list(ins), ""));
        }
        let kept = expect_norm(self.name(), x, w.map_or(&[], std::slice::from_ref), ins)?;
        expect_saved(self.name(), dy, x, &[mean, rstd], kept, ins)?;
        let mut outs: Metas = smallvec![x.clone()];
        outs.extend(w.cloned());
        outs.extend(w.filter(|_| self.bias).cloned());
        Ok(outs)
    }

    /// Linear in `dy`. If rows are sharded, the gradients of the weights are partial sums.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        grad_rows(&ins[1], usize::from(self.weight), 2, usize::from(self.weight) + usize::from(self.bias))
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let [dy, x, w, mean, rstd] = ins else {
            let [dy, x, mean, rstd] = ins else { unreachable!("infer counted the operands") };
            return Ok(smallvec![cpu::layer_norm_input_backward(self.name(), dy, x, mean, rstd)?]);
        };
        let (dx, dw, db) = cpu::layer_norm_backward(self.name(), dy, x, Some(w), mean, rstd)?;
        let mut outs: Tensors = smallvec![dx, dw];
        outs.extend(self.bias.then_some(db));
        Ok(outs)
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let [dy, x, w, mean, rstd] = ins else {
            let [dy, x, mean, rstd] = ins else { unreachable!("infer counted the operands") };
            return Ok(smallvec![cuda::layer_norm_input_backward(self.name(), dy, x, mean, rstd)?]);
        };
        let (dx, dw, db) = cuda::layer_norm_backward(self.name(), dy, x, Some(w), mean, rstd)?;
        let mut outs: Tensors = smallvec![dx, dw];
        outs.extend(self.bias.then_some(db));
        Ok(outs)
    }

    /// Per element: 2 to normalize x, 3 for the two means, 4 for dx; 1 to weight dy and 2 for dw; 1 for db.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(9 + 3 * u64::from(self.weight) + u64::from(self.bias), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (dy, x) = (g.input_meta(0).clone(), g.input_meta(1).clone());
        let w = self.weight.then(|| g.input_meta(2).clone());
        // The gradient with respect to (x[, w]), of the operands (x[, w], dy).
        let mut all = unfused(&x, w.as_ref(), self.eps, true)?
            .gradient(&[true, true][..1 + usize::from(self.weight)])?;
        let of = if self.weight { vec![1, 2, 0] } else { vec![1, 0] };
        if self.bias {
            let rows = (0..dy.shape.len() - 1).collect();
            let grad = all.wide_input(2)?;
            let sums = all.apply(Sum { dims: rows, keep: false }, &[grad])?;
            let sums = all.cast(sums, dy.dtype)?;
            all.returns(sums);
        }
        for i in of.len()..g.ins_len() {
            g.none(i, STATISTIC);
        }
        all.write_vjp(g, &of)
    }
}

/// The reason why a derivative's operand that is a statistic has no gradient.
pub(in crate::ops) const STATISTIC: &str = "a statistic: the gradient of x includes it";

/// Refuses a gradient that does not have the dtype and shape of `x`, and statistics that do not have the shape `kept`.
pub(in crate::ops) fn expect_saved(
    verb: &str,
    dy: &Meta,
    x: &Meta,
    statistics: &[&Meta],
    kept: Shape,
    ins: &[Meta],
) -> Result<()> {
    let statistic = Meta { dtype: accumulator(x.dtype), shape: kept };
    if dy == x && statistics.iter().all(|&s| *s == statistic) {
        return Ok(());
    }
    Err(Error::invalid(verb, format!("wants dy like x, and statistics {statistic}"), list(ins), ""))
}

/// Returns the rows of `(dy, x, operands, statistics) -> (dx, gradients of weights)`.
pub(in crate::ops) fn grad_rows(x: &Meta, operands: usize, statistics: usize, weights: usize) -> Vec<Row> {
    use std::iter::{once, repeat_n};
    let cut = |s: AxisPlacement| {
        let ins =
            [s, s].into_iter().chain(repeat_n(AxisPlacement::R, operands)).chain(repeat_n(s, statistics));
        Row::new(ins, once(s).chain(repeat_n(AxisPlacement::TreeSum(Leaf::Pairs), weights)))
    };
    let linear = Row::new(
        once(AxisPlacement::SUM).chain(repeat_n(AxisPlacement::R, 1 + operands + statistics)),
        repeat_n(AxisPlacement::SUM, 1 + weights),
    );
    (0..x.shape.len() - 1).map(|d| cut(AxisPlacement::S(d))).chain([linear]).collect()
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize], weight: bool, bias: bool| {
        let (n, outer) = shape.split_last().expect("a shape with a last dim");
        let kept: Vec<usize> = outer.iter().copied().chain([1]).collect();
        let (x, mean, rstd) = (Input::ints(shape), Input::ints(kept.clone()), Input::positive(kept));
        let w = weight.then(|| Input::ints([*n]));
        let ins = [x.clone(), x].into_iter().chain(w).chain([mean, rstd]);
        Sample::new(LayerNormGrad { eps: Bits(1e-3), weight, bias }, ins)
            .rounded(outer.iter().product::<usize>() + n)
            .not_smooth()
    };
    vec![
        sample(&[5, 3], true, true),
        sample(&[2, 3, 7], true, false),
        sample(&[5], true, true),
        sample(&[3, 5], false, false),
        sample(&[0, 3], true, true),
    ]
}
