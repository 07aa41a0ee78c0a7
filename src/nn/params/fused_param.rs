//! Parameters that hold several maps: their declaration, and their pieces by path.

use crate::error::Result;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::pieces::{FusedMaps, ParamPiece};
use crate::nn::params::scope::Scope;
use crate::rng::Init;

impl Params {
    /// Returns the pieces of a parameter: several for a fused one, otherwise one.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Gpt, GptConfig, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let config = GptConfig {
    ///         vocabulary: 11, block: 6, layers: 1, heads: 2, width: 8, dropout: 0.1, bias: false,
    ///     };
    ///     Gpt::new(&mut params, config)?;
    ///     let qkv = params.find("h.0.attn.qkv.weight").expect("declared");
    ///     assert_eq!(params.pieces(qkv).len(), 3);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the parameter is another model's.
    pub fn pieces(&self, id: ParamId) -> &[ParamPiece] {
        self.pieces_of(id)
    }

    /// Returns the parameter that stores the piece at a path, and the piece, or `None`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let maps = FusedMaps::new(2, [("q", 4), ("k", 2), ("v", 2)])?;
    ///     params.root().child("attn").child("qkv").fused_param("weight", &maps, &[5], Init::Ones)?;
    ///     let (qkv, k) = params.find_piece("attn.k.weight").expect("declared");
    ///     assert_eq!(params.path(qkv), "attn.qkv.weight");
    ///     assert_eq!(k.of(params.value(qkv))?.shape()[..], [4, 5]);
    ///     assert!(params.find_piece("attn.qkv.weight").is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn find_piece(&self, path: &str) -> Option<(ParamId, &ParamPiece)> {
        let (id, nth) = self.piece_at(path)?;
        Some((id, &self.pieces_of(id)[nth]))
    }
}

impl Scope<'_> {
    /// Declares a parameter that holds several maps: `[groups, rows per group, inputs..]` for a weight, and
    /// `[groups · rows per group]` for a bias, whose `inputs` are empty. The pieces' paths have the maps' names in place
    /// of this scope's last part.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let maps = FusedMaps::new(1, [("q", 4), ("k", 2), ("v", 2)])?;
    ///     let qkv = params.root().child("qkv").fused_param("weight", &maps, &[5], Init::Ones)?;
    ///     // FSDP shards the rows of all groups, so that one group is cut as well.
    ///     assert_eq!(params.value(qkv).spec().to_string(), "f32[1, 8, 5]@(fsdp:RS(0..2; 4,4))");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn fused_param(
        &mut self,
        name: &str,
        maps: &FusedMaps,
        inputs: &[usize],
        init: Init,
    ) -> Result<ParamId> {
        let (shape, pieces) = maps.layout_of(self.path(), name, inputs);
        self.declare(name, shape, init, Some(pieces))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::{DTensor, DeviceMesh};
    use crate::nn::Plan;
    use crate::tensor::Tensor;

    /// The pieces of a parameter cover each of its elements once, and all three ways to find an element agree.
    #[test]
    fn pieces_cover_their_parameter() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let mut params = Params::new(&mesh, Plan::default(), 1)?;
            let maps = [
                FusedMaps::new(3, [("q", 4), ("k", 1), ("v", 2)])?,
                FusedMaps::new(1, [("a", 2), ("b", 3)])?,
                FusedMaps::new(4, [("one", 3)])?,
                FusedMaps::new(0, [("none", 3)])?,
            ];
            for (i, maps) in maps.iter().enumerate() {
                for (name, inputs) in [("weight", &[5][..]), ("bias", &[]), ("cube", &[2, 3])] {
                    params.root().child(i).child("map").fused_param(name, maps, inputs, Init::Ones)?;
                }
            }
            params.root().param("scalar", [], Init::Ones)?;
            params.root().param("empty", [0, 3], Init::Ones)?;
            for id in params.ids() {
                let shape = params.value(id).shape().clone();
                let n = shape.numel();
                let index = Tensor::from_vec((0..n as i64).collect(), shape)?;
                let index = DTensor::distribute(&mesh, &index, "()")?;
                let mut covered = vec![0; n];
                for piece in params.pieces(id) {
                    let found = piece.of(&index)?;
                    assert_eq!(found.shape(), piece.shape());
                    let found = found.full_tensor()?.to_vec::<i64>()?;
                    for (element, &index) in found.iter().enumerate() {
                        assert_eq!(piece.param_index(element), index as usize, "{}", piece.path());
                        covered[index as usize] += 1;
                    }
                    for range in [0..n, n / 3..n / 2, 1.min(n)..n] {
                        let inside = (0..found.len()).filter(|&e| range.contains(&(found[e] as usize)));
                        let inside: Vec<usize> = inside.collect();
                        let runs: Vec<usize> = piece
                            .runs(range)
                            .flat_map(|run| {
                                let same = |i| piece.param_index(run.piece_start + i) == run.param_start + i;
                                assert!((0..run.len).all(same), "{run:?}");
                                run.piece_start..run.piece_start + run.len
                            })
                            .collect();
                        assert_eq!(runs, inside, "{}", piece.path());
                    }
                }
                assert!(covered.iter().all(|&times| times == 1), "{}: {covered:?}", params.path(id));
            }
            let e = params.pieces(params.ids().next().expect("some"))[0].of(&DTensor::zeros(
                &mesh,
                crate::tensor::DType::F32,
                [5],
                "()",
            )?);
            assert!(e.unwrap_err().to_string().contains("for the piece 0.q.weight; got f32[5]@()"));
            let (id, piece) = params.find_piece("0.q.weight").expect("declared");
            let flat = params.value(id).reshape([105])?;
            let e = piece.of(&flat).unwrap_err().to_string();
            assert!(e.ends_with("got f32[105]@() for [3, 7, 5]"), "{e}");
            let mut again = params.root();
            let e = again.child("0").child("k").param("weight", [2], Init::Ones).unwrap_err().to_string();
            assert!(e.starts_with("param: two parameters share a path; got 0.k.weight"), "{e}");
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
