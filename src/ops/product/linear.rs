//! `linear`: a linear map with a bias and an activation function, as one operator.
//!
//! Rows shard the leading dims of the input, or the rows of the weight. None shards the inputs over which the map sums:
//! the bias and the function follow the last addition. [`DTensor::linear`](crate::dtensor::DTensor::linear) applies
//! separate operators to operands that are so sharded.
//!
//! On a CUDA device, the product and the functions are separate launches with the bits of the CPU, in f32 for f16 and bf16.

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::ops::accumulator;
use crate::ops::{
    Activation, Add, AxisPlacement, Input, Matmul, MeshAxis, Meta, Metas, Op, Row, Sample, Sum, Tensors, Vjp,
    VjpValue, Windows, Work, list,
};
use crate::tensor::{Shape, Tensor, cpu, cuda};

/// A linear map over the last dim: `(x, w[, b]) -> (y[, z])` with `z = x wᵀ + b` and `y = f(z)`. Applied by
/// [`DTensor::linear`](crate::dtensor::DTensor::linear).
///
/// x is `[.., inputs]`, w `[rows.., inputs]` with one or two dims of rows, b `[rows..]`, y and z `[.., rows..]`. Without
/// an activation function, `y` is `z` and the only result. f16 and bf16 compute in f32, and each result is rounded once,
/// where separate operators round three times; the derivative reads the rounded `z`.
///
/// ```
/// use isoshard::{nn::Activation, ops::{Linear, eval_whole}, tensor::Tensor};
/// let (x, w) = (Tensor::from_vec(vec![1.0, 2.0], [1, 2])?, Tensor::from_vec(vec![1.0, 1.0, 3.0, -4.0], [2, 2])?);
/// let outs = eval_whole(&Linear { bias: false, activation: Some(Activation::Relu) }, &[x, w])?;
/// assert_eq!((outs[0].to_f64_vec(), outs[1].to_f64_vec()), (vec![3.0, 0.0], vec![3.0, -5.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Linear {
    /// True if there is an operand b.
    pub bias: bool,
    /// The function of each element.
    pub activation: Option<Activation>,
}

/// The letters of leading dims: all but those of the inputs and of the weight's rows.
fn letters(weight_dims: usize) -> &'static str {
    if weight_dims == 3 { "abcdefhijlmopqrstuvwxyz" } else { "abcdefghijlmopqrstuvwxyz" }
}

impl Linear {
    /// Returns the product of the map as an operator: the signature for operands with these numbers of dims.
    fn product(x_dims: usize, weight_dims: usize) -> Result<Matmul> {
        let (leading, rows) =
            (&letters(weight_dims)[..x_dims - 1], if weight_dims == 3 { "gn" } else { "n" });
        Matmul::new(&format!("{leading}k, {rows}k -> {leading}{rows}"))
    }

    /// Returns the operands as matrices, and the shape of the results.
    fn matrices(&self, ins: &[Tensor]) -> Result<(Tensor, Tensor, Option<Tensor>, Shape)> {
        let (x, w) = (&ins[0], &ins[1]);
        let (&inputs, leading) = x.shape().split_last().expect("infer wants dims");
        let rows = &w.shape()[..w.shape().len() - 1];
        let [m, n] = [leading, rows].map(|dims| dims.iter().product::<usize>());
        let bias = ins.get(2).map(|bias| bias.reshape([n])).transpose()?;
        let shape = leading.iter().chain(rows).copied().collect();
        Ok((x.reshape([m, inputs])?, w.reshape([n, inputs])?, bias, shape))
    }
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let refused = |rule: String, remedy: &str| {
            Err(Error::invalid(self.name(), rule, list(ins), remedy.to_string()))
        };
        let operands = 2 + usize::from(self.bias);
        if ins.len() != operands {
            return refused(format!("wants {operands} operands"), "");
        }
        let (x, w) = (&ins[0], &ins[1]);
        let most = letters(w.shape.len()).len() + 1;
        if !(1..=most).contains(&x.shape.len()) {
            return refused(format!("wants 1 to {most} dims"), "reshape it first");
        }
        let (inputs, leading) = x.shape.split_last().expect("it has dims");
        let rows = match &w.shape[..] {
            [rows @ .., k] if k == inputs && matches!(rows.len(), 1 | 2) => rows,
            _ => {
                let rule =
                    format!("wants weights [rows, {inputs}] or [groups, rows, {inputs}] for x's last dim");
                return refused(rule, "transpose them");
            }
        };
        if ins.get(2).is_some_and(|bias| *bias.shape != *rows) {
            return refused("wants one bias per row of the weight".into(), "reshape it");
        }
        if ins.iter().any(|x| x.dtype != ins[0].dtype || !x.dtype.is_float()) {
            return refused("wants one floating dtype".into(), "cast one of them");
        }
        let y = Meta { dtype: x.dtype, shape: leading.iter().chain(rows).copied().collect() };
        Ok(std::iter::repeat_n(y, 1 + usize::from(self.activation.is_some())).collect())
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let (leading, outs) = (ins[0].shape.len() - 1, 1 + usize::from(self.activation.is_some()));
        let row = |x, w, y| {
            let ins: SmallVec<[AxisPlacement; 4]> =
                [x, w].into_iter().chain(self.bias.then_some(w)).collect();
            Row::new(ins, std::iter::repeat_n(y, outs))
        };
        let (whole, cut) = (AxisPlacement::R, AxisPlacement::S);
        let of_input = (0..leading).map(|d| row(cut(d), whole, cut(d)));
        let of_weight = (0..ins[1].shape.len() - 1).map(|d| row(whole, cut(d), cut(leading + d)));
        of_input.chain(of_weight).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (x, w, bias, shape) = self.matrices(ins)?;
        let (y, z) = cpu::linear(self.name(), &x, &w, bias.as_ref(), self.activation.map(Activation::loops))?;
        [Some(y), z].into_iter().flatten().map(|y| y.reshape(shape.clone())).collect()
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (x, w, bias, shape) = self.matrices(ins)?;
        let (m, n, inputs) = (x.shape()[0], w.shape()[0], x.shape()[1]);
        let (dtype, wide) = (x.dtype(), accumulator(x.dtype()));
        let run = |op: &dyn Op, ins: &mut [Tensor]| Ok::<Tensor, Error>(op.cuda(ins, at)?.remove(0));
        let a = x.cast(wide)?.reshape([1, m, inputs])?;
        let b = w.cast(wide)?.reshape([1, n, inputs])?.transpose(1, 2)?;
        let mut z = cuda::gemm(self.name(), &a, &b, &[inputs], at.exact)?.reshape([m, n])?;
        if let Some(bias) = bias {
            z = run(&Add, &mut [z, bias.cast(wide)?.expand([m, n])?])?;
        }
        let y = self.activation.map(|f| run(f.operator(), &mut [z.clone()])).transpose()?;
        y.into_iter().chain([z]).map(|result| result.cast(dtype)?.reshape(shape.clone())).collect()
    }

    /// `2mnk` for the product, and per element of a result 1 for the bias and the function's operations.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let elements = outs[0].shape.iter().fold(1u64, |all, &n| all.saturating_mul(n as u64));
        let inputs = *ins[0].shape.last().expect("infer wants dims") as u64;
        let per_element = u64::from(self.bias) + self.activation.map_or(0, Activation::flops);
        Work::new(elements.saturating_mul(inputs.saturating_mul(2).saturating_add(per_element)), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (x_dims, weight_dims) = (g.input_meta(0).shape.len(), g.input_meta(1).shape.len());
        let dz = match self.activation {
            None => g.grad(0),
            Some(activation) => {
                let (dy, z) = (g.grad(0), g.output(1));
                let dz = activation.gradient(g, dy, z)?;
                // The gradient of `z` itself is zero but for second derivatives.
                let own = g.grad(1);
                g.apply(Add, &[dz, own])?
            }
        };
        if self.bias && g.needs(2) {
            let dims = (0..x_dims - 1).collect();
            let db = g.apply(Sum { dims, keep: false }, &[dz])?;
            g.set(2, db);
        }
        let product = Linear::product(x_dims, weight_dims)?;
        let operands: [VjpValue; 2] = [g.input(0), g.input(1)];
        for i in (0..2).filter(|&i| g.needs(i)).collect::<SmallVec<[usize; 2]>>() {
            let grad = g.apply(product.transposed(i), &[dz, operands[1 - i]])?;
            g.set(i, grad);
        }
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |x: &[usize], w: &[usize], bias: bool, activation| {
        let rows = &w[..w.len() - 1];
        let ins = [Input::ints(x), Input::ints(w)].into_iter().chain(bias.then(|| Input::ints(rows)));
        Sample::new(Linear { bias, activation }, ins)
    };
    vec![
        sample(&[2, 3, 5], &[4, 5], true, Some(Activation::Gelu)),
        sample(&[5, 3], &[3, 3], true, None),
        sample(&[3, 5], &[2, 3, 5], true, Some(Activation::Silu)),
        sample(&[5], &[7, 5], false, Some(Activation::GeluTanh)),
        sample(&[3, 2], &[5, 2], true, Some(Activation::Relu)).not_smooth(),
        sample(&[3, 0], &[2, 0], true, None),
        sample(&[0, 3], &[2, 3], true, Some(Activation::Gelu)),
    ]
}
