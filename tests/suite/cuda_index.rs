//! Sorting, writing by index, counting and flipping on a CUDA device have the CPU's bits, for every dtype, with ties,
//! zeros of both signs and NaN, in any strides. Without a device, the shim compiles the same kernels for the CPU.

use isoshard::ops::*;
use isoshard::tensor::{DType, Device, Shape, Tensor};

use crate::common::shim;
use crate::common::{self, bits_differ, mix};

fn compare(op: &dyn Op, device: Device, ins: &[Tensor]) {
    let want = eval_whole(op, ins).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let on_device = |x: &Tensor| x.to_device(device).expect("there is room");
    // The second time, every operand is a view whose dims are stored in the opposite order.
    let turned = |x: &Tensor| {
        let order: Vec<usize> = (0..x.shape().len()).rev().collect();
        let stored = x.permute(&order).and_then(|t| t.to_owned_copy()).expect("a copy");
        on_device(&stored).permute(&order).expect("a view")
    };
    for ins in [ins.iter().map(on_device).collect::<Vec<_>>(), ins.iter().map(turned).collect()] {
        let got = eval_whole(op, &ins).unwrap_or_else(|e| panic!("{op:?}: {e}"));
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            if let Some(difference) = bits_differ(got, want) {
                panic!("{op:?} of {}, result {k}: {difference}", ins[0].notation());
            }
        }
    }
}

fn values(dtype: DType, shape: &[usize], salt: u64) -> Tensor {
    let value = |e: usize| match mix(e as u64 ^ salt << 20) % 13 {
        0 if dtype.is_float() => f64::NAN,
        1 => -0.0,
        2 if dtype.is_float() => f64::NEG_INFINITY,
        3 if dtype.is_float() => f64::INFINITY,
        k if dtype == DType::U8 => (k * 19) as f64,
        k => k as f64 * 0.5 * if e.is_multiple_of(2) { -1.0 } else { 1.0 },
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    common::tensor(dtype, &values, &Shape::from(shape))
}

fn indices(shape: &[usize], n: usize, salt: u64) -> Tensor {
    let len: usize = shape.iter().product();
    Tensor::from_vec((0..len as u64).map(|e| (mix(e + salt) % n as u64) as i64).collect(), shape).unwrap()
}

#[test]
fn sorts_of_every_dtype() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for (shape, dim) in
            [(&[3, 5, 4][..], 1), (&[2, 300], 1), (&[3000], 0), (&[1, 1], 0), (&[0, 3], 1), (&[3, 0], 1)]
        {
            let x = values(dtype, shape, 1);
            for descending in [false, true] {
                compare(&Sort { dim, descending }, device, std::slice::from_ref(&x));
                let k = shape[dim].div_ceil(3);
                compare(&TopK { dim, k, largest: descending }, device, std::slice::from_ref(&x));
            }
            for (k, blocks) in [(1, 2), (2, 1)] {
                let op = TopKBlocks { dim, k, largest: true, blocks };
                if op.infer(&[Meta::of(&x)]).is_ok() {
                    compare(&op, device, std::slice::from_ref(&x));
                }
            }
        }
    }
}

#[test]
fn writes_by_index() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for (dim, x, src) in [
            (0, &[7, 3][..], &[20, 3][..]),
            (1, &[3, 5, 4], &[3, 9, 4]),
            (2, &[2, 3, 40], &[2, 3, 1]),
            (0, &[4], &[0]),
        ] {
            let ins = [values(dtype, x, 1), indices(src, x[dim], 3), values(dtype, src, 2)];
            for rule in [ScatterRule::Last, ScatterRule::Max, ScatterRule::Min] {
                let op = Scatter { dim, rule };
                if rule == ScatterRule::Last || dtype != DType::Bool {
                    compare(&op, device, &ins);
                }
            }
            compare(&LastWrite { dim, extent: x[dim] }, device, &ins[1..2]);
            // An index that is expanded along the dims after `dim`.
            let rows: Shape = src.iter().enumerate().map(|(d, &n)| if d > dim { 1 } else { n }).collect();
            let rows = indices(&rows, x[dim], 5).to_device(device).and_then(|i| i.expand(src)).unwrap();
            let host = rows.to_device(Device::Cpu).unwrap();
            let mut ops: Vec<(Box<dyn Op>, Vec<Tensor>)> = vec![
                (Box::new(Gather { dim }), vec![ins[0].clone(), rows.clone()]),
                (
                    Box::new(Scatter { dim, rule: ScatterRule::Last }),
                    vec![ins[0].clone(), rows.clone(), ins[2].clone()],
                ),
            ];
            if dtype.is_float() {
                let add = ScatterAdd { dim, extent: x[dim] };
                let src = common::ordinary(dtype, &src.into(), 6);
                ops.push((Box::new(add), vec![rows.clone(), src]));
            } else if [DType::I64, DType::I32].contains(&dtype) {
                let add = ScatterAdd { dim, extent: x[dim] };
                compare(&add, device, &ins[1..]);
                ops.push((Box::new(add), vec![rows.clone(), ins[2].clone()]));
            }
            for (op, ins) in ops {
                let plain: Vec<Tensor> = ins
                    .iter()
                    .map(|t| {
                        if t.dtype() == DType::I64 && t.device() == device { host.clone() } else { t.clone() }
                    })
                    .collect();
                let want = eval_whole(&*op, &plain).unwrap().remove(0);
                let there: Vec<Tensor> = ins.iter().map(|t| t.to_device(device).unwrap()).collect();
                let got = eval_whole(&*op, &there).unwrap().remove(0);
                assert_eq!(bits_differ(&got, &want), None, "{op:?} {dtype} with an expanded index");
            }
        }
    }
}

#[test]
fn counts_joined_indices_and_flips() {
    let Some(device) = shim::device() else { return };
    for shape in [&[5, 7][..], &[3000], &[0]] {
        compare(&Bincount { bins: 9 }, device, &[indices(shape, 9, 1)]);
        let op = LinearIndex { extents: [4, 9, 2].into_iter().collect() };
        compare(&op, device, &[indices(shape, 4, 1), indices(shape, 9, 2), indices(shape, 2, 3)]);
    }
    for dtype in DType::ALL {
        for (shape, dim) in [(&[3, 5, 4][..], 1), (&[7], 0), (&[2, 0], 0), (&[40, 9], 1)] {
            compare(&Flip { dim }, device, &[values(dtype, shape, 4)]);
        }
        let of = MatrixDiagonal { rows: 2, columns: 0, offset: -1 };
        compare(&Diagonal { of }, device, &[values(dtype, &[3, 5, 4], 4)]);
        compare(&DiagEmbed { of, extents: (4, 3) }, device, &[values(dtype, &[5, 3], 4)]);
    }
}

#[test]
fn an_index_out_of_range_is_an_error() {
    let Some(device) = shim::device() else { return };
    let (x, src) = (values(DType::F32, &[3], 1), values(DType::F32, &[2], 2));
    let index = Tensor::from_vec(vec![1i64, 3], [2]).unwrap();
    let scatter = |rule| Box::new(Scatter { dim: 0, rule }) as Box<dyn Op>;
    let written = vec![x, index.clone(), src];
    let cases: Vec<(Box<dyn Op>, Vec<Tensor>)> = vec![
        (scatter(ScatterRule::Last), written.clone()),
        (scatter(ScatterRule::Max), written.clone()),
        (scatter(ScatterRule::Min), written),
        (Box::new(LastWrite { dim: 0, extent: 3 }), vec![index.clone()]),
        (Box::new(LinearIndex { extents: [3].into_iter().collect() }), vec![index.clone()]),
        (Box::new(Bincount { bins: 3 }), vec![index]),
    ];
    // A result without elements has no legal index.
    let add = |dtype, n: usize| -> (Box<dyn Op>, Vec<Tensor>) {
        let index = Tensor::full(DType::I64, [n], 3);
        (Box::new(ScatterAdd { dim: 0, extent: 0 }), vec![index, values(dtype, &[n], 1)])
    };
    let cases = cases.into_iter().chain([add(DType::F32, 1), add(DType::F32, 2), add(DType::I32, 2)]);
    for (op, ins) in cases {
        let e = eval_whole(&*op, &ins).unwrap_err().to_string();
        assert!(e.starts_with(&format!("{}: an index leaves dim 0; got index 3", op.name())), "{e}");
        let ins: Vec<Tensor> = ins.iter().map(|x| x.to_device(device).unwrap()).collect();
        let out = eval_whole(&*op, &ins).expect("the kernel only reports").remove(0);
        let read = if out.numel() > 0 { &out } else { &ins[0] };
        let e = read.to_device(Device::Cpu).expect_err("reported").to_string();
        assert!(e.starts_with(&format!("{}: an index leaves its dim; got index 3", op.name())), "{e}");
    }
}
