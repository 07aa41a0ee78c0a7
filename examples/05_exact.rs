//! 5. Sums that ranks share: the bits of one rank, or fewer bytes. `cargo run --example 05_exact`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::placement::{Layout, short::R};
use isoshard::rng::Generator;
use isoshard::tensor::DType;

/// The sum of twelve rows of normals on `ranks` ranks: its bits, and the bytes that rank 0 received for it.
fn sum(ranks: usize, reduction: Reduction) -> Result<(Vec<u32>, u64)> {
    let mut results = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        mesh.set_reduction(reduction);
        // Twelve rows on three ranks: four each. The summation tree over twelve halves at six, so rank 0 has finished the
        // nodes [0, 3) and [3, 4), rank 1 [4, 5), [5, 6) and [6, 8), rank 2 [8, 9) and [9, 12).
        let x = DTensor::randn(&mesh, DType::F32, [12, 1, 100], "(S0)".parse()?, &mut Generator::new(3))?;
        let partial = x.sum(&[0, 1], false)?;
        assert_eq!(partial.spec().to_string(), "f32[100]@(dp:P(sum))");
        if ranks == 3 && reduction == Reduction::Exact {
            let said = partial.explain(Layout::new([R]))?;
            assert!(said.starts_with("all_reduce(sum) over dp{0, 1, 2} of 2, 3 and 2 nodes: "), "{said}");
        }
        let before = mesh.received_bytes();
        let whole = partial.full_tensor()?.to_vec::<f32>()?;
        Ok((whole.into_iter().map(f32::to_bits).collect(), mesh.received_bytes() - before))
    })?;
    Ok(results.swap_remove(0))
}

fn main() -> Result<()> {
    let (one, _) = sum(1, Reduction::Exact)?;
    for ranks in [2, 3, 4, 5] {
        let ((exact, exact_bytes), (fast, fast_bytes)) =
            (sum(ranks, Reduction::Exact)?, sum(ranks, Reduction::Fast)?);
        assert_eq!(exact, one, "exact sums do not depend on the number of ranks");
        let differ = fast.iter().zip(&one).filter(|(a, b)| a != b).count();
        println!(
            "{ranks} ranks: exact {exact_bytes} bytes; fast {fast_bytes} bytes, {differ} of 100 sums in other bits"
        );
        match ranks {
            // Equal power-of-two parts are nodes of the tree: then both are the same.
            2 | 4 => assert_eq!((differ, exact_bytes), (0, fast_bytes)),
            _ => assert!(differ > 0),
        }
    }
    Ok(())
}
