//! The text and the number of a group.

use crate::base::Fnv1a;

/// The longest name of a group, in bytes. Names travel between processes, so readers bound them.
pub(in crate::comm) const NAME_BYTES: usize = 256;

/// Returns a group's text in errors: `dp{0, 4, 8}`; with more than 16 ranks `world{0..16384}`, `dp{3..16384 by 8}`,
/// or the first 16 and the number of the rest.
pub(in crate::comm) fn label(name: &str, ranks: &[usize]) -> String {
    const SHOWN: usize = 16;
    let list = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() <= SHOWN {
        return format!("{name}{{{}}}", list(ranks));
    }
    let (first, last) = (ranks[0], ranks[ranks.len() - 1]);
    let step = ranks[1].saturating_sub(first);
    if step == 0 || !ranks.windows(2).all(|pair| pair[0].checked_add(step) == Some(pair[1])) {
        return format!("{name}{{{} and {} more}}", list(&ranks[..SHOWN]), ranks.len() - SHOWN);
    }
    match step {
        1 => format!("{name}{{{first}..{}}}", last.saturating_add(1)),
        _ => format!("{name}{{{first}..{} by {step}}}", last.saturating_add(1)),
    }
}

/// Returns a number made from a group's name and ranks (FNV-1a, 64 bits). Ranks and the coordinator name the group by
/// it.
pub(in crate::comm) fn group_number(name: &str, ranks: &[usize]) -> u64 {
    let bytes = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes());
    Fnv1a::of(name.bytes().chain([0xff]).chain(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stay_short() {
        let named = |ranks: &mut dyn Iterator<Item = usize>| label("g", &ranks.collect::<Vec<_>>());
        assert_eq!(named(&mut [0, 4, 8].into_iter()), "g{0, 4, 8}");
        assert_eq!(named(&mut (0..16)), "g{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}");
        assert_eq!(named(&mut (0..16_384)), "g{0..16384}");
        assert_eq!(named(&mut (3..16_384).step_by(8)), "g{3..16380 by 8}");
        let odd = named(&mut (0..20).chain([99]));
        assert_eq!(odd, "g{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 5 more}");
        assert_eq!(
            named(&mut (0..17).rev()),
            "g{16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1 and 1 more}"
        );
    }
}
