//! CUDA kernels of layer norm and RMS norm over the last dim, and of their derivatives: the counterpart of `cpu.rs`.

use crate::error::{Error, Result};
use crate::tensor::cuda::reduce::{LeafKind, THREAD, TreeSpread, columns_blocks, run_stages, wide};
use crate::tensor::cuda::{Gpu, RowEntries, RowLaunch, entries, statistic};
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// Computes a layer norm, as [`cpu::layer_norm`](super::cpu::layer_norm).
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(crate) fn layer_norm(
    verb: &str,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let gpu = Gpu::of(x)?;
    let (x, weight, bias) = (x.contiguous()?, packed(weight)?, packed(bias)?);
    let mut y = gpu.uninit(x.dtype(), x.shape())?;
    let (mut mean, mut rstd) = (statistic(&gpu, &x)?, statistic(&gpu, &x)?);
    if x.numel() > 0 {
        let rows = RowLaunch::of(verb, &x)?;
        let operands = [&x, &y].into_iter().chain(&weight).chain(&bias);
        let launch = rows.kernel(&gpu, entries!("layer_norm"), operands)?.read(&x);
        let launch = launch.read_or_null(weight.as_ref()).read_or_null(bias.as_ref());
        rows.run(&gpu, launch.write(&mut y).write(&mut mean).write(&mut rstd).arg(eps), 1)?;
    }
    Ok((y, mean, rstd))
}

/// Computes an RMS norm, as [`cpu::rms_norm`](super::cpu::rms_norm).
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub(crate) fn rms_norm(
    verb: &str,
    x: &Tensor,
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(x)?;
    let (x, weight) = (x.contiguous()?, packed(weight)?);
    let (mut y, mut rstd) = (gpu.uninit(x.dtype(), x.shape())?, statistic(&gpu, &x)?);
    if x.numel() > 0 {
        let rows = RowLaunch::of(verb, &x)?;
        let operands = [&x, &y].into_iter().chain(&weight);
        let launch = rows.kernel(&gpu, entries!("rms_norm"), operands)?.read(&x);
        let launch = launch.read_or_null(weight.as_ref());
        rows.run(&gpu, launch.write(&mut y).write(&mut rstd).arg(eps), 1)?;
    }
    Ok((y, rstd))
}

/// Computes the gradients of a layer norm, as [`cpu::layer_norm_backward`](super::cpu::layer_norm_backward).
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub(crate) fn layer_norm_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let pass = CudaNormBackward::new(verb, entries!("layer_norm_grad"), [dy, x], weight, Some(mean), rstd)?;
    let (dx, dw, db) = pass.run()?;
    Ok((dx, dw, db.expect("a norm with a mean has a bias")))
}

/// Computes the gradient of the input of a layer norm without weight and bias.
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub(super) fn layer_norm_input_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<Tensor> {
    CudaNormBackward::new(verb, entries!("layer_norm_grad"), [dy, x], None, Some(mean), rstd)?.input()
}

/// Computes the gradients of an RMS norm, as [`cpu::rms_norm_backward`](super::cpu::rms_norm_backward).
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub(crate) fn rms_norm_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (dx, dw, _) =
        CudaNormBackward::new(verb, entries!("rms_norm_grad"), [dy, x], weight, None, rstd)?.run()?;
    Ok((dx, dw))
}

struct CudaNormBackward<'a> {
    verb: &'a str,
    gpu: Gpu,
    entries: RowEntries,
    dy: Tensor,
    x: Tensor,
    weight: Option<Tensor>,
    mean: Option<Tensor>,
    rstd: Tensor,
}

impl<'a> CudaNormBackward<'a> {
    fn new(
        verb: &'a str,
        entries: RowEntries,
        [dy, x]: [&Tensor; 2],
        weight: Option<&Tensor>,
        mean: Option<&Tensor>,
        rstd: &Tensor,
    ) -> Result<CudaNormBackward<'a>> {
        Ok(CudaNormBackward {
            verb,
            gpu: Gpu::of(x)?,
            entries,
            dy: dy.contiguous()?,
            x: x.contiguous()?,
            weight: packed(weight)?,
            mean: packed(mean)?,
            rstd: rstd.contiguous()?,
        })
    }

    fn run(self) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let (gpu, x) = (&self.gpu, &self.x);
        let dx = self.input()?;
        if x.numel() == 0 {
            let width = [*x.shape().last().expect("a norm refuses a tensor without dims")];
            let none = || gpu.zeros(x.dtype(), width);
            return Ok((dx, none()?, self.mean.is_some().then(none).transpose()?));
        }
        let (dw, db) = self.weights()?;
        Ok((dx, dw, db))
    }

    /// Computes the gradient of the input.
    fn input(&self) -> Result<Tensor> {
        let (gpu, x) = (&self.gpu, &self.x);
        let mut dx = gpu.uninit(x.dtype(), x.shape())?;
        if x.numel() == 0 {
            return Ok(dx);
        }
        let rows = RowLaunch::of(self.verb, x)?;
        let operands = [&self.dy, x, &dx].into_iter().chain(&self.weight);
        let launch = rows.kernel(gpu, self.entries, operands)?.read(&self.dy).read(x);
        let launch = launch.read_or_null(self.weight.as_ref());
        let launch = if let Some(mean) = &self.mean { launch.read(mean) } else { launch };
        rows.run(gpu, launch.read(&self.rstd).write(&mut dx), 2)?;
        Ok(dx)
    }

    /// Computes the gradients of weight and bias, which are sums over all leading dims. One launch for both computes
    /// the innermost leading dim up to a few topmost nodes; further launches add these and the other dims.
    fn weights(&self) -> Result<(Tensor, Option<Tensor>)> {
        let shape = self.x.shape();
        let (&width, leading) = shape.split_last().expect("a norm refuses a tensor without dims");
        let (n, outer) = leading.split_last().map_or((1, &[][..]), |(&n, outer)| (n, outer));
        let outer_len: usize = outer.iter().product();
        let columns = outer_len * width;
        if columns > u32::MAX as usize || n > i32::MAX as usize {
            let given = self.x.notation();
            return Err(Error::unsupported(
                self.verb,
                "2^32 columns or more in one kernel",
                given,
                "split it",
            ));
        }
        let TreeSpread { depth, split, team } =
            TreeSpread::new(n, columns, self.gpu.multiprocessors() as usize * 1024, THREAD);
        let parts: Shape = outer.iter().copied().chain([1 << split, width]).collect();
        let acc = wide(self.x.dtype());
        let mut dw = self.gpu.uninit(acc, parts.clone())?;
        let mut db = self.mean.is_some().then(|| self.gpu.uninit(acc, parts)).transpose()?;
        let launch =
            self.gpu.kernel(self.entries.file, "weights", self.x.dtype())?.read(&self.dy).read(&self.x);
        let launch = if let Some(mean) = &self.mean { launch.read(mean) } else { launch };
        let mut launch = launch.read(&self.rstd).write(&mut dw);
        if let Some(db) = &mut db {
            launch = launch.write(db);
        }
        let launch = launch.arg(outer_len as u64).arg(width as u32).arg(n as u32);
        let launch = launch.arg(depth).arg(split).arg(team);
        launch.start([columns_blocks(columns, team), 1 << split, 1], [32, 8, 1], 0)?;
        let inner = (split > 0).then_some((outer.len(), LeafKind::Pairs));
        let outer = (0..outer.len()).rev().filter(|&d| outer[d] != 1).map(|d| (d, LeafKind::One));
        let stages: Vec<(usize, LeafKind)> = inner.into_iter().chain(outer).collect();
        let whole = |parts: Tensor| self.whole(parts, &stages, width);
        Ok((whole(dw)?, db.map(whole).transpose()?))
    }

    fn whole(&self, parts: Tensor, stages: &[(usize, LeafKind)], width: usize) -> Result<Tensor> {
        let dtype: DType = self.x.dtype();
        run_stages(self.verb, parts, stages, ReduceOp::Sum, dtype)?.reshape([width])
    }
}

fn packed(x: Option<&Tensor>) -> Result<Option<Tensor>> {
    x.map(Tensor::contiguous).transpose()
}
