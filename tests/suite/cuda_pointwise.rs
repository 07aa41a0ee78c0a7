//! Pointwise operators and copies on a CUDA device have the CPU's bits: for every dtype, every bit pattern of small
//! dtypes, and layouts of every kind. Without a device, the shim compiles the same kernels for the CPU.

use std::sync::Arc;

use crate::common::shim::Order;
use crate::common::{self, SplitMix, mix, shim};
use half::{bf16, f16};
use isoshard::ops::*;
use isoshard::tensor::{DType, Device, Element, Shape, Tensor};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const NUMBERS: [DType; 7] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8];

/// A pointwise operator and the dtypes of its operands; `None` stands for the dtype under test.
pub type Case = (Arc<dyn Op>, &'static [Option<DType>], &'static [DType]);

pub fn cases() -> Vec<Case> {
    const ONE: &[Option<DType>] = &[None];
    const TWO: &[Option<DType>] = &[None; 2];
    const THREE: &[Option<DType>] = &[None; 3];
    const CONDITION: Option<DType> = Some(DType::Bool);
    let mut cases: Vec<Case> = Vec::new();
    macro_rules! add {
        ($ins:expr, $dtypes:expr; $($op:expr),* $(,)?) => { $(cases.push((Arc::new($op), $ins, $dtypes));)* };
    }
    // The operators of the table list their own dtypes.
    for op in formulas() {
        let takes = |n: usize, dtype| op.infer(&vec![Meta::new(dtype, [2]); n]).is_ok();
        let [float, integer, bool] = [DType::F32, DType::I32, DType::Bool]
            .map(|dtype| [ONE, TWO, THREE].into_iter().find(|ins| takes(ins.len(), dtype)));
        let ins = float.or(integer).expect("one, two or three f32 or i32 operands");
        let dtypes: &[DType] = match (float, integer, bool) {
            (None, _, None) => &NUMBERS[4..],
            (None, ..) => &DType::ALL[4..],
            (_, None, _) => &FLOATS,
            _ => &NUMBERS,
        };
        cases.push((op, ins, dtypes));
    }
    use CompareKind::{Eq, Ge, Gt, Le, Lt, Ne};
    for kind in [Eq, Ne, Lt, Le, Gt, Ge] {
        add![TWO, &DType::ALL; Compare { kind }];
    }
    for kind in [FloatTestKind::Nan, FloatTestKind::Infinite, FloatTestKind::Finite] {
        add![ONE, &FLOATS; FloatTest { kind }];
    }
    add![ONE, &DType::ALL; ZeroGrad];
    add![&[CONDITION, None], &DType::ALL; Mask { on: true }, Mask { on: false }];
    add![&[CONDITION, None, None], &DType::ALL; Select];
    for dtype in DType::ALL {
        add![ONE, &DType::ALL; Cast { dtype }];
    }
    cases
}

/// Numbers of every magnitude and all special values, in an order that pairs each with every other.
fn awkward(dtype: DType, shape: impl Into<Shape>, salt: u64) -> Tensor {
    let shape = shape.into();
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.0,
        3.0,
        -2.5,
        1e4,
        -1e4,
        88.5,
        -103.9,
        709.5,
        1e-40,
        -1e-45,
        5e-324,
        6e-8,
        65504.0,
        1e38,
        -3e38,
        1e300,
        2147483648.0,
        -2147483648.0,
        9.3e18,
        255.0,
        256.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    let value = |e: u64| {
        let bits = mix(e ^ salt << 40);
        if bits & 3 == 0 {
            return special[(bits >> 8) as usize % special.len()];
        }
        let unit = (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        unit * 10f64.powi(((bits >> 3) % 9) as i32 - 4)
    };
    let values: Vec<f64> = (0..shape.numel() as u64).map(value).collect();
    common::tensor(dtype, &values, &shape)
}

/// The bits, with one NaN for all.
fn bits(x: &Tensor) -> Vec<u64> {
    fn each<T: Element>(x: &Tensor, bits: impl Fn(T) -> u64) -> Vec<u64> {
        x.to_vec::<T>().expect("of this dtype").into_iter().map(bits).collect()
    }
    let x = &x.to_device(Device::Cpu).expect("a result");
    match x.dtype() {
        DType::F32 => each(x, |x: f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits().into() }),
        DType::F64 => each(x, |x: f64| if x.is_nan() { 0x7ff8 << 48 } else { x.to_bits() }),
        DType::F16 => each(x, |x: f16| if x.is_nan() { 0x7e00 } else { x.to_bits().into() }),
        DType::BF16 => each(x, |x: bf16| if x.is_nan() { 0x7fc0 } else { x.to_bits().into() }),
        DType::I64 => each(x, |x: i64| x as u64),
        DType::I32 => each(x, |x: i32| x as u32 as u64),
        DType::U8 => each(x, |x: u8| x.into()),
        DType::Bool => each(x, |x: bool| x.into()),
    }
}

/// Runs the operator on the CPU and on the device, on views of the same tensors.
pub fn compare(op: &dyn Op, device: Device, ins: &[Tensor], view: &dyn Fn(usize, Tensor) -> Tensor) {
    let on = |device: Device| {
        let moved = ins.iter().map(|x| x.to_device(device).expect("there is room")).enumerate();
        let views: Vec<Tensor> = moved.map(|(k, x)| view(k, x)).collect();
        eval_whole(op, &views).unwrap_or_else(|e| panic!("{op:?} of {views:?}: {e}")).remove(0)
    };
    let (want, got) = (on(Device::Cpu), on(device));
    assert_eq!((got.dtype(), got.shape(), got.device()), (want.dtype(), want.shape(), device), "{op:?}");
    let (want, got) = (bits(&want), bits(&got));
    if let Some(at) = (0..want.len()).find(|&i| want[i] != got[i]) {
        let given: Vec<f64> =
            ins.iter().map(|x| view(0, x.clone()).to_f64_vec().get(at).copied().unwrap_or(0.0)).collect();
        panic!("{op:?} of {ins:.0?}: element {at}, about {given:?}, is {:x}, not {:x}", got[at], want[at]);
    }
}

pub fn operands(case: &Case, dtype: DType, shape: &Shape, salt: u64) -> Vec<Tensor> {
    let of = |(k, d): (usize, &Option<DType>)| awkward(d.unwrap_or(dtype), shape, salt + k as u64);
    case.1.iter().enumerate().map(of).collect()
}

#[test]
fn every_operator_at_every_length() {
    let Some(device) = shim::device() else { return };
    for case in cases() {
        for &dtype in case.2 {
            for n in [0, 1, 3, 17, 255, 4099] {
                compare(&*case.0, device, &operands(&case, dtype, &[n].into(), n as u64), &|_, x| x);
            }
        }
    }
}

#[test]
fn every_bit_pattern_of_sixteen() {
    let Some(device) = shim::device() else { return };
    let halves = Tensor::from_vec((0..=u16::MAX).map(f16::from_bits).collect(), [1 << 16]).expect("as many");
    let upper = Tensor::from_vec((0..=u16::MAX).map(bf16::from_bits).collect(), [1 << 16]).expect("as many");
    for (op, ins, dtypes) in cases() {
        if ins.len() == 1 && dtypes.contains(&DType::F16) {
            compare(&*op, device, std::slice::from_ref(&halves), &|_, x| x);
            compare(&*op, device, std::slice::from_ref(&upper), &|_, x| x);
        }
    }
}

#[test]
fn bit_patterns_of_thirty_two_and_sixty_four_in_prime_steps() {
    let Some(device) = shim::device() else { return };
    let narrow: Vec<f32> = (0..=u32::MAX).step_by(40_009).map(f32::from_bits).collect();
    let n = narrow.len();
    let mut stream = SplitMix(7);
    let wide: Vec<f64> = (0..n).map(|_| f64::from_bits(stream.next_u64())).collect();
    let near: Vec<f64> = (0..n).map(|i| (i as f64 / n as f64 - 0.5) * 60.0).collect();
    let narrow = Tensor::from_vec(narrow, [n]).expect("as many");
    let [wide, near] = [wide, near].map(|v| Tensor::from_vec(v, [n]).expect("as many"));
    for (op, ins, dtypes) in cases() {
        if ins.len() == 1 && dtypes.contains(&DType::F32) {
            for x in [&narrow, &wide, &near] {
                compare(&*op, device, std::slice::from_ref(x), &|_, x| x);
            }
        }
    }
}

/// A function that makes a view of a tensor.
type View = Box<dyn Fn(Tensor) -> Tensor>;

/// Views of one shape: contiguous, repeated along each dim and along all, transposed, and slices with and without the
/// alignment of a pack.
fn views(shape: [usize; 3]) -> Vec<(Shape, View)> {
    let [a, b, c] = shape;
    let cut = move |lead: usize| -> View {
        Box::new(move |x| x.narrow(1, 1, b).unwrap().narrow(2, lead, c).unwrap())
    };
    let expand = move |x: Tensor| x.expand(shape).unwrap();
    vec![
        (shape.into(), Box::new(|x| x)),
        ([c].into(), Box::new(expand)),
        ([a, 1, 1].into(), Box::new(expand)),
        ([b, 1].into(), Box::new(expand)),
        ([a, 1, c].into(), Box::new(expand)),
        ([].into(), Box::new(expand)),
        ([c, b, a].into(), Box::new(|x| x.permute(&[2, 1, 0]).unwrap())),
        ([b, a, c].into(), Box::new(|x| x.transpose(0, 1).unwrap())),
        ([a, c, b].into(), Box::new(|x| x.transpose(1, 2).unwrap())),
        ([a, b + 2, c + 16].into(), cut(16)),
        ([a, b + 2, c + 5].into(), cut(3)),
        (
            [1 + a * b * c].into(),
            Box::new(move |x| x.narrow(0, 1, a * b * c).unwrap().reshape(shape).unwrap()),
        ),
    ]
}

#[test]
fn every_operator_in_every_layout() {
    let Some(device) = shim::device() else { return };
    for (at, case) in cases().iter().enumerate() {
        // One dtype per operator is enough here; they take turns.
        let dtype = case.2[at % case.2.len()];
        layouts(device, case, dtype, [3, 5, 32], at as u64);
    }
}

/// Large enough that transposed operands are copied first.
#[test]
fn every_dtype_in_every_layout() {
    let Some(device) = shim::device() else { return };
    let add: Case = (Arc::new(Add), &[None; 2], &NUMBERS);
    let select: Case = (Arc::new(Select), &[Some(DType::Bool), None, None], &DType::ALL);
    for case in [add, select] {
        for &dtype in case.2 {
            layouts(device, &case, dtype, [2, 3, 48], 1);
            layouts(device, &case, dtype, [3, 70, 90], 2);
        }
    }
}

/// Tests every view as the first operand, with every third one as the others.
fn layouts(device: Device, case: &Case, dtype: DType, shape: [usize; 3], salt: u64) {
    let views = views(shape);
    for first in 0..views.len() {
        for second in (first % 3..views.len()).step_by(3) {
            let chosen = |k: usize| &views[[first, second, first + second][k] % views.len()];
            let ins =
                |(k, d): (usize, &Option<DType>)| awkward(d.unwrap_or(dtype), &chosen(k).0, salt + k as u64);
            let ins: Vec<Tensor> = case.1.iter().enumerate().map(ins).collect();
            compare(&*case.0, device, &ins, &|k, x| (chosen(k).1)(x));
            if case.1.len() == 1 {
                break;
            }
        }
    }
}

#[test]
fn more_dims_than_a_kernel_walks() {
    let Some(device) = shim::device() else { return };
    let shape = [2usize, 3, 2, 2, 3, 2, 2, 3];
    let order = [7, 5, 3, 1, 6, 4, 2, 0];
    for dtype in [DType::BF16, DType::F64] {
        let ins = [awkward(dtype, shape, 1), awkward(dtype, shape, 2)];
        compare(&Mul, device, &ins, &|k, x| {
            if k == 0 { x.permute(&order).unwrap() } else { x.permute(&[0, 5, 3, 1, 6, 4, 2, 7]).unwrap() }
                .reshape([864])
                .unwrap()
        });
        let turned: Shape = order.iter().map(|&d| shape[d]).collect();
        let ins = [awkward(dtype, turned, 3), awkward(dtype, shape, 4)];
        compare(&Sub, device, &ins, &|k, x| if k == 0 { x } else { x.permute(&order).unwrap() });
    }
}

#[test]
fn a_result_lies_over_an_operand_that_nobody_else_holds() {
    let Some(device) = shim::device() else { return };
    let here = |salt| awkward(DType::F32, [7, 33], salt);
    let there = |salt| here(salt).to_device(device).expect("there is room");
    let run = |ins: &mut [Tensor]| {
        let metas: Metas = ins.iter().map(Meta::of).collect();
        let at = Windows::whole(&metas, &metas[..1]);
        Sub.cuda(ins, &at).expect("legal").remove(0)
    };
    let want = bits(&eval_whole(&Sub, &[here(1), here(2)]).expect("legal")[0]);
    let mut ins = [there(1), there(2)];
    let out = run(&mut ins);
    assert!(out.shares_storage(&ins[0]) && bits(&out) == want);
    let kept = there(1);
    let mut ins = [kept.clone(), there(2)];
    let out = run(&mut ins);
    assert!(out.shares_storage(&ins[1]) && bits(&out) == want);
    let (mut ins, other) = ([kept.clone(), there(2)], there(2));
    ins[1] = other.clone();
    let out = run(&mut ins);
    assert!(!ins.iter().any(|x| out.shares_storage(x)) && bits(&out) == want);
    assert_eq!(bits(&kept), bits(&here(1)), "what somebody holds stays as it was");
    // With a repeated operand.
    let row = awkward(DType::F32, [33], 5);
    let want = bits(&eval_whole(&Sub, &[here(1), row.expand([7, 33]).unwrap()]).expect("legal")[0]);
    let mut ins = [there(1), row.to_device(device).unwrap().expand([7, 33]).unwrap()];
    let out = run(&mut ins);
    assert!(out.shares_storage(&ins[0]) && bits(&out) == want);
    // With one tensor as both operands.
    let x = there(1);
    assert!(bits(&run(&mut [x.clone(), x.clone()])).iter().all(|&b| b == 0 || b == 0x7fc0_0000));
}

#[test]
fn lists_have_the_bits_of_single_calls() {
    let Some(device) = shim::device() else { return };
    list(&Mul, 2, &NUMBERS, device);
    list(&MulScalar::by(-3.0), 1, &NUMBERS, device);
    list(&AddScalar::by(0.7), 1, &FLOATS, device);
    list(&Lerp, 3, &FLOATS, device);
    list(&Addcdiv::by(0.3), 3, &FLOATS, device);
}

/// Computes 110 calls at once and one by one: of several dtypes and lengths, empty, strided, and with operands that
/// something else holds.
fn list<O: Batched>(op: &O, arity: usize, dtypes: &[DType], device: Device) {
    const LENS: [usize; 7] = [1, 7, 256, 0, 2048, 5000, 31];
    let here = |k: usize| -> Vec<Tensor> {
        let operand =
            |i: usize| awkward(dtypes[k % dtypes.len()], [LENS[k % LENS.len()], 2], (3 * k + i) as u64);
        (0..arity).map(operand).collect()
    };
    let view = |k: usize, x: Tensor| if k % 10 == 9 { x.transpose(0, 1).expect("two dims") } else { x };
    let there = |k: usize| -> Vec<Tensor> {
        here(k).iter().map(|x| view(k, x.to_device(device).expect("there is room"))).collect()
    };
    let mut operands: Vec<Vec<Tensor>> = (0..110).map(there).collect();
    let held: Vec<Tensor> = operands.iter().step_by(3).map(|ins| ins[0].clone()).collect();
    let before: Vec<Vec<u64>> = held.iter().map(bits).collect();
    let whole = |ins: &Vec<Tensor>| {
        let metas: Metas = ins.iter().map(Meta::of).collect();
        Windows::whole(&metas, &metas[..1])
    };
    let windows: Vec<Windows> = operands.iter().map(whole).collect();
    let mut calls: Vec<(&O, &mut [Tensor])> = operands.iter_mut().map(|ins| (op, &mut ins[..])).collect();
    let outs = O::cuda_batch(&mut calls, &windows.iter().collect::<Vec<_>>()).expect("legal");
    for (k, out) in outs.iter().enumerate() {
        let ins: Vec<Tensor> = here(k).into_iter().map(|x| view(k, x)).collect();
        let want = eval_whole(op, &ins).expect("legal").remove(0);
        assert_eq!((out[0].dtype(), out[0].shape()), (want.dtype(), want.shape()), "call {k}");
        assert!(bits(&out[0]) == bits(&want), "{op:?}, call {k}: {:?}", want.shape());
    }
    assert!(held.iter().map(bits).eq(before), "{op:?}: what something else holds stays as it was");
}

/// In every order of a block's threads, because transposed copies go through shared memory.
#[test]
fn copies_between_random_layouts() {
    let Some(device) = shim::device() else { return };
    for (seed, order) in [(11, Order::Ascending), (12, Order::Descending), (13, Order::Shuffled(1))] {
        shim::with_order(order, || copies(device, seed));
    }
}

fn copies(device: Device, seed: u64) {
    let mut stream = SplitMix(seed);
    for round in 0..150usize {
        let dtype = *stream.pick(&DType::ALL);
        let ndim = 1 + stream.below(5);
        let long = round % 3;
        let shape: Shape = (0..ndim)
            .map(|_| match stream.below(4) {
                0 => 1 + stream.below(3),
                1 => *stream.pick(&[8, 16, 32, 64]),
                _ => 1 + stream.below([7, 20, 70][long]),
            })
            .collect();
        if shape.numel() > 60_000 {
            continue;
        }
        let mut order: Vec<usize> = (0..ndim).collect();
        (0..ndim).for_each(|d| order.swap(d, d + stream.below(ndim - d)));
        let (cut, keep) = (stream.below(ndim), 1 + stream.below(shape[order[0]].max(1)));
        let x = awkward(dtype, shape.clone(), seed + round as u64);
        let view = |x: Tensor| {
            let x = x.permute(&order).unwrap();
            let len = x.shape()[cut];
            let x = x.narrow(cut, len - len.min(keep), len.min(keep)).unwrap();
            if round % 5 == 0 {
                let mut wide = x.shape().to_vec();
                wide.insert(0, 3);
                return x.expand(wide).unwrap();
            }
            x
        };
        let want = view(x.clone()).to_owned_copy().expect("there is room");
        let got = view(x.to_device(device).expect("there is room")).to_owned_copy().expect("legal");
        assert!(got.is_contiguous() && got.device() == device);
        let got = got.to_device(Device::Cpu).expect("a copy");
        assert!(
            want.as_bytes().unwrap() == got.as_bytes().unwrap(),
            "{dtype}{shape} by {order:?}, {keep} of dim {cut}"
        );
    }
}

#[test]
fn moves_and_constants() {
    let Some(device) = shim::device() else { return };
    let moves: Vec<Box<dyn Op>> = vec![
        Box::new(Slice { dim: 1, start: 3, len: 30 }),
        Box::new(Pad { dim: 1, before: 3, after: 2 }),
        Box::new(Pad { dim: 0, before: 0, after: 1 }),
        Box::new(Permute { order: [1, 0].into_iter().collect() }),
        Box::new(Expand { shape: [3, 5, 64].into() }),
        Box::new(Reshape { shape: [8, 40].into() }),
    ];
    for dtype in DType::ALL {
        for op in &moves {
            compare(&**op, device, &[awkward(dtype, [5, 64], 3)], &|_, x| x);
            compare(&**op, device, &[awkward(dtype, [64, 5], 3)], &|_, x| x.transpose(0, 1).unwrap());
        }
        for dim in [0, 1] {
            for lens in [[64, 64, 64], [1, 0, 5], [33, 8, 1]] {
                let shape = |len: usize| if dim == 0 { [len, 37] } else { [37, len] };
                let ins: Vec<Tensor> =
                    lens.iter().map(|&len| awkward(dtype, shape(len), len as u64)).collect();
                compare(&Cat { dim }, device, &ins, &|_, x| x);
                let lens = lens.into_iter().collect();
                let split = Split { dim, lens };
                let whole = awkward(dtype, shape(split.lens.iter().sum()), 9);
                compare(&split, device, &[whole], &|_, x| x);
            }
        }
        for value in
            [0.0, -0.0, 1.0, 0.1, -3.7, 300.0, 1e30, 1.0 + 1.0 / 256.0 + 1e-9, f64::INFINITY, f64::NAN]
        {
            for n in [0, 1, 1001] {
                let full = Tensor::full_on(device, dtype, [n], value).expect("there is room");
                assert_eq!(bits(&full), bits(&Tensor::full(dtype, [n], value)), "{value} in {dtype}");
            }
        }
    }
}
