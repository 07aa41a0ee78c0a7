//! The names of parameters, of their pieces and of their units.

use rustc_hash::FxHashMap;

use crate::dtensor::CountedList;
use crate::error::{Error, Result};
use crate::nn::params::param_unit::ParamUnit;
use crate::nn::params::pieces::ParamPiece;

/// The indices of parameters, pieces and units by name.
#[derive(Clone, Default)]
pub(super) struct ParamNames {
    params: FxHashMap<String, usize>,
    /// The indices of the parameter and of the piece there.
    pieces: FxHashMap<String, (usize, usize)>,
    units: FxHashMap<String, usize>,
}

/// The declarations that are running and are taken back if they fail.
#[derive(Default)]
pub(super) struct Declaring {
    pub running: usize,
    /// The sites and blocks that they have added.
    pub added: Vec<DeclaredPath>,
}

/// A path that a declaration has added.
pub(super) enum DeclaredPath {
    Site(String),
    Block(String),
}

impl ParamNames {
    pub fn param(&self, path: &str) -> Option<usize> {
        self.params.get(path).copied()
    }

    pub fn piece(&self, path: &str) -> Option<(usize, usize)> {
        self.pieces.get(path).copied()
    }

    pub fn unit(&self, name: &str) -> Option<usize> {
        self.units.get(name).copied()
    }

    /// Refuses the path of a parameter and those of its pieces if another has one of them.
    pub fn expect_free(&self, path: &str, pieces: &[ParamPiece]) -> Result<()> {
        let is_taken = |name: &&str| self.params.contains_key(*name) || self.pieces.contains_key(*name);
        match pieces.iter().map(ParamPiece::path).chain([path]).find(is_taken) {
            None => Ok(()),
            Some(path) => {
                Err(Error::invalid("param", "two parameters share a path", path, "rename one of them"))
            }
        }
    }

    /// Adds the names of the parameter with this index.
    pub fn add(&mut self, index: usize, path: &str, pieces: &[ParamPiece]) {
        self.params.insert(path.into(), index);
        for (nth, piece) in pieces.iter().enumerate() {
            self.pieces.insert(piece.path().into(), (index, nth));
        }
    }

    /// Removes the names of a parameter.
    pub fn remove(&mut self, path: &str, pieces: &[ParamPiece]) {
        self.params.remove(path);
        for piece in pieces {
            self.pieces.remove(piece.path());
        }
    }

    pub fn add_unit(&mut self, index: usize, name: &str) {
        self.units.insert(name.into(), index);
    }

    /// Sets the names of all units.
    pub fn set_units(&mut self, units: &CountedList<ParamUnit>) {
        self.units = units.iter().enumerate().map(|(index, unit)| (unit.name.clone(), index)).collect();
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::spmd;
    use crate::dtensor::{DTensor, DeviceMesh, visits};
    use crate::error::Result;
    use crate::nn::{Forward, Params, Plan, recompute};
    use crate::rng::Init;
    use crate::tensor::DType;

    /// Returns the visits of parameters and units in the declaration of `n` parameters, in a forward pass that reads each
    /// twice, and in the backward pass.
    fn visits_of(ranks: usize, n: usize, path: fn(usize, usize) -> String, recomputed: bool) -> [usize; 3] {
        let run = move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("fsdp", ranks)])?;
            let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
            params.compute_in(DType::BF16)?;
            let mut seen = vec![visits()];
            for i in 0..n {
                params.all_or_none(|params| {
                    params.root().site(&i.to_string());
                    params.root().param(&path(i, n), [2], Init::Ones)
                })?;
            }
            seen.push(visits());
            let ids: Vec<_> = params.ids().collect();
            let all = move |cx: &Forward, _: &[DTensor]| {
                let twice = ids.iter().map(|&id| cx.param(id)?.add(&cx.param(id)?));
                let twice = twice.collect::<Result<Vec<_>>>()?;
                DTensor::cat(&twice.iter().collect::<Vec<_>>(), 0)?.exp()
            };
            let cx = Forward::train_without_dropout(&params);
            let x = DTensor::ones(&mesh, DType::BF16, [1], "(R)")?;
            let y = if recomputed { recompute(&cx, &[&x], all)? } else { all(&cx, &[x])? };
            drop(cx);
            seen.push(visits());
            y.sum_all()?.backward()?;
            seen.push(visits());
            Ok([0, 1, 2].map(|i| seen[i + 1] - seen[i]))
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{e}")).remove(0)
    }

    /// A scan of all parameters, of all units or of a unit per parameter would make it four times as many.
    #[test]
    fn twice_as_many_parameters_take_twice_as_many_visits() {
        let paths: [fn(usize, usize) -> String; 4] = [
            |i, _| format!("w{i}"),
            |i, _| format!("h.0.w{i}"),
            |i, n| format!("h.{}.w{i}", 2 * i / n),
            |i, _| format!("h.{i}.w"),
        ];
        for (path, ranks) in paths.into_iter().flat_map(|path| [(path, 1), (path, 2)]) {
            for recomputed in [false, true] {
                let [few, many] = [24, 48].map(|n| visits_of(ranks, n, path, recomputed));
                let text = format!("{} on {ranks}, {recomputed}: {few:?} and {many:?} visits", path(1, 2));
                assert!(few.iter().zip(&many).all(|(few, many)| *many <= 2 * few + 8), "{text}");
            }
        }
    }

    #[test]
    fn names_follow_what_is_declared_and_taken_back() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let mut params = Params::new(&mesh, Plan::default(), 7)?;
            let first = params.root().param("h.0.w", [2], Init::Ones)?;
            let refused = params.all_or_none(|params| {
                params.root().param("h.0.v", [2], Init::Ones)?;
                params.root().param("h.1.w", [2], Init::Ones)?;
                params.all_or_none(|params| params.root().param("h.2.w", [2], Init::Ones))?;
                params.root().param("h.0.w", [2], Init::Ones)
            });
            assert!(refused.unwrap_err().to_string().contains("two parameters share a path"));
            let names = ["h.0.w", "h.0.v", "h.1.w", "h.2.w"];
            assert_eq!(names.map(|name| params.find(name).is_some()), [true, false, false, false]);
            assert_eq!(names.map(|name| params.find_piece(name).is_some()), [true, false, false, false]);
            let again = params.root().param("h.1.w", [2], Init::Ones)?;
            assert_eq!((params.find("h.0.w"), params.find("h.1.w")), (Some(first), Some(again)));
            assert_eq!(params.find_piece("h.1.w").expect("declared").0, again);
            assert_eq!([first, again].map(|id| params.unit_of(id)), [0, 1]);
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
