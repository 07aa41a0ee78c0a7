//! An operator of a user that breaks a clause of the contract of `Op` gets an error in its name, on one rank and on several.

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::ops::{
    AxisPlacement, MeshAxis, Meta, Metas, Mul, Op, Row, Tensors, Vjp, VjpValue, Windows, Work, eval_whole,
    no_cuda_kernel,
};
use isoshard::placement::Leaf;
use isoshard::tensor::{DType, Tensor};
use isoshard::{Error, Result};

/// The clause that an operator on a matrix breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Clause {
    FewerResultsInRow,
    FewerOperandsInRow,
    DimOfOperand,
    DimOfResult,
    TreeSumOfOperand,
    TreeSumOfNothing,
    TreeSumForSomeAxes,
    RaggedWithoutOperand,
    FewerResults,
    MoreResults,
    OtherShape,
    OtherDtype,
    SetBeyond,
    SetOtherShape,
    InputBeyond,
    GradBeyond,
    NoneBeyond,
    ForeignValue,
    NoAnswer,
}

use Clause::*;

const CLAUSES: [(Clause, &str); 19] = [
    (
        FewerResultsInRow,
        "a row has one placement per operand and one per result; got S0 -> S0 for (f32[4, 3]) -> (f32[4, 3], f32[4, 3])",
    ),
    (FewerOperandsInRow, "a row has one placement per operand and one per result; got -> S0 for"),
    (DimOfOperand, "a row shards a dim that the tensor has; got operand 0 in S99 -> S0 for (f32[4, 3])"),
    (DimOfResult, "a row shards a dim that the tensor has; got result 0 in S0 -> S2 for"),
    (TreeSumOfOperand, "only a result of a row is a tree sum"),
    (TreeSumOfNothing, "a row with a tree sum shards an operand"),
    (TreeSumForSomeAxes, "the rows with a tree sum are the same for every axis"),
    (RaggedWithoutOperand, "a result is ragged if an operand is"),
    (FewerResults, "the kernel returns one tensor per result; got 0 result(s), (), of 1 that infer states"),
    (MoreResults, "the kernel returns one tensor per result; got 2 result(s)"),
    (OtherShape, "the kernel's result"),
    (OtherDtype, "the kernel's result"),
    (SetBeyond, "the derivative names the operands that there are; got operand 7 of 1 in `set`"),
    (SetOtherShape, "the gradient of operand 0 has the operand's shape and dtype; got f32[4] for f32[4, 3]"),
    (InputBeyond, "the derivative names the operands that there are; got operand 1 of 1 in `input`"),
    (GradBeyond, "the derivative names the results that there are; got result 1 of 1 in `grad`"),
    (NoneBeyond, "the derivative names the operands that there are; got operand 3 of 1 in `none`"),
    (ForeignValue, "the derivative names the values that there are"),
    (NoAnswer, "no derivative with respect to operand 0"),
];

/// Copies a matrix, but for the clause.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Breaks(Clause);

impl Op for Breaks {
    fn name(&self) -> &'static str {
        "breaks"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let len = if self.0 == FewerResultsInRow { 2 } else { 1 };
        Ok((0..len).map(|_| ins[0].clone()).collect())
    }

    fn rows(&self, _: &[Meta], axis: MeshAxis) -> Vec<Row> {
        use AxisPlacement::{R, Ragged, S, TreeSum};
        let sum = TreeSum(Leaf::Pairs);
        let row = match self.0 {
            FewerOperandsInRow => Row::new([], [S(0)]),
            DimOfOperand => Row::new([S(99)], [S(0)]),
            DimOfResult => Row::new([S(0)], [S(2)]),
            TreeSumOfOperand => Row::new([sum], [S(0)]),
            TreeSumOfNothing => Row::new([R], [sum]),
            TreeSumForSomeAxes if axis.ranks > 1 => Row::new([S(0)], [sum]),
            RaggedWithoutOperand => Row::new([S(0)], [Ragged]),
            _ => Row::new([S(0)], [S(0)]),
        };
        vec![row]
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = ins[0].clone();
        Ok(match self.0 {
            FewerResults => Tensors::new(),
            FewerResultsInRow | MoreResults => [x.clone(), x].into_iter().collect(),
            OtherShape => [x.reshape([x.shape()[1], x.shape()[0]])?].into_iter().collect(),
            OtherDtype => [x.cast(DType::F64)?].into_iter().collect(),
            _ => [x].into_iter().collect(),
        })
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        match self.0 {
            SetBeyond => g.set(7, dy),
            SetOtherShape => {
                let sum = isoshard::ops::Sum { dims: [1].into_iter().collect(), keep: false };
                let row_sums = g.apply(sum, &[dy])?;
                g.set(0, row_sums);
            }
            InputBeyond => {
                let x = g.input(1);
                let dx = g.apply(Mul, &[x, dy])?;
                g.set(0, dx);
            }
            GradBeyond => g.set(0, g.grad(1)),
            NoneBeyond => g.none(3, "it is not there"),
            ForeignValue => {
                let dx = g.apply(Mul, &[dy, foreign()])?;
                g.set(0, dx);
            }
            NoAnswer => {}
            _ => g.set(0, dy),
        }
        Ok(())
    }
}

/// A value of a longer program.
fn foreign() -> VjpValue {
    let x = Meta::new(DType::F32, [4, 3]);
    let program = Vjp::write(&isoshard::ops::Tan, &[x], &[true]).expect("it has a derivative");
    program.grads[0].expect("it is wanted")
}

fn call(mesh: &DeviceMesh, clause: Clause, layout: &str) -> Result<()> {
    let x = DTensor::full(mesh, DType::F32, [4, 3], layout, 1.0)?.requires_grad()?;
    let y = DTensor::apply(&Breaks(clause), &[&x])?;
    y[0].sum_all()?.backward()?;
    Ok(())
}

#[test]
fn each_broken_clause_is_an_error_in_the_operators_name() {
    for ranks in [1, 2, 3] {
        for (clause, text) in CLAUSES {
            for layout in ["(S0)", "(R)", "(S1)"] {
                for fast in [false, true] {
                    let run = move |rank| {
                        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
                        if fast {
                            mesh.set_reduction(Reduction::Fast);
                        }
                        Ok(call(&mesh, clause, layout).err().map(|e| e.to_string()))
                    };
                    let said = spmd(ranks, run).unwrap_or_else(|e| panic!("{clause:?}: {e}"));
                    for said in said {
                        // An axis of one rank, or one along which nothing is cut, has no other rows.
                        if clause == TreeSumForSomeAxes && (ranks == 1 || layout == "(R)") {
                            continue;
                        }
                        let said = said
                            .unwrap_or_else(|| panic!("{clause:?} on {ranks} ranks of {layout}: no error"));
                        let is_told = said.starts_with("breaks: ") && said.contains(text);
                        assert!(is_told, "{clause:?} on {ranks} ranks of {layout}: {said}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_kernel_on_whole_tensors_keeps_the_contract_too() {
    let x = Tensor::zeros(DType::F32, [4, 2]);
    for (clause, text) in [
        (
            FewerResults,
            "breaks: the kernel returns one tensor per result; got 0 result(s), (), of 1 that infer states",
        ),
        (
            OtherShape,
            "breaks: the kernel's result 0 has the shape of its window; got f32[2, 4] for [4, 2]; mend Op::eval",
        ),
        (
            OtherDtype,
            "breaks: the kernel's result 0 has the dtype that infer states; got f64[4, 2] for f32[4, 2]",
        ),
    ] {
        let said: Error = eval_whole(&Breaks(clause), std::slice::from_ref(&x)).unwrap_err();
        assert!(said.to_string().starts_with(text), "{said}");
    }
}
