//! A user's own operators, which use only the public interface, behave like the crate's.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{
    Add, Algebra, AxisPlacement, Bits, Dropout, Expand, Input, MeshAxis, Meta, Metas, Mul, Op, Pointwise,
    Reshape, Row, Sample, Tensors, Unkeyed, Vjp, Windows, Work, arity, no_cuda_kernel,
};
use isoshard::placement::{Layout, Leaf};
use isoshard::rng::{Draw, Generator};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor, cpu};
use isoshard::testing::judge;
use isoshard::{Error, Result};

use crate::common::shim;

#[path = "../../examples/08_own_model.rs"]
#[allow(dead_code)]
mod own_model;
#[path = "../../examples/09_own_operator.rs"]
#[allow(dead_code)]
mod own_operator;
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
        let x = DTensor::full(&mesh, DType::F32, [32], "(S0)", 1.0)?.requires_grad()?;
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

/// Runs the example's operator, which has no CUDA kernel: equal bits on four meshes.
#[test]
fn an_own_operator_is_alike_on_every_mesh() {
    own_operator::main().unwrap_or_else(|e| panic!("{e}"));
}

/// On a device the operator refuses by name, in the forward pass and in a derivative that reaches it, on every rank.
#[test]
fn an_operator_without_a_cuda_kernel_is_refused_by_name() {
    let Some(device) = shim::device() else { return };
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank.on(device), &[("dp", 2)])?;
        let x = DTensor::full(&mesh, DType::F32, [4, 3], "(S0)", 1.0)?;
        let op = own_operator::DiscountedSum { gamma: Bits(0.5), reverse: false };
        Ok(DTensor::apply_one(&op, &[&x]).unwrap_err().to_string())
    };
    let said = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(said, ["discounted_sum: has no CUDA kernel; got f32[2, 3]; use a mesh on Device::Cpu"; 2]);
}

/// An operator whose kernel returns one row too many.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct WrongShape;

impl Pointwise for WrongShape {
    const NAME: &'static str = "wrong_shape";
    const ARITY: usize = 1;

    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        Ok(ins[0].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        Ok(Tensor::zeros(ins[0].dtype(), [ins[0].shape()[0] + 1]))
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        no_cuda_kernel(self, ins)
    }

    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("it is not written")
    }
}

#[test]
fn a_kernel_with_a_wrong_shape_is_an_error() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let x = DTensor::zeros(&mesh, DType::I32, [3], "(S0)")?;
        Ok(DTensor::apply_one(&WrongShape, &[&x]).unwrap_err().to_string())
    };
    let said = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    let text = |given: usize, due: usize| {
        format!(
            "wrong_shape: the kernel's results are not this rank's shards of what infer states; got i32[{given}] for \
             i32[3]@(dp:S0); return i32[{due}]"
        )
    };
    assert_eq!(said, [text(3, 2), text(2, 1)]);
}

/// The sum of squares over the last dim, whose rows let a rank sum its own part of that dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SumOfSquares;

impl Op for SumOfSquares {
    fn name(&self) -> &'static str {
        "sum_of_squares"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if ![DType::F32, DType::F64].contains(&x.dtype) || x.shape.is_empty() {
            let rule = "wants an f32 or f64 tensor with a dim";
            return Err(Error::invalid(self.name(), rule, x.to_string(), ""));
        }
        let kept = &x.shape[..x.shape.len() - 1];
        Ok([Meta::new(x.dtype, kept)].into_iter().collect())
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 1)).collect();
        rows.push(Row::new([AxisPlacement::S(last)], [AxisPlacement::TreeSum(Leaf::Pairs)]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let last = ins[0].shape().len() - 1;
        let squares = match ins[0].dtype() {
            DType::F64 => cpu::map1::<f64, f64, _>(&ins[0], |x| x * x)?,
            _ => cpu::map1::<f32, f32, _>(&ins[0], |x| x * x)?,
        };
        Ok([cpu::reduce(self.name(), &squares, &[last], ReduceOp::Sum, false)?].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(2, ins, outs)
    }

    /// `2 x dy`.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let Meta { shape, .. } = g.input_meta(0).clone();
        let column: Shape = shape[..shape.len() - 1].iter().copied().chain([1]).collect();
        let (x, dy) = (g.input(0), g.grad(0));
        let dy = g.apply(Reshape { shape: column }, &[dy])?;
        let dy = g.apply(Expand { shape }, &[dy])?;
        let twice = g.apply(Add, &[x, x])?;
        let dx = g.apply(Mul, &[twice, dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// An own sum follows the reduction tree: a sharded last dim gives a partial sum with the bits of a single rank, also if
/// the shards are several nodes of the tree.
#[test]
fn an_own_sum_follows_the_tree() {
    let sums = |ranks: usize, layout: &'static str| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::new(&rank, &[("tp", ranks)])?;
            let mut generator = Generator::new(3);
            let x = DTensor::randn(&mesh, DType::F32, [3, 1000], layout.parse::<Layout>()?, &mut generator)?;
            let x = x.requires_grad()?;
            let y = DTensor::apply_one(&SumOfSquares, &[&x])?;
            // Halves, quarters and eighths are nodes of the tree.
            if layout == "(S1)" && ranks.is_power_of_two() {
                assert!(y.layout().has_partial(), "{}", y.spec());
            }
            let gradient = y.exp()?.sum_all()?.backward()?.take(&x).expect("a leaf tensor");
            let [y, gradient] = [y, gradient].map(|t| t.full_tensor()?.to_vec::<f32>());
            Ok((y?, gradient?))
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{e}")).remove(0)
    };
    let want = sums(1, "(R)");
    for ranks in [2, 3, 4, 5, 8] {
        for layout in ["(S1)", "(S0)"] {
            assert!(sums(ranks, layout) == want, "{layout} on {ranks} ranks");
        }
    }
}

/// The rows of both hold in the judge of the crate's own operators.
#[test]
fn the_judge_passes_own_operators() {
    for reverse in [false, true] {
        let op = own_operator::DiscountedSum { gamma: Bits(0.5), reverse };
        let verdict = judge(&Sample::new(op, [Input::ints([5, 3, 7])]));
        verdict.assert();
        assert!(verdict.rows > 0);
    }
    judge(&Sample::new(SumOfSquares, [Input::ints([3, 65])])).assert();
}
