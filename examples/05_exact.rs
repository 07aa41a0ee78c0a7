//! 5. Sums over ranks: the bits of a single rank, or fewer bytes. `cargo run --example 05_exact`
//!
//! Prints a table of exact and fast sums on 2 to 5 ranks.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::placement::{Layout, short::R};
use isoshard::rng::Generator;
use isoshard::tensor::DType;

/// Sums twelve rows of normal numbers on `ranks` ranks. Returns the sums, and the bytes that rank 0 received for them.
fn sums(ranks: usize, reduction: Reduction) -> Result<(Vec<f32>, u64)> {
    let mut results = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        mesh.set_reduction(reduction);
        let x = DTensor::randn(&mesh, DType::F32, [12, 1, 100], "(S0)", &mut Generator::new(3))?;
        let partial = x.sum(&[0, 1], false)?;
        assert_eq!(partial.spec().to_string(), "f32[100]@(dp:P(sum))");
        // An exact sum follows one tree over the twelve rows, on every mesh. The tree halves them at 6, then at 3 and
        // 9. Of three ranks with four rows each, rank 0 has finished the nodes [0, 3) and [3, 4), rank 1 [4, 5), [5, 6)
        // and [6, 8), rank 2 [8, 9) and [9, 12). Each rank sends its finished nodes.
        if ranks == 3 && reduction == Reduction::Exact {
            let plan = partial.explain(Layout::new([R]))?;
            assert!(plan.starts_with("all_reduce(sum) over dp{0, 1, 2} of 2, 3 and 2 nodes: "), "{plan}");
        }
        let before = mesh.received_bytes();
        let whole = partial.full_tensor()?.to_vec::<f32>()?;
        Ok((whole, mesh.received_bytes() - before))
    })?;
    Ok(results.swap_remove(0))
}

fn main() -> Result<()> {
    let (single, _) = sums(1, Reduction::Exact)?;
    println!("100 sums of twelve numbers each, compared with a single rank:\n");
    println!("        exact                          fast");
    println!("ranks   received   other bits          received   other bits   largest difference");
    for ranks in [2, 3, 4, 5] {
        let (exact, exact_bytes) = sums(ranks, Reduction::Exact)?;
        let (fast, fast_bytes) = sums(ranks, Reduction::Fast)?;
        let others =
            |sums: &[f32]| sums.iter().zip(&single).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let differences = fast.iter().zip(&single).map(|(a, b)| (a - b).abs());
        println!(
            "{ranks:>5}{exact_bytes:>9} B{:>13}{fast_bytes:>17} B{:>13}{:>21.1e}",
            format!("{} of 100", others(&exact)),
            format!("{} of 100", others(&fast)),
            differences.fold(0.0, f32::max)
        );
        assert_eq!(others(&exact), 0, "exact sums do not depend on the number of ranks");
        match ranks {
            // Equal shards in a power-of-two number are nodes of the tree, so both kinds of sums are the same.
            2 | 4 => assert_eq!((others(&fast), exact_bytes), (0, fast_bytes)),
            _ => assert!(others(&fast) > 0),
        }
    }
    println!("\nExact sums have the bits of a single rank on every mesh. Fast sums round in another order.");
    Ok(())
}
