//! Reductions, softmax, norms, folds, operators on indices and optimizers on a CUDA device have the CPU's
//! bits, at lengths around those of leaves and warps, in any order of threads. Without a device, the shim compiles
//! the same kernels for the CPU.

use std::slice::from_ref;
use std::sync::Arc;

use crate::common::samples::catalog;
use crate::common::shim::{self, Order};
use crate::common::{self, bits_differ, mix, ordinary};
use isoshard::ops::*;
use isoshard::placement::Region;
use isoshard::tensor::{DType, Device, Dims, FoldOrder, FoldStep, ReduceOp, Shape, Tensor, cuda};

pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const LENGTHS: [usize; 16] = [1, 2, 3, 9, 31, 32, 33, 63, 65, 97, 128, 129, 300, 1000, 4097, 9001];

pub fn to(device: Device, ins: &[Tensor]) -> Vec<Tensor> {
    ins.iter().map(|x| x.to_device(device).expect("there is room")).collect()
}

/// Runs the operator on the CPU and on the device, and returns the CPU's results.
pub fn compare(op: &dyn Op, device: Device, ins: &[Tensor]) -> Tensors {
    let want = eval_whole(op, ins).unwrap_or_else(|e| panic!("{op:?} of {ins:.0?}: {e}"));
    let got = eval_whole(op, &to(device, ins)).unwrap_or_else(|e| panic!("{op:?} of {ins:.0?}: {e}"));
    assert_same(op, &got, &want);
    want
}

pub fn assert_same(op: &dyn Op, got: &[Tensor], want: &[Tensor]) {
    for (k, (got, want)) in got.iter().zip(want).enumerate() {
        if let Some(difference) = bits_differ(got, want) {
            panic!("{op:?}, result {k}: {difference}");
        }
    }
}

/// Returns the columns `at..at + n` of a wider tensor on the device, whose rows have any alignment.
fn strided(device: Device, x: &Tensor, at: usize) -> Tensor {
    let last = x.shape().len() - 1;
    let n = x.shape()[last];
    let wide = cat(&[pad_of(x, at), x.clone(), pad_of(x, 3)], last);
    wide.to_device(device).and_then(|t| t.narrow(last, at, n)).expect("there is room")
}

fn pad_of(x: &Tensor, n: usize) -> Tensor {
    let mut shape = x.shape().clone();
    *shape.last_mut().expect("a last dim") = n;
    ordinary(x.dtype(), &shape, 77)
}

fn cat(parts: &[Tensor], dim: usize) -> Tensor {
    let op = Cat { dim };
    eval_whole(&op, parts).expect("parts of one shape").remove(0)
}

pub fn dims(list: &[usize]) -> Dims {
    list.iter().copied().collect()
}

fn reductions(list: &[usize], keep: bool) -> Vec<Box<dyn Op>> {
    vec![
        Box::new(Sum { dims: dims(list), keep }),
        Box::new(Max { dims: dims(list), keep }),
        Box::new(Min { dims: dims(list), keep }),
    ]
}

fn number(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    if dtype.is_float() { ordinary(dtype, shape, salt) } else { common::small_ints(dtype, shape, salt) }
}

const NUMBERS: [DType; 7] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8];

#[test]
fn reductions_of_rows_and_columns() {
    let Some(device) = shim::device() else { return };
    for dtype in NUMBERS {
        for n in LENGTHS {
            let rows = number(dtype, &[3, n].into(), 1);
            let columns = number(dtype, &[n, 37].into(), 2);
            let (inner, outer) = (number(dtype, &[n, 2].into(), 3), number(dtype, &[n].into(), 4));
            for keep in [false, true] {
                for op in reductions(&[1], keep) {
                    let want = compare(&*op, device, from_ref(&rows));
                    let got = eval_whole(&*op, &[strided(device, &rows, 5)]).expect("a view");
                    assert_same(&*op, &got, &want);
                    let turned = rows.transpose(0, 1).unwrap().contiguous().unwrap();
                    let view = turned.to_device(device).unwrap().transpose(0, 1).unwrap();
                    assert_same(&*op, &eval_whole(&*op, &[view]).expect("a view"), &want);
                }
                for op in reductions(&[0], keep) {
                    compare(&*op, device, from_ref(&columns));
                    compare(&*op, device, from_ref(&outer));
                }
                for op in reductions(&[0, 1], keep) {
                    compare(&*op, device, from_ref(&inner));
                }
            }
        }
    }
}

#[test]
fn sums_of_terms_and_wide_sums_at_every_length() {
    let Some(device) = shim::device() else { return };
    let terms = [
        SumTerm::Deviation,
        SumTerm::SquaredDeviation,
        SumTerm::ExpDifference,
        SumTerm::Power(Bits(3.0)),
        SumTerm::Power(Bits(0.7)),
    ];
    for dtype in FLOATS {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        for n in LENGTHS {
            for (shape, list) in [(&[3, n][..], &[1][..]), (&[n, 5], &[0]), (&[n, 2], &[0, 1]), (&[n], &[])] {
                let x = ordinary(dtype, &shape.into(), 1);
                let kept: Vec<usize> =
                    (0..shape.len()).map(|d| if list.contains(&d) { 1 } else { shape[d] }).collect();
                for term in terms {
                    let with = ordinary(wide, &kept[..].into(), 2);
                    let op = TermSum { term, dims: dims(list) };
                    compare(&op, device, &[x.clone(), with]);
                }
                let op = TermSum { term: SumTerm::Power(Bits(2.0)), dims: dims(list) };
                compare(&op, device, &[x.clone(), ordinary(DType::F64, &kept[..].into(), 3)]);
                compare(&WideSum { dims: dims(list), keep: true }, device, &[x]);
            }
        }
    }
    for dtype in [DType::U8, DType::I32, DType::Bool] {
        for n in LENGTHS {
            let x = common::small_ints(dtype, &[n, 3].into(), 4);
            compare(&Sum { dims: dims(&[0]), keep: false }, device, from_ref(&x));
            compare(&Sum { dims: dims(&[0, 1]), keep: true }, device, &[x]);
        }
    }
}

#[test]
fn products_and_first_indices_of_every_dtype() {
    let Some(device) = shim::device() else { return };
    for dtype in NUMBERS {
        for n in [1, 2, 31, 33, 65, 300] {
            let x = number(dtype, &[3, n, 2].into(), 1);
            for list in [&[1][..], &[0, 1], &[0, 2], &[]] {
                compare(&Prod { dims: dims(list), keep: false }, device, from_ref(&x));
                if dtype.is_float() {
                    let kept: Vec<usize> =
                        (0..3).map(|d| if list.contains(&d) { 1 } else { x.shape()[d] }).collect();
                    compare(
                        &ProdGrad { dims: dims(list) },
                        device,
                        &[ordinary(dtype, &kept[..].into(), 2), x.clone()],
                    );
                }
            }
            for dim in 0..3 {
                let max = Max { dims: dims(&[dim]), keep: true };
                let max = eval_whole(&max, from_ref(&x)).unwrap().remove(0);
                compare(&FirstIndex { dim }, device, &[x.clone(), max]);
            }
            let rows = number(dtype, &[7, n].into(), 3);
            let first = rows.narrow(1, n / 2, 1).unwrap();
            compare(&FirstIndex { dim: 1 }, device, &[rows, first]);
        }
    }
    let nan = Tensor::from_vec(vec![1.0f32, f32::NAN, -0.0, f32::NAN], [2, 2]).unwrap();
    let of = Tensor::from_vec(vec![f32::NAN, 0.0], [2, 1]).unwrap();
    compare(&FirstIndex { dim: 1 }, device, &[nan, of]);
}

#[test]
fn reductions_over_any_dims_of_any_view() {
    let Some(device) = shim::device() else { return };
    for dtype in [DType::F32, DType::BF16, DType::I32] {
        let x = number(dtype, &[4, 13, 2, 35].into(), 9);
        for set in 0..16usize {
            let list: Vec<usize> = (0..4).filter(|d| set >> d & 1 == 1).collect();
            for op in reductions(&list, set % 3 == 0) {
                compare(&*op, device, from_ref(&x));
                for order in [[3, 1, 0, 2], [1, 0, 3, 2], [2, 3, 1, 0]] {
                    let view = x.permute(&order).unwrap();
                    let want = eval_whole(&*op, &[view]).unwrap();
                    let view = x.to_device(device).unwrap().permute(&order).unwrap();
                    assert_same(&*op, &eval_whole(&*op, &[view]).unwrap(), &want);
                }
            }
        }
        let row = number(dtype, &[1, 35].into(), 4);
        let op = Sum { dims: dims(&[0, 1]), keep: false };
        let want = eval_whole(&op, &[row.expand([40, 35]).unwrap()]).unwrap();
        let got = row.to_device(device).and_then(|r| r.expand([40, 35])).unwrap();
        assert_same(&op, &eval_whole(&op, &[got]).unwrap(), &want);
    }
}

/// A few long rows are divided over blocks, and a second launch joins them.
#[test]
fn long_reductions() {
    let Some(device) = shim::device() else { return };
    for (shape, list) in [
        (&[200_003][..], &[0][..]),
        (&[2, 60_001], &[1]),
        (&[70_000, 3], &[0]),
        (&[3, 5000, 7], &[1]),
        (&[9000, 40], &[0, 1]),
        (&[3000, 1, 20], &[0, 1]),
    ] {
        for dtype in [DType::F32, DType::F16] {
            for op in reductions(list, false) {
                compare(&*op, device, &[number(dtype, &shape.into(), 6)]);
            }
        }
    }
}

#[test]
fn nothing_to_reduce() {
    let Some(device) = shim::device() else { return };
    for (shape, list) in [([0, 3], [0]), ([3, 0], [0]), ([3, 0], [1])] {
        compare(&Sum { dims: dims(&list), keep: true }, device, &[Tensor::zeros(DType::BF16, shape)]);
    }
    let zeros = Tensor::from_vec(vec![-0.0f32], [1, 1]).unwrap();
    let sum = compare(&Sum { dims: dims(&[0, 1]), keep: false }, device, &[zeros]).remove(0);
    assert_eq!(sum.to_vec::<f32>().unwrap()[0].to_bits(), (-0.0f32).to_bits());
}

#[test]
fn argmax_of_ties_and_nans() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for n in [1, 2, 8, 9, 33, 300, 1500] {
            let value = |e: usize| match mix(e as u64 * 7 + n as u64) % 11 {
                0 if e.is_multiple_of(5) && dtype.is_float() => f64::NAN,
                1 => -0.0,
                k => (k / 4) as f64,
            };
            let values: Vec<f64> = (0..4 * n).map(value).collect();
            let x = common::tensor(dtype, &values, &[4, n].into());
            let want = compare(&Argmax { dim: 1 }, device, from_ref(&x));
            let turned = x.transpose(0, 1).unwrap().contiguous().unwrap();
            assert_same(&Argmax { dim: 0 }, &compare(&Argmax { dim: 0 }, device, from_ref(&turned)), &want);
            let view = turned.to_device(device).and_then(|t| t.transpose(0, 1)).unwrap();
            assert_same(&Argmax { dim: 1 }, &eval_whole(&Argmax { dim: 1 }, &[view]).unwrap(), &want);
        }
    }
}

/// Returns softmax, its logarithm and their gradients along dim 1, each with its number of operands.
pub fn softmax_ops() -> [(Box<dyn Op>, usize); 4] {
    [
        (Box::new(Softmax { dim: 1 }), 1),
        (Box::new(LogSoftmax { dim: 1 }), 1),
        (Box::new(SoftmaxGrad { dim: 1 }), 2),
        (Box::new(LogSoftmaxGrad { dim: 1 }), 2),
    ]
}

#[test]
fn softmax_and_its_like_at_every_length() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for n in LENGTHS {
            let x = |salt| ordinary(dtype, &[5, n].into(), salt);
            let (y, dy) = (x(1), x(2));
            for (op, arity) in softmax_ops() {
                let want = compare(&*op, device, &[y.clone(), dy.clone()][..arity]);
                let views = [strided(device, &y, 1), strided(device, &dy, 2)];
                assert_same(&*op, &eval_whole(&*op, &views[..arity]).unwrap(), &want);
            }
            let m = eval_whole(&Max { dims: dims(&[1]), keep: true }, from_ref(&y)).unwrap().remove(0);
            compare(&SumExp, device, &[y, m]);
        }
        let x = ordinary(dtype, &[7, 40, 3].into(), 1);
        compare(&Softmax { dim: 1 }, device, from_ref(&x));
        compare(&LogSoftmax { dim: 0 }, device, &[x]);
        let odd = [f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, f64::INFINITY, -0.0, 0.0, -0.0];
        compare(&Softmax { dim: 1 }, device, &[common::tensor(dtype, &odd, &[4, 2].into())]);
        compare(&LogSoftmax { dim: 1 }, device, &[common::tensor(dtype, &odd, &[8, 1].into())]);
    }
}

#[test]
fn norms_at_every_length() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for n in LENGTHS {
            let shape = if n > 1000 { [2, 3, n] } else { [3, 11, n] };
            let x = |salt| ordinary(dtype, &shape.into(), salt);
            let (w, b) = (ordinary(dtype, &[n].into(), 3), ordinary(dtype, &[n].into(), 4));
            let eps = Bits(1e-5);
            compare(&LayerNorm { eps, weight: true, bias: false }, device, &[x(1), w.clone()]);
            let op = LayerNorm { eps, weight: true, bias: true };
            let outs = compare(&op, device, &[x(1), w.clone(), b.clone()]);
            let views = [strided(device, &x(1), 3), strided(device, &w, 1), b.to_device(device).unwrap()];
            assert_same(&op, &eval_whole(&op, &views).unwrap(), &outs);
            let saved = [x(2), x(1), w.clone(), outs[1].clone(), outs[2].clone()];
            compare(&LayerNormGrad { eps: Bits(1e-5), weight: true, bias: true }, device, &saved);
            compare(&LayerNorm { eps, weight: false, bias: false }, device, &[x(1)]);
            let saved = [x(2), x(1), outs[1].clone(), outs[2].clone()];
            compare(&LayerNormGrad { eps: Bits(1e-5), weight: false, bias: false }, device, &saved);
            let rstd = compare(&RmsNorm { eps }, device, &[x(1), w.clone()]).remove(1);
            compare(&RmsNormGrad { eps: Bits(1e-5) }, device, &[x(2), x(1), w, rstd]);
        }
    }
}

/// Rows whose squares overflow stand between ordinary ones, in short rows and in long ones.
#[test]
fn norms_whose_variance_overflows() {
    let Some(device) = shim::device() else { return };
    for (dtype, most) in
        [(DType::F32, f64::from(f32::MAX)), (DType::F64, f64::MAX), (DType::BF16, half::bf16::MAX.to_f64())]
    {
        for n in [1usize, 3, 4, 33, 300, 5000] {
            let large = |r: usize, c: usize| match (r % 3, c % 4) {
                (0, _) => (mix((7 * r + c) as u64) % 9) as f64 - 4.0,
                (1, _) => most,
                (_, 0) => most,
                (_, 1) => -most,
                _ => 0.0,
            };
            let values: Vec<f64> = (0..7).flat_map(|r| (0..n).map(move |c| large(r, c))).collect();
            let x = common::tensor(dtype, &values, &[7, n].into());
            let (dy, w) = (ordinary(dtype, &[7, n].into(), 2), ordinary(dtype, &[n].into(), 3));
            let eps = Bits(1e-5);
            let outs =
                compare(&LayerNorm { eps, weight: true, bias: false }, device, &[x.clone(), w.clone()]);
            assert!(outs[0].to_f64_vec().iter().all(|y| y.is_finite()), "{dtype} {n}");
            let saved = [dy.clone(), x.clone(), w.clone(), outs[1].clone(), outs[2].clone()];
            compare(&LayerNormGrad { eps: Bits(1e-5), weight: true, bias: true }, device, &saved);
            let outs = compare(&RmsNorm { eps }, device, &[x.clone(), w.clone()]);
            compare(&RmsNormGrad { eps: Bits(1e-5) }, device, &[dy, x, w, outs[1].clone()]);
        }
    }
}

/// The gradients of weights sum many rows: divided over blocks, with outer dims of every kind.
#[test]
fn gradients_of_norms_over_many_rows() {
    let Some(device) = shim::device() else { return };
    for shape in [&[3000, 5][..], &[5, 700, 3], &[3, 1, 2, 40, 9], &[7], &[0, 3], &[2, 0]] {
        let x = |salt| ordinary(DType::BF16, &shape.into(), salt);
        let w = ordinary(DType::BF16, &[*shape.last().unwrap()].into(), 3);
        let outs = compare(
            &LayerNorm { eps: Bits(0.1), weight: true, bias: true },
            device,
            &[x(1), w.clone(), w.clone()],
        );
        compare(
            &LayerNormGrad { eps: Bits(1e-5), weight: true, bias: true },
            device,
            &[x(2), x(1), w, outs[1].clone(), outs[2].clone()],
        );
    }
}

pub fn whole(op: &dyn Op, ins: &[Tensor]) -> Windows {
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    Windows::whole(&metas, &op.infer(&metas).expect("legal operands"))
}

pub fn compare_at(op: &dyn Op, device: Device, ins: &[Tensor], at: &Windows) {
    let want = op.eval(&mut ins.to_vec(), at).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let got = op.cuda(&mut to(device, ins), at).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    assert_same(op, &got, &want);
}

/// Returns indices below `n`; a third of them are 0.
pub fn indices(shape: &[usize], n: usize, salt: u64) -> Tensor {
    let len: usize = shape.iter().product();
    let few = |e: u64| if mix(e ^ salt).is_multiple_of(3) { 0 } else { mix(e + salt) % n as u64 };
    Tensor::from_vec((0..len as u64).map(|e| few(e) as i64).collect(), shape).unwrap()
}

#[test]
fn rows_by_index() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for (rows, width, shape) in [(7, 3, &[5][..]), (40, 16, &[3, 33]), (3, 8, &[]), (5, 1, &[2, 0])] {
            let table = number(dtype, &[rows, width].into(), 1);
            let index = indices(shape, rows, 2);
            let want = compare(&Embedding, device, &[table.clone(), index.clone()]);
            let views = [strided(device, &table, 3), index.to_device(device).unwrap()];
            assert_same(&Embedding, &eval_whole(&Embedding, &views).unwrap(), &want);
            let part = [table.narrow(0, 2, rows - 2).unwrap(), index];
            let mut at = whole(&Embedding, &[table.clone(), part[1].clone()]);
            at.ins[0].region = Region::of_box(Dims::from_slice(&[2, 0]), [rows - 2, width].into());
            compare_at(&Embedding, device, &part, &at);
        }
        for (dim, x, index) in
            [(1, [5, 3, 4], [5, 9, 4]), (0, [3, 2, 35], [7, 2, 35]), (2, [2, 3, 40], [2, 3, 1])]
        {
            let (x, index) = (number(dtype, &x.into(), 1), indices(&index, x[dim], 3));
            let op = Gather { dim };
            let want = compare(&op, device, &[x.clone(), index.clone()]);
            let turned = x.permute(&[2, 0, 1]).unwrap().contiguous().unwrap().to_device(device).unwrap();
            let views = [turned.permute(&[1, 2, 0]).unwrap(), index.to_device(device).unwrap()];
            assert_same(&op, &eval_whole(&op, &views).unwrap(), &want);
        }
    }
}

/// Sums by destination: many hits of few destinations and few hits of many, over one dim and several, of any width.
#[test]
fn sums_by_destination() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for (rows, width, shape) in [
            (3, 2, &[1][..]),
            (5, 1, &[31]),
            (1, 5, &[33]),
            (70_000, 3, &[300]),
            (4, 7, &[3, 50]),
            (2, 40, &[5, 1, 70]),
            (300, 2, &[3, 2, 700]),
            (5, 3, &[]),
            (5, 3, &[0]),
        ] {
            let index = indices(shape, rows, 4);
            let dy: Shape = shape.iter().copied().chain([width]).collect();
            let ins = [index, ordinary(dtype, &dy, 5)];
            let op = EmbeddingGrad { rows };
            compare(&op, device, &ins);
            let mut at = whole(&op, &ins);
            at.outs[0].region = Region::of_box(Dims::from_slice(&[1, 0]), [rows - 1, width].into());
            compare_at(&op, device, &ins, &at);
        }
        for (dim, extent, shape) in
            [(1, 3, [5, 70]), (0, 5, [3, 2]), (1, 2, [4, 1]), (0, 90_000, [40, 3]), (1, 300, [2, 2500])]
        {
            let ins = [indices(&shape, extent, 6), ordinary(dtype, &shape.into(), 7)];
            let op = ScatterAdd { dim, extent };
            compare(&op, device, &ins);
            let mut at = whole(&op, &ins);
            let mut start = Dims::from_slice(&[0, 0]);
            start[dim] = 1;
            let mut held = Shape::from(shape);
            held[dim] = extent - 1;
            at.outs[0].region = Region::of_box(start, held);
            compare_at(&op, device, &ins, &at);
        }
    }
}

/// An index that the CPU refuses at once is reported by the next read of a value on the device, once, with the
/// operator's name.
#[test]
fn an_index_out_of_range_is_named() {
    let Some(device) = shim::device() else { return };
    let f = |shape: &[usize]| ordinary(DType::F32, &shape.into(), 1);
    let index = |i: i64, shape: &[usize]| Tensor::from_vec(vec![i; shape.iter().product()], shape).unwrap();
    let stat = || Tensor::full(DType::F32, [2, 1], 1.0);
    let cases: Vec<(Arc<dyn Op>, Vec<Tensor>)> = vec![
        (Arc::new(Embedding), vec![f(&[4, 2]), index(4, &[3])]),
        (Arc::new(Embedding), vec![f(&[4, 2]), index(-1, &[3])]),
        (Arc::new(EmbeddingGrad { rows: 4 }), vec![index(9, &[2]), f(&[2, 3])]),
        (Arc::new(Gather { dim: 1 }), vec![f(&[2, 4]), index(-7, &[2, 3])]),
        (Arc::new(ScatterAdd { dim: 1, extent: 4 }), vec![index(4, &[2, 3]), f(&[2, 3])]),
        (Arc::new(ScatterAdd { dim: 1, extent: 4 }), vec![index(4, &[2, 1]), f(&[2, 1])]),
        (Arc::new(CrossEntropy::default()), vec![f(&[2, 4]), index(4, &[2]), stat(), stat()]),
        (Arc::new(CrossEntropyGrad::default()), vec![f(&[2, 4]), index(4, &[2]), stat(), stat(), f(&[2])]),
        (
            Arc::new(CrossEntropyGrad::default()),
            vec![f(&[2, 600]), index(600, &[2]), stat(), stat(), f(&[2])],
        ),
    ];
    for (op, ins) in cases {
        let e = eval_whole(&*op, &ins).unwrap_err().to_string();
        let (verb, found) =
            (op.name(), ins.iter().find(|t| t.dtype() == DType::I64).unwrap().to_f64_vec()[0]);
        assert!(e.starts_with(&format!("{verb}: an index leaves")), "{e}");
        let out = eval_whole(&*op, &to(device, &ins)).expect("the kernel only reports").remove(0);
        let e = out.to_device(Device::Cpu).expect_err("reported").to_string();
        assert!(e.starts_with(&format!("{verb}: an index leaves its dim; got index {found}")), "{e}");
        out.to_device(Device::Cpu).expect("an error is given once");
    }
}

#[test]
fn folds_of_every_order() {
    let Some(device) = shim::device() else { return };
    let push = |member, node| FoldStep::Push { operand: member, node };
    let join = FoldStep::Join;
    let several = vec![push(0, 0), push(2, 0), join, push(0, 1), FoldStep::Empty, push(2, 0), join];
    let long: Vec<FoldStep> =
        std::iter::once(push(0, 0)).chain((0..150).flat_map(|_| [push(1, 0), join])).collect();
    let mut orders: Vec<FoldOrder> = [1, 2, 3, 5, 8, 70].map(FoldOrder::halving).into();
    orders.push(FoldOrder::new(vec![2, 0, 1], several));
    orders.push(FoldOrder::new(vec![1, 1], long.repeat(2)));
    orders.push(FoldOrder::new(vec![1, 1], long));
    for order in &orders {
        for dtype in DType::ALL {
            for n in [1, 7, 64, 1000] {
                let shape = Shape::from([n]);
                let members: Vec<Tensor> = (order.nodes().iter().enumerate())
                    .map(|(m, &nodes)| number(dtype, &[nodes, n].into(), m as u64))
                    .collect();
                for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                    let got = cuda::fold(op, order, &shape, &to(device, &members)).unwrap();
                    let want = fold_by_definition(op, order, &shape, &members);
                    let given = format!("{op} {dtype} {n} {order:?}");
                    assert_eq!(bits_differ(&got, &want), None, "{given}");
                }
            }
        }
    }
}

pub fn fold_by_definition(op: ReduceOp, order: &FoldOrder, shape: &Shape, members: &[Tensor]) -> Tensor {
    let mut stack: Vec<Tensor> = Vec::new();
    for step in order.steps() {
        match *step {
            FoldStep::Push { operand: member, node } => stack.push(members[member].select(0, node).unwrap()),
            FoldStep::Empty => stack.push(Tensor::zeros(members[0].dtype(), shape)),
            FoldStep::Join => {
                let right = stack.pop().expect("two to join");
                op.fold(stack.last_mut().expect("two to join"), &right).expect("alike");
            }
        }
    }
    let outs: Vec<Tensor> = stack.iter().map(|t| t.reshape([1, shape.numel()]).unwrap()).collect();
    if outs.len() == 1 { outs[0].reshape(shape).unwrap() } else { cat(&outs, 0) }
}

#[test]
fn optimizers_in_place_and_never_into_a_clone() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        let state = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        for n in [0, 1, 5, 1024, 4097, 9000] {
            let t = |dtype, salt| ordinary(dtype, &[n].into(), salt);
            let square = |x: Tensor| eval_whole(&Mul, &[x.clone(), x]).unwrap().remove(0);
            let scale = Tensor::full(state, [], 0.37);
            let adam = AdamWStep::at_step(3, 0.01, (0.9, 0.99), 1e-8, 0.1);
            let ins = [t(dtype, 1), t(dtype, 2), t(state, 3), square(t(state, 4)), scale.clone()];
            compare(&adam, device, &ins);
            let ins = [t(dtype, 1), t(dtype, 2), t(state, 3), scale.clone()];
            for nesterov in [false, true] {
                let op = SgdStep { momentum: Bits(0.9), weight_decay: Bits(0.1), nesterov, lr: Unkeyed(0.3) };
                compare(&op, device, &ins);
                let kept = to(device, &ins);
                let at = whole(&op, &ins);
                op.cuda(&mut kept.clone(), &at).unwrap();
                assert_same(&op, &kept, &ins);
                let mut own = to(device, &ins);
                let outs = op.cuda(&mut own, &at).unwrap();
                assert!(outs[0].shares_storage(&own[0]) && outs[1].shares_storage(&own[2]));
                assert_same(&op, &outs, &op.eval(&mut ins.to_vec(), &at).unwrap());
            }
        }
    }
}

#[test]
fn optimizers_round_the_new_parameter() {
    let Some(device) = shim::device() else { return };
    let adam = AdamWStep::at_step(3, 0.01, (0.9, 0.99), 1e-8, 0.1);
    let sgd = SgdStep { momentum: Bits(0.9), weight_decay: Bits(0.1), nesterov: true, lr: Unkeyed(0.3) };
    for half in [DType::BF16, DType::F16] {
        for n in [0, 1, 5, 1024, 4097, 9000] {
            let t = |salt| ordinary(DType::F32, &[n].into(), salt);
            let square = |x: Tensor| eval_whole(&Mul, &[x.clone(), x]).unwrap().remove(0);
            let (rounded, scale) = (Tensor::zeros(half, [n]), Tensor::full(DType::F32, [], 0.37));
            compare(&adam, device, &[t(1), t(2), t(3), square(t(4)), rounded.clone(), scale.clone()]);
            let ins = [t(1), t(2), t(3), rounded, scale];
            compare(&sgd, device, &ins);
            let mut own = to(device, &ins);
            let outs = sgd.cuda(&mut own, &whole(&sgd, &ins)).unwrap();
            assert!(outs[2].shares_storage(&own[3]));
        }
    }
}

/// No barrier is missing: another order of threads changes nothing.
#[test]
fn in_any_order_of_threads() {
    let Some(device) = shim::device() else { return };
    for order in [Order::Descending, Order::Shuffled(1), Order::Shuffled(2)] {
        shim::with_order(order, || {
            let x = ordinary(DType::F32, &[3, 1000].into(), 1);
            let long = ordinary(DType::F32, &[1, 9001].into(), 2);
            for op in reductions(&[1], false) {
                compare(&*op, device, from_ref(&x));
                compare(&*op, device, &[x.transpose(0, 1).unwrap().contiguous().unwrap()]);
                compare(&*op, device, from_ref(&long));
            }
            for x in [&x, &long] {
                compare(&Softmax { dim: 1 }, device, from_ref(x));
                compare(&SoftmaxGrad { dim: 1 }, device, &[x.clone(), x.clone()]);
                compare(&Argmax { dim: 1 }, device, from_ref(x));
                let w = ordinary(DType::F32, &[x.shape()[1]].into(), 2);
                let outs = compare(
                    &LayerNorm { eps: Bits(0.1), weight: true, bias: true },
                    device,
                    &[x.clone(), w.clone(), w.clone()],
                );
                let saved = [x.clone(), x.clone(), w, outs[1].clone(), outs[2].clone()];
                compare(&LayerNormGrad { eps: Bits(1e-5), weight: true, bias: true }, device, &saved);
            }
            let index = indices(&[3, 2000], 300, 3);
            let dy = ordinary(DType::F32, &[3, 2000, 2].into(), 4);
            compare(&EmbeddingGrad { rows: 300 }, device, &[index, dy]);
        });
    }
}

/// Runs the catalog's samples of every operator.
#[test]
fn samples_of_the_catalog() {
    let Some(device) = shim::device() else { return };
    for sample in catalog() {
        for dtype in [DType::F32, DType::F64] {
            let ins = common::ordinary_values(&sample, dtype, 3);
            compare(&*sample.op, device, &ins);
        }
    }
}
