//! Attention kernels with the CPU's bits.
//!
//! In addition to operands and results, a launch needs memory for finished nodes of reduction trees whose siblings are
//! not finished: a few tiles per block of threads. There are kernels for head dims up to 64 and, except for the
//! bias's gradient, up to 128. All other head dims, and f64, use a kernel that works in chunks; f16 and bf16 are converted to f32 for it.
//!
//! Calls that positions alone mask (causal, full, sliding windows) have kernels of their own, with fewer registers. The
//! kernels for all other calls take f32 and f64; queries, keys, values and gradients of f16 and bf16 are converted for
//! them, and the bias is read and its gradient written as it is.

use bytemuck::{Pod, Zeroable};
use isoshard_kernels::attention::BiasSum;

use super::tree::DimArg;
use super::{CallArg, CudaAttention, contiguous_rows, extents};
use crate::error::{Error, Result};
use crate::ops::attention::scores::{ScoreOperands, ScoreRule};
use crate::tensor::cuda::{Gpu, cast};
use crate::tensor::{DType, Tensor};

impl CudaAttention<'_> {
    /// Returns the output as a buffer `[batch, queries, heads, dv]`.
    pub(super) fn forward_exact(
        &self,
        gpu: &Gpu,
        [q, k, v]: [&Tensor; 3],
        lse: &mut Tensor,
    ) -> Result<Tensor> {
        let ([b, h, tq, d], dv) = (extents(q), v.shape()[3]);
        let kernel = ExactKernel::of(self, gpu, q.dtype(), d.max(dv), KernelPass::Forward)?;
        let mut o = gpu.uninit(kernel.dtype, [b, tq, h, dv])?;
        let [q, k, v] = kernel.operands([q, k, v])?;
        let extra = ScoreBuffers::of(self, &q)?;
        let call = extra.call(self).call([&q, &k, &v], None)?;
        let dims = [d, dv].map(|d| DimArg::new(d, kernel.chunk));
        let chunks = dims[1].chunks as usize;
        let items = b * h * query_blocks(&call);
        let (mut stack, blocks) = kernel.stack(gpu, items, chunks, call.levels as usize, 2)?;
        gpu.kernel(kernel.sources()[0], kernel.stem, kernel.dtype)?
            .arg(call)
            .arg(dims[0])
            .arg(dims[1])
            .read(&q)
            .read(&k)
            .read(&v)
            .read(&extra.bias)
            .read(&extra.mask)
            .read(&extra.documents[0])
            .read(&extra.documents[1])
            .write(&mut o)
            .write(lse)
            .write(&mut stack)
            .start(
                [blocks as u32, chunks as u32, 1],
                THREADS,
                kernel.shared_bytes(KernelPass::Forward) + kernel.row_bytes(&call),
            )?;
        kernel.result(o)
    }

    /// Returns the gradients as buffers `[batch, length, heads, d]`.
    pub(super) fn backward_exact(
        &self,
        gpu: &Gpu,
        ins: [&Tensor; 4],
        lse: &Tensor,
        o: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let ([b, h, tq, d], [_, groups, keys, dv]) = (extents(ins[0]), extents(ins[2]));
        let kernel = ExactKernel::of(self, gpu, ins[0].dtype(), d.max(dv), KernelPass::Backward)?;
        let delta = self.delta(gpu, o, ins[3])?;
        let [q, k, v, grad] = kernel.operands(ins)?;
        let extra = ScoreBuffers::of(self, &q)?;
        let call = extra.call(self).call([&q, &k, &v], Some([&grad, &grad]))?;
        let dims = [d, dv].map(|d| DimArg::new(d, kernel.chunk));
        let launch = |stem| {
            let launch = gpu.kernel(kernel.sources()[1], stem, kernel.dtype)?;
            let launch = launch.arg(call).arg(dims[0]).arg(dims[1]).read(&q).read(&k).read(&v).read(&grad);
            let launch = launch.read(lse).read(&delta).read(&extra.bias).read(&extra.mask);
            Ok::<_, Error>(launch.read(&extra.documents[0]).read(&extra.documents[1]))
        };
        let chunks = dims.map(|dim| dim.chunks as usize);
        let (shared_bytes, resident) = (kernel.shared_bytes(KernelPass::Backward), kernel.resident);

        let mut dq = gpu.uninit(kernel.dtype, [b, tq, h, d])?;
        let items = b * h * query_blocks(&call);
        let (mut stack, blocks) = kernel.stack(gpu, items, chunks[0], call.levels as usize, resident)?;
        let grid = [blocks as u32, chunks[0] as u32, 1];
        launch(kernel.dq)?.write(&mut dq).write(&mut stack).start(grid, THREADS, shared_bytes)?;

        let [mut dk, mut dvs] = [
            gpu.uninit(kernel.dtype, [b, keys, groups, d])?,
            gpu.uninit(kernel.dtype, [b, keys, groups, dv])?,
        ];
        let (items, chunks) = (b * groups * keys.div_ceil(64), chunks[0].max(chunks[1]));
        let (mut stack, blocks) = kernel.stack(gpu, items, chunks, 2 * call.levels as usize, resident)?;
        let grid = [blocks as u32, chunks as u32, 1];
        let launch = launch(kernel.dkv)?.write(&mut dk).write(&mut dvs);
        launch.write(&mut stack).start(grid, THREADS, shared_bytes)?;
        Ok([kernel.result(dq)?, kernel.result(dk)?, kernel.result(dvs)?])
    }
}

impl CudaAttention<'_> {
    /// Returns the gradient of the bias.
    pub(super) fn bias_exact(
        &self,
        gpu: &Gpu,
        ins: [&Tensor; 4],
        lse: &Tensor,
        o: &Tensor,
        sum: &BiasSum,
    ) -> Result<Tensor> {
        let ([_, _, tq, d], [_, _, keys, dv]) = (extents(ins[0]), extents(ins[2]));
        let kernel = ExactKernel::of(self, gpu, ins[0].dtype(), d.max(dv), KernelPass::Bias)?;
        let delta = self.delta(gpu, o, ins[3])?;
        let [q, k, v, grad] = kernel.operands(ins)?;
        let extra = ScoreBuffers::of(self, &q)?;
        let call = extra.call(self).call([&q, &k, &v], Some([&grad, &grad]))?;
        let dims = [d, dv].map(|d| DimArg::new(d, kernel.chunk));
        let joins = sum.joins();
        let (mut height, mut levels) = (0, 1);
        for &joins in &joins {
            levels = levels.max(height + 1);
            height = height + 1 - usize::from(joins);
        }
        let device = ins[0].device();
        let joins = Tensor::from_vec(joins.clone(), [joins.len()])?.to_device(device)?;
        let [batch, heads, ..] = sum.bias.map(|n| n as u32);
        let shape =
            BiasArg { batch, heads, over_queries: u32::from(sum.repeats()[2]), levels: levels as u32 };
        let query_tiles = if sum.repeats()[2] { 1 } else { tq.div_ceil(ROWS) };
        let items = sum.bias[0] * sum.bias[1] * query_tiles * keys.div_ceil(kernel.cols);
        let blocks = items.min(kernel.resident * gpu.multiprocessors() as usize);
        let dtype = if kernel.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut stack = gpu.uninit(dtype, [blocks, levels, ROWS * kernel.cols])?;
        let mut out = gpu.uninit(kernel.given, sum.bias)?;
        let launch = gpu.kernel(kernel.sources()[2], kernel.dbias, kernel.dtype)?;
        let launch = launch.arg(call).arg(dims[0]).arg(dims[1]).arg(shape);
        let launch = launch.read(&q).read(&k).read(&v).read(&grad).read(lse).read(&delta).read(&extra.bias);
        let launch =
            launch.read(&extra.mask).read(&extra.documents[0]).read(&extra.documents[1]).read(&joins);
        let shared_bytes = kernel.shared_bytes(KernelPass::Bias);
        launch.write(&mut out).write(&mut stack).start(blocks as u32, THREADS, shared_bytes)?;
        Ok(out)
    }
}

/// `struct BiasShape` in `kernels/cuda/attention_backward.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BiasArg {
    batch: u32,
    heads: u32,
    over_queries: u32,
    levels: u32,
}

/// The optional operands of the scores as the kernels read them; q in place of absent ones.
struct ScoreBuffers {
    bias: Tensor,
    mask: Tensor,
    documents: [Tensor; 2],
}

impl ScoreBuffers {
    fn of(call: &CudaAttention<'_>, q: &Tensor) -> Result<ScoreBuffers> {
        let documents = match call.operands.documents {
            Some([of_q, of_k]) => [of_q.contiguous()?, of_k.contiguous()?],
            None => [q.clone(), q.clone()],
        };
        let [bias, mask] = [call.operands.bias, call.operands.mask].map(|x| x.unwrap_or(q).clone());
        Ok(ScoreBuffers { bias, mask, documents })
    }

    /// Returns the call with these operands.
    fn call<'a>(&'a self, of: &CudaAttention<'a>) -> CudaAttention<'a> {
        let documents = of.operands.documents.map(|_| [&self.documents[0], &self.documents[1]]);
        CudaAttention { operands: ScoreOperands { documents, ..of.operands }, ..*of }
    }
}

/// Returns the number of blocks of a head's queries. Blocks begin at multiples of 64.
fn query_blocks(call: &CallArg) -> usize {
    ((call.q_start + call.queries - 1) / 64 - call.q_start / 64 + 1) as usize
}

/// The number of threads per block, in every kernel.
const THREADS: u32 = 256;
/// The number of rows of a tile.
const ROWS: usize = 64;

#[derive(Clone, Copy)]
enum KernelPass {
    Forward,
    Backward,
    Bias,
}

/// The head dims that a kernel takes: up to 64, up to 128, and up to 1024.
#[derive(Clone, Copy)]
enum HeadClass {
    Narrow,
    Wide,
    Any,
}

/// A variant of the kernels: `Tiles` in `kernels/cuda/attention.cuh`.
#[derive(Clone, Copy)]
struct ExactKernel {
    class: HeadClass,
    stem: &'static str,
    dq: &'static str,
    dkv: &'static str,
    dbias: &'static str,
    /// True if more than positions decides the scores.
    masked: bool,
    dropout: bool,
    /// The dtype that the kernel takes.
    dtype: DType,
    /// The dtype of the operands.
    given: DType,
    cols: usize,
    chunk: usize,
    /// The number of blocks of the derivative's kernels per multiprocessor.
    resident: usize,
}

impl ExactKernel {
    fn of(
        call: &CudaAttention<'_>,
        gpu: &Gpu,
        given: DType,
        d: usize,
        pass: KernelPass,
    ) -> Result<ExactKernel> {
        let ScoreRule { before: _, after: _, soft_cap, bias, mask, documents } = call.rule;
        let masked = soft_cap.is_some() || bias || mask || documents;
        let narrow = ExactKernel {
            class: HeadClass::Narrow,
            stem: "narrow",
            dq: "narrow_dq",
            dkv: "narrow_dkv",
            dbias: "narrow_dbias",
            masked,
            dropout: call.dropout.is_some(),
            dtype: if masked && given != DType::F64 { DType::F32 } else { given },
            given,
            cols: 64,
            chunk: 64,
            resident: 2,
        };
        let wide = ExactKernel {
            class: HeadClass::Wide,
            stem: "wide",
            dq: "wide_dq",
            dkv: "wide_dkv",
            chunk: 128,
            resident: 1,
            ..narrow
        };
        let any = ExactKernel {
            class: HeadClass::Any,
            stem: "any",
            dq: "any_dq",
            dkv: "any_dkv",
            dbias: "any_dbias",
            resident: 1,
            ..narrow
        };
        let fits = |kernel: &ExactKernel| kernel.shared_bytes(pass) + 8192 <= gpu.properties().shared_bytes;
        match given {
            _ if d > 1024 => {
                let rule = "is not built for vectors of more than 1024 elements on a device";
                Err(Error::unsupported(call.verb, rule, format!("{d}"), "use Device::Cpu"))
            }
            DType::F64 => Ok(ExactKernel { cols: 32, ..any }),
            _ if d <= 64 => Ok(narrow),
            _ if d <= 128 && !matches!(pass, KernelPass::Bias) && fits(&wide) => Ok(wide),
            _ => Ok(ExactKernel { dtype: DType::F32, ..any }),
        }
    }

    /// Returns the sources of the forward kernel, of the derivative's and of the bias's gradient. The kernels are large, so
    /// each variant compiles separately, at its first use.
    fn sources(&self) -> [&'static str; 3] {
        macro_rules! of_class {
            ($class:literal, $bias:literal) => {
                match (self.masked, self.dropout) {
                    (false, false) => {
                        [concat!("attention_", $class), concat!("attention_grad_", $class), $bias]
                    }
                    (false, true) => [
                        concat!("attention_", $class, "_dropout"),
                        concat!("attention_grad_", $class, "_dropout"),
                        concat!($bias, "_dropout"),
                    ],
                    (true, false) => [
                        concat!("attention_masked_", $class),
                        concat!("attention_masked_grad_", $class),
                        $bias,
                    ],
                    (true, true) => [
                        concat!("attention_masked_", $class, "_dropout"),
                        concat!("attention_masked_grad_", $class, "_dropout"),
                        concat!($bias, "_dropout"),
                    ],
                }
            };
        }
        match self.class {
            HeadClass::Narrow => of_class!("narrow", "attention_bias_grad_narrow"),
            HeadClass::Wide => of_class!("wide", "attention_bias_grad_any"),
            HeadClass::Any => of_class!("any", "attention_bias_grad_any"),
        }
    }

    /// Converts operands to the kernel's dtype and makes rows contiguous.
    fn operands<const N: usize>(&self, x: [&Tensor; N]) -> Result<[Tensor; N]> {
        let mut ready = x.map(Tensor::clone);
        for x in &mut ready {
            *x = if self.dtype == self.given {
                contiguous_rows(x)?
            } else {
                cast(x, self.dtype)?.contiguous()?
            };
        }
        Ok(ready)
    }

    /// Converts a result to the operands' dtype.
    fn result(&self, x: Tensor) -> Result<Tensor> {
        if self.dtype == self.given { Ok(x) } else { cast(&x, self.given) }
    }

    /// Allocates memory for finished nodes whose siblings are not finished. Also returns the number of blocks that
    /// share `items`.
    fn stack(
        &self,
        gpu: &Gpu,
        items: usize,
        chunks: usize,
        levels: usize,
        resident: usize,
    ) -> Result<(Tensor, usize)> {
        let blocks = items.min(resident * gpu.multiprocessors() as usize);
        let dtype = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok((gpu.uninit(dtype, [blocks * chunks, levels, ROWS, self.chunk])?, blocks))
    }

    /// Returns the size of a block's tiles in shared memory.
    fn shared_bytes(&self, pass: KernelPass) -> usize {
        let size = if self.dtype == DType::F64 { 8 } else { 4 };
        let (pitch, step) = (self.chunk + 16 / size, ROWS + 16 / size);
        let operands = match pass {
            KernelPass::Forward => 1,
            KernelPass::Backward | KernelPass::Bias => 2,
        };
        (operands * (ROWS + self.cols) * pitch + self.cols * step) * size
    }

    /// Returns the size of the sums of a block's rows and of their finished nodes.
    fn row_bytes(&self, call: &CallArg) -> usize {
        let size = if self.dtype == DType::F64 { 8 } else { 4 };
        (1 + call.row_levels as usize) * ROWS * size
    }
}
