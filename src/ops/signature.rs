//! Signatures over named dims, `"m k, k n -> m n"`, and what follows from them alone.

use std::fmt;

use smallvec::SmallVec;

use super::{Algebra, AxisPlacement, Meta, Row, list};
use crate::error::{Error, Result};
use crate::placement::Leaf;
use crate::tensor::Shape;

type Letters = SmallVec<[u8; 6]>;

/// The dims of operands and result by name, as in Einstein's summation: a letter that is missing from the result is
/// summed over.
///
/// ```
/// use isoshard::ops::Signature;
/// let linear = Signature::parse("b t k, n k -> b t n")?;
/// assert_eq!(format!("{:?}", linear.rows()[0]), "S0 R -> S0");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Signature {
    ins: SmallVec<[Letters; 2]>,
    out: Letters,
}

impl Signature {
    /// Reads `"m k, k n -> m n"`; spaces between letters are optional.
    ///
    /// # Errors
    /// Refuses a text of another form, a letter that stands twice in one operand, and a result letter no operand has.
    pub fn parse(text: &str) -> Result<Signature> {
        let bad = |rule: &str| {
            Error::invalid("signature", rule, format!("{text:?}"), "write it as \"m k, k n -> m n\"")
        };
        let (ins, out) = text.split_once("->").ok_or_else(|| bad("no arrow"))?;
        let letters = |part: &str| -> Result<Letters> {
            let l: Letters = part.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
            if l.iter().any(|b| !b.is_ascii_alphabetic()) {
                return Err(bad("a dim's name is one letter"));
            }
            if (1..l.len()).any(|i| l[..i].contains(&l[i])) {
                return Err(bad("a letter stands twice in one operand"));
            }
            Ok(l)
        };
        let sig = Signature { ins: ins.split(',').map(letters).collect::<Result<_>>()?, out: letters(out)? };
        if sig.out.iter().any(|l| !sig.ins.iter().any(|i| i.contains(l))) {
            return Err(bad("the result has a letter that no operand has"));
        }
        Ok(sig)
    }

    /// The signature of a matrix product: for each operand and the result, batch letters and the last two. Reads no text,
    /// since products are made at every call.
    pub(super) fn of(ins: [(&[u8], &[u8; 2]); 2], out: (&[u8], &[u8; 2])) -> Signature {
        let letters = |(batch, last): (&[u8], &[u8; 2])| batch.iter().chain(last).copied().collect();
        Signature { ins: ins.into_iter().map(letters).collect(), out: letters(out) }
    }

    /// The number of operands.
    pub fn operands_len(&self) -> usize {
        self.ins.len()
    }

    /// The letters of operand `i`.
    pub fn operand(&self, i: usize) -> &[u8] {
        &self.ins[i]
    }

    /// The letters of the result.
    pub fn result(&self) -> &[u8] {
        &self.out
    }

    /// The signature of the derivative with respect to operand `i` of a two-operand product: the result's gradient
    /// comes first, the other operand second.
    pub fn transposed(&self, i: usize) -> Signature {
        Signature {
            ins: [self.out.clone(), self.ins[1 - i].clone()].into_iter().collect(),
            out: self.ins[i].clone(),
        }
    }

    /// The result's shape.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, operands whose number, dims or extents do not fit.
    pub fn infer(&self, verb: &str, ins: &[Meta]) -> Result<Shape> {
        let bad = |rule: String| Error::invalid(verb, rule, list(ins), format!("the operands are {self}"));
        if ins.len() != self.ins.len() || ins.iter().zip(&self.ins).any(|(m, l)| m.shape.len() != l.len()) {
            return Err(bad("the number of dims does not fit".into()));
        }
        let mut extents = [None::<usize>; 128];
        for (meta, letters) in ins.iter().zip(&self.ins) {
            for (&n, &l) in meta.shape.iter().zip(letters) {
                let known = extents[l as usize].get_or_insert(n);
                if *known != n {
                    return Err(bad(format!("dim {} has extents {known} and {n}", l as char)));
                }
            }
        }
        Ok(self
            .out
            .iter()
            .map(|&l| extents[l as usize].expect("parse checked the result's letters"))
            .collect())
    }

    /// The number of combinations of all letters' indices: as many products of elements are added up. Operands fit.
    pub(super) fn points(&self, ins: &[Meta]) -> u64 {
        let mut seen = Letters::new();
        let mut points = 1u64;
        for (&n, &l) in ins.iter().zip(&self.ins).flat_map(|(m, letters)| m.shape.iter().zip(letters)) {
            if !seen.contains(&l) {
                seen.push(l);
                points = points.saturating_mul(n as u64);
            }
        }
        points
    }

    /// One row a letter (sharded wherever it stands; summed letters leave a partial sum), and the partial rows of a
    /// product, which is linear in each operand.
    pub fn rows(&self) -> Vec<Row> {
        let at = |letters: &Letters, l: u8| letters.iter().position(|&x| x == l);
        let mut seen = Letters::new();
        let mut rows = Vec::new();
        for &l in self.out.iter().chain(self.ins.iter().flatten()) {
            if seen.contains(&l) {
                continue;
            }
            seen.push(l);
            let ins = self.ins.iter().map(|i| at(i, l).map_or(AxisPlacement::R, AxisPlacement::S));
            let out = at(&self.out, l).map_or(AxisPlacement::TreeSum(Leaf::Chain), AxisPlacement::S);
            rows.push(Row::new(ins, [out]));
        }
        rows.extend(Algebra::Multilinear.rows(self.ins.len()));
        rows
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |l: &Letters| l.iter().map(|&b| (b as char).to_string()).collect::<Vec<_>>().join(" ");
        write!(f, "{} -> {}", self.ins.iter().map(word).collect::<Vec<_>>().join(", "), word(&self.out))
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}
