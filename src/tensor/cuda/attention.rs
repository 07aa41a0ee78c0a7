//! Causal attention and its derivative; the kernels say what they compute, and what that should cost.
//!
//! Beside operands and results there are the finished nodes that wait in summation trees: for each block of threads on the
//! device a few tiles. Head dims up to 64 and up to 128 have kernels of their own; the others, and f64, one that takes them in
//! chunks, which f16 and bf16 reach by way of f32.
//!
//! Missing: a split of a few queries' keys over several multiprocessors, which generation would want.

mod tree;

use bytemuck::{Pod, Zeroable};

use super::copy::{cast, fill};
use super::gpu::Gpu;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use tree::{DimArg, depth};

/// `softmax(scale * q k^T, causally masked) v` and its derivative, as [`cpu::CausalAttention`](crate::tensor::cpu::CausalAttention),
/// by bits.
#[derive(Clone, Copy, Debug)]
pub struct CausalAttention<'a> {
    /// The function's name in errors.
    pub verb: &'a str,
    /// The global index of the first query.
    pub q_start: usize,
    /// The factor before the softmax.
    pub scale: f64,
    /// Zeros among the probabilities.
    pub dropout: Option<AttentionDropout>,
}

/// Which probabilities are kept: those whose word of a draw is not below a threshold. That of batch b, head h, query i and
/// key j is word `((b H + h) Tq + i) Tk + j`, with whole extents and global indices.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout {
    /// Philox's key.
    pub key: [u32; 2],
    /// The upper half of its counter.
    pub high: u64,
    /// The least word that keeps.
    pub threshold: u32,
    /// True where nothing is kept, whatever the word.
    pub everything: bool,
    /// The factor of what is kept.
    pub scale: f64,
    /// The whole's heads, queries and keys.
    pub extents: [usize; 3],
    /// The first batch and the first head given.
    pub start: [usize; 2],
}

impl CausalAttention<'_> {
    /// The output `[batch, heads, queries, dv]`, a view of a buffer `[batch, queries, heads, dv]`, and the logarithm of each
    /// row's sum of exponentials.
    ///
    /// # Errors
    /// Head dims beyond 1024; a device without room, a launch that fails.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let gpu = Gpu::of(q)?;
        let [b, h, tq, d] = extents(q);
        let (dv, sum) = (v.shape()[3], sum_dtype(q));
        let mut lse = gpu.stale(sum, [b, h, tq])?;
        if b * h * tq * k.shape()[2] == 0 {
            fill(&mut lse, f64::NEG_INFINITY)?;
            return Ok((gpu.zeros(q.dtype(), [b, tq, h, dv])?.transpose(1, 2)?, lse));
        }
        let kind = Kind::of(self.verb, &gpu, q.dtype(), d.max(dv), Pass::Forward)?;
        let mut o = gpu.stale(kind.dtype, [b, tq, h, dv])?;
        let [q, k, v] = kind.operands([q, k, v])?;
        let call = self.call([&q, &k, &v], None)?;
        let dims = [d, dv].map(|d| DimArg::new(d, kind.chunk));
        let chunks = dims[1].chunks as usize;
        let items = b * h * call.query_blocks();
        let (mut stack, blocks) = kind.stack(&gpu, items, chunks, call.levels as usize, 2)?;
        gpu.kernel("attention", kind.stem, kind.dtype)?
            .arg(call)
            .arg(dims[0])
            .arg(dims[1])
            .read(&q)
            .read(&k)
            .read(&v)
            .write(&mut o)
            .write(&mut lse)
            .write(&mut stack)
            .run(
                [blocks as u32, chunks as u32, 1],
                THREADS,
                kind.shared_bytes(Pass::Forward) + kind.row_bytes(&call),
            )?;
        Ok((kind.result(o)?, lse))
    }

    /// The gradients of `q`, `k` and `v`, from the forward pass's operands and results and the gradient `grad` of `o`.
    ///
    /// # Errors
    /// As [`CausalAttention::forward`].
    pub fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let gpu = Gpu::of(q)?;
        let ([b, h, tq, d], [_, groups, keys, dv]) = (extents(q), extents(v));
        if b * h * tq * groups * keys == 0 {
            let zeros = |x: &Tensor| gpu.zeros(x.dtype(), x.shape().clone());
            return Ok([zeros(q)?, zeros(k)?, zeros(v)?]);
        }
        let delta = self.delta(&gpu, o, grad)?;
        let kind = Kind::of(self.verb, &gpu, q.dtype(), d.max(dv), Pass::Backward)?;
        let [q, k, v] = kind.operands([q, k, v])?;
        let [grad] = kind.operands([grad])?;
        let lse = lse.contiguous()?;
        let call = self.call([&q, &k, &v], Some([&grad, &grad]))?;
        let dims = [d, dv].map(|d| DimArg::new(d, kind.chunk));
        let launch = |stem| {
            let launch = gpu.kernel("attention_grad", stem, kind.dtype)?;
            let launch = launch.arg(call).arg(dims[0]).arg(dims[1]).read(&q).read(&k).read(&v).read(&grad);
            Ok::<_, Error>(launch.read(&lse).read(&delta))
        };
        let chunks = dims.map(|dim| dim.chunks as usize);
        let (shared_bytes, resident) = (kind.shared_bytes(Pass::Backward), kind.resident);

        let mut dq = gpu.stale(kind.dtype, [b, tq, h, d])?;
        let items = b * h * call.query_blocks();
        let (mut stack, blocks) = kind.stack(&gpu, items, chunks[0], call.levels as usize, resident)?;
        let grid = [blocks as u32, chunks[0] as u32, 1];
        launch(kind.dq)?.write(&mut dq).write(&mut stack).run(grid, THREADS, shared_bytes)?;

        let [mut dk, mut dvs] =
            [gpu.stale(kind.dtype, [b, keys, groups, d])?, gpu.stale(kind.dtype, [b, keys, groups, dv])?];
        let (items, chunks) = (b * groups * keys.div_ceil(64), chunks[0].max(chunks[1]));
        let (mut stack, blocks) = kind.stack(&gpu, items, chunks, 2 * call.levels as usize, resident)?;
        let grid = [blocks as u32, chunks as u32, 1];
        let launch = launch(kind.dkv)?.write(&mut dk).write(&mut dvs);
        launch.write(&mut stack).run(grid, THREADS, shared_bytes)?;
        Ok([kind.result(dq)?, kind.result(dk)?, kind.result(dvs)?])
    }

    /// Each row's sum of `o` times its gradient.
    fn delta(&self, gpu: &Gpu, o: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let [b, h, tq, dv] = extents(o);
        let (o, grad) = (contiguous_rows(o)?, contiguous_rows(grad)?);
        let mut delta = gpu.stale(sum_dtype(&o), [b, h, tq])?;
        let call = self.call([&o, &o, &o], Some([&o, &grad]))?;
        let launch = gpu.kernel("attention_grad", "delta", o.dtype())?.arg(call).arg(dv as u32);
        let blocks = (b * h * tq).div_ceil(8).min(16 * gpu.multiprocessors() as usize);
        launch.read(&o).read(&grad).write(&mut delta).run(blocks as u32, THREADS, 0)?;
        Ok(delta)
    }

    fn call(&self, [q, k, v]: [&Tensor; 3], outs: Option<[&Tensor; 2]>) -> Result<CallArg> {
        let ([b, h, tq, _], [_, groups, keys, _]) = (extents(q), extents(k));
        let narrow = |x: usize| {
            let rule = "counts queries, keys and heads up to 2^31";
            let fits = u32::try_from(x).ok().filter(|&x| x < 1 << 31);
            fits.ok_or_else(|| Error::unsupported(self.verb, rule, format!("{q}, {k}"), "cut the operands"))
        };
        narrow(b * h * (tq / 64 + 2))?;
        narrow(b * groups * (keys / 64 + 1))?;
        let [o, grad] = outs.unwrap_or([q, q]);
        let dropout = self.dropout.as_ref();
        let [draw_heads, draw_queries, draw_keys] = dropout.map_or([0; 3], |d| d.extents.map(|n| n as u64));
        let [first_batch, first_head] = dropout.map_or([0; 2], |d| d.start.map(|n| n as u64));
        let over_queries = depth(tq) + (h / groups.max(1)).next_power_of_two().trailing_zeros();
        Ok(CallArg {
            steps: [q, k, v, o, grad].map(steps),
            draw: [draw_heads, draw_queries, draw_keys, first_batch, first_head],
            key: dropout.map_or([0; 2], |d| d.key),
            high: dropout.map_or(0, |d| d.high),
            scale: self.scale,
            factor: dropout.map_or(1.0, |d| d.scale),
            batch: narrow(b)?,
            heads: narrow(h)?,
            groups: narrow(groups)?,
            queries: narrow(tq)?,
            keys: narrow(keys)?,
            q_start: narrow(self.q_start + tq).map(|end| end - tq as u32)?,
            dropout: dropout.map_or(0, |d| 1 + u32::from(d.everything)),
            threshold: dropout.map_or(0, |d| d.threshold),
            levels: depth(keys).max(over_queries).max(1),
            row_levels: depth(keys.next_multiple_of(64)).max(1),
        })
    }
}

/// `struct AttentionCall` in `kernels/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CallArg {
    /// Of batch, head and row: q, k, v, o, grad.
    steps: [[u64; 3]; 5],
    draw: [u64; 5],
    key: [u32; 2],
    high: u64,
    scale: f64,
    factor: f64,
    batch: u32,
    heads: u32,
    groups: u32,
    queries: u32,
    keys: u32,
    q_start: u32,
    dropout: u32,
    threshold: u32,
    levels: u32,
    row_levels: u32,
}

impl CallArg {
    /// How many blocks the queries of a head stand in, which begin at multiples of 64.
    fn query_blocks(&self) -> usize {
        ((self.q_start + self.queries - 1) / 64 - self.q_start / 64 + 1) as usize
    }
}

/// Threads of a block, in every kernel.
const THREADS: u32 = 256;
/// Rows of a tile.
const ROWS: usize = 64;

#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

/// One of the kernels' variants: `Tiles` in `kernels/attention.cuh`.
#[derive(Clone, Copy)]
struct Kind {
    stem: &'static str,
    dq: &'static str,
    dkv: &'static str,
    /// What it takes, and what the operands are.
    dtype: DType,
    given: DType,
    cols: usize,
    chunk: usize,
    /// Blocks of the derivative's kernels that a multiprocessor holds.
    resident: usize,
}

impl Kind {
    fn of(verb: &str, gpu: &Gpu, given: DType, d: usize, pass: Pass) -> Result<Kind> {
        let (dtype, cols, resident) = (given, 64, 2);
        let narrow = Kind {
            stem: "narrow",
            dq: "narrow_dq",
            dkv: "narrow_dkv",
            dtype,
            given,
            cols,
            chunk: 64,
            resident,
        };
        let wide = Kind { stem: "wide", dq: "wide_dq", dkv: "wide_dkv", chunk: 128, resident: 1, ..narrow };
        let any = Kind { stem: "any", dq: "any_dq", dkv: "any_dkv", resident: 1, ..narrow };
        let fits =
            |kind: &Kind| kind.shared_bytes(pass) + 8192 <= gpu.stream().device.driver.facts().shared_bytes;
        match given {
            _ if d > 1024 => {
                let rule = "is not built for vectors of more than 1024 elements on a device";
                Err(Error::unsupported(verb, rule, format!("{d}"), "use Device::Cpu"))
            }
            DType::F64 => Ok(Kind { cols: 32, ..any }),
            _ if d <= 64 => Ok(narrow),
            _ if d <= 128 && fits(&wide) => Ok(wide),
            _ => Ok(Kind { dtype: DType::F32, ..any }),
        }
    }

    /// Operands as the kernels take them: in its dtype, rows contiguous.
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

    /// A buffer `[batch, length, heads, d]` as the caller wants it.
    fn result(&self, x: Tensor) -> Result<Tensor> {
        let x = if self.dtype == self.given { x } else { cast(&x, self.given)? };
        x.transpose(1, 2)
    }

    /// Room for the nodes that wait, and the number of blocks of threads that share `items`.
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
        Ok((gpu.stale(dtype, [blocks * chunks, levels, ROWS, self.chunk])?, blocks))
    }

    /// A block's tiles in shared memory.
    fn shared_bytes(&self, pass: Pass) -> usize {
        let size = if self.dtype == DType::F64 { 8 } else { 4 };
        let (pitch, step) = (self.chunk + 16 / size, ROWS + 16 / size);
        let operands = match pass {
            Pass::Forward => 1,
            Pass::Backward => 2,
        };
        (operands * (ROWS + self.cols) * pitch + self.cols * step) * size
    }

    /// The sums of a block's rows, and their nodes that wait.
    fn row_bytes(&self, call: &CallArg) -> usize {
        let size = if self.dtype == DType::F64 { 8 } else { 4 };
        (1 + call.row_levels as usize) * ROWS * size
    }
}

fn extents(x: &Tensor) -> [usize; 4] {
    x.shape()[..].try_into().expect("the operator has seen four dims")
}

fn steps(x: &Tensor) -> [u64; 3] {
    [0, 1, 2].map(|dim| x.strides()[dim] as u64)
}

fn sum_dtype(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// This tensor if its last dim is contiguous, else a contiguous copy.
fn contiguous_rows(x: &Tensor) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    if x.strides()[last] == 1 || x.shape()[last] <= 1 { Ok(x.clone()) } else { x.contiguous() }
}
