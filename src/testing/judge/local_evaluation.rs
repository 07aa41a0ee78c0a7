//! Runs an operator's kernel on the shards of all ranks, one after another, without communication.

use crate::ops::{Op, RaggedBoxes, Tensors, Window, Windows, are_cut_alike};
use crate::placement::Spec;
use crate::tensor::Tensor;
use crate::testing::expected_panics::caught;

/// Runs `op` on every rank of the mesh without communication, once per box of flattened dims if `by_boxes`. Errors and
/// panics become texts.
pub(super) fn eval_apart(
    op: &dyn Op,
    ins: &[(&Spec, &[Tensor])],
    outs: &[Spec],
    by_boxes: bool,
) -> std::result::Result<Vec<Tensors>, String> {
    let mesh = &outs[0].mesh;
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
            let call = || {
                if !by_boxes {
                    return op.eval(&mut locals, &at);
                }
                let boxes = RaggedBoxes::of(&at);
                let stored = outs.iter().zip(&at.outs).map(|(s, w)| (s.dtype, w.local().clone()));
                boxes.run(&locals, stored, |locals, at| op.eval(locals, at))
            };
            match caught(call) {
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

/// Returns true if the dispatcher would run a kernel once per box of these operands and results.
pub(super) fn have_common_boxes(ins: &[Spec], outs: &[Spec]) -> bool {
    let [ins, outs] = [ins, outs].map(|specs| specs.iter().map(|s| (&s.shape, &s.layout)));
    are_cut_alike(ins, outs)
}

fn window(spec: &Spec, coords: &[usize]) -> Window {
    Window { global: spec.shape.clone(), region: spec.region_at(coords) }
}
