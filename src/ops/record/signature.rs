//! Signatures of contractions over named dims, `"m k, k n -> m n"`: result shapes and sharding rows follow from them.

use std::fmt;

use smallvec::SmallVec;

use super::{Algebra, AxisPlacement, Meta, Row, list};
use crate::error::{Error, Result};
use crate::placement::Leaf;
use crate::tensor::Shape;

/// A few dims by name.
pub(in crate::ops) type Letters = SmallVec<[u8; 6]>;

/// The dims of operands and result by name, as in `einsum`: letters that the result lacks are summed over.
/// [`DTensor::einsum`](crate::dtensor::DTensor::einsum) takes the same text.
///
/// ```
/// use isoshard::ops::Signature;
/// let linear = Signature::parse("b t k, n k -> b t n")?;
/// assert_eq!(format!("{:?}", linear.rows()[0]), "S0 R -> S0"); // shard the batch
/// assert_eq!(format!("{:?}", linear.rows()[2]), "R S0 -> S2"); // shard the weight's rows
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Signature {
    ins: SmallVec<[Letters; 2]>,
    out: Letters,
}

impl Signature {
    /// Parses `"m k, k n -> m n"`. Spaces between letters are optional.
    ///
    /// ```
    /// use isoshard::ops::Signature;
    /// assert_eq!(Signature::parse("mk,kn->mn")?.to_string(), "m k, k n -> m n");
    /// assert!(Signature::parse("m k, k n").is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the text has another form, if one operand has a letter twice, or if the result has a letter
    /// that no operand has.
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

    /// Creates the signature of a matrix product from the batch letters and the last two letters of each operand and of
    /// the result. Avoids parsing, because every call of `matmul` creates one.
    pub(in crate::ops) fn of(ins: [(&[u8], &[u8; 2]); 2], out: (&[u8], &[u8; 2])) -> Signature {
        let letters = |(batch, last): (&[u8], &[u8; 2])| batch.iter().chain(last).copied().collect();
        Signature { ins: ins.into_iter().map(letters).collect(), out: letters(out) }
    }

    /// Returns the number of operands.
    pub(crate) fn operands_len(&self) -> usize {
        self.ins.len()
    }

    /// Returns the letters of operand `i`.
    pub(crate) fn operand(&self, i: usize) -> &[u8] {
        &self.ins[i]
    }

    /// Returns the letters of the result.
    pub(crate) fn result(&self) -> &[u8] {
        &self.out
    }

    /// Returns the signature of the derivative of a two-operand product with respect to operand `i`. Its operands are
    /// the result's gradient and the other operand.
    pub(crate) fn transposed(&self, i: usize) -> Signature {
        Signature {
            ins: [self.out.clone(), self.ins[1 - i].clone()].into_iter().collect(),
            out: self.ins[i].clone(),
        }
    }

    /// Returns the result's shape.
    ///
    /// ```
    /// # use isoshard::{ops::{Meta, Signature}, tensor::DType};
    /// let product = Signature::parse("m k, k n -> m n")?;
    /// let ins = [Meta::new(DType::F32, [4, 6]), Meta::new(DType::F32, [6, 5])];
    /// assert_eq!(product.infer("matmul", &ins)?[..], [4, 5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error, which begins with `verb`, if the operands' number, dims or extents do not fit.
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

    /// Returns the product of the extents of all letters: the number of products of elements that are added up. The
    /// operands must fit the signature.
    pub(in crate::ops) fn points(&self, ins: &[Meta]) -> u64 {
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

    /// Returns the sharding rows: one per letter, which shards every operand and result that has the letter, and leaves
    /// a partial sum if the letter is summed over; and the rows of partial operands, since a product is linear in each
    /// operand.
    ///
    /// ```
    /// # use isoshard::ops::Signature;
    /// let rows = format!("{:?}", Signature::parse("m k, k n -> m n")?.rows());
    /// assert_eq!(rows, "[S0 R -> S0, R S1 -> S1, S1 S0 -> P(sum), P(sum) R -> P(sum), R P(sum) -> P(sum)]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
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
