//! The judge of operators that a user writes: those that take one dtype alone, and samples that no rank takes. Each
//! sample of the crate's own takes f32 and f64, so none is judged in one of them only.

use isoshard::ops::{
    AxisPlacement, Input, InputFill, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work,
    arity, no_cuda_kernel,
};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, Judge, judge, values};
use isoshard::{Error, Result};

use crate::common::samples::catalog;

/// Counts the rows above each row of a matrix; on the shard alone if `wrong`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RowNumbers {
    dtype: DType,
    wrong: bool,
}

impl Op for RowNumbers {
    fn name(&self) -> &'static str {
        "row_numbers"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.dtype != self.dtype {
            return Err(Error::invalid(self.name(), "takes one dtype", x.to_string(), "cast it"));
        }
        Ok([x.clone()].into_iter().collect())
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        vec![Row::same(AxisPlacement::S(0), 1), Row::same(AxisPlacement::S(1), 1)]
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let first = if self.wrong { 0 } else { at.outs[0].start(0) };
        let shape = at.outs[0].local();
        let (columns, mut y) = (shape[1].max(1), ins[0].to_f64_vec());
        y.iter_mut().enumerate().for_each(|(e, y)| *y += (first + e / columns) as f64);
        Ok([values::tensor(self.dtype, &y, shape)].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("this test has no use for it")
    }
}

fn sample(dtype: DType, wrong: bool) -> Sample {
    let input = Input { meta: Meta::new(dtype, [5, 3]), fill: InputFill::Ints };
    Sample::new(RowNumbers { dtype, wrong }, [input])
}

#[test]
fn operators_of_one_dtype_are_judged() {
    for dtype in [DType::F32, DType::F64] {
        let verdict = judge(&sample(dtype, false));
        verdict.assert();
        assert!(verdict.rows >= 6 && verdict.pairs > 0 && verdict.resized > 0, "{verdict}");
        let text = judge(&sample(dtype, true)).to_string();
        let place = format!("{dtype}[5, 3]@(a:S0) -> result 0 {dtype}[5, 3]@(a:S0): rank 1, element 9");
        assert!(text.contains("the row S0 -> S0 is wrong") && text.contains(&place), "{text}");
    }
}

#[test]
fn refused_samples_are_wrong_and_say_why() {
    let refused = Sample::new(RowNumbers { dtype: DType::F64, wrong: false }, [Input::ints([5, 3])]);
    let text = judge(&refused).to_string();
    let why = "a single rank refuses the sample: row_numbers: takes one dtype; got f32[5, 3]";
    assert!(text.contains(why), "{text}");
    // No value of these operands fits a table of one row.
    let beyond = Sample::new(isoshard::ops::Embedding, [Input::ints([1, 3]), Input::index([4], 9)]);
    let text = judge(&beyond).to_string();
    assert!(text.contains("a single rank refuses the sample: embedding:"), "{text}");
}

#[test]
fn samples_of_the_crate_take_f32_and_f64() {
    for sample in catalog() {
        for dtype in [DType::F32, DType::F64] {
            let metas: Vec<Meta> = values::values(&sample, dtype, 1).iter().map(Meta::of).collect();
            assert!(sample.op.infer(&metas).is_ok(), "{sample:?} in {dtype}");
        }
    }
}

#[test]
fn losses_in_f64_are_steps() {
    let check = Equivalence::new(|mesh| {
        let ranks = mesh.mesh().rank_len();
        Ok(vec![0.5, if ranks > 1 { 0.25 } else { 0.125 }])
    });
    let text = check.check().expect_err("the second loss differs").to_string();
    assert!(text.contains("step 1, loss: element [] is 2.5e-1"), "{text}");
}

/// Adds 1 to the first row of a matrix and 2 to its last. If `wrong`, a part of two is taken for either the upper or the
/// lower one: parts that two ragged axes cut also lie between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MarkEnds {
    wrong: bool,
}

impl Op for MarkEnds {
    fn name(&self) -> &'static str {
        "mark_ends"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        Ok([x.clone()].into_iter().collect())
    }

    fn rows(&self, _: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let listed = axis.ranks == 2 && axis.ragged().is_some_and(|cut| cut.dims == 1);
        listed.then(|| Row::same(AxisPlacement::Ragged, 1)).into_iter().collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (shape, x) = (at.outs[0].local(), Meta::of(&ins[0]));
        let (rows, columns, mut y) = (shape[0], shape[1], ins[0].to_f64_vec());
        if rows > 0 {
            let first = at.outs[0].start(0);
            let is_upper = first == 0;
            let is_lower = if self.wrong {
                !is_upper || rows == at.outs[0].global[0]
            } else {
                first + rows == at.outs[0].global[0]
            };
            if is_upper {
                y[..columns].iter_mut().for_each(|y| *y += 1.0);
            }
            if is_lower {
                y[(rows - 1) * columns..].iter_mut().for_each(|y| *y += 2.0);
            }
        }
        Ok([values::tensor(x.dtype, &y, shape)].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("this test has no use for it")
    }
}

/// Each row holds by itself. Only parts of parts, several on either axis, show that they do not hold together.
#[test]
fn rows_that_fail_for_ragged_shards_within_ragged_shards_are_found() {
    let sample = |wrong: bool| Sample::new(MarkEnds { wrong }, [Input::ints([9, 3])]);
    judge(&sample(false)).assert();
    let judge = Judge::new(&sample(true));
    judge.one_axis().assert();
    judge.one_axis_by_bits().assert();
    for verdict in [judge.two_axes(), judge.two_axes_by_bits()] {
        let text = verdict.to_string();
        let place = "[9, 3]@(a:RS(0..1; 3,6), b:RS(0..1; 1,2))";
        assert!(text.contains("the rows [RS -> RS, RS -> RS] are wrong together"), "{text}");
        assert!(text.contains(place), "{text}");
    }
}
