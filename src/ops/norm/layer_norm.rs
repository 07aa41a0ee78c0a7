//! `layer_norm` over the last dim.

use smallvec::smallvec;

use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::softmax::sum_exp::statistic_shape;
use crate::ops::unfused::UnfusedExpression;
use crate::ops::{
    AddScalar, AxisPlacement, Bits, Input, LayerNormGrad, MeshAxis, Meta, Metas, Mul, Op, Row, Rsqrt, Sample,
    Sub, Tensors, Vjp, Windows, Work, accumulator, arity, list,
};
use crate::tensor::{Shape, Tensor};

/// Layer norm over the last dim, which is not sharded (Ba et al., *Layer Normalization*, 2016). Applied by
/// [`DTensor::layer_norm`](crate::dtensor::DTensor::layer_norm).
///
/// `(x[, w[, b]]) -> (y, mean, rstd)` with `y = (x - mean) * rstd * w + b` and `rstd = 1 / sqrt(var + eps)`. x and y are
/// `[.., C]`, w and b `[C]`, mean and rstd `[.., 1]` in f32 (f64 for f64). The gradient of x includes the paths through
/// mean and rstd; incoming gradients of these two results are dropped.
///
/// ```
/// use isoshard::{ops::{Bits, LayerNorm, eval_whole}, tensor::{DType, Tensor}};
/// let (x, w) = (Tensor::from_vec(vec![1.0, 3.0], [1, 2])?, Tensor::full(DType::F64, [2], 10.0));
/// let outs = eval_whole(&LayerNorm { eps: Bits(0.0), weight: true, bias: false }, &[x, w])?;
/// assert_eq!((outs[0].to_f64_vec(), outs[1].to_f64_vec()), (vec![-10.0, 10.0], vec![2.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerNorm {
    /// The number added to the variance.
    pub eps: Bits,
    /// True if there is an operand w.
    pub weight: bool,
    /// True if there is an operand b, which requires w.
    pub bias: bool,
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let x = match (self.weight, self.bias) {
            (true, true) => &arity::<3>(self.name(), ins)?[0],
            (true, false) => &arity::<2>(self.name(), ins)?[0],
            (false, false) => &arity::<1>(self.name(), ins)?[0],
            (false, true) => {
                let rule = "has no bias without a weight";
                return Err(Error::invalid(self.name(), rule, list(ins), "give a weight of ones"));
            }
        };
        let statistic =
            Meta { dtype: accumulator(x.dtype), shape: expect_norm(self.name(), x, &ins[1..], ins)? };
        Ok(smallvec![x.clone(), statistic.clone(), statistic])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let weights = usize::from(self.weight) + usize::from(self.bias);
        let row =
            |s| Row::new(std::iter::once(s).chain(std::iter::repeat_n(AxisPlacement::R, weights)), [s, s, s]);
        (0..ins[0].shape.len() - 1).map(|d| row(AxisPlacement::S(d))).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, mean, rstd) = cpu::layer_norm(self.name(), &ins[0], ins.get(1), ins.get(2), self.eps.0)?;
        Ok(smallvec![y, mean, rstd])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, mean, rstd) = cuda::layer_norm(self.name(), &ins[0], ins.get(1), ins.get(2), self.eps.0)?;
        Ok(smallvec![y, mean, rstd])
    }

    /// Per element: 1 for the mean, 3 for the variance, 2 for the result, 1 each for weight and bias. Per row: 4.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let rows = elements(&outs[1]).saturating_mul(4);
        Work::elementwise(6 + u64::from(self.weight) + u64::from(self.bias), ins, outs).plus(rows)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(1, "a statistic, for the derivative of result 0");
        g.constant(2, "a statistic, for the derivative of result 0");
        let (weight, bias) = (self.weight, self.bias);
        let mut ins = vec![g.grad(0), g.input(0)];
        ins.extend(weight.then(|| g.input(1)));
        ins.extend([g.output(1), g.output(2)]);
        let grads = g.apply_all(LayerNormGrad { eps: self.eps, weight, bias }, &ins)?;
        for (i, grad) in grads.into_iter().enumerate() {
            g.set(i, grad);
        }
        Ok(())
    }
}

/// Returns the expression of `y` without a bias, from x and, if there is one, w. If it is not `centred`, it is that of
/// RMS norm.
pub(in crate::ops) fn unfused(
    x: &Meta,
    w: Option<&Meta>,
    eps: Bits,
    centred: bool,
) -> Result<UnfusedExpression> {
    let ins: Vec<&Meta> = std::iter::once(x).chain(w).collect();
    let mut e = UnfusedExpression::of(&ins);
    let mut y = e.wide_input(0)?;
    if centred {
        let mean = e.row_means(y)?;
        let mean = e.expand(mean, y)?;
        y = e.apply(Sub, &[y, mean])?;
    }
    let squares = e.apply(Mul, &[y, y])?;
    let variance = e.row_means(squares)?;
    let variance = e.apply(AddScalar { by: eps }, &[variance])?;
    let rstd = e.apply(Rsqrt, &[variance])?;
    let rstd = e.expand(rstd, y)?;
    y = e.apply(Mul, &[y, rstd])?;
    if w.is_some() {
        let w = e.wide_input(1)?;
        let w = e.expand(w, y)?;
        y = e.apply(Mul, &[y, w])?;
    }
    let y = e.cast(y, x.dtype)?;
    e.returns(y);
    Ok(e)
}

/// Returns the shape of the statistics. Refuses weights that do not have x's dtype and the extent of its last dim.
pub(in crate::ops) fn expect_norm(verb: &str, x: &Meta, weights: &[Meta], ins: &[Meta]) -> Result<Shape> {
    x.dtype.expect_float(verb)?;
    match x.shape.split_last() {
        Some((&n, _)) if weights.iter().all(|w| w.dtype == x.dtype && *w.shape == [n]) => {
            Ok(statistic_shape(x))
        }
        _ => Err(Error::invalid(
            verb,
            "wants weights of x's dtype, one for each index of its last dim",
            list(ins),
            "",
        )),
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize], weights: usize| {
        let w = [*shape.last().expect("a shape with a last dim")];
        let ins = [Input::ints(shape), Input::ints(w), Input::ints(w)];
        let op = LayerNorm { eps: Bits(1e-3), weight: weights > 0, bias: weights > 1 };
        Sample::new(op, ins.into_iter().take(1 + weights))
    };
    vec![
        sample(&[5, 3], 2),
        sample(&[2, 3, 7], 1),
        sample(&[5], 2),
        sample(&[3, 1], 0),
        sample(&[2, 5], 0),
        sample(&[0, 3], 2),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn follows_its_definition() {
        let x: Vec<f64> = (0..14).map(|i| f64::from(i * i % 11) - 3.0).collect();
        let (w, b): (Vec<f64>, Vec<f64>) = (0..7).map(|i| (0.5 * f64::from(i) - 1.0, f64::from(i))).unzip();
        let t = |v: &[f64], shape: &[usize]| Tensor::from_slice(v, shape).unwrap();
        let op = LayerNorm { eps: Bits(0.01), weight: true, bias: true };
        let outs = eval_whole(&op, &[t(&x, &[2, 7]), t(&w, &[7]), t(&b, &[7])]).unwrap();
        for (r, row) in x.chunks(7).enumerate() {
            let mean = row.iter().sum::<f64>() / 7.0;
            let rstd = 1.0 / (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 7.0 + 0.01).sqrt();
            assert!((outs[1].to_f64_vec()[r] - mean).abs() < 1e-13);
            assert!((outs[2].to_f64_vec()[r] - rstd).abs() < 1e-13);
            for (c, x) in row.iter().enumerate() {
                let want = (x - mean) * rstd * w[c] + b[c];
                assert!((outs[0].to_f64_vec()[r * 7 + c] - want).abs() < 1e-12);
            }
        }
    }
}
