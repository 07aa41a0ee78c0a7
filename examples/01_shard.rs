//! 1. One tensor, stored in shards. `cargo run --example 01_shard`
//!
//! Prints which rank stores which elements, before and after a move.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::Tensor;

/// A tensor as one rank sees it: the picture of its layout, and the values that the rank stores.
type Seen = (String, String);

fn main() -> Result<()> {
    // Four ranks, here threads of this process, all run the same program.
    let ranks = spmd(4, |rank| {
        // They form a grid of 2 x 2, the mesh. Its axes have names.
        let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
        let seen = |x: &DTensor| -> Seen { (x.spec().draw(), x.local().to_string()) };

        // A layout says what each axis does to a tensor: here dp shards its rows (dim 0), and tp its columns (dim 1).
        let whole = Tensor::from_vec((0..15).map(|i| i as f32).collect(), [5, 3])?;
        let layout = Layout::new([Placement::Shard(0), Placement::Shard(1)]);
        let x = DTensor::distribute(&mesh, &whole, layout)?;
        // Every rank sees the whole shape and stores its shard. Shards need not be equal.
        let shards = [[3, 2], [3, 1], [2, 2], [2, 1]];
        assert_eq!(x.shape()[..], [5, 3]);
        assert_eq!(x.local().shape()[..], shards[rank.rank()]);

        // Arithmetic needs nothing from other ranks, and its result has the operands' layout.
        let squares = x.mul(&x)?;
        assert_eq!(squares.layout(), x.layout());
        assert_eq!(mesh.received_bytes(), 0);

        // A sum over sharded dims leaves a contribution on each rank: the sums that the rank has finished, one per node of
        // the reduction tree. That is a layout too, named Partial.
        let sum = squares.sum_all()?;
        assert_eq!(sum.spec().to_string(), "f32[]@(dp:P(sum), tp:P(sum))");
        assert_eq!(sum.item()?, 1015.0);

        // Redistributing changes where elements are stored, never their values. A rank receives exactly what it lacks.
        let before = mesh.received_bytes();
        let rows = x.redistribute(Layout::new([Placement::Shard(0), Placement::Replicate]))?;
        let received = mesh.received_bytes() - before;
        let lacked = rows.local().numel() - x.local().numel();
        assert_eq!(received, 4 * lacked as u64);
        assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, whole.to_vec::<f32>()?);
        Ok((seen(&x), seen(&rows), seen(&sum), received))
    })?;

    println!("A tensor of 5 x 3 on 2 x 2 ranks: dp shards the rows, tp the columns.\n");
    show(ranks.iter().map(|(x, ..)| x));
    println!("Now tp replicates instead: each rank stores whole rows.");
    let received: Vec<String> = ranks.iter().map(|(.., received)| received.to_string()).collect();
    println!("The ranks received {} bytes, the elements that they lacked.\n", received.join(", "));
    show(ranks.iter().map(|(_, rows, ..)| rows));
    println!(
        "The sum of the squares, 1015, before it is added up: each rank stores the sums that it has finished.\n"
    );
    show(ranks.iter().map(|(_, _, sum, _)| sum));
    Ok(())
}

/// Prints the picture that all ranks agree on, and what each rank stores, side by side.
fn show<'a>(ranks: impl Iterator<Item = &'a Seen>) {
    let (pictures, stored): (Vec<&String>, Vec<&String>) =
        ranks.map(|(picture, stored)| (picture, stored)).unzip();
    assert!(pictures.iter().all(|picture| picture == &pictures[0]));
    println!("{}", pictures[0]);
    let columns: Vec<Vec<String>> = stored
        .iter()
        .enumerate()
        .map(|(rank, text)| {
            std::iter::once(format!("rank {rank}")).chain(text.lines().map(str::to_string)).collect()
        })
        .collect();
    for i in 0..columns.iter().map(Vec::len).max().unwrap_or(0) {
        let line: String = columns.iter().map(|c| format!("{:<16}", c.get(i).map_or("", |s| s))).collect();
        println!("{}", line.trim_end());
    }
    println!();
}
