//! 9. An operator of your own: a scan along a dim, equal bits on four meshes. `cargo run --example 09_own_operator`

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{
    Algebra, AxisPlacement, Bits, MeshAxis, Meta, Metas, Op, Row, Tensors, Vjp, Windows, Work, arity,
    no_cuda_kernel,
};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::cpu::Real;
use isoshard::tensor::{DType, Tensor};
use isoshard::{Error, Result};

/// The discounted sum along the last dim: `y[t] = x[t] + gamma y[t - 1]`, or `x[t] + gamma y[t + 1]` if `reverse`, as
/// the returns of a sequence of rewards. On f32 and f64.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DiscountedSum {
    /// The discount per step.
    pub gamma: Bits,
    /// True if the last element is the first step.
    pub reverse: bool,
}

impl DiscountedSum {
    fn scan<T: Real>(&self, x: &mut Tensor) -> Result<()> {
        let steps = x.shape()[x.shape().len() - 1];
        let gamma = T::of(self.gamma.0);
        for row in x.make_mut::<T>()?.chunks_mut(steps.max(1)) {
            let mut y = T::of(0.0);
            let mut add = |x: &mut T| {
                y = y.mul_add(gamma, *x);
                *x = y;
            };
            if self.reverse { row.iter_mut().rev().for_each(add) } else { row.iter_mut().for_each(&mut add) }
        }
        Ok(())
    }
}

impl Op for DiscountedSum {
    fn name(&self) -> &'static str {
        "discounted_sum"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.shape.is_empty() || ![DType::F32, DType::F64].contains(&x.dtype) {
            let rule = "wants an f32 or f64 tensor with a dim";
            return Err(Error::invalid(self.name(), rule, x.to_string(), "cast or reshape it"));
        }
        Ok([x.clone()].into_iter().collect())
    }

    /// Any dim but the last may be sharded: a later step needs all earlier ones. A row `S(last) -> S(last)` would be
    /// false. The operator is linear, so in fast mode it takes a partial sum as it is.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = 0..ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 1)).collect();
        rows.extend(Algebra::Linear.rows(1));
        rows
    }

    /// In place, if the operand has no other owner.
    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let mut x = std::mem::take(&mut ins[0]);
        match x.dtype() {
            DType::F32 => self.scan::<f32>(&mut x)?,
            _ => self.scan::<f64>(&mut x)?,
        }
        Ok([x].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    /// A fused multiply-add for each element.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(2, ins, outs)
    }

    /// The transposed map is the scan in the other direction.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(DiscountedSum { reverse: !self.reverse, ..self.clone() }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// The returns of 5 sequences of 33 rewards and the gradient of their mean square, and the bytes that rank 0 received
/// for them.
fn returns(mesh: &'static str, layout: &'static str) -> Result<([Vec<f32>; 2], u64)> {
    let mut results = spmd(Mesh::parse(mesh, 0)?.rank_len(), move |rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let mut generator = Generator::new(7);
        let rewards = DTensor::randn(&mesh, DType::F32, [5, 33], layout, &mut generator)?;
        let rewards = rewards.requires_grad()?;
        let op = DiscountedSum { gamma: Bits(0.95), reverse: true };
        let returns = DTensor::apply_one(&op, &[&rewards])?;
        let gradient = returns.mul(&returns)?.mean_all()?.backward()?.take(&rewards).expect("a leaf tensor");
        let received = mesh.received_bytes();
        let [returns, gradient] = [returns, gradient].map(|x| x.full_tensor()?.to_vec());
        Ok(([returns?, gradient?], received))
    })?;
    Ok(results.swap_remove(0))
}

/// Runs the operator on four meshes, and compares.
///
/// # Errors
/// Returns an error if a rank fails.
pub fn main() -> Result<()> {
    let (want, _) = returns("1", "()")?;
    println!("the first returns are {:?}", &want[0][..3]);
    for (mesh, layout) in [("dp=3", "(S0)"), ("dp=2,tp=2", "(S0, S1)"), ("tp=4", "(S1)")] {
        let (got, received) = returns(mesh, layout)?;
        assert_eq!(got, want, "{mesh}");
        println!("{mesh:>10} {layout:<9} gives the same bits; rank 0 received {received} bytes");
    }
    Ok(())
}
