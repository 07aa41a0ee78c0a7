//! Runs an operator's kernel on the shards of all ranks, one after another, without communication.

use crate::ops::{Op, Tensors, Window, Windows};
use crate::placement::Spec;
use crate::tensor::Tensor;
use crate::testing::quiet::caught;

/// Runs `op` on every rank of the mesh without communication. Errors and panics become texts.
pub(super) fn eval_apart(
    op: &dyn Op,
    ins: &[(&Spec, &[Tensor])],
    outs: &[Spec],
) -> std::result::Result<Vec<Tensors>, String> {
    let mesh = &outs[0].mesh;
    let window = |s: &Spec, c: &[usize]| Window { global: s.shape.clone(), region: s.region_at(c) };
    mesh.ranks()
        .map(|rank| {
            let coords = mesh.coords_of(rank).expect("a rank of the mesh");
            let at = Windows {
                ins: ins.iter().map(|(s, _)| window(s, &coords)).collect(),
                outs: outs.iter().map(|s| window(s, &coords)).collect(),
                exact: true,
            };
            // Unshared copies let kernels work in place, as they do in the engine.
            let mut locals: Tensors =
                ins.iter().map(|(_, parts)| parts[rank].to_owned_copy().expect("it is in memory")).collect();
            match caught(|| op.eval(&mut locals, &at)) {
                Ok(Ok(found)) if found.len() != outs.len() => {
                    Err(format!("rank {rank} returns {} results instead of {}", found.len(), outs.len()))
                }
                Ok(Ok(found)) => Ok(found),
                Ok(Err(e)) => Err(format!("rank {rank}: {e}")),
                Err(panic) => Err(format!("rank {rank} panics: {panic}")),
            }
        })
        .collect()
}
