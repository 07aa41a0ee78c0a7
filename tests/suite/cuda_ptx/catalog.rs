//! The catalog's samples, formulas, casts, narrow products and optimizers in the interpreter of PTX.

use std::collections::BTreeSet;

use isoshard::ops::*;
use isoshard::tensor::{DType, Device, Tensor, cuda};

use super::{FLOATS, check, check_some};
use crate::common::failures::is_complete;
use crate::common::{bits_differ, ordinary, ordinary_values};
use crate::cuda_pointwise;
use crate::cuda_reduce::compare;

/// The beginnings of the names of sources that no sample in f32 launches. Other tests here run one of each, at least.
const ELSEWHERE: [&str; 9] = [
    "attention_",
    "cast_bf16",
    "cast_f16",
    "cast_f64",
    "fold",
    "matmul_bf16",
    "matmul_f16",
    "matmul_f64",
    "random",
];

/// One launch per entry and grid. A new file of `kernels/cuda/` needs a sample, or a test here.
#[test]
fn every_operator_and_every_file_of_kernels() {
    let formulas: BTreeSet<String> = formulas().iter().map(|op| op.name().to_string()).collect();
    let ran = check_some("catalog", 1, &[], move |device| {
        for sample in catalog().iter().filter(|sample| !formulas.contains(sample.op.name())) {
            compare(&*sample.op, device, &ordinary_values(sample, DType::F32, 3));
        }
    });
    let Some(ran) = ran else { return };
    let ran: BTreeSet<&str> = ran.iter().map(|name| of_any_dtype(name)).collect();
    let files = cuda::programs().iter().filter_map(|(file, _)| file.strip_suffix(".cu"));
    let missing: Vec<&str> = files
        .filter(|f| !ran.contains(of_any_dtype(f)) && !ELSEWHERE.iter().any(|e| f.starts_with(e)))
        .collect();
    assert!(missing.is_empty(), "{missing:?}: no sample of the catalog launches a kernel of these files");
}

/// Returns a source's name without its dtype.
fn of_any_dtype(name: &str) -> &str {
    let dtypes = ["_f64", "_f32", "_f16", "_bf16", "_i64", "_i32", "_u8", "_bool"];
    dtypes.iter().find_map(|dtype| name.strip_suffix(dtype)).unwrap_or(name)
}

/// Numbers of every magnitude and special values take every branch: every eighth formula, or all of them in a complete run.
#[test]
fn formulas_of_awkward_numbers() {
    check("formulas", &[], |device| {
        let every = if is_complete() { 1 } else { 8 };
        for case in cuda_pointwise::cases().iter().step_by(every) {
            let dtype = if case.2.contains(&DType::F32) { DType::F32 } else { DType::I64 };
            cuda_pointwise::compare(
                &*case.0,
                device,
                &cuda_pointwise::operands(case, dtype, &[257].into(), 3),
                &|_, x| x,
            );
        }
    });
}

#[test]
fn casts_and_products_of_other_floats() {
    check("casts", &[], |device| {
        for from in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64] {
            let x = match from {
                DType::I64 => Input::index([301], 1 << 40).values(DType::F32, 1),
                _ => ordinary(from, &[301].into(), 1),
            };
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I64] {
                compare(&Cast { dtype }, device, std::slice::from_ref(&x));
            }
        }
        for dtype in [DType::F16, DType::F64] {
            let (a, b) = (ordinary(dtype, &[33, 40].into(), 1), ordinary(dtype, &[40, 35].into(), 2));
            compare(&Matmul::new("m k, k n -> m n").unwrap(), device, &[a, b]);
        }
    });
}

#[test]
fn optimizers_and_lists() {
    check("steps", &[], |device| {
        for dtype in FLOATS {
            let t = |dtype, salt| ordinary(dtype, &[1501].into(), salt);
            let square = |x: Tensor| eval_whole(&Mul, &[x.clone(), x]).unwrap().remove(0);
            let scale = Tensor::full(DType::F32, [], 0.37);
            let adam = AdamWStep::at_step(3, 0.01, (0.9, 0.99), 1e-8, 0.1);
            let ins = [t(dtype, 1), t(dtype, 2), t(DType::F32, 3), square(t(DType::F32, 4)), scale.clone()];
            compare(&adam, device, &ins);
            let sgd =
                SgdStep { momentum: Bits(0.9), weight_decay: Bits(0.1), nesterov: true, lr: Unkeyed(0.3) };
            compare(&sgd, device, &[t(dtype, 1), t(dtype, 2), t(DType::F32, 3), scale.clone()]);
            if dtype == DType::F32 {
                for half in [DType::BF16, DType::F16] {
                    let rounded = || Tensor::zeros(half, [1501]);
                    let [p, g, m, v, _] = ins.clone();
                    compare(&adam, device, &[p, g, m, v, rounded(), scale.clone()]);
                    compare(&sgd, device, &[t(dtype, 1), t(dtype, 2), t(dtype, 3), rounded(), scale.clone()]);
                }
            }
            list(&MulScalar::by(-3.0), dtype, device);
        }
    });
}

/// Computes calls of several lengths in one launch.
fn list<O: Batched>(op: &O, dtype: DType, device: Device) {
    let here: Vec<Tensor> =
        [1, 7, 0, 300, 31].iter().map(|&n| ordinary(dtype, &[n].into(), n as u64)).collect();
    let mut there: Vec<[Tensor; 1]> = here.iter().map(|x| [x.to_device(device).unwrap()]).collect();
    let windows: Vec<Windows> = here
        .iter()
        .map(|x| {
            let metas: Metas = [Meta::of(x)].into_iter().collect();
            Windows::whole(&metas, &metas)
        })
        .collect();
    let mut calls: Vec<(&O, &mut [Tensor])> = there.iter_mut().map(|ins| (op, &mut ins[..])).collect();
    let outs = O::cuda_batch(&mut calls, &windows.iter().collect::<Vec<_>>()).unwrap();
    for (out, x) in outs.iter().zip(&here) {
        let want = eval_whole(op, std::slice::from_ref(x)).unwrap().remove(0);
        assert_eq!(bits_differ(&out[0], &want), None, "{op:?} of {} elements", x.numel());
    }
}
