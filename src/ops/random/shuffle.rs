//! `shuffle`: puts the indices of a dim in a random order, which is a function of the draw.

use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp, Windows,
    Work, arity,
};
use crate::rng::{Draw, Generator, Permutation};
use crate::tensor::{KernelList, Tensor};

/// Puts the indices of a dim, which is not sharded, in random order: `y[.., i, ..] = x[.., order(i), ..]`, with the
/// draw's [`Permutation`] `order`. The inverse is `y[.., order(i), ..] = x[.., i, ..]`. Applied by
/// [`DTensor::shuffle`](crate::dtensor::DTensor::shuffle).
///
/// ```
/// use isoshard::ops::{Shuffle, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::Tensor};
/// let op = Shuffle { dim: 0, inverse: false, draw: Unkeyed(Generator::new(1).next_draw()) };
/// let x = Tensor::from_vec((0..9i64).collect(), [9])?;
/// let y = eval_whole(&op, &[x.clone()])?.remove(0);
/// let back = eval_whole(&Shuffle { inverse: true, ..op }, &[y])?.remove(0);
/// assert_eq!(back.to_vec::<i64>()?, x.to_vec::<i64>()?);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shuffle {
    /// The dim.
    pub dim: usize,
    /// True for the inverse, which restores the original order.
    pub inverse: bool,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Op for Shuffle {
    fn name(&self) -> &'static str {
        "shuffle"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if self.dim >= x.shape.len() {
            return Err(Error::invalid(self.name(), "no such dim", format!("dim {} of {x}", self.dim), ""));
        }
        Ok(smallvec![x.clone()])
    }

    /// All dims but `dim` may be sharded. Elements are only moved, so any partial is accepted.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 1)).collect();
        rows.extend(Algebra::Structural.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = ins[0].contiguous()?;
        let mut order = KernelList::zeros(self.name(), x.shape()[self.dim])?;
        Permutation::new(self.draw.0, order.len() as u64).fill(0, &mut order)?;
        // Moves bytes, so that one loop serves all dtypes.
        let width = x.shape()[self.dim + 1..].iter().product::<usize>() * x.dtype().size_bytes();
        let mut out = Tensor::uninit(x.dtype(), x.shape());
        if out.numel() > 0 {
            let whole = order.len() * width;
            for (out, x) in out.bytes_mut().chunks_exact_mut(whole).zip(x.as_bytes()?.chunks_exact(whole)) {
                for (i, &place) in order.iter().enumerate() {
                    let (to, from) = if self.inverse { (place as usize, i) } else { (i, place as usize) };
                    out[to * width..][..width].copy_from_slice(&x[from * width..][..width]);
                }
            }
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::shuffle(self.draw.0, &ins[0], self.dim, self.inverse)?])
    }

    /// A random position per index of the dim. Elements are moved.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs).plus((ins[0].shape[self.dim] as u64).saturating_mul(Work::SPECIAL))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(Shuffle { inverse: !self.inverse, ..self.clone() }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let shuffle = |dim, inverse| Shuffle { dim, inverse, draw: Unkeyed(Generator::new(9).next_draw()) };
    vec![
        Sample::new(shuffle(0, false), [Input::ints([7, 3])]),
        Sample::new(shuffle(1, false), [Input::ints([3, 5])]),
        Sample::new(shuffle(1, true), [Input::ints([2, 7, 3])]),
        Sample::new(shuffle(0, false), [Input::ints([5])]),
        Sample::new(shuffle(0, true), [Input::ints([0, 3])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn follows_the_permutation_and_its_inverse_undoes_it() {
        let (n, draw) = (1009usize, Generator::new(1).next_draw());
        let order = Permutation::new(draw, n as u64);
        for (shape, dim) in [([n, 2], 0), ([2, n], 1)] {
            let x = Tensor::from_vec((0..2 * n as i64).collect(), shape).unwrap();
            let run = |inverse, x: &Tensor| {
                let op = Shuffle { dim, inverse, draw: Unkeyed(draw) };
                eval_whole(&op, std::slice::from_ref(x)).unwrap().swap_remove(0)
            };
            let y = run(false, &x);
            let at = |t: &Tensor, i: usize| {
                let rows = t.narrow(dim, i, 1).unwrap();
                rows.to_vec::<i64>().unwrap()
            };
            for i in 0..n {
                assert_eq!(at(&y, i), at(&x, order.at(i as u64).unwrap() as usize));
            }
            assert_eq!(run(true, &y).to_vec::<i64>().unwrap(), x.to_vec::<i64>().unwrap());
        }
    }
}
