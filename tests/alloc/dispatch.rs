//! The allocations of calls whose plans are cached.

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::DType;

use crate::calls;

/// Returns the number of allocations of the third of three equal calls, and its result.
fn allocations_of<T>(mut call: impl FnMut() -> isoshard::Result<T>) -> isoshard::Result<(usize, T)> {
    call()?;
    call()?;
    let before = calls();
    let result = call()?;
    Ok((calls() - before, result))
}

/// A view allocates nothing, and other results have one buffer. A tape node is one block, and so are all values that it
/// keeps. A pass adds the gradient of the loss, the leaf's gradient and the table that has it.
#[test]
fn dispatch_allocates_only_what_it_returns_or_keeps() {
    let run = |rank| {
        let mesh = DeviceMesh::parse(&rank, "dp=2")?;
        let x = DTensor::full(&mesh, DType::F32, [16, 8], "(S0)", 0.5)?;
        let leaf = x.requires_grad()?;
        let (view, _) = allocations_of(|| x.transpose(0, 1))?;
        let (recorded_view, y) = allocations_of(|| leaf.transpose(0, 1))?;
        let (product, _) = allocations_of(|| x.mul(&x))?;
        let (recorded_product, _) = allocations_of(|| leaf.mul(&x))?;
        assert_eq!([view, recorded_view, product, recorded_product], [0, 1, 1, 3]);
        let (pass, gradients) = allocations_of(|| y.clone().backward_from(y.detach()))?;
        assert!(gradients.get(&leaf).is_some());
        assert_eq!(pass, 1, "the table of gradients");
        let loss = y.sum_all()?;
        let (pass, _) = allocations_of(|| loss.backward_keeping())?;
        assert_eq!(pass, 3, "the first gradient, a contiguous one and the table");
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}
