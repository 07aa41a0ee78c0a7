//! `cat`: joins operands along a dim.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Slice, Tensors, Vjp, Windows,
    Work, list,
};
use crate::tensor::Tensor;

/// Joins operands along a dim, which is not sharded. The operands have one dtype and equal extents in all other dims.
/// Applied by [`DTensor::cat`](crate::dtensor::DTensor::cat).
///
/// ```
/// use isoshard::{ops::{Cat, eval_whole}, tensor::Tensor};
/// let (x, y) = (Tensor::from_vec(vec![1.0, 2.0], [1, 2])?, Tensor::from_vec(vec![3.0], [1, 1])?);
/// let z = eval_whole(&Cat { dim: 1 }, &[x, y])?.remove(0);
/// assert_eq!((&z.shape()[..], z.to_f64_vec()), (&[1, 3][..], vec![1.0, 2.0, 3.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cat {
    /// The dim.
    pub dim: usize,
}

impl Op for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let bad = |rule: &str| {
            Err(Error::invalid(self.name(), rule, format!("dim {} of {}", self.dim, list(ins)), ""))
        };
        let Some(first) = ins.first() else { return bad("wants operands") };
        if self.dim >= first.shape.len() {
            return bad("no such dim");
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for m in ins {
            let fits = m.shape.len() == shape.len()
                && (0..shape.len()).all(|d| d == self.dim || m.shape[d] == shape[d])
                && m.dtype == first.dtype;
            if !fits {
                return bad("the operands' dtypes or other extents differ");
            }
            // An extent that overflows stays at the maximum, which no tensor has.
            shape[self.dim] = shape[self.dim].saturating_add(m.shape[self.dim]);
        }
        Ok(smallvec![Meta { dtype: first.dtype, shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        others
            .map(|d| Row::same(AxisPlacement::S(d), ins.len()))
            .chain(Algebra::Structural.rows(ins.len()))
            .collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let mut out = Tensor::uninit_on(ins[0].device(), ins[0].dtype(), at.outs[0].local().clone())?;
        let strides = out.strides().to_vec();
        let mut start = 0;
        for x in ins.iter() {
            x.copy_block(&mut out, x.shape(), (0, x.strides()), (start * strides[self.dim], &strides))?;
            start += x.shape()[self.dim];
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.eval(ins, at)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let lens: Vec<usize> = (0..g.ins_len()).map(|i| g.input_meta(i).shape[self.dim]).collect();
        let dy = g.grad(0);
        let mut start = 0;
        for (i, len) in lens.into_iter().enumerate() {
            if g.needs(i) {
                let dx = g.apply(Slice { dim: self.dim, start, len }, &[dy])?;
                g.set(i, dx);
            }
            start += len;
        }
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Cat { dim: 0 }, [Input::ints([2, 3]), Input::ints([3, 3])]),
        Sample::new(Cat { dim: 1 }, [Input::ints([5, 1]), Input::ints([5, 0]), Input::ints([5, 2])]),
        Sample::new(Cat { dim: 0 }, [Input::ints([3])]),
    ]
}
