//! `rotary_apply`: rotates pairs of elements by given cosines and sines.

use isoshard_kernels::rows::Rotary;
use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::{
    Add, AxisPlacement, Cast, Input, MeshAxis, Meta, Metas, Mul, Op, Reshape, Row, Sample, Slice, Sub,
    Tensors, Vjp, VjpValue, Windows, Work, accumulator, arity, list,
};
use crate::tensor::cpu::{StridedRows, as_elements_mut, cast};
use crate::tensor::{DType, Tensor};

/// The pairs of elements that a rotary position embedding rotates.
///
/// ```
/// use isoshard::ops::RotaryPairing;
/// assert_ne!(RotaryPairing::Halves, RotaryPairing::Interleaved);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryPairing {
    /// Elements `i` and `i + width/2`, as in Llama's published weights for PyTorch, and in GPT-NeoX.
    Halves,
    /// Neighbours `2i` and `2i + 1`, as in Su et al. (2021), GPT-J and DeepSeek.
    Interleaved,
}

/// Rotates pairs of elements of the last dim by given angles: `(x [.., D], cos, sin) -> y`, with cos and sin `[.., D/2]`
/// in f32 (f64 for f64). Applied by [`DTensor::rotary_with`](crate::dtensor::DTensor::rotary_with).
///
/// The pair `(a, b)` becomes `(a cos - b sin, b cos + a sin)`. f16 and bf16 compute in f32 and round once.
///
/// ```
/// use isoshard::{ops::{RotaryApply, RotaryPairing, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [4])?;
/// let (cos, sin) = (Tensor::from_vec(vec![1.0, 0.0], [2])?, Tensor::from_vec(vec![0.0, 1.0], [2])?);
/// let op = RotaryApply { pairing: RotaryPairing::Interleaved, inverse: false };
/// assert_eq!(eval_whole(&op, &[x, cos, sin])?[0].to_f64_vec(), [1.0, 2.0, -4.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotaryApply {
    /// The elements that are rotated together.
    pub pairing: RotaryPairing,
    /// True to rotate by the negative angle.
    pub inverse: bool,
}

impl Op for RotaryApply {
    fn name(&self) -> &'static str {
        "rotary_apply"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, cos, sin] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        let bad = |rule: String| Err(Error::invalid(self.name(), rule, list(ins), ""));
        let Some((&d, outer)) = x.shape.split_last().filter(|(d, _)| *d % 2 == 0) else {
            return bad("wants [.., width] with an even width".into());
        };
        let fits = |t: &Meta| t.shape.split_last() == Some((&(d / 2), outer));
        if !fits(cos) || !fits(sin) {
            return bad("wants a cosine and a sine for each pair".into());
        }
        let wide = accumulator(x.dtype);
        if cos.dtype != wide || sin.dtype != wide {
            return bad(format!("wants tables in {wide}"));
        }
        Ok(smallvec![x.clone()])
    }

    /// Linear in the vectors, and in both tables together. Interleaved pairs admit a sharded last dim if no boundary cuts a pair.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let (last, r) = (ins[0].shape.len() - 1, AxisPlacement::R);
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 3)).collect();
        let (d, pieces) = (ins[0].shape[last], axis.pieces(last));
        let even = d.is_multiple_of(2 * pieces)
            || (pieces == axis.ranks && d.div_ceil(pieces) == 2 * (d / 2).div_ceil(pieces));
        if self.pairing == RotaryPairing::Interleaved && even {
            rows.push(Row::same(AxisPlacement::S(last), 3));
        }
        let sum = AxisPlacement::SUM;
        rows.extend([[sum, r, r], [r, sum, sum]].map(|ins| Row::new(ins, [sum])));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let dtype = ins[0].dtype();
        Ok(smallvec![match dtype {
            DType::F32 => self.rotate::<f32>(&ins[0], &ins[1], &ins[2])?,
            DType::F64 => self.rotate::<f64>(&ins[0], &ins[1], &ins[2])?,
            half => cast(&self.rotate::<f32>(&cast(&ins[0], DType::F32)?, &ins[1], &ins[2])?, half)?,
        }])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let interleaved = self.pairing == RotaryPairing::Interleaved;
        Ok(smallvec![cuda::rotary_apply([&ins[0], &ins[1], &ins[2]], interleaved, self.inverse)?])
    }

    /// Two products and an addition per element.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(3, ins, outs)
    }

    /// `dx` is `dy` rotated back. For a pair `(a, b)`, `dcos = a da + b db` and `dsin = a db - b da`.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (x, cos, sin, dy) = (g.input(0), g.input(1), g.input(2), g.grad(0));
        if g.needs(0) {
            let dx = g.apply(RotaryApply { inverse: !self.inverse, ..*self }, &[dy, cos, sin])?;
            g.set(0, dx);
        }
        if g.needs(1) || g.needs(2) {
            let dtype = g.input_meta(1).dtype;
            let [a, b] = self.pair_elements(g, x, dtype)?;
            let [da, db] = self.pair_elements(g, dy, dtype)?;
            if g.needs(1) {
                let (first, second) = (g.apply(Mul, &[a, da])?, g.apply(Mul, &[b, db])?);
                let d = g.apply(Add, &[first, second])?;
                g.set(1, d);
            }
            if g.needs(2) {
                let (first, second) = (g.apply(Mul, &[a, db])?, g.apply(Mul, &[b, da])?);
                let terms = if self.inverse { [second, first] } else { [first, second] };
                let d = g.apply(Sub, &terms)?;
                g.set(2, d);
            }
        }
        Ok(())
    }
}

impl RotaryApply {
    /// Adds steps that split the last dim into the first and the second elements of the pairs.
    fn pair_elements(&self, g: &mut Vjp, x: VjpValue, dtype: DType) -> Result<[VjpValue; 2]> {
        let Meta { dtype: own, shape } = g.meta(x).clone();
        let (last, pairs) = (shape.len() - 1, shape[shape.len() - 1] / 2);
        let x = if own == dtype { x } else { g.apply(Cast { dtype }, &[x])? };
        Ok(match self.pairing {
            RotaryPairing::Halves => [
                g.apply(Slice { dim: last, start: 0, len: pairs }, &[x])?,
                g.apply(Slice { dim: last, start: pairs, len: pairs }, &[x])?,
            ],
            RotaryPairing::Interleaved => {
                let outer = || shape[..last].iter().copied().chain([pairs]);
                let apart = g.apply(Reshape { shape: outer().chain([2]).collect() }, &[x])?;
                let mut one = |start| {
                    let half = g.apply(Slice { dim: last + 1, start, len: 1 }, &[apart])?;
                    g.apply(Reshape { shape: outer().collect() }, &[half])
                };
                [one(0)?, one(1)?]
            }
        })
    }

    /// Rotates `x`; the tables have its outer dims, with any strides. The result is contiguous.
    fn rotate<T: Rotary>(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let last = x.shape().len() - 1;
        let d = x.shape()[last];
        let mut out = Tensor::uninit(T::DTYPE, x.shape());
        if out.numel() > 0 {
            let whole = |t: &Tensor| {
                if t.shape()[last] > 1 && t.strides()[last] != 1 { t.contiguous() } else { Ok(t.clone()) }
            };
            let (x, cos, sin) = (whole(x)?, whole(cos)?, whole(sin)?);
            let strides = [&x, &cos, &sin].map(|t| &t.strides()[..last]);
            let strided = StridedRows::new(&x.shape()[..last], strides);
            let operands = [x.data::<T>()?, cos.data()?, sin.data()?];
            let interleaved = self.pairing == RotaryPairing::Interleaved;
            let out = as_elements_mut(out.bytes_mut());
            T::rotate_pairs(operands, &strided, d / 2, [interleaved, self.inverse], out);
        }
        Ok(out)
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], d: usize, pairing, inverse| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let table = Input::ints(with(d / 2));
        Sample::new(RotaryApply { pairing, inverse }, [Input::ints(with(d)), table.clone(), table])
    };
    vec![
        sample(&[5], 6, RotaryPairing::Halves, false),
        sample(&[2, 3], 10, RotaryPairing::Interleaved, true),
        sample(&[3, 1], 2, RotaryPairing::Interleaved, false),
        sample(&[0], 4, RotaryPairing::Halves, true),
    ]
}
