//! `flip`: reverses the indices of a dim.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Tensor};

/// Reverses the indices of a dim, which is not sharded: `y[.., i, ..] = x[.., n - 1 - i, ..]`. Applied by
/// [`DTensor::flip`](crate::dtensor::DTensor::flip).
///
/// ```
/// use isoshard::{ops::{Flip, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// assert_eq!(eval_whole(&Flip { dim: 0 }, &[x])?[0].to_f64_vec(), [3.0, 4.0, 1.0, 2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Flip {
    /// The dim.
    pub dim: usize,
}

impl Op for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if self.dim >= x.shape.len() {
            return Err(Error::invalid(self.name(), "no such dim", format!("dim {} of {x}", self.dim), ""));
        }
        Ok(smallvec![x.clone()])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 1)).collect();
        rows.extend(Algebra::Structural.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = ins[0].contiguous()?;
        let mut out = Tensor::uninit(x.dtype(), x.shape());
        if out.numel() > 0 {
            // Moves bytes, so that one loop serves all dtypes.
            let row = x.shape()[self.dim + 1..].iter().product::<usize>() * x.dtype().size_bytes();
            let block = row * x.shape()[self.dim];
            let blocks = out.bytes_mut().chunks_exact_mut(block).zip(x.as_bytes()?.chunks_exact(block));
            for (out, x) in blocks {
                match row {
                    1 => reverse::<1>(out, x),
                    2 => reverse::<2>(out, x),
                    4 => reverse::<4>(out, x),
                    8 => reverse::<8>(out, x),
                    _ => {
                        for (out, x) in out.chunks_exact_mut(row).zip(x.rchunks_exact(row)) {
                            out.copy_from_slice(x);
                        }
                    }
                }
            }
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (gpu, x) = (Gpu::of(&ins[0])?, ins[0].contiguous()?);
        let mut out = gpu.uninit(x.dtype(), x.shape())?;
        let (len, inner) = (x.shape()[self.dim], x.shape()[self.dim + 1..].iter().product::<usize>());
        // Only the size of an element matters.
        let dtype = match x.dtype().size_bytes() {
            1 => DType::U8,
            2 => DType::BF16,
            4 => DType::I32,
            _ => DType::I64,
        };
        let launch = gpu.kernel("flip", "flip", dtype)?.read(&x).write(&mut out).arg(x.numel() as u64);
        let blocks = x.numel().div_ceil(256).min(1 << 20) as u32;
        launch.arg(len as u64).arg(inner as u64).start(blocks, 256, 0)?;
        Ok(smallvec![out])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(self.clone(), &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// Reverses elements of `N` bytes.
fn reverse<const N: usize>(out: &mut [u8], x: &[u8]) {
    let (out, x) = (out.as_chunks_mut::<N>().0, x.as_chunks::<N>().0);
    out.iter_mut().zip(x.iter().rev()).for_each(|(out, x)| *out = *x);
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Flip { dim: 0 }, [Input::ints([5, 3])]),
        Sample::new(Flip { dim: 1 }, [Input::ints([3, 5, 2])]),
        Sample::new(Flip { dim: 1 }, [Input::ints([7, 3])]),
        Sample::new(Flip { dim: 0 }, [Input::ints([0, 3])]),
    ]
}
