//! `pad`: zeros before and after a dim. The derivative of `slice`.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Slice, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::Tensor;

/// Adds zeros before and after the operand along one dim. The derivative of [`Slice`](crate::ops::Slice).
///
/// ```
/// use isoshard::ops::{Pad, eval_whole};
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// let y = eval_whole(&Pad { dim: 0, before: 1, after: 2 }, &[x])?.remove(0);
/// assert_eq!(y.to_f64_vec(), [0.0, 1.0, 2.0, 0.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pad {
    /// The dim.
    pub dim: usize,
    /// The number of zeros before the operand.
    pub before: usize,
    /// The number of zeros after the operand.
    pub after: usize,
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if self.dim >= x.shape.len() {
            return Err(Error::invalid(self.name(), "no such dim", format!("dim {} of {x}", self.dim), ""));
        }
        let mut shape = x.shape.clone();
        let around = self.before.checked_add(self.after);
        let Some(extent) = around.and_then(|n| n.checked_add(shape[self.dim])) else {
            let given = format!("{} before and {} after dim {} of {x}", self.before, self.after, self.dim);
            return Err(Error::invalid(self.name(), "the extent overflows", given, ""));
        };
        shape[self.dim] = extent;
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// A partial sum is accepted, since zeros add nothing. A partial maximum is not, since the zeros would count as
    /// values.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        others
            .map(|d| Row::same(AxisPlacement::S(d), 1))
            .chain([Row::same(AxisPlacement::SUM, 1).exact()])
            .collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let mut out = Tensor::zeros_on(x.device(), x.dtype(), at.outs[0].local().clone())?;
        let strides = out.strides().to_vec();
        x.copy_block(&mut out, x.shape(), (0, x.strides()), (self.before * strides[self.dim], &strides))?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.eval(ins, at)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let len = g.input_meta(0).shape[self.dim];
        let dy = g.grad(0);
        let dx = g.apply(Slice { dim: self.dim, start: self.before, len }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Pad { dim: 0, before: 2, after: 0 }, [Input::ints([3, 5])]),
        Sample::new(Pad { dim: 1, before: 1, after: 3 }, [Input::ints([2, 0, 3])]),
        Sample::new(Pad { dim: 2, before: 0, after: 1 }, [Input::ints([2, 3, 1])]),
    ]
}
