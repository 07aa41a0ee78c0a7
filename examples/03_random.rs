//! 3. Random numbers that belong to global indices. `cargo run --example 03_random`
//!
//! Prints one random tensor as 1, 2 and 5 ranks store it, side by side.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::rng::{Generator, Init, Permutation};
use isoshard::tensor::DType;

const ROWS: usize = 7;
const COLUMNS: usize = 3;

/// Returns normal numbers, some of them dropped, as each of `ranks` ranks stores them: sharded by rows.
fn stored(ranks: usize) -> Result<Vec<Vec<f32>>> {
    spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        // A generator gives each random operator a number of its own. The ranks compare their generators once, at the
        // first use, and name a rank that was seeded differently. After that nothing is communicated.
        let mut generator = Generator::new(42);
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        let rows = Layout::new([Placement::Shard(0)]);
        let x = DTensor::init(&mesh, DType::F32, [ROWS, COLUMNS], rows, init, &mut generator)?;
        // Dropout decides by an element's global index, on whichever rank the element is.
        let y = x.dropout(0.25, &mut generator)?;
        assert_eq!(mesh.received_bytes(), 0);
        y.local().to_vec::<f32>()
    })
}

fn main() -> Result<()> {
    let meshes = [1, 2, 5];
    println!("Seven rows of normal numbers, some of them dropped (zero), sharded by rows:\n");
    println!(
        "        {}",
        meshes
            .map(|ranks| format!("{:<32}", format!("on {ranks} rank{}", if ranks == 1 { "" } else { "s" })))
            .concat()
            .trim_end()
    );
    let stored = meshes.map(stored).into_iter().collect::<Result<Vec<_>>>()?;
    for row in 0..ROWS {
        let cells = stored.iter().map(|ranks| {
            let (rank, numbers) = stored_row(ranks, row);
            let numbers: String = numbers.iter().map(|x| format!("{x:>8.4}")).collect();
            format!("{:<32}", format!("rank {rank}{numbers}"))
        });
        println!("row {row}   {}", cells.collect::<String>().trim_end());
    }

    // The same numbers, bit for bit. Seven rows on five ranks leave the last rank empty.
    let single = stored[0].concat();
    assert!(stored.iter().all(|ranks| ranks.concat() == single));
    assert!(stored[2][4].is_empty());
    assert!(single.contains(&0.0) && single.iter().any(|x| *x != 0.0));

    // Parts of a program get generators of their own, so that a new part does not change the numbers of the other
    // parts.
    let root = Generator::new(42);
    assert_ne!(root.child("dropout").next_draw(), root.child("params").next_draw());

    // A random order of a data set is a function as well: any rank computes any position, and no rank stores a table.
    let order = Permutation::new(root.child("epoch 0").next_draw(), 1_000_000_007);
    assert_eq!(order.position(order.at(123_456_789)?)?, 123_456_789);
    println!(
        "\nOf 1,000,000,007 examples in random order, number 123,456,789 is example {}.",
        order.at(123_456_789)?
    );
    Ok(())
}

/// Finds the rank that stores a row, and the row.
fn stored_row(ranks: &[Vec<f32>], row: usize) -> (usize, &[f32]) {
    let mut first = 0;
    for (rank, numbers) in ranks.iter().enumerate() {
        let rows = numbers.len() / COLUMNS;
        if row < first + rows {
            return (rank, &numbers[(row - first) * COLUMNS..][..COLUMNS]);
        }
        first += rows;
    }
    unreachable!("some rank stores row {row}")
}
