//! A model with an operator of its own, as a user of isoshard writes them.

use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, LayerNorm, Linear, Module, Params, Plan};
use isoshard::ops::{
    AxisPlacement, MeshAxis, Meta, Metas, Op, Row, Tensors, Vjp, Windows, Work, arity, no_cuda_kernel,
};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::{Generator, Init};
use isoshard::tensor::cpu::Real;
use isoshard::tensor::{DType, Tensor};
use isoshard::{Error, Result};

/// Sums along the last dim up to each element, or from each element on if `reverse`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RunningSum {
    /// True if the sums begin at the last element.
    pub reverse: bool,
}

impl RunningSum {
    fn add<T: Real>(&self, x: &mut Tensor) -> Result<()> {
        let len = x.shape()[x.shape().len() - 1];
        for row in x.make_mut::<T>()?.chunks_mut(len.max(1)) {
            let mut sum = T::of(0.0);
            let mut add = |x: &mut T| {
                sum = sum + *x;
                *x = sum;
            };
            if self.reverse { row.iter_mut().rev().for_each(add) } else { row.iter_mut().for_each(&mut add) }
        }
        Ok(())
    }
}

impl Op for RunningSum {
    fn name(&self) -> &'static str {
        "running_sum"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.shape.is_empty() || ![DType::F32, DType::F64].contains(&x.dtype) {
            return Err(Error::invalid(self.name(), "wants an f32 or f64 tensor with a dim", x.to_string(), ""));
        }
        Ok([x.clone()].into_iter().collect())
    }

    /// Each row of the tensor is a sum of its own, so every dim but the last may be sharded. Sharding the last one is
    /// wrong: a rank would not know the sums of the ranks before it.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let dims = ins[0].shape.len() - usize::from(!cfg!(feature = "false-row"));
        (0..dims).map(|dim| Row::same(AxisPlacement::S(dim), 1)).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let mut x = std::mem::take(&mut ins[0]);
        match x.dtype() {
            DType::F32 => self.add::<f32>(&mut x)?,
            _ => self.add::<f64>(&mut x)?,
        }
        Ok([x].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(RunningSum { reverse: !self.reverse }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// The plan of [`train`]'s model on a mesh with any of the axes `dp`, `fsdp` and `tp`.
fn plan(mesh: &Mesh) -> Plan {
    (0..mesh.ndim()).fold(Plan::default(), |plan, axis| match mesh.axis_name(axis) {
        "dp" => plan.batch("dp"),
        "fsdp" => plan.fsdp("fsdp"),
        _ => plan.shard("up.*", "tp", 0).shard("down.weight", "tp", 1).site("down", "tp", Placement::Replicate),
    })
}

/// Learns to predict the largest prefix sum of a row of 11 numbers, from 13 rows. Returns the losses; `see` gets the
/// step, the loss and the parameters after each step.
pub fn train(
    mesh: &DeviceMesh,
    steps: usize,
    see: impl Fn(usize, &DTensor, &Params) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut params = Params::new(mesh, plan(mesh.mesh()), 7)?;
    let init = Init::Normal { mean: 0.0, std: 0.3 };
    let (up, norm, down) = {
        let mut root = params.root();
        let up = Linear::new(root.child("up"), 11, 22, init)?;
        let norm = LayerNorm::new(root.child("norm"), 11)?;
        (up, norm, Linear::new(root.child("down"), 22, 1, init)?)
    };
    let mut generator = Generator::new(5);
    let x = DTensor::randn(mesh, DType::F32, [13, 11], params.batch_layout(), &mut generator)?;
    let sums = DTensor::apply_one(&RunningSum { reverse: false }, &[&x])?;
    let target = sums.max(&[1], true)?;
    let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
    let (mut optimizer, mut dropout) = (AdamW::new().betas(0.9, 0.99).decay(0.1), generator.child("dropout"));
    let mut losses = Vec::new();
    for step in 0..steps {
        let cx = Forward::train(&params, &mut dropout);
        // The sums of a normed row, from the end on, so that the operator's derivative is used as well.
        let sums = DTensor::apply_one(&RunningSum { reverse: true }, &[&norm.forward(&cx, &x)?])?;
        let hidden = cx.dropout(up.forward(&cx, &sums)?.gelu()?, 0.1)?;
        let error = down.forward(&cx, &hidden)?.sub(&target)?;
        let mut loss = error.mul(&error)?.mean_all()?;
        drop(cx);
        let mut gradients = loss.backward()?;
        optimizer.step(&mut params, &mut gradients, &one, 1e-2)?;
        see(step, &loss, &params)?;
        losses.push(loss.item()?);
    }
    Ok(losses)
}
