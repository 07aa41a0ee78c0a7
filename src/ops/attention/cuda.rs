//! Causal attention and its derivative: [by the CPU's bits](exact), or, where these are not asked for, [fast](fast). The
//! kernels say what they compute, and what that should cost.
//!
//! Missing: a split of a few queries' keys over several multiprocessors, which generation would want.

mod exact;
mod fast;
mod tree;

use bytemuck::{Pod, Zeroable};

use crate::error::{Error, Result};
use crate::tensor::cuda::{Gpu, fill};
use crate::tensor::{DType, Split, Tensor};
use tree::depth;

/// `softmax(scale * q k^T, causally masked) v` and its derivative, as
/// [`cpu::CausalAttention`](crate::ops::cpu::CausalAttention).
#[derive(Clone, Copy, Debug)]
pub struct CausalAttention<'a> {
    /// The function's name in errors.
    pub verb: &'a str,
    /// The time of the first query.
    pub q_start: usize,
    /// The factor before the softmax.
    pub scale: f64,
    /// Zeros among the probabilities.
    pub dropout: Option<AttentionDropout>,
    /// Whether the bits must be the CPU's. If not, f16 and bf16 with head dims up to 128 that are multiples of 8 go
    /// to matrix units, which differ by a few roundings to the dtype; the others are exact all the same.
    pub exact: bool,
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
    /// The first batch, the first head and the first query given. Queries count from the whole's first one, whatever its time.
    pub start: [usize; 3],
}

impl CausalAttention<'_> {
    /// The output `[batch, heads, queries, dv]`, a view of a buffer `[batch, queries, heads, dv]`, and the logarithm of each
    /// row's sum of exponentials.
    ///
    /// # Errors
    /// Head dims beyond 1024; a device without room, a launch that fails.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let gpu = Gpu::of(q)?;
        let ([b, h, tq, _], [_, _, keys, dv]) = (extents(q), extents(v));
        let mut lse = gpu.uninit(sum_dtype(q), [b, h, tq])?;
        if b * h * tq * keys == 0 {
            fill(&mut lse, f64::NEG_INFINITY)?;
            return Ok((gpu.zeros(q.dtype(), [b, tq, h, dv])?.transpose(1, 2)?, lse));
        }
        let o = match self.fast_kind(&gpu, q, v) {
            Some(kind) => self.forward_fast(kind, &gpu, [q, k, v], &mut lse)?,
            None => self.forward_exact(&gpu, [q, k, v], &mut lse)?,
        };
        Ok((o.transpose(1, 2)?, lse))
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
        if q.shape()[..3].iter().chain(&k.shape()[..3]).any(|&n| n == 0) {
            let zeros = |x: &Tensor| gpu.zeros(x.dtype(), x.shape().clone());
            return Ok([zeros(q)?, zeros(k)?, zeros(v)?]);
        }
        let (lse, ins) = (&lse.contiguous()?, [q, k, v, grad]);
        let [dq, dk, dv] = match self.fast_kind(&gpu, q, v) {
            Some(kind) => self.backward_fast(kind, &gpu, ins, lse, &self.delta(&gpu, o, grad)?)?,
            None => self.backward_exact(&gpu, ins, lse, o)?,
        };
        Ok([dq.transpose(1, 2)?, dk.transpose(1, 2)?, dv.transpose(1, 2)?])
    }

    /// Each row's sum of `o` times its gradient.
    fn delta(&self, gpu: &Gpu, o: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let [b, h, tq, dv] = extents(o);
        let (o, grad) = (contiguous_rows(o)?, contiguous_rows(grad)?);
        let mut delta = gpu.uninit(sum_dtype(&o), [b, h, tq])?;
        let call = self.call([&o, &o, &o], Some([&o, &grad]))?;
        let launch = gpu.kernel("attention_delta", "delta", o.dtype())?.arg(call).arg(dv as u32);
        let blocks = (b * h * tq).div_ceil(8).min(16 * gpu.multiprocessors() as usize);
        launch.read(&o).read(&grad).write(&mut delta).run(blocks as u32, 256, 0)?;
        Ok(delta)
    }

    fn call(&self, [q, k, v]: [&Tensor; 3], outs: Option<[&Tensor; 2]>) -> Result<CallArg> {
        let ([b, h, tq, _], [_, groups, keys, _]) = (extents(q), extents(k));
        let narrow = |x: usize| {
            let rule = "counts queries, keys and heads up to 2^31";
            let fits = u32::try_from(x).ok().filter(|&x| x < 1 << 31);
            fits.ok_or_else(|| {
                Error::unsupported(
                    self.verb,
                    rule,
                    format!("{}, {}", q.notation(), k.notation()),
                    "cut the operands",
                )
            })
        };
        narrow(b * h * (tq / 64 + 2))?;
        narrow(b * groups * (keys / 64 + 1))?;
        let [o, grad] = outs.unwrap_or([q, q]);
        let dropout = self.dropout.as_ref();
        let [draw_heads, draw_queries, draw_keys] = dropout.map_or([0; 3], |d| d.extents.map(|n| n as u64));
        let [first_batch, first_head, first_query] = dropout.map_or([0; 3], |d| d.start.map(|n| n as u64));
        let over_queries = depth(tq) + Split::Halves.depth(h / groups.max(1), 1);
        Ok(CallArg {
            steps: [q, k, v, o, grad].map(steps),
            draw: [draw_heads, draw_queries, draw_keys, first_batch, first_head, first_query],
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
    draw: [u64; 6],
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
