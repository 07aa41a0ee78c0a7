//! Each type has a name of its own, so that errors, profiles and documentation say which one is meant.

use std::collections::BTreeMap;

use super::items::{ItemKind, items};
use super::source::{kernel_sources, sources};

/// At most one name in so many may be used twice.
const NAMES_PER_DOUBLE: usize = 20;

/// The names of types of both packages outside tests, and of aliases, with the places that define them.
pub fn types() -> BTreeMap<String, Vec<String>> {
    named(&[ItemKind::Type, ItemKind::Alias])
}

fn named(kinds: &[ItemKind]) -> BTreeMap<String, Vec<String>> {
    let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources().into_iter().chain(kernel_sources()) {
        for item in items(&source).into_iter().filter(|i| kinds.contains(&i.kind)) {
            types.entry(item.name).or_default().push(format!("{}:{}", source.path.display(), item.line));
        }
    }
    types
}

/// The names that several types share.
pub fn doubled(types: &BTreeMap<String, Vec<String>>) -> Vec<(&String, &Vec<String>)> {
    types.iter().filter(|(_, places)| places.len() > 1).collect()
}

#[test]
fn few_types_share_a_name() {
    let types = types();
    let doubled = doubled(&types);
    let listed: Vec<String> =
        doubled.iter().map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert!(types.len() > 400, "only {} types are read", types.len());
    assert!(
        doubled.len() <= types.len() / NAMES_PER_DOUBLE,
        "{} of {} names of types are used twice or more, and 1 in {NAMES_PER_DOUBLE} may be:\n{}",
        doubled.len(),
        types.len(),
        listed.join("\n")
    );
}

#[test]
fn no_type_of_comm_shares_its_name() {
    let types = named(&[ItemKind::Type]);
    let in_comm = |place: &String| place.starts_with("src/comm/");
    let doubled = doubled(&types).into_iter().filter(|(_, places)| places.iter().any(in_comm));
    let doubled: Vec<String> =
        doubled.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert!(doubled.is_empty(), "names of `comm` that stand twice in the crate:\n{}", doubled.join("\n"));
}
