//! The kernels of mixtures of experts on a device give the bits of the CPU, for whole operands and for a rank's part.

use crate::common::shim;
use crate::common::{bits_differ, ordinary, small_ints};
use isoshard::ops::*;
use isoshard::placement::Region;
use isoshard::tensor::{DType, Device, Dims, Shape, Tensor};

fn compare_at(op: &dyn Op, device: Device, ins: &[Tensor], at: &Windows) {
    let want = op.eval(&mut ins.to_vec(), at).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let mut ins: Vec<Tensor> = ins.iter().map(|x| x.to_device(device).expect("there is room")).collect();
    let got = op.cuda(&mut ins, at).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    for (k, (got, want)) in got.iter().zip(&want).enumerate() {
        if let Some(difference) = bits_differ(got, want) {
            panic!("{op:?}, result {k}: {difference}");
        }
    }
}

fn whole(op: &dyn Op, ins: &[Tensor]) -> Windows {
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    Windows::whole(&metas, &op.infer(&metas).expect("legal operands"))
}

fn number(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    if dtype.is_float() { ordinary(dtype, shape, salt) } else { small_ints(dtype, shape, salt) }
}

fn part(start: &[usize], shape: impl Into<Shape>) -> Region {
    Region::of_box(Dims::from_slice(start), shape.into())
}

#[test]
fn slots_of_many_tokens() {
    let Some(device) = shim::device() else { return };
    for (shape, experts) in [(&[3, 700, 2][..], 5), (&[256, 1], 3), (&[2, 257, 1], 1), (&[1, 1], 300)] {
        let expert = Input::index(shape, experts).values(DType::F32, 3);
        for capacity in [None, Some(0), Some(2), Some(1000)] {
            let op = ExpertSlots { experts, capacity };
            let ins = [expert.clone()];
            compare_at(&op, device, &ins, &whole(&op, &ins));
        }
    }
}

#[test]
fn rows_to_slots_and_back() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for (batch, tokens, choices, slots, width) in [(2, 5, 2, 10, 16), (1, 3, 1, 6, 5), (3, 40, 2, 82, 32)]
        {
            let slot = Input::slots([batch, tokens, choices], slots).values(DType::F32, 5);
            let permute = PermuteTokens { slots };
            let x = number(dtype, &[batch, tokens, 1, width].into(), 1);
            // A token is sent to all its slots from one place.
            let x = x.expand([batch, tokens, choices, width]).unwrap();
            let ins = [x, slot.clone()];
            let mut at = whole(&permute, &ins);
            compare_at(&permute, device, &ins, &at);
            at.outs[0].region = part(&[0, 2, 0], [batch, slots - 3, width]);
            compare_at(&permute, device, &ins, &at);
            let mut at = whole(&permute, &ins);
            at.ins[0].region = part(&[0, 1, 0, 0], [batch, tokens - 1, choices, width]);
            let ins = [ins[0].narrow(1, 1, tokens - 1).unwrap(), slot.clone()];
            compare_at(&permute, device, &ins, &at);

            let y = number(dtype, &[batch, slots, width].into(), 2);
            let ins = [y.clone(), slot.clone()];
            let mut at = whole(&UnpermuteTokens, &ins);
            compare_at(&UnpermuteTokens, device, &ins, &at);
            at.ins[0].region = part(&[0, 1, 0], [batch, slots - 1, width]);
            let ins = [y.narrow(1, 1, slots - 1).unwrap(), slot];
            compare_at(&UnpermuteTokens, device, &ins, &at);
        }
    }
}

#[test]
fn products_per_expert() {
    let Some(device) = shim::device() else { return };
    let sizes = || Unkeyed(GroupSizes::new(3, [4, 0, 37, 1, 40, 0]).expect("two entries"));
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let (op, grad) = (
            GroupedMatmul { sizes: sizes() },
            GroupedMatmulGrad { experts: sizes().0.experts(), sizes: sizes() },
        );
        let x = ordinary(dtype, &[2, 41, 33].into(), 1);
        let w = ordinary(dtype, &[3, 33, 9].into(), 2);
        let dy = ordinary(dtype, &[2, 41, 9].into(), 3);
        let ins = [x.clone(), w.clone()];
        let mut at = whole(&op, &ins);
        compare_at(&op, device, &ins, &at);
        at.ins[1].region = part(&[1, 0, 0], [1, 33, 9]);
        compare_at(&op, device, &[x.clone(), w.narrow(0, 1, 1).unwrap()], &at);
        let ins = [x, dy];
        let mut at = whole(&grad, &ins);
        compare_at(&grad, device, &ins, &at);
        at.outs[0].region = part(&[1, 0, 0], [2, 33, 9]);
        compare_at(&grad, device, &ins, &at);
    }
}

/// Equal slots gave columns of either row.
#[test]
fn equal_slots_are_named() {
    let Some(device) = shim::device() else { return };
    let slot = Tensor::from_vec(vec![2i64, 0, 2, -1, -1, 2], [2, 3, 1]).expect("six elements");
    let rows = Tensor::full(DType::F32, [2, 3, 1, 5], 1.0);
    let op = PermuteTokens { slots: 3 };
    let said = |device: Device| {
        let ins = [&rows, &slot].map(|x| x.to_device(device).expect("there is room"));
        eval_whole(&op, &ins).and_then(|out| out[0].to_device(Device::Cpu)).unwrap_err().to_string()
    };
    assert!(
        said(device).starts_with("permute_tokens: two rows have the same slot; got slot 2"),
        "{}",
        said(device)
    );
    let on_cpu = said(Device::Cpu);
    assert!(
        on_cpu.starts_with("permute_tokens: two rows have the same slot; got slot 2 of batch entry 0"),
        "{on_cpu}"
    );
}

/// An expert or slot that the CPU refuses at once is reported by the next read of a value on the device.
#[test]
fn experts_and_slots_out_of_range_are_named() {
    let Some(device) = shim::device() else { return };
    let index = |i: i64| Tensor::from_vec(vec![i, 0], [2, 1]).expect("two elements");
    let rows = Tensor::full(DType::F32, [2, 1, 3], 1.0);
    let slots = Tensor::full(DType::F32, [4, 3], 1.0);
    let cases: [(Box<dyn Op>, Vec<Tensor>, i64); 4] = [
        (Box::new(ExpertSlots { experts: 4, capacity: None }), vec![index(4)], 4),
        (Box::new(ExpertSlots { experts: 4, capacity: None }), vec![index(-1)], -1),
        (Box::new(PermuteTokens { slots: 4 }), vec![rows, index(4)], 4),
        (Box::new(UnpermuteTokens), vec![slots, index(-2)], -2),
    ];
    for (op, ins, found) in cases {
        let e = eval_whole(&*op, &ins).unwrap_err().to_string();
        assert!(e.starts_with(op.name()) && e.contains(&format!(" {found} ")), "{e}");
        let ins: Vec<Tensor> = ins.iter().map(|x| x.to_device(device).expect("there is room")).collect();
        let out = eval_whole(&*op, &ins).expect("the kernel only reports").remove(0);
        let e = out.to_device(Device::Cpu).expect_err("reported").to_string();
        assert!(e.starts_with(&format!("{}: an index leaves its dim; got index {found}", op.name())), "{e}");
    }
}
