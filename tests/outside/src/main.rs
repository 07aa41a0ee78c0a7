//! Trains on two ranks, and counts the kernels that the library brings.

use isoshard::comm::spmd;
use isoshard::dtensor::DeviceMesh;
use isoshard::tensor::cuda;

fn main() -> isoshard::Result<()> {
    let losses = spmd(2, |rank| outside::train(&DeviceMesh::new(&rank, &[("fsdp", 2)])?, 3, |_, _, _| Ok(())))?;
    assert_eq!(losses[0], losses[1]);
    assert!(losses[0][2] < losses[0][0], "{losses:?}");
    // Every kernel's text is part of the library.
    assert!(cuda::programs().iter().all(|(name, text)| name.ends_with(".cu") && !text.is_empty()));
    assert!(cuda::headers().iter().all(|(name, text)| name.ends_with(".cuh") && !text.is_empty()));
    println!("{} programs, {} headers", cuda::programs().len(), cuda::headers().len());
    Ok(())
}
