//! A user's own operators, which use only the public interface, behave like the crate's.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{
    AxisPlacement, Bits, Dropout, MeshAxis, Meta, Metas, Op, Row, Tensors, Unkeyed, Vjp, Windows, Work,
};
use isoshard::placement::Layout;
use isoshard::rng::{Draw, Generator};
use isoshard::tensor::{DType, Tensor};

#[path = "../../examples/08_own_model.rs"]
#[allow(dead_code)]
mod own_model;
#[path = "../../examples/07_own_optimizer.rs"]
#[allow(dead_code)]
mod own_optimizer;

/// Runs the example's optimizer, which implements no private trait: batched, in place, equal bits on four meshes.
#[test]
fn an_own_optimizer_trains_alike_on_every_mesh() {
    own_optimizer::main().unwrap_or_else(|e| panic!("{e}"));
}

/// Runs the example's model, plan and training loop: equal bits on three meshes.
#[test]
fn an_own_model_trains_alike_on_every_mesh() {
    own_model::main().unwrap_or_else(|e| panic!("{e}"));
}

/// Dropout, whose draw is not part of the cache key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OwnDropout {
    draw: Unkeyed<Draw>,
}

impl Op for OwnDropout {
    fn name(&self) -> &'static str {
        "own_dropout"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        Ok(ins.iter().cloned().collect())
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        vec![Row::same(AxisPlacement::S(0), 1)]
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Dropout { p: Bits(0.5), draw: self.draw }.eval(ins, at)
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Dropout { p: Bits(0.5), draw: self.draw }.cuda(ins, at)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Dropout { p: Bits(0.5), draw: self.draw }.work(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(self.clone(), &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// The first draw's plan serves all calls, but the derivative belongs to each call's draw.
#[test]
fn every_draw_has_its_own_derivative() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut generator = Generator::new(1);
        let x = DTensor::full(&mesh, DType::F32, [32], 1.0, "(S0)".parse::<Layout>()?)?.requires_grad()?;
        let mut masks = Vec::new();
        for number in 0..3 {
            let y = DTensor::apply_one(&OwnDropout { draw: Unkeyed(generator.next_draw()) }, &[&x])?;
            let gradient = y.sum_all()?.backward()?.take(&x).expect("x is a leaf");
            let (y, gradient) = (y.full_tensor()?.to_f64_vec(), gradient.full_tensor()?.to_f64_vec());
            assert_eq!(gradient, y, "draw {number}");
            masks.push(y);
        }
        assert!(masks[0] != masks[1] && masks[1] != masks[2]);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}
