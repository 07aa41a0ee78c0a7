//! Attention kernels on matrix units, for f16 and bf16. Their bits differ from the CPU's.

use super::{CudaAttention, extents};
use crate::error::{Error, Result};
use crate::ops::attention::scores::ScoreRule;
use crate::tensor::Tensor;
use crate::tensor::cuda::Gpu;

impl CudaAttention<'_> {
    /// Returns the kernels for these operands, or `None` if there are none or results must have the CPU's bits.
    pub(super) fn fast_kernel(&self, gpu: &Gpu, q: &Tensor, v: &Tensor) -> Option<FastKernel> {
        let (d, dv) = (q.shape()[3], v.shape()[3]);
        let half = q.dtype().is_half();
        let whole = d % 8 == 0 && dv % 8 == 0 && d > 0 && dv > 0;
        // The kernels take the maximum before scaling, which is right for a positive scale only.
        let positive = self.scale > 0.0;
        let causal = self.rule == ScoreRule::CAUSAL;
        if self.exact || !causal || !half || !whole || !positive || gpu.properties().capability.0 < 8 {
            return None;
        }
        KERNELS.into_iter().find(|kernel| d.max(dv) <= kernel.d)
    }

    /// Returns the output as a buffer `[batch, queries, heads, dv]`.
    pub(super) fn forward_fast(
        &self,
        kernel: FastKernel,
        gpu: &Gpu,
        ins: [&Tensor; 3],
        lse: &mut Tensor,
    ) -> Result<Tensor> {
        let [q, k, v] = aligned(ins)?;
        let ([b, h, tq, d], dv) = (extents(&q), v.shape()[3]);
        let mut o = gpu.uninit(q.dtype(), [b, tq, h, dv])?;
        let launch = gpu.kernel(kernel.sources(self.dropout.is_some())[0], kernel.stem, q.dtype())?;
        let launch = launch.arg(self.call([&q, &k, &v], None)?).arg(d as u32).arg(dv as u32);
        let blocks = b * h * tq.div_ceil(FORWARD_ROWS);
        let launch = launch.read(&q).read(&k).read(&v).write(&mut o).write(lse);
        launch.start(blocks as u32, THREADS, kernel.shared_bytes(FORWARD_ROWS))?;
        Ok(o)
    }

    /// Returns the gradients as buffers `[batch, length, heads, d]`.
    pub(super) fn backward_fast(
        &self,
        kernel: FastKernel,
        gpu: &Gpu,
        ins: [&Tensor; 4],
        lse: &Tensor,
        delta: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let [q, k, v, grad] = aligned(ins)?;
        let ([b, h, tq, d], [_, groups, keys, dv]) = (extents(&q), extents(&v));
        let call = self.call([&q, &k, &v], Some([&grad, &grad]))?;
        let launch = |stem| {
            let launch = gpu.kernel(kernel.sources(self.dropout.is_some())[1], stem, q.dtype())?;
            let launch = launch.arg(call).arg(d as u32).arg(dv as u32).read(&q).read(&k).read(&v).read(&grad);
            Ok::<_, Error>(launch.read(lse).read(delta))
        };
        let shared_bytes = kernel.shared_bytes(2 * BACKWARD_ROWS);
        let mut dq = gpu.uninit(q.dtype(), [b, tq, h, d])?;
        let blocks = b * h * tq.div_ceil(BACKWARD_ROWS);
        launch(kernel.dq)?.write(&mut dq).start(blocks as u32, THREADS, shared_bytes)?;
        let [mut dk, mut dvs] =
            [gpu.uninit(k.dtype(), [b, keys, groups, d])?, gpu.uninit(v.dtype(), [b, keys, groups, dv])?];
        let blocks = b * groups * keys.div_ceil(BACKWARD_ROWS);
        launch(kernel.dkv)?.write(&mut dk).write(&mut dvs).start(blocks as u32, THREADS, shared_bytes)?;
        Ok([dq, dk, dvs])
    }
}

/// The number of threads per block.
const THREADS: u32 = 128;
/// The number of rows of a block's tile.
const FORWARD_ROWS: usize = 128;
const BACKWARD_ROWS: usize = 64;

/// A variant of the kernels: `Flash` in `kernels/cuda/flash.cuh`.
#[derive(Clone, Copy)]
pub(super) struct FastKernel {
    /// The sources of the forward and backward kernels, without and with dropout.
    sources: [[&'static str; 2]; 2],
    stem: &'static str,
    dq: &'static str,
    dkv: &'static str,
    /// The largest head dim.
    d: usize,
    /// The number of columns of a tile.
    cols: usize,
}

macro_rules! kernel {
    ($stem:literal, $d:literal, $cols:literal) => {
        FastKernel {
            sources: [
                [concat!("attention_", $stem), concat!("attention_grad_", $stem)],
                [concat!("attention_", $stem, "_dropout"), concat!("attention_grad_", $stem, "_dropout")],
            ],
            stem: $stem,
            dq: concat!($stem, "_dq"),
            dkv: concat!($stem, "_dkv"),
            d: $d,
            cols: $cols,
        }
    };
}

const KERNELS: [FastKernel; 4] = [
    kernel!("fast32", 32, 64),
    kernel!("fast64", 64, 64),
    kernel!("fast96", 96, 32),
    kernel!("fast128", 128, 32),
];

impl FastKernel {
    fn sources(&self, dropout: bool) -> [&'static str; 2] {
        self.sources[usize::from(dropout)]
    }

    /// Returns the size of shared memory: a tile of `rows` rows, and two stages of two tiles of `cols` rows.
    fn shared_bytes(&self, rows: usize) -> usize {
        (rows + 4 * self.cols) * (self.d + 8) * 2
    }
}

/// Returns the operands, copied if a row does not begin at a multiple of 16 bytes.
fn aligned<const N: usize>(x: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut ready = x.map(Tensor::clone);
    for x in &mut ready {
        let steps = x.strides()[..3].iter().zip(x.shape().iter());
        let apart = steps.clone().all(|(&step, &n)| n == 1 || step % 8 == 0) && x.strides()[3] == 1;
        if !apart || x.device_address().is_none_or(|at| at % 16 != 0) {
            *x = x.to_owned_copy()?;
        }
    }
    Ok(ready)
}
