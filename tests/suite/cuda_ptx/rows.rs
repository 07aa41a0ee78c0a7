//! Operators over rows in the interpreter of PTX: reductions, gradients of softmax and norms, and losses of classes.

use std::slice::from_ref;

use isoshard::ops::*;
use isoshard::tensor::{DType, FoldOrder, ReduceOp, Tensor, cuda};

use super::{FLOATS, check};
use crate::common::{bits_differ, mix, ordinary, small_ints};
use crate::cuda_reduce::{compare, dims, fold_by_definition, to};

/// Narrow and wide floats beside the two of every test.
const OTHERS: [DType; 2] = [DType::F16, DType::F64];

/// Rows and columns that several warps share, and a row that is divided over blocks.
#[test]
fn reductions() {
    check("reductions", &[("barrier", "-columns_f32"), ("barrier", "-rows_bf16")], |device| {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64] {
            for (shape, dim) in [([3, 300], 1), ([70, 33], 0)] {
                let x = match dtype {
                    DType::I64 => small_ints(dtype, &shape.into(), 1),
                    _ => ordinary(dtype, &shape.into(), 1),
                };
                let list = || dims(&[dim]);
                compare(&Max { dims: list(), keep: true }, device, from_ref(&x));
                if [DType::F32, DType::BF16].contains(&dtype) {
                    compare(&Argmax { dim }, device, from_ref(&x));
                    compare(&Prod { dims: list(), keep: false }, device, from_ref(&x));
                    compare(&FirstIndex { dim }, device, &[x.clone(), x.narrow(dim, 2, 1).unwrap()]);
                    let kept: &[usize] = if dim == 0 { &[1, 33] } else { &[3, 1] };
                    let with = ordinary(DType::F32, &kept.into(), 2);
                    let term = SumTerm::SquaredDeviation;
                    compare(&TermSum { term, dims: list() }, device, &[x.clone(), with]);
                } else {
                    compare(&Min { dims: list(), keep: false }, device, from_ref(&x));
                    compare(&Sum { dims: list(), keep: false }, device, from_ref(&x));
                }
            }
        }
        compare(&Max { dims: dims(&[0]), keep: false }, device, &[ordinary(DType::F32, &[9001].into(), 3)]);
        for dtype in FLOATS {
            let parts: Vec<Tensor> = (0..5).map(|m| ordinary(dtype, &[1, 300].into(), m)).collect();
            let order = FoldOrder::halving(5);
            let got = cuda::fold(ReduceOp::Sum, &order, &[300].into(), &to(device, &parts)).unwrap();
            let want = fold_by_definition(ReduceOp::Sum, &order, &[300].into(), &parts);
            assert_eq!(bits_differ(&got, &want), None, "a fold in {dtype}");
        }
    });
}

/// Sums of the weights' gradients are divided over blocks.
#[test]
fn gradients_of_softmax_and_norms() {
    check("row-gradients", &[("barrier", "-softmax_grad_bf16"), ("barrier", "-weights_f32")], |device| {
        for (dtype, rows, cols) in
            [(DType::F32, 40, 70), (DType::BF16, 3, 1100), (OTHERS[0], 3, 70), (OTHERS[1], 3, 33)]
        {
            let x = |salt| ordinary(dtype, &[rows, cols].into(), salt);
            let w = ordinary(dtype, &[cols].into(), 3);
            compare(&SoftmaxGrad { dim: 1 }, device, &[x(1), x(2)]);
            if OTHERS.contains(&dtype) {
                compare(&Softmax { dim: 1 }, device, &[x(1)]);
                continue;
            }
            compare(&LogSoftmax { dim: 1 }, device, &[x(1)]);
            compare(&LogSoftmaxGrad { dim: 1 }, device, &[x(1), x(2)]);
            let eps = Bits(1e-5);
            let layer = LayerNorm { eps, weight: true, bias: true };
            let outs = compare(&layer, device, &[x(1), w.clone(), w.clone()]);
            let saved = [x(2), x(1), w.clone(), outs[1].clone(), outs[2].clone()];
            compare(&LayerNormGrad { eps, weight: true, bias: true }, device, &saved);
            let rstd = compare(&RmsNorm { eps }, device, &[x(1), w.clone()]).remove(1);
            compare(&RmsNormGrad { eps }, device, &[x(2), x(1), w, rstd]);
        }
    });
}

#[test]
fn losses_of_classes() {
    check("losses", &[], |device| {
        for dtype in FLOATS {
            for (classes, terms) in [
                (65, CrossEntropyTerms::default()),
                (
                    513,
                    CrossEntropyTerms {
                        ignore_index: Some(1),
                        nll_factor: Bits(0.75),
                        z_factor: Bits(0.125),
                    },
                ),
            ] {
                let logits = ordinary(dtype, &[2, 3, classes].into(), 1);
                let target: Vec<i64> = (0..6).map(|r| (mix(r) % classes as u64) as i64).collect();
                let target = Tensor::from_vec(target, [2, 3]).unwrap();
                let max = Max { dims: dims(&[2]), keep: true };
                let m = eval_whole(&max, from_ref(&logits)).unwrap().remove(0);
                let s = compare(&SumExp, device, &[logits.clone(), m.clone()]).remove(0);
                let ins = [logits.clone(), target, m.clone(), s.clone()];
                let loss = compare(&CrossEntropy { terms }, device, &ins).remove(0);
                let dy = ordinary(loss.dtype(), &[2, 3].into(), 5);
                let ins: Vec<Tensor> = ins.into_iter().chain([dy.clone()]).collect();
                compare(&CrossEntropyGrad { terms }, device, &ins);
                if classes == 65 {
                    let own = ordinary(s.dtype(), logits.shape(), 2);
                    let row_sum = Some(Bits(0.75));
                    let ins = [logits, own, m, s, dy];
                    compare(&SoftCrossEntropy { row_sum }, device, &ins[..4]);
                    compare(&SoftCrossEntropyGrad { row_sum }, device, &ins);
                }
            }
        }
    });
}
