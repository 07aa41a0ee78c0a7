//! Path patterns, and the names nearest to a pattern that matches nothing.

use rustc_hash::FxHashSet;

pub(in crate::nn) use crate::comm::path_matches as matches;
use crate::error::Error;
use crate::tensor::sort_by_key;

/// Returns the refusal, in the name of `verb`, of a pattern that matches none of the `paths` of this `kind`.
pub(in crate::nn) fn no_match(verb: &str, pattern: &str, paths: &[&str], kind: &str) -> Error {
    let given = format!("{pattern:?} among {} {kind}(s)", paths.len());
    let remedy = match nearest(pattern, paths) {
        near if near.is_empty() => format!("the model declares no {kind}"),
        near => format!("the nearest are {}", near.join(", ")),
    };
    Error::invalid(verb, format!("a pattern matches no {kind}"), given, remedy)
}

/// Returns up to three paths that need the fewest edits to match `pattern`, the nearest first. Parts that are `*` in
/// the pattern stay `*`, so `h.0.up` and `h.1.up` count once.
pub(in crate::nn) fn nearest(pattern: &str, paths: &[&str]) -> Vec<String> {
    let parts: Vec<&str> = pattern.split('.').collect();
    let open = |path: &&str| {
        let of_path: Vec<&str> = path.split('.').collect();
        if of_path.len() != parts.len() {
            return path.to_string();
        }
        let pairs = parts.iter().zip(of_path);
        pairs.map(|(&part, own)| if part == "*" { part } else { own }).collect::<Vec<_>>().join(".")
    };
    let mut known = FxHashSet::default();
    let opened = paths.iter().map(open).filter(|path| known.insert(path.clone()));
    let mut near: Vec<(usize, String)> = opened.map(|path| (edit_distance(pattern, &path), path)).collect();
    sort_by_key(&mut near, |(distance, _)| *distance);
    near.into_iter().take(3).map(|(_, path)| path).collect()
}

/// Returns the fewest insertions, deletions and replacements of letters that turn `a` into `b` (Levenshtein 1966).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert!(matches("h.*.attn.qkv.weight", "h.11.attn.qkv.weight"));
        assert!(!matches("h.*.attn", "h.1.attn.qkv"));
        assert!(!matches("h.*", "h"));
        assert!(
            matches("**", "h.1.up")
                && matches("**.up", "up")
                && matches("h.**", "h")
                && matches("h.**", "h.1.up")
        );
        assert!(matches("h.**.weight", "h.1.up.weight") && matches("**.1.**.weight", "h.1.up.weight"));
        assert!(!matches("**.up", "h.up.weight") && !matches("h.**.weight", "x.h.weight"));
    }

    #[test]
    fn the_nearest_names() {
        assert_eq!(
            [("", ""), ("ab", ""), ("kitten", "sitting"), ("ab", "ba")].map(|(a, b)| edit_distance(a, b)),
            [0, 2, 3, 2]
        );
        let paths = ["wte.weight", "h.0.up.weight", "h.0.up.bias", "h.1.up.weight", "h.1.up.bias", "norm"];
        assert_eq!(nearest("h.*.up.wieght", &paths), ["h.*.up.weight", "h.*.up.bias", "wte.weight"]);
        assert_eq!(nearest("h.up.weight", &paths)[..2], ["h.0.up.weight", "h.1.up.weight"]);
        assert!(nearest("h", &[]).is_empty());
    }
}
