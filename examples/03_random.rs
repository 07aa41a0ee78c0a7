//! 3. Random numbers that belong to global indices. `cargo run --example 03_random`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::rng::{Generator, Init, Permutation};
use isoshard::tensor::DType;

/// A tensor of normal numbers with some dropped, sharded by rows over `ranks` ranks, and then whole.
fn values(ranks: usize) -> Result<Vec<f32>> {
    let mut all = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        // A generator hands out draws, one for each random operator. The ranks compare theirs once, at the first draw:
        // a rank that was seeded differently is named. After that nothing is communicated.
        let mut generator = Generator::new(42);
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        let rows = Layout::new([Placement::Shard(0)]);
        let x = DTensor::init(&mesh, DType::F32, [7, 3], rows, init, &mut generator)?;
        // Dropout reads the number of each element's global index, wherever the element lies.
        let y = x.dropout(0.5, &mut generator)?;
        assert_eq!(mesh.received_bytes(), 0);
        y.full_tensor()?.to_vec::<f32>()
    })?;
    Ok(all.swap_remove(0))
}

fn main() -> Result<()> {
    // One rank, two, five: the same numbers, bit for bit. Seven rows on five ranks leave one of them empty.
    let single = values(1)?;
    assert_eq!(values(2)?, single);
    assert_eq!(values(5)?, single);
    assert!(single.contains(&0.0) && single.iter().any(|x| *x != 0.0));

    // Parts of a program get generators of their own: adding one does not change the others' numbers.
    let root = Generator::new(42);
    assert_ne!(root.child("dropout").next_draw(), root.child("params").next_draw());

    // A data order is a function as well: any rank can ask for any place of it, and none keeps a table.
    let order = Permutation::new(root.child("epoch 0").next_draw(), 1_000_000_007);
    assert_eq!(order.position(order.at(123_456_789)?)?, 123_456_789);
    println!("21 numbers were the same on 1, 2 and 5 ranks");
    Ok(())
}
