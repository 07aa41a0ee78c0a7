//! A bridge makes no second copy of a tensor: while tensors cross, a rank allocates its shards on the other mesh and
//! at most one packed copy of the data that it sends.

use isoshard::Result;
use isoshard::comm::{Rank, Spmd};
use isoshard::dtensor::{Bridge, DTensor, DeviceMesh, Transfer};
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::DType;

use crate::taken;

/// Moves tensors over a bridge. Each rank returns the bytes of its shards there, of the packed data that it sends,
/// and of its allocations.
fn crossed(
    shapes: &'static [[usize; 2]],
    from: &'static str,
    to: &'static str,
) -> Vec<(usize, usize, usize)> {
    let run = move |rank: Rank| -> Result<(usize, usize, usize)> {
        let (train, generate) = (Mesh::over(&[("a", 3)], 0..3)?, Mesh::over(&[("b", 2)], 2..4)?);
        let ends = (from.parse::<Layout>()?, to.parse::<Layout>()?);
        let transfers = shapes.iter().map(|s| Transfer::new(DType::F32, *s, ends.0.clone(), ends.1.clone()));
        let bridge = Bridge::new(&rank, &train, &generate, transfers)?;
        let on = |mesh: &Mesh| mesh.contains(rank.rank()).then(|| DeviceMesh::on(&rank, mesh)).transpose();
        let (here, there) = (on(&train)?, on(&generate)?);
        let source = |mesh: &DeviceMesh| -> Result<Vec<DTensor>> {
            shapes.iter().map(|s| DTensor::full(mesh, DType::F32, *s, ends.0.clone(), 1)).collect()
        };
        let sources = here.as_ref().map(source).transpose()?.unwrap_or_default();
        rank.world().barrier()?;
        let before = taken();
        let arrived = bridge.send(&sources, there.as_ref())?;
        let taken = taken() - before;
        let part: usize = arrived.iter().map(|x| x.local().len_bytes()).sum();
        Ok((part, bridge.sent_bytes() as usize, taken))
    };
    // Near their limit, ranks take no segments from the system that many tensors share.
    Spmd::new(4).memory_limit(64 << 20).run(run).unwrap_or_else(|e| panic!("{e}"))
}

/// Blocks may be up to a quarter larger than requested.
fn block(bytes: usize) -> usize {
    bytes + bytes / 4 + 4096
}

#[test]
fn large_tensors_are_not_packed() {
    for (from, to) in [("(S0)", "(S1)"), ("(S0)", "(R)"), ("(R)", "(S0)"), ("(S1)", "(S0)")] {
        for (rank, (part, _, taken)) in crossed(&[[1021, 515], [2053, 257]], from, to).into_iter().enumerate()
        {
            assert!(taken <= block(part), "{from} to {to}, rank {rank}: {taken} for a part of {part}");
        }
    }
}

#[test]
fn small_ones_are_packed_once() {
    const SHAPES: &[[usize; 2]] = &[[101, 103], [107, 109], [113, 127], [131, 137]];
    for (from, to) in [("(S0)", "(S1)"), ("(S0)", "(R)"), ("(R)", "(S0)")] {
        for (rank, (part, sent, taken)) in crossed(SHAPES, from, to).into_iter().enumerate() {
            assert!(
                taken <= block(part) + block(sent) + 8 * 4096,
                "{from} to {to}, rank {rank}: {taken} for a part of {part} and {sent} sent"
            );
        }
    }
}
