//! Losses of classes on a CUDA device have the CPU's bits, whole and with sharded classes.

use std::slice::from_ref;

use crate::common::shim;
use crate::common::{mix, ordinary};
use crate::cuda_reduce::{FLOATS, assert_same, compare, compare_at, dims, to, whole};
use isoshard::ops::*;
use isoshard::placement::Region;
use isoshard::tensor::{Device, Dims, Tensor};

#[test]
fn cross_entropy_whole_and_cut() {
    let Some(device) = shim::device() else { return };
    let plain = CrossEntropyTerms::default();
    let all = CrossEntropyTerms { ignore_index: Some(1), nll_factor: Bits(0.75), z_factor: Bits(0.125) };
    for dtype in FLOATS {
        for (classes, terms) in [1, 3, 65, 511, 513, 2049].into_iter().flat_map(|n| [(n, plain), (n, all)]) {
            let rows = 6;
            let logits = ordinary(dtype, &[2, 3, classes].into(), 1);
            let target: Vec<i64> = (0..rows).map(|r| (mix(r) % classes as u64) as i64).collect();
            let target = Tensor::from_vec(target, [2, 3]).unwrap();
            let m = Max { dims: dims(&[2]), keep: true };
            let m = eval_whole(&m, from_ref(&logits)).unwrap().remove(0);
            let s = eval_whole(&SumExp, &[logits.clone(), m.clone()]).unwrap().remove(0);
            let loss = compare(
                &CrossEntropy { terms },
                device,
                &[logits.clone(), target.clone(), m.clone(), s.clone()],
            );
            let dy = ordinary(loss[0].dtype(), &[2, 3].into(), 5);
            let ins = [logits, target, m, s, dy];
            compare(&CrossEntropyGrad { terms }, device, &ins);
            let cut = classes / 3;
            for (start, len) in [(0, cut), (cut, classes - cut)] {
                for (op, arity) in [(&CrossEntropy { terms } as &dyn Op, 4), (&CrossEntropyGrad { terms }, 5)]
                {
                    let mut part: Vec<Tensor> = ins[..arity].to_vec();
                    let mut at = whole(op, &part);
                    part[0] = part[0].narrow(2, start, len).unwrap();
                    let window = |w: &mut Window| {
                        w.region = Region::of_box(Dims::from_slice(&[0, 0, start]), [2, 3, len].into());
                    };
                    window(&mut at.ins[0]);
                    if arity == 5 {
                        window(&mut at.outs[0]);
                    }
                    compare_at(op, device, &part, &at);
                }
            }
        }
    }
}

#[test]
fn soft_cross_entropy_of_own_and_repeated_rows() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for classes in [1, 3, 65, 511, 513, 4097] {
            let logits = ordinary(dtype, &[2, 3, classes].into(), 1);
            let m = Max { dims: dims(&[2]), keep: true };
            let m = eval_whole(&m, from_ref(&logits)).unwrap().remove(0);
            let s = eval_whole(&SumExp, &[logits.clone(), m.clone()]).unwrap().remove(0);
            let own = ordinary(s.dtype(), logits.shape(), 2);
            let repeated = own.narrow(0, 0, 1).and_then(|q| q.narrow(1, 0, 1)).unwrap();
            let repeated = repeated.to_device(device).and_then(|q| q.expand(logits.shape())).unwrap();
            let dy = ordinary(s.dtype(), &[2, 3].into(), 5);
            for row_sum in [None, Some(Bits(0.75))] {
                let op = SoftCrossEntropy { row_sum };
                let ins = [logits.clone(), own.clone(), m.clone(), s.clone()];
                compare(&op, device, &ins);
                let sum = row_sum.is_none().then(|| s.clone());
                let ins: Vec<Tensor> = ins.into_iter().chain([dy.clone()]).chain(sum).collect();
                let grad = SoftCrossEntropyGrad { row_sum };
                compare(&grad, device, &ins);
                for (op, arity) in [(&op as &dyn Op, 4), (&grad, ins.len())] {
                    let mut held = to(device, &ins[..arity]);
                    held[1] = repeated.clone();
                    let mut whole = ins[..arity].to_vec();
                    whole[1] = repeated.to_device(Device::Cpu).unwrap();
                    assert_same(op, &eval_whole(op, &held).unwrap(), &eval_whole(op, &whole).unwrap());
                }
            }
        }
    }
}
