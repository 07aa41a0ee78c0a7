//! The origin of a tensor: two tensors of one dtype and shape are told apart by how they were made.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use super::signature::Subject;
use crate::module_path::ModulePath;

thread_local!(static CURRENT: Cell<Lineage> = const { Cell::new(Lineage::NONE) });

/// The way in which a distributed tensor was made: a hash of its parameter's path, or of the operator, the attributes and the
/// operands that computed it. It is the same on all ranks, whatever part of the tensor each holds, and it does not
/// depend on how many other tensors a rank has made.
///
/// Each call that moves a [`DTensor`](crate::dtensor::DTensor) carries its lineage ([`Call::lineage`](super::Call)).
/// Members compare it, so a rank that gathers another tensor of the same shape gets an error in place of a mixture.
/// Tensors of a program's own calls ([`Group`](crate::comm::Group)) have none.
///
/// Moving a tensor to another layout keeps its lineage. Copying it costs nothing but 24 bytes.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let result = spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 1.0)?;
///     let y = x.mul_scalar(10.0)?;
///     if rank.rank() == 0 { x.full_tensor() } else { y.full_tensor() }
/// });
/// assert!(result.unwrap_err().to_string().contains("of mul_scalar"));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lineage {
    hash: u64,
    /// The parameter's path, or the operator that made the tensor.
    name: &'static str,
}

/// The guard of [`Lineage::enter`].
pub(crate) struct LineageScope {
    outer: Lineage,
    /// The guard stays on its thread.
    thread: PhantomData<*const ()>,
}

impl Lineage {
    /// The lineage of tensors that are not distributed ones.
    pub const NONE: Lineage = Lineage { hash: 0, name: "" };

    /// Returns the lineage of a tensor that is known by its path alone, such as a parameter. Tensors of another `kind`
    /// with the same path differ.
    fn named(kind: &str, path: &str) -> Lineage {
        Lineage { hash: hash_text(hash_text(SEED, kind), path), name: ModulePath::new(path).as_str() }
    }

    /// Returns the lineage of a parameter.
    pub(crate) fn parameter(path: &str) -> Lineage {
        Lineage::named("parameter", path)
    }

    /// Returns true for a parameter with another path.
    pub(crate) fn is_another_parameter(self, path: &str) -> bool {
        self.name != path && self == Lineage::parameter(self.name)
    }

    /// Returns the lineage of what an operator computes from nothing; `attributes` is a hash of what it was asked for.
    pub(crate) fn made_by(name: &'static str, attributes: u64) -> Lineage {
        Lineage { hash: mixed(hash_text(SEED, name), attributes), name }
    }

    /// Returns the lineage of a call's first result, given a hash of the operator and its attributes.
    #[inline]
    pub(crate) fn of_call(
        name: &'static str,
        attributes: u64,
        operands: impl Iterator<Item = Lineage>,
    ) -> Lineage {
        Lineage { hash: operands.fold(attributes, |hash, operand| mixed(hash, operand.hash)), name }
    }

    /// Returns the lineage of a call's result number `i`, given the first one's.
    #[inline]
    pub(crate) fn result(self, i: usize) -> Lineage {
        if i == 0 { self } else { Lineage { hash: mixed(self.hash, i as u64), name: self.name } }
    }

    /// Returns the lineage of several tensors that share a call. That of a single tensor is its own.
    pub(crate) fn of_all(mut all: impl Iterator<Item = Lineage>) -> Lineage {
        let Some(first) = all.next() else { return Lineage::NONE };
        all.fold(first, |whole, one| Lineage { hash: mixed(whole.hash, one.hash), name: first.name })
    }

    /// Returns the hash, which is 0 for [`Lineage::NONE`] alone.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::Lineage::NONE.hash(), 0);
    /// ```
    pub fn hash(self) -> u64 {
        self.hash
    }

    /// Returns the parameter's path, or the name of the operator that made the tensor; of several tensors in one call,
    /// the first one's.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::Lineage::NONE.name(), "");
    /// ```
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the lineage of the tensors that this thread's calls are made for.
    pub(crate) fn current() -> Lineage {
        CURRENT.get()
    }

    /// Makes this thread's calls ones for tensors of this lineage, until the guard is dropped.
    #[must_use = "the scope ends when the guard is dropped"]
    pub(crate) fn enter(self) -> LineageScope {
        LineageScope { outer: CURRENT.replace(self), thread: PhantomData }
    }

    /// Returns what members compare and errors show.
    pub(in crate::comm) fn subject(self) -> Subject<'static> {
        Subject { lineage: self.hash, name: self.name }
    }
}

impl Default for Lineage {
    fn default() -> Lineage {
        Lineage::NONE
    }
}

impl Drop for LineageScope {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// Writes the name and the hash: `h.1.w (lineage 9f8a04c27d3b1e65)`.
impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.subject().fmt(f)
    }
}

impl fmt::Debug for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{:016x}", self.name, self.hash)
    }
}

const SEED: u64 = 0x243f_6a88_85a3_08d3;

/// Adds a number to a hash. The order counts, and the result is not 0, the hash of no lineage.
#[inline]
fn mixed(hash: u64, x: u64) -> u64 {
    // The multiplication spreads low bits upwards, the rotation brings high ones down (as FxHash and wyhash do).
    let hash =
        (hash ^ x.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(32);
    hash.wrapping_add(SEED) | 1
}

fn hash_text(hash: u64, text: &str) -> u64 {
    let part = |bytes: &[u8]| bytes.iter().fold(0, |word, &b| word << 8 | u64::from(b));
    let words = text.as_bytes().chunks(8).map(part);
    mixed(words.fold(hash, mixed), text.len() as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Operators, attributes, operands, their order and the number of a result all count; nothing is 0.
    #[test]
    fn what_is_made_otherwise_has_another_hash() {
        let leaves = ["h.0", "h.1", "h.10", "", "\0", "\0\0"].map(|path| Lineage::named("parameter", path));
        let mut all: Vec<Lineage> = leaves.into();
        all.push(Lineage::named("state", "h.0"));
        all.extend((0..300).map(|n| Lineage::made_by("full", n)));
        all.push(Lineage::made_by("zeros", 0));
        for a in leaves {
            all.extend((0..3).map(|i| Lineage::of_call("neg", 7, [a].into_iter()).result(i)));
            for b in leaves {
                all.push(Lineage::of_call("add", 8, [a, b].into_iter()));
                all.push(Lineage::of_call("mul", 9, [a, b].into_iter()));
                all.push(Lineage::of_all([a, b].into_iter()));
            }
        }
        let hashes: HashSet<u64> = all.iter().map(|one| one.hash()).collect();
        assert_eq!(hashes.len(), all.len());
        assert!(!hashes.contains(&0));
        assert_eq!(Lineage::of_all([leaves[1]].into_iter()), leaves[1]);
    }

    #[test]
    fn a_scope_ends_with_its_guard() {
        let one = Lineage::named("parameter", "w");
        let outer = one.enter();
        let inner = Lineage::NONE.enter();
        assert_eq!(Lineage::current(), Lineage::NONE);
        drop(inner);
        assert_eq!(Lineage::current(), one);
        drop(outer);
        assert_eq!(Lineage::current(), Lineage::NONE);
    }
}
