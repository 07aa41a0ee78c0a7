//! Declared parameters, sites and blocks: the parameters' units, and declarations that are taken back.

use super::{ParamUnit, Params};
use crate::comm::ModulePath;
use crate::nn::param_id::ParamId;
use crate::nn::pieces::ParamPiece;
use crate::rng::Generator;

/// The parameters that are declared at some time.
pub(in crate::nn) struct DeclaredParams {
    len: usize,
    generator: Generator,
}

impl Params {
    pub(in crate::nn) fn has_site(&self, path: &str) -> bool {
        self.sites.contains(path)
    }

    pub(in crate::nn) fn sites(&self) -> impl Iterator<Item = &str> {
        self.sites.iter().map(|s| &s[..])
    }

    pub(in crate::nn) fn declare_site(&mut self, path: String) {
        self.sites.insert(path);
    }

    pub(in crate::nn) fn block(&self, path: &str) -> Option<ModulePath> {
        self.blocks.get(path).copied()
    }

    pub(in crate::nn) fn blocks(&self) -> impl Iterator<Item = &str> {
        self.blocks.keys().map(|s| &s[..])
    }

    pub(in crate::nn) fn declare_block(&mut self, path: String) {
        let module = ModulePath::new(&path);
        self.blocks.insert(path, module);
    }

    /// Returns the path of the module that declared a parameter.
    pub(in crate::nn) fn module_of(&self, id: ParamId) -> ModulePath {
        self.at(id).module
    }

    pub(in crate::nn) fn unit_of(&self, id: ParamId) -> usize {
        self.at(id).unit
    }

    pub(in crate::nn) fn units(&self) -> &[ParamUnit] {
        &self.units
    }

    pub(in crate::nn) fn pieces_of(&self, id: ParamId) -> &[ParamPiece] {
        &self.at(id).pieces
    }

    /// Returns the state of the declarations, for [`Params::forget_since`].
    pub(in crate::nn) fn declared(&self) -> DeclaredParams {
        DeclaredParams { len: self.list.len(), generator: self.generator.clone() }
    }

    /// Forgets the parameters that were declared since. They must have declared no sites.
    pub(in crate::nn) fn forget_since(&mut self, DeclaredParams { len, generator }: DeclaredParams) {
        self.generator = generator;
        self.list.truncate(len);
        self.units.iter_mut().for_each(|unit| unit.members.retain(|id| id.index < len));
        // New units are the last ones, so the numbers of the others stay.
        self.units.retain(|unit| !unit.members.is_empty());
    }

    /// Adds a parameter to its unit: the part of its path up to the first number, such as `h.0`. Parameters without a
    /// number form the root unit.
    pub(super) fn unit_for(&mut self, path: &str, id: ParamId) -> usize {
        let number =
            path.split('.').position(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        let name =
            number.map(|n| path.split('.').take(n + 1).collect::<Vec<_>>().join(".")).unwrap_or_default();
        let at = self.units.iter().position(|u| u.name == name).unwrap_or_else(|| {
            self.units.push(ParamUnit { name, members: Vec::new() });
            self.units.len() - 1
        });
        self.units[at].members.push(id);
        at
    }
}
