//! Parsing the notation of placements, layouts and specs: `R`, `S0`, `P(sum)`, `RS(0..1; 3,0,2)`,
//! `f32[64, 128]@(dp:S0, tp:R)`.

use std::str::FromStr;

use smallvec::SmallVec;

use super::layout::axes_sharing_dims;
use super::{Layout, Mesh, Placement, Spec};
use crate::error::{Error, Result};
use crate::tensor::{DType, ReduceOp, Shape, sort_by_key};

impl Spec {
    /// Parses a spec as `Display` writes it, for a tensor on `mesh`.
    ///
    /// ```
    /// # fn main() -> isoshard::Result<()> {
    /// use isoshard::placement::{Mesh, Spec};
    ///
    /// let mesh = Mesh::parse("dp=2,tp=2", 0)?;
    /// let text = "bf16[64, 128]@(dp:S0^1, tp:S0^0)";
    /// assert_eq!(Spec::parse(text, &mesh)?.to_string(), text);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Refuses text of another form, axes other than the mesh's, and what [`Spec::validate`] refuses.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Spec> {
        let (tensor, layout) = text.split_once('@').ok_or_else(|| unread("spec", text, FORM))?;
        let (dtype, shape) = tensor.trim().split_once('[').ok_or_else(|| unread("spec", text, FORM))?;
        let Some(dtype) = DType::ALL.into_iter().find(|d| d.name() == dtype.trim()) else {
            let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
            return Err(unread("spec", text, &format!("the dtypes are {}", names.join(", "))));
        };
        let shape = shape.strip_suffix(']').and_then(numbers).ok_or_else(|| unread("spec", text, FORM))?;
        let inner = layout.trim().strip_prefix('(').and_then(|t| t.strip_suffix(')'));
        let mut layout = Vec::new();
        for (a, part) in split(inner.ok_or_else(|| unread("spec", text, FORM))?).into_iter().enumerate() {
            let (name, placement) = part.split_once(':').ok_or_else(|| unread("spec", text, FORM))?;
            if a >= mesh.ndim() || mesh.axis_name(a) != name.trim() {
                return Err(unread("spec", text, &format!("name the axes of the mesh {mesh}, in order")));
            }
            layout.push(placement);
        }
        Spec::new(mesh, dtype, Shape::from(shape), read_layout(&layout, text)?)
    }
}

impl FromStr for Placement {
    type Err = Error;

    /// Parses a placement as `Display` writes it.
    fn from_str(text: &str) -> Result<Placement> {
        read_placement(text.trim())
            .ok_or_else(|| unread("placement", text, "write R, S0, P(sum) or RS(0..1; 3,0,2)"))
    }
}

impl FromStr for Layout {
    type Err = Error;

    /// Parses a layout as `Display` writes it, e.g. `(S0, R)`.
    fn from_str(text: &str) -> Result<Layout> {
        let inner = text.trim().strip_prefix('(').and_then(|t| t.strip_suffix(')'));
        let inner = inner.ok_or_else(|| unread("layout", text, "write it as (S0, R)"))?;
        read_layout(&split(inner), text)
    }
}

const FORM: &str = "write it as f32[64, 128]@(dp:S0, tp:R)";

fn unread(verb: &str, text: &str, remedy: &str) -> Error {
    Error::invalid(verb, "cannot be read", format!("{text:?}"), remedy)
}

fn read_layout(parts: &[&str], text: &str) -> Result<Layout> {
    let mut placements = Vec::with_capacity(parts.len());
    let mut nestings: Vec<Option<usize>> = Vec::with_capacity(parts.len());
    for part in parts {
        let (placement, nesting) = match part.split_once('^') {
            None => (*part, None),
            Some((placement, k)) => {
                let k = k.trim().parse().map_err(|_| unread("layout", text, NESTING))?;
                (placement, Some(k))
            }
        };
        placements.push(placement.parse::<Placement>()?);
        nestings.push(nesting);
    }
    let mut order: Vec<usize> = Vec::with_capacity(parts.len());
    for a in 0..parts.len() {
        if order.contains(&a) {
            continue;
        }
        let mut family = axes_sharing_dims(&placements, a);
        sort_by_key(&mut family, |&b| (nestings[b], b));
        let named = family.iter().enumerate().all(|(k, &b)| nestings[b] == Some(k));
        if !named && family.iter().any(|&b| nestings[b].is_some()) {
            return Err(unread("layout", text, NESTING));
        }
        order.extend(family);
    }
    Layout::new(placements).with_order(&order)
}

const NESTING: &str = "number all axes that split a dim from ^0, the outermost, or none of them";

fn read_placement(text: &str) -> Option<Placement> {
    if text == "R" {
        return Some(Placement::Replicate);
    }
    if let Some(inner) = text.strip_prefix("RS(").and_then(|t| t.strip_suffix(')')) {
        let (range, units) = inner.split_once(';')?;
        let dims = range.trim().strip_prefix("0..")?.parse().ok()?;
        return Some(Placement::RaggedShard { dims, units: numbers(units)?.as_slice().into() });
    }
    if let Some(inner) = text.strip_prefix("P(").and_then(|t| t.strip_suffix(')')) {
        let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
        return ops.into_iter().find(|op| op.to_string() == inner).map(Placement::Partial);
    }
    text.strip_prefix('S')?.parse().ok().map(Placement::Shard)
}

/// Splits text at the commas outside parentheses; an empty text has no parts.
fn split(text: &str) -> SmallVec<[&str; 4]> {
    let (mut parts, mut start, mut depth) = (SmallVec::new(), 0, 0usize);
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    if !text.trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

/// Parses numbers separated by commas; an empty text has none.
fn numbers(text: &str) -> Option<Vec<usize>> {
    match text.trim() {
        "" => Some(Vec::new()),
        text => text.split(',').map(|n| n.trim().parse().ok()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::short::*;
    use super::*;

    /// A new kind of placement does not compile here until it has an example, which must then parse.
    #[test]
    fn every_placement_reads_back() {
        let next = |p: &Placement| match p {
            Placement::Replicate => Some(shard(1)),
            Placement::Shard(_) => Some(partial(ReduceOp::Max)),
            Placement::Partial(_) => Some(ragged(2, &[1, 0, 2])),
            Placement::RaggedShard { .. } => None,
        };
        let all: Vec<Placement> = std::iter::successors(Some(R), next).collect();
        let read: Vec<Placement> = all.iter().map(|p| p.to_string().parse().unwrap()).collect();
        assert_eq!((&all, all.len()), (&read, 4));
    }

    #[test]
    fn written_texts_read_back() {
        let mesh = Mesh::parse("dp=2,tp=3,pp=1", 0).unwrap();
        for text in [
            "f32[64, 128]@(dp:S0, tp:R, pp:S1)",
            "bool[]@(dp:R, tp:R, pp:R)",
            "bf16[0, 7]@(dp:S0^1, tp:S0^0, pp:R)",
            "f16[4, 4]@(dp:S0^2, tp:S0^0, pp:S0^1)",
            "i64[4, 6, 5]@(dp:RS(0..2; 1,0)^2, tp:S0^0, pp:S1^1)",
            "u8[5]@(dp:P(min), tp:RS(0..1; 3,0,2), pp:R)",
        ] {
            assert_eq!(Spec::parse(text, &mesh).unwrap().to_string(), text);
        }
        let single = Mesh::parse("1", 0).unwrap();
        assert_eq!(Spec::parse("f64[2]@()", &single).unwrap().to_string(), "f64[2]@()");
        assert_eq!("( S0^1 ,S0^0)".parse::<Layout>().unwrap().to_string(), "(S0^1, S0^0)");
        // Numbers in mesh order spell out the default.
        assert_eq!("(S0^0, S0^1)".parse::<Layout>().unwrap().to_string(), "(S0, S0)");
    }

    #[test]
    fn other_texts_are_refused() {
        let mesh = Mesh::parse("dp=2,tp=2", 0).unwrap();
        let refused = |text: &str, want: &str| {
            assert_eq!(Spec::parse(text, &mesh).unwrap_err().to_string(), want);
        };
        for text in [
            "f32[4]",
            "f32@(dp:R, tp:R)",
            "f32[4@(dp:R, tp:R)",
            "f32[x]@(dp:R, tp:R)",
            "f32[4]@dp:R",
            "f32[4]@(R, R)",
        ] {
            refused(
                text,
                &format!("spec: cannot be read; got {text:?}; write it as f32[64, 128]@(dp:S0, tp:R)"),
            );
        }
        refused(
            "f8[4]@(dp:R, tp:R)",
            "spec: cannot be read; got \"f8[4]@(dp:R, tp:R)\"; the dtypes are f32, f64, f16, bf16, i64, i32, u8, bool",
        );
        refused(
            "f32[4]@(tp:R, dp:R)",
            "spec: cannot be read; got \"f32[4]@(tp:R, dp:R)\"; name the axes of the mesh (dp=2, tp=2), in order",
        );
        refused(
            "f32[4]@(dp:R)",
            "layout: wants one placement for each mesh axis; got (R) on mesh (dp=2, tp=2); give 2",
        );
        for text in ["", "S", "Sx", "P", "P(mean)", "RS(1..2; 1)", "RS(0..1)", "RS(0..1; x)", "r"] {
            let want =
                format!("placement: cannot be read; got {text:?}; write R, S0, P(sum) or RS(0..1; 3,0,2)");
            assert_eq!(text.parse::<Placement>().unwrap_err().to_string(), want);
        }
        for text in ["(S0^1, S0)", "(S0^1, S0^2)", "(S0^0, S0^0)", "(S0^x, S0)", "(R^1)"] {
            let want = format!("layout: cannot be read; got {text:?}; {NESTING}");
            assert_eq!(text.parse::<Layout>().unwrap_err().to_string(), want);
        }
    }
}
