//! Rows that a CUDA device loads by packs of 16 bytes, and the same rows at addresses and of lengths that allow none, have
//! the CPU's bits: leaves of packs, a pack more or less, one element, few rows, and views that begin anywhere.

use std::slice::from_ref;

use crate::common::failures::is_complete;
use crate::common::shim;
use crate::common::{mix, ordinary};
use crate::cuda_reduce::{FLOATS, assert_same, compare, dims, softmax_ops, to};
use isoshard::ops::*;
use isoshard::tensor::{DType, Device, Tensor};

/// The operands that begin at no pack: all of them, or before that one after the other.
#[derive(Clone, Copy, PartialEq)]
pub enum Moved {
    Together,
    Each,
}

/// Lengths of rows: leaves of packs of every kind, from one short leaf to a team of 16 warps; beside them, rows that begin
/// at no pack. Longer rows belong to a block, whose packs begin anywhere.
const LENGTHS: [usize; 22] =
    [1, 2, 7, 8, 9, 16, 24, 31, 32, 40, 48, 64, 72, 96, 128, 192, 256, 320, 777, 1024, 4096, 4104];

#[test]
fn softmax_and_norms_by_packs() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for n in LENGTHS {
            for rows in [1, 9] {
                softmaxes(device, dtype, [rows, n], Moved::Each);
                norms(device, dtype, [rows, n], Moved::Each);
            }
        }
    }
}

/// Compares softmax, its logarithm and their gradients, also of operands that begin one to three elements later.
pub fn softmaxes(device: Device, dtype: DType, shape: [usize; 2], moved: Moved) {
    let (y, dy) = (ordinary(dtype, &shape.into(), 1), ordinary(dtype, &shape.into(), 2));
    for (op, arity) in softmax_ops() {
        anywhere(&*op, (device, moved), &[y.clone(), dy.clone()][..arity]);
    }
}

/// Compares norms with and without weight and bias, and their gradients, as [`softmaxes`] does.
pub fn norms(device: Device, dtype: DType, shape: [usize; 2], moved: Moved) {
    let x = |salt| ordinary(dtype, &shape.into(), salt);
    let (w, b) = (ordinary(dtype, &[shape[1]].into(), 3), ordinary(dtype, &[shape[1]].into(), 4));
    let eps = Bits(1e-5);
    let outs = anywhere(&LayerNorm { eps, weight: true, bias: true }, (device, moved), &[x(1), w.clone(), b]);
    let saved = [x(2), x(1), w.clone(), outs[1].clone(), outs[2].clone()];
    anywhere(&LayerNormGrad { eps, weight: true, bias: true }, (device, moved), &saved);
    anywhere(&LayerNorm { eps, weight: false, bias: false }, (device, moved), &[x(1)]);
    let rstd = anywhere(&RmsNorm { eps }, (device, moved), &[x(1), w.clone()]).remove(1);
    anywhere(&RmsNormGrad { eps }, (device, moved), &[x(2), x(1), w, rstd]);
}

#[test]
fn losses_by_packs() {
    let Some(device) = shim::device() else { return };
    for dtype in FLOATS {
        for n in LENGTHS.into_iter().chain([504, 511, 512, 2047, 2056]) {
            losses(device, dtype, [3, n], Moved::Each);
        }
    }
}

/// Compares the operators of cross entropy, as [`softmaxes`] does.
pub fn losses(device: Device, dtype: DType, shape: [usize; 2], moved: Moved) {
    let logits = ordinary(dtype, &shape.into(), 1);
    let target: Vec<i64> = (0..shape[0]).map(|r| (mix(r as u64) % shape[1] as u64) as i64).collect();
    let target = Tensor::from_vec(target, [shape[0]]).unwrap();
    let m = anywhere(&Max { dims: dims(&[1]), keep: true }, (device, moved), from_ref(&logits)).remove(0);
    let s = anywhere(&SumExp, (device, moved), &[logits.clone(), m.clone()]).remove(0);
    let dy = ordinary(s.dtype(), &[shape[0]].into(), 5);
    let q = ordinary(s.dtype(), &shape.into(), 6);
    let terms = CrossEntropyTerms { ignore_index: Some(1), nll_factor: Bits(0.75), z_factor: Bits(0.125) };
    let ins = [logits.clone(), target, m.clone(), s.clone(), dy.clone()];
    anywhere(&CrossEntropyGrad { terms }, (device, moved), &ins);
    let (soft, row_sum) = ([logits, q, m, s, dy], Some(Bits(0.75)));
    anywhere(&SoftCrossEntropy { row_sum }, (device, moved), &soft[..4]);
    anywhere(&SoftCrossEntropyGrad { row_sum }, (device, moved), &soft);
}

#[test]
fn reductions_by_packs() {
    let Some(device) = shim::device() else { return };
    for dtype in [FLOATS.as_slice(), &[DType::I64, DType::I32, DType::U8]].concat() {
        for n in LENGTHS.into_iter().chain([8192, 12_288, 16_384]) {
            for rows in [1, 9] {
                reductions(device, dtype, [rows, n], Moved::Each);
            }
        }
        // A row of many blocks. Several of them take nine times as long, and are the same calls for all dtypes.
        let rows = if dtype == DType::F32 || is_complete() { 9 } else { 1 };
        reductions(device, dtype, [rows, 100_003], Moved::Each);
    }
}

/// Compares sums, maxima, minima, first largest elements and sums of terms, as [`softmaxes`] does; also of rows that are
/// parts of longer rows.
pub fn reductions(device: Device, dtype: DType, shape: [usize; 2], moved: Moved) {
    let number = |shape: [usize; 2]| match dtype.is_float() {
        true => ordinary(dtype, &shape.into(), 1),
        false => crate::common::small_ints(dtype, &shape.into(), 1),
    };
    let x = number(shape);
    let dims = || dims(&[1]);
    let mut ops: Vec<Box<dyn Op>> = vec![
        Box::new(Sum { dims: dims(), keep: false }),
        Box::new(Max { dims: dims(), keep: true }),
        Box::new(Min { dims: dims(), keep: false }),
        Box::new(Argmax { dim: 1 }),
    ];
    if dtype.is_float() {
        ops.push(Box::new(WideSum { dims: dims(), keep: true }));
    }
    for op in ops {
        anywhere(&*op, (device, moved), from_ref(&x));
        for pad in [1, 8] {
            let long = number([shape[0], shape[1] + 2 * pad]);
            let part = |x: &Tensor| x.narrow(1, pad, shape[1]).unwrap();
            let want = eval_whole(&*op, &[part(&long)]).unwrap();
            let got = eval_whole(&*op, &[part(&long.to_device(device).unwrap())]).unwrap();
            assert_same(&*op, &got, &want);
        }
    }
    if dtype.is_float() {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let with = ordinary(wide, &[shape[0], 1].into(), 2);
        for term in [SumTerm::Deviation, SumTerm::SquaredDeviation, SumTerm::ExpDifference] {
            anywhere(&TermSum { term, dims: dims() }, (device, moved), &[x.clone(), with.clone()]);
        }
    }
}

/// Compares with the CPU, first with operands as they are allocated, then with operands that begin one to three elements
/// later.
fn anywhere(op: &dyn Op, (device, moved): (Device, Moved), ins: &[Tensor]) -> Tensors {
    let want = compare(op, device, ins);
    let shifted = |by: &dyn Fn(usize) -> usize| {
        let mut held = to(device, ins);
        held.iter_mut().zip(ins).enumerate().for_each(|(k, (held, x))| {
            if by(k) > 0 {
                *held = later(device, x, by(k));
            }
        });
        assert_same(op, &eval_whole(op, &held).unwrap(), &want);
    };
    let one_by_one = if moved == Moved::Each { ins.len() } else { 0 };
    for one in 0..one_by_one {
        shifted(&|k| if k == one { 1 + k % 3 } else { 0 });
    }
    shifted(&|_| 1);
    want
}

/// Returns a contiguous view on the device that begins `by` elements behind a multiple of 16 bytes.
fn later(device: Device, x: &Tensor, by: usize) -> Tensor {
    let flat = Cat { dim: 0 };
    let parts = [Tensor::zeros(x.dtype(), [by]), x.reshape([x.numel()]).unwrap()];
    let whole = eval_whole(&flat, &parts).unwrap().remove(0).to_device(device).unwrap();
    whole.narrow(0, by, x.numel()).and_then(|view| view.reshape(x.shape().clone())).unwrap()
}
