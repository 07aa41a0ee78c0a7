//! 1. One tensor, stored in pieces. `cargo run --example 01_shard`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::Tensor;

fn main() -> Result<()> {
    // Four ranks, threads of this process, all run the same program.
    spmd(4, |rank| {
        // They form a grid of 2 x 2; its axes have names.
        let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;

        // A layout says what each axis does to a tensor: here dp cuts its rows and tp its columns.
        let whole = Tensor::from_vec((0..15).map(|i| i as f32).collect(), [5, 3])?;
        let layout = Layout::new([Placement::Shard(0), Placement::Shard(1)]);
        let x = DTensor::distribute(&mesh, &whole, layout)?;
        assert_eq!(x.spec().to_string(), "f32[5, 3]@(dp:S0, tp:S1)");

        // It behaves as the whole; a rank holds its part, and parts need not be equal.
        let parts = [[3, 2], [3, 1], [2, 2], [2, 1]];
        assert_eq!(x.shape()[..], [5, 3]);
        assert_eq!(x.local().shape()[..], parts[rank.rank()]);

        // Arithmetic needs nothing from other ranks, and its result lies as its operands do.
        let y = x.mul(&x)?;
        assert_eq!(y.layout(), x.layout());
        assert_eq!(mesh.received_bytes(), 0);

        // A sum over cut dims leaves a part of the sum on each rank: that is a layout, too, named Partial.
        let sum = y.sum_all()?;
        assert_eq!(sum.spec().to_string(), "f32[]@(dp:P(sum), tp:P(sum))");
        assert_eq!(sum.full_tensor()?.item()?, 1015.0);

        // Redistributing changes where elements lie, never what they are. A rank receives exactly what it lacks.
        let before = mesh.received_bytes();
        let rows = x.redistribute(Layout::new([Placement::Shard(0), Placement::Replicate]))?;
        let lacked = rows.local().numel() - x.local().numel();
        assert_eq!(mesh.received_bytes() - before, 4 * lacked as u64);
        assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, whole.to_vec::<f32>()?);
        Ok(())
    })?;
    println!("a 5 x 3 tensor lay on a mesh of 2 x 2 ranks and was one tensor all the time");
    Ok(())
}
