//! The CUDA kernels of rotary position embedding.

use bytemuck::{Pod, Zeroable};
use smallvec::SmallVec;

use super::cpu::Rotation;
use crate::error::Result;
use crate::tensor::cuda::{Gpu, cast};
use crate::tensor::math::log::ln_f64;
use crate::tensor::{DType, Dims, Shape, Tensor, short_list, sort_by_key};

/// Rotates `x` `[.., time, d]`, which may have any strides, with the same bits as [`Rotation::apply`]. The result has
/// the same order of dims in memory as `x`.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(super) fn rotary(rotation: &Rotation, x: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (time, last) = (x.shape().len() - 2, x.shape().len() - 1);
    // Order the dims as in memory, the last one excepted.
    let mut order: Dims = (0..last).collect();
    sort_by_key(&mut order, |&dim| std::cmp::Reverse(x.strides()[dim]));
    order.push(last);
    let mut inverse = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
    let shape: Dims = short_list(order.iter().map(|&dim| x.shape()[dim]));
    let mut out = gpu.uninit(x.dtype(), &shape[..])?.permute(&inverse)?;
    if x.numel() > 0 {
        let rows = x.strides()[last] == 1 || x.shape()[last] == 1;
        let x = if rows { x.clone() } else { x.contiguous()? };
        let mut dims = outer_dims(&x, &out, time);
        let copied = if dims.len() > DIMS { x.contiguous()? } else { x };
        if dims.len() > DIMS {
            out = gpu.uninit(copied.dtype(), copied.shape().clone())?;
            dims = outer_dims(&copied, &out, time);
        }
        launch(&gpu, rotation, &copied, &mut out, &dims)?;
    }
    Ok(out)
}

/// The number of dims, time and the last excepted, over which the kernel loops.
const DIMS: usize = 3;

/// A dim before time: its extent, and its strides in the operand and in the result.
type OuterDim = [usize; 3];

/// Returns the dims before `time`. Neighbours are merged if one stride continues the other in both tensors.
fn outer_dims(x: &Tensor, out: &Tensor, time: usize) -> SmallVec<[OuterDim; 4]> {
    let mut dims: SmallVec<[OuterDim; 4]> = SmallVec::new();
    for dim in (0..time).filter(|&dim| x.shape()[dim] != 1) {
        let next = [x.shape()[dim], x.strides()[dim], out.strides()[dim]];
        match dims.last_mut() {
            Some(held) if held[1] == next[0] * next[1] && held[2] == next[0] * next[2] => {
                *held = [held[0] * next[0], next[1], next[2]];
            }
            _ => dims.push(next),
        }
    }
    dims
}

fn launch(gpu: &Gpu, rotation: &Rotation, x: &Tensor, out: &mut Tensor, dims: &[OuterDim]) -> Result<()> {
    let (time, last) = (x.shape().len() - 2, x.shape().len() - 1);
    let (len, pairs) = (x.shape()[time], x.shape()[last] / 2);
    let mut arg = RotationArg {
        ln: ln_f64(rotation.base),
        sign: if rotation.inverse { -1.0 } else { 1.0 },
        start: rotation.start as u64,
        time: len as u64,
        pairs: pairs as u64,
        time_steps: [x.strides()[time] as u64, out.strides()[time] as u64],
        len: [1; DIMS],
        steps: [0; DIMS],
        out_steps: [0; DIMS],
    };
    for (i, &[n, step, out_step]) in dims.iter().rev().enumerate() {
        let at = DIMS - 1 - i;
        (arg.len[at], arg.steps[at], arg.out_steps[at]) = (n as u64, step as u64, out_step as u64);
    }
    let pack = 16 / x.dtype().size_bytes();
    let whole = |x: &Tensor| {
        x.strides()[..last].iter().zip(x.shape().iter()).all(|(&step, &n)| n <= 1 || step % pack == 0)
            && x.device_address().is_some_and(|at| at % 16 == 0)
    };
    let (stem, pack) =
        if pairs % pack == 0 && whole(x) && whole(out) { ("packs", pack) } else { ("rotary", 1) };
    let blocks = (len * (pairs / pack)).div_ceil(THREADS);
    // No more threads than fill the device, because each thread computes its own sines.
    let count = arg.len.iter().product::<u64>() as usize;
    let shares = (gpu.multiprocessors() as usize * 16).div_ceil(blocks).min(count).min(65535);
    let launch = gpu.kernel("rotary", stem, x.dtype())?.arg(arg).read(x).write(out);
    launch.start([blocks as u32, shares as u32, 1], THREADS as u32, 0)
}

/// The number of threads per block.
const THREADS: usize = 128;

/// `struct Rotation` in `kernels/cuda/rotary.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RotationArg {
    ln: f64,
    sign: f64,
    start: u64,
    time: u64,
    pairs: u64,
    time_steps: [u64; 2],
    len: [u64; DIMS],
    steps: [u64; DIMS],
    out_steps: [u64; DIMS],
}

/// Computes the cosines and sines of positions times angles; see [`RotaryTable`](crate::ops::RotaryTable).
///
/// # Errors
/// Returns the errors of [`rotary`].
pub(super) fn tables(position: &Tensor, angle: &Tensor, dtype: DType, scale: f64) -> Result<[Tensor; 2]> {
    let gpu = Gpu::of(position)?;
    let (position, angle) = (position.contiguous()?, cast(&angle.contiguous()?, DType::F64)?);
    let shape: Shape = position.shape().iter().copied().chain([angle.numel()]).collect();
    let (mut cos, mut sin) = (gpu.uninit(dtype, shape.clone())?, gpu.uninit(dtype, shape)?);
    if cos.numel() > 0 {
        let (count, pairs) = (cos.numel(), angle.numel());
        let launch = gpu.kernel("rotary_table", "rotary_table", dtype)?.read(&position).read(&angle);
        let launch = launch.write(&mut cos).write(&mut sin).arg(scale).arg(count as u64).arg(pairs as u64);
        launch.start(count.div_ceil(256) as u32, 256, 0)?;
    }
    Ok([cos, sin])
}

/// `struct Pairs` in `kernels/cuda/rotary_apply.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct PairsArg {
    sign: f64,
    count: u64,
    pairs: u64,
    interleaved: u64,
    len: [u64; 4],
    steps: [[u64; 4]; 3],
}

/// Rotates pairs of `x` by tables; see [`RotaryApply`](crate::ops::RotaryApply). The result is contiguous.
///
/// # Errors
/// Returns the errors of [`rotary`].
pub(super) fn rotary_apply([x, cos, sin]: [&Tensor; 3], interleaved: bool, inverse: bool) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let mut out = gpu.uninit(x.dtype(), x.shape().clone())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let last = x.shape().len() - 1;
    let row = |t: &Tensor| {
        if t.shape()[last] > 1 && t.strides()[last] != 1 { t.contiguous() } else { Ok(t.clone()) }
    };
    let mut ins = [row(x)?, row(cos)?, row(sin)?];
    let mut dims = common_dims(&ins, last);
    if dims.len() > 4 {
        ins = [x.contiguous()?, cos.contiguous()?, sin.contiguous()?];
        dims = common_dims(&ins, last);
    }
    let pairs = x.shape()[last] / 2;
    let count = x.numel() / 2;
    let mut arg = PairsArg {
        sign: if inverse { -1.0 } else { 1.0 },
        count: count as u64,
        pairs: pairs as u64,
        interleaved: u64::from(interleaved),
        len: [1; 4],
        steps: [[0; 4]; 3],
    };
    for (i, (len, steps)) in dims.iter().rev().enumerate() {
        arg.len[3 - i] = *len as u64;
        (0..3).for_each(|k| arg.steps[k][3 - i] = steps[k] as u64);
    }
    let launch = gpu.kernel("rotary_apply", "rotary_apply", x.dtype())?.arg(arg);
    let launch = launch.read(&ins[0]).read(&ins[1]).read(&ins[2]).write(&mut out);
    launch.start(count.div_ceil(256) as u32, 256, 0)?;
    Ok(out)
}

/// Returns the extents and strides of the dims before `last`. Neighbours are merged if one stride continues the other in
/// all three tensors.
fn common_dims(ins: &[Tensor; 3], last: usize) -> SmallVec<[(usize, [usize; 3]); 4]> {
    let mut dims: SmallVec<[(usize, [usize; 3]); 4]> = SmallVec::new();
    for d in (0..last).filter(|&d| ins[0].shape()[d] != 1) {
        let (n, next) = (ins[0].shape()[d], [0, 1, 2].map(|k| ins[k].strides()[d]));
        match dims.last_mut() {
            Some((len, steps)) if (0..3).all(|k| steps[k] == next[k] * n) => {
                *len *= n;
                *steps = next;
            }
            _ => dims.push((n, next)),
        }
    }
    dims
}
