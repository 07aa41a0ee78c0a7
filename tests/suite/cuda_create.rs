//! Tensors made from global indices have the same elements on a CUDA device, whatever a rank stores of them.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::DiagonalBand;
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Device};

use crate::common::shim;

/// Returns the bytes of each rank's shard of sequences, bands and one-hot rows on a device.
fn shards(device: Device, shape: [usize; 2], layout: &'static str) -> Vec<Vec<Vec<u8>>> {
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank.on(device), &[("a", 2), ("b", 2)])?;
        let layout = || layout.parse::<Layout>();
        let mut all = Vec::new();
        for dtype in DType::ALL {
            let line: Layout = "(S0, S0)".parse()?;
            if dtype != DType::Bool {
                all.push(DTensor::arange(&mesh, dtype, 3, 100, 7, line.clone())?);
            }
            if dtype.is_float() {
                all.push(DTensor::arange(&mesh, dtype, 0.3, -1.7, -0.1, line.clone())?);
                all.push(DTensor::linspace(&mesh, dtype, -0.1, 1e4, 37, line.clone())?);
                all.push(DTensor::linspace(&mesh, dtype, 5, 7, 1, line)?);
            }
            let eye = DTensor::eye(&mesh, dtype, shape[0], shape[1], layout()?)?;
            let ones = DTensor::ones(&mesh, dtype, shape, layout()?)?;
            for diagonal in [-2, 0, 1, i64::MAX, i64::MIN] {
                all.extend([ones.tril(diagonal)?, ones.triu(diagonal)?]);
            }
            all.push(eye);
            let index = DTensor::arange(&mesh, DType::I64, 0, 11, 1, "(S0, R)")?;
            all.push(index.one_hot(13, dtype)?);
        }
        all.push(DTensor::band_mask(&mesh, shape, DiagonalBand { low: -1, high: 2 }, layout()?)?);
        all.push(DTensor::from_fn(&mesh, shape, layout()?, |i| (10 * i[0] + i[1]) as i32)?);
        all.iter().map(|x| Ok(x.local().to_device(Device::Cpu)?.contiguous()?.as_bytes()?.to_vec())).collect()
    };
    spmd(4, run).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn shards_have_the_cpus_bits() {
    let Some(device) = shim::device() else { return };
    for (shape, layout) in [
        ([7, 5], "(S0, S1)"),
        ([4, 8], "(S1, S1)"),
        ([5, 9], "(R, S0)"),
        ([9, 3], "(RS(0..2; 11, 16), R)"),
        ([0, 3], "(S1, R)"),
    ] {
        assert!(shards(device, shape, layout) == shards(Device::Cpu, shape, layout), "{shape:?} {layout}");
    }
}

#[test]
fn an_index_that_is_no_class_is_named() {
    let Some(device) = shim::device() else { return };
    let said = |device: Device| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::new(&rank.on(device), &[("a", 1)])?;
            let index = DTensor::full(&mesh, DType::I64, [3], Layout::replicated(1), 5)?;
            index.one_hot(5, DType::F32)?.local().to_device(Device::Cpu)
        };
        spmd(1, run).unwrap_err().to_string()
    };
    assert!(said(device).contains("one_hot: an index leaves its dim; got index 5"), "{}", said(device));
    assert!(
        said(Device::Cpu).contains("one_hot: an index leaves dim 1; got index 5"),
        "{}",
        said(Device::Cpu)
    );
}
