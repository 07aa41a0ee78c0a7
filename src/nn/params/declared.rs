//! Declared parameters, sites and blocks: the parameters' units, and declarations that are taken back.

use super::Params;
use super::names::DeclaredPath;
use crate::comm::ModulePath;
use crate::dtensor::{CountedList, GradientUnit};
use crate::error::Result;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::param_unit::ParamUnit;
use crate::nn::params::pieces::ParamPiece;
use crate::tensor::DType;

/// The bytes of the root's gradients that wait for each other.
const ROOT_BYTES: usize = 32 << 20;

impl Params {
    /// Refuses a plan with a pattern that matches neither what was declared nor an adapter of a declared weight, which
    /// may be declared later.
    pub(crate) fn expect_plan_matches(&self) -> Result<()> {
        let pieces = self.list.iter().flat_map(|param| &param.pieces).map(ParamPiece::path);
        let maps = pieces.map(|path| path.strip_suffix(".weight").unwrap_or(path));
        let adapters: Vec<String> =
            maps.flat_map(|path| ["a", "b"].map(|name| format!("{path}.lora_{name}"))).collect();
        let mut paths = self.paths();
        paths.extend(adapters.iter().map(|path| &path[..]));
        self.plan.expect_matches(
            &paths,
            &self.sites().collect::<Vec<_>>(),
            &self.blocks().collect::<Vec<_>>(),
        )
    }

    pub(in crate::nn) fn has_site(&self, path: &str) -> bool {
        self.sites.contains(path)
    }

    pub(in crate::nn) fn sites(&self) -> impl Iterator<Item = &str> {
        self.sites.iter().map(|s| &s[..])
    }

    pub(in crate::nn) fn block(&self, path: &str) -> Option<ModulePath> {
        self.blocks.get(path).copied()
    }

    pub(in crate::nn) fn blocks(&self) -> impl Iterator<Item = &str> {
        self.blocks.keys().map(|s| &s[..])
    }

    /// Returns the path of the module that declared a parameter.
    pub(in crate::nn) fn module_of(&self, id: ParamId) -> ModulePath {
        self.at(id).module
    }

    pub(in crate::nn) fn unit_of(&self, id: ParamId) -> usize {
        self.at(id).unit
    }

    pub(crate) fn units(&self) -> &CountedList<ParamUnit> {
        &self.units
    }

    pub(in crate::nn) fn pieces_of(&self, id: ParamId) -> &[ParamPiece] {
        &self.at(id).pieces
    }

    /// Returns the parameter and the piece there that have a path.
    pub(in crate::nn) fn piece_at(&self, path: &str) -> Option<(ParamId, usize)> {
        let (index, nth) = self.names.piece(path)?;
        Some((ParamId { index, model: self.number }, nth))
    }

    pub(in crate::nn) fn declare_site(&mut self, path: String) {
        if self.sites.insert(path.clone()) && self.declaring.running > 0 {
            self.declaring.added.push(DeclaredPath::Site(path));
        }
    }

    pub(in crate::nn) fn declare_block(&mut self, path: String) {
        let module = ModulePath::new(&path);
        if self.blocks.insert(path.clone(), module).is_none() && self.declaring.running > 0 {
            self.declaring.added.push(DeclaredPath::Block(path));
        }
    }

    /// Runs `declare`. If it fails, its declarations are taken back: the parameters, sites and blocks, and the draws of
    /// their values.
    pub(in crate::nn) fn all_or_none<T>(
        &mut self,
        declare: impl FnOnce(&mut Params) -> Result<T>,
    ) -> Result<T> {
        let (len, added, generator) = (self.list.len(), self.declaring.added.len(), self.generator.clone());
        self.declaring.running += 1;
        let declared = declare(self);
        self.declaring.running -= 1;
        if declared.is_err() {
            self.generator = generator;
            for path in self.declaring.added.drain(added..) {
                match path {
                    DeclaredPath::Site(path) => drop(self.sites.remove(&path)),
                    DeclaredPath::Block(path) => drop(self.blocks.remove(&path)),
                }
            }
            self.take_back(len);
        }
        if self.declaring.running == 0 {
            self.declaring.added.clear();
        }
        declared
    }

    /// Removes all parameters but the first `len`.
    fn take_back(&mut self, len: usize) {
        for param in self.list.drain(len..) {
            self.names.remove(&param.path, &param.pieces);
        }
        self.units.iter_mut().for_each(|unit| unit.members.retain(|id| id.index < len));
        // New units are the last ones, so the numbers of the others stay.
        self.units.retain(|unit| !unit.members.is_empty());
        self.names.set_units(&self.units);
        self.checked.set(None);
    }

    /// Adds a parameter to its unit: the part of its path up to the first number, such as `h.0`. Parameters without a
    /// number form the root unit.
    pub(super) fn unit_for(&mut self, path: &str, id: ParamId) -> usize {
        let number =
            path.split('.').position(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        let name =
            number.map(|n| path.split('.').take(n + 1).collect::<Vec<_>>().join(".")).unwrap_or_default();
        let unit = self.names.unit(&name).unwrap_or_else(|| {
            self.names.add_unit(self.units.len(), &name);
            let gradients = gradient_unit(&name, None);
            let members = CountedList::default();
            let (stays_gathered, padding, gathered_len) = (false, 0, 0);
            self.units.push(ParamUnit { name, members, gradients, stays_gathered, padding, gathered_len });
            self.units.len() - 1
        });
        self.units[unit].members.push(id);
        unit
    }
}

/// Returns the unit of the gradients of a unit's parameters. The root's may be a whole model's, so few of them wait.
pub(super) fn gradient_unit(name: &str, reduced_in: Option<DType>) -> GradientUnit {
    GradientUnit::next(if name.is_empty() { ROOT_BYTES } else { usize::MAX }, reduced_in)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::nn::{Activation, SelfAttentionConfig};
    use crate::nn::{Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, MlpConfig, NormConfig, Plan};
    use crate::rng::Init;

    /// Returns the digest of the parameters, and the names of all that is declared.
    fn state(params: &Params) -> Result<(u64, Vec<String>)> {
        let indices = |unit: &ParamUnit| unit.members.iter().map(|id| id.index).collect::<Vec<_>>();
        let units = params.units().iter().map(|unit| format!("unit {}: {:?}", unit.name, indices(unit)));
        let paths = params.ids().map(|id| format!("param {}", params.path(id)));
        let sites = params.sites().map(|path| format!("site {path}"));
        let blocks = params.blocks().map(|path| format!("block {path}"));
        Ok((params.digest()?, paths.chain(sites).chain(blocks).chain(units).collect()))
    }

    #[test]
    fn what_a_failed_declaration_declares_is_taken_back() {
        let run = |rank| {
            let mesh = DeviceMesh::parse(&rank, "tp=2")?;
            let new = || Params::new(&mesh, Plan::default(), 7);
            let normal = Init::Normal { mean: 0.0, std: 1.0 };
            let (mut params, mut fresh) = (new()?, new()?);
            for params in [&mut params, &mut fresh] {
                params.root().child("h").child(0).param("w", [3], normal)?;
                params.root().child("h").child(0).block_here();
                params.root().site("x");
            }
            let before = state(&params)?;
            let e = params.all_or_none(|params| {
                let mut root = params.root();
                root.child("h").child(0).param("v", [3], normal)?;
                root.child("h").child(1).param("w", [3], normal)?;
                root.child("h").child(1).block_here();
                root.child("h").child(1).site_here();
                root.child("h").child(0).param("w", [3], normal)
            });
            assert!(e.unwrap_err().to_string().contains("two parameters share a path"));
            assert_eq!(state(&params)?, before);
            for params in [&mut params, &mut fresh] {
                params.all_or_none(|params| params.root().child("h").child(1).param("u", [3], normal))?;
            }
            assert_eq!(state(&params)?, state(&fresh)?);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// A model whose second layer is refused leaves nothing behind: the next model has the values of a first one.
    #[test]
    fn a_refused_model_leaves_nothing_behind() {
        let run = |rank| {
            let mesh = DeviceMesh::parse(&rank, "tp=2")?;
            let mlp =
                MlpConfig { hidden: 6, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 };
            let layer = |heads| DecoderLayer {
                attention: SelfAttentionConfig::new(heads, 2, 4),
                feed_forward: FeedForwardConfig::Mlp(mlp),
            };
            let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
            let config = |heads| DecoderConfig::new(11, 6, 8, norm, vec![layer(2), layer(heads)]);
            let mut params = Params::new(&mesh, Plan::default(), 7)?;
            // Three heads do not share two heads of keys.
            Decoder::new(&mut params, config(3)).expect_err("the second layer does not fit");
            assert_eq!((params.len(), params.units().len()), (0, 0));
            assert_eq!((params.sites().count(), params.blocks().count()), (0, 0));
            Decoder::new(&mut params, config(2))?;
            let mut fresh = Params::new(&mesh, Plan::default(), 7)?;
            Decoder::new(&mut fresh, config(2))?;
            assert_eq!(state(&params)?, state(&fresh)?);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
