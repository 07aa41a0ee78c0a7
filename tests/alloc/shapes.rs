//! The memory of a program whose shapes differ at every call, such as a sequence that grows.

use isoshard::comm::DryRun;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::DType;

use crate::peak_of;

/// Plans, metadata and moves of 100,000 shapes take no more memory at once than those of 20,000.
#[test]
fn a_hundred_thousand_shapes_take_bounded_memory() {
    let peak = |shapes: usize| {
        let run = || {
            let dry = DryRun::new(4, 1)?;
            let mesh = DeviceMesh::parse(&dry.rank()?, "dp=2,tp=2")?;
            for len in 1..=shapes {
                let zeros = |layout: &str| DTensor::zeros(&mesh, DType::F32, [len, 64], layout);
                let (x, y) = (zeros("(S0, R)")?.requires_grad()?, zeros("(R, S1)")?);
                let loss = x.mul(&y)?.sum(&[0], false)?;
                if len % 8 == 0 {
                    loss.sum_all()?.backward()?;
                }
            }
            Ok::<_, isoshard::Error>(())
        };
        let (result, peak) = peak_of(run);
        result.unwrap_or_else(|e| panic!("{shapes}: {e}"));
        peak
    };
    let (few, many) = (peak(20_000), peak(100_000));
    println!("{} KiB for 20,000 shapes, {} KiB for 100,000", few >> 10, many >> 10);
    assert!(many < few + few / 10, "{few} bytes for 20,000 shapes, {many} for 100,000");
}
