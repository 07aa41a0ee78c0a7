//! CUDA kernels of attention and of its derivatives: [with the CPU's bits](exact), or [fast](fast) if they are
//! not required. The sources in `kernels/cuda/` document the algorithms and their cost.
//!
//! Missing: a division of the keys of few queries among multiprocessors, which text generation would need.

mod exact;
mod fast;
mod tree;

use bytemuck::{Pod, Zeroable};

use super::scores::{ScoreOperands, ScoreRule, bias_sum};
use crate::error::{Error, Result};
use crate::tensor::cuda::{Gpu, fill};
use crate::tensor::{DType, SplitRule, Tensor};
use tree::depth;

/// Computes `softmax(scale * q k^T, masked) v` and its derivative on a CUDA device, as
/// [`CpuAttention`](crate::ops::cpu::CpuAttention).
#[derive(Clone, Copy, Debug)]
pub struct CudaAttention<'a> {
    /// The name with which errors begin.
    pub verb: &'a str,
    /// The position of the first query in the sequence of keys.
    pub q_start: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the probabilities, or `None`.
    pub dropout: Option<CudaAttentionDropout>,
    /// True if results must have the CPU's bits. If false, f16 and bf16 with head dims up to 128 that are multiples of
    /// 8 use matrix units, whose results differ by a few roundings; all other operands give the CPU's bits in any case.
    pub exact: bool,
    /// The treatment of the scores. The matrix units compute causal attention without further operands; all other rules
    /// give the CPU's bits in any case.
    pub rule: ScoreRule,
    /// The optional operands that the rule names.
    pub operands: ScoreOperands<'a>,
}

/// The probabilities that dropout keeps: those whose random word is not below a threshold. The probability of batch b,
/// head h, query i and key j uses word `((b H + h) Tq + i) Tk + j` of the draw, with global extents and indices.
#[derive(Clone, Copy, Debug)]
pub struct CudaAttentionDropout {
    /// Philox's key.
    pub key: [u32; 2],
    /// The upper half of its counter.
    pub high: u64,
    /// The least word that keeps a probability.
    pub threshold: u32,
    /// True if all probabilities are dropped.
    pub everything: bool,
    /// The factor of the probabilities that are kept.
    pub scale: f64,
    /// The global numbers of heads, queries and keys.
    pub extents: [usize; 3],
    /// The global indices of the first given batch, head and query. Queries count from 0, independently of their
    /// position.
    pub start: [usize; 3],
}

impl<'a> CudaAttention<'a> {
    /// Returns exact causal attention without dropout, whose first query has the position `q_start`.
    pub fn causal(verb: &'a str, q_start: usize, scale: f64) -> CudaAttention<'a> {
        let (rule, operands) = (ScoreRule::CAUSAL, ScoreOperands::default());
        CudaAttention { verb, q_start, scale, dropout: None, exact: true, rule, operands }
    }

    /// Returns the output `[batch, heads, queries, dv]`, a view of a buffer `[batch, queries, heads, dv]`, and the
    /// logarithm of each row's sum of exponentials.
    ///
    /// # Errors
    /// Refuses head dims beyond 1024. Returns an error if the device has no memory left or a launch fails.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let gpu = Gpu::of(q)?;
        let ([b, h, tq, _], [_, _, keys, dv]) = (extents(q), extents(v));
        let mut lse = gpu.uninit(sum_dtype(q), [b, h, tq])?;
        if b * h * tq * keys == 0 {
            fill(&mut lse, f64::NEG_INFINITY)?;
            return Ok((gpu.zeros(q.dtype(), [b, tq, h, dv])?.transpose(1, 2)?, lse));
        }
        let o = match self.fast_kernel(&gpu, q, v) {
            Some(kernel) => self.forward_fast(kernel, &gpu, [q, k, v], &mut lse)?,
            None => self.forward_exact(&gpu, [q, k, v], &mut lse)?,
        };
        Ok((o.transpose(1, 2)?, lse))
    }

    /// Returns the gradients of `q`, `k` and `v` from the forward pass's operands and results and the gradient `grad`
    /// of `o`.
    ///
    /// # Errors
    /// Returns the errors of [`CudaAttention::forward`].
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
        let [dq, dk, dv] = match self.fast_kernel(&gpu, q, v) {
            Some(kernel) => self.backward_fast(kernel, &gpu, ins, lse, &self.delta(&gpu, o, grad)?)?,
            None => self.backward_exact(&gpu, ins, lse, o)?,
        };
        Ok([dq.transpose(1, 2)?, dk.transpose(1, 2)?, dv.transpose(1, 2)?])
    }

    /// Returns the gradient of the bias, as
    /// [`CpuAttention::bias_backward`](crate::ops::cpu::CpuAttention::bias_backward).
    ///
    /// # Errors
    /// Returns the errors of [`CudaAttention::forward`].
    pub fn bias_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<Tensor> {
        let gpu = Gpu::of(q)?;
        let Some(bias) = self.operands.bias else {
            return Err(Error::invalid(self.verb, "has no bias", q.notation(), ""));
        };
        let sum = bias_sum([q, k], bias);
        if sum.bias[3] != sum.shape[3] || sum.shape.contains(&0) {
            return gpu.zeros(q.dtype(), bias.shape().clone());
        }
        self.bias_exact(&gpu, [q, k, v, grad], &lse.contiguous()?, o, &sum)
    }

    /// Computes the sum of `o` times its gradient per row.
    fn delta(&self, gpu: &Gpu, o: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let [b, h, tq, dv] = extents(o);
        let (o, grad) = (contiguous_rows(o)?, contiguous_rows(grad)?);
        let mut delta = gpu.uninit(sum_dtype(&o), [b, h, tq])?;
        let call = self.call([&o, &o, &o], Some([&o, &grad]))?;
        let launch = gpu.kernel("attention_delta", "delta", o.dtype())?.arg(call).arg(dv as u32);
        let blocks = (b * h * tq).div_ceil(8).min(16 * gpu.multiprocessors() as usize);
        launch.read(&o).read(&grad).write(&mut delta).start(blocks as u32, 256, 0)?;
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
        let over_queries = depth(tq) + SplitRule::Halves.depth(h / groups.max(1), 1);
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
            bias: self.operands.bias.map_or([0; 4], broadcast_steps),
            mask: self.operands.mask.map_or([0; 4], broadcast_steps),
            documents: self.operands.documents.map_or([0; 2], |of| of.map(|x| batch_step(x) as u64)),
            cap: self.rule.soft_cap.map_or(1.0, |cap| cap.0),
            before: limit(self.rule.before),
            after: limit(self.rule.after),
            extras: u32::from(self.rule.soft_cap.is_some())
                | u32::from(self.rule.bias) << 1
                | u32::from(self.rule.mask) << 2
                | u32::from(self.rule.documents) << 3,
            bias_dtype: match self.operands.bias.map(Tensor::dtype) {
                Some(DType::F16) => 1,
                Some(DType::BF16) => 2,
                _ => 0,
            },
        })
    }
}

/// `struct AttentionCall` in `kernels/cuda/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CallArg {
    /// The strides of batch, head and row of q, k, v, o and grad.
    steps: [[u64; 3]; 5],
    draw: [u64; 6],
    bias: [u64; 4],
    mask: [u64; 4],
    documents: [u64; 2],
    key: [u32; 2],
    high: u64,
    scale: f64,
    factor: f64,
    cap: f64,
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
    before: u32,
    after: u32,
    /// `ScoreExtra` in `kernels/cuda/attention.cuh`.
    extras: u32,
    /// `BiasDtype` in `kernels/cuda/attention.cuh`.
    bias_dtype: u32,
}

/// Returns a bound of a window as the kernels read it: positions are below 2^31.
fn limit(bound: Option<usize>) -> u32 {
    bound.map_or(i32::MAX as u32, |n| n.min(i32::MAX as usize) as u32)
}

/// Returns the strides of bias or mask, 0 along a dim in which it repeats.
fn broadcast_steps(x: &Tensor) -> [u64; 4] {
    [0, 1, 2, 3].map(|d| if x.shape()[d] == 1 { 0 } else { x.strides()[d] as u64 })
}

/// Returns the stride of the batch of document numbers.
fn batch_step(x: &Tensor) -> usize {
    if x.shape()[0] == 1 { 0 } else { x.strides()[0] }
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

/// Returns this tensor if its last dim is contiguous, else a contiguous copy.
fn contiguous_rows(x: &Tensor) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    if x.strides()[last] == 1 || x.shape()[last] <= 1 { Ok(x.clone()) } else { x.contiguous() }
}
