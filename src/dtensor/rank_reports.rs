//! What an error says of all ranks of a mesh.

use crate::comm::Group;
use crate::error::Result;
use crate::tensor::{Device, Shape, Tensor};

/// Ranks and things that an error lists; the rest it counts.
pub(super) const SHOWN: usize = 8;

/// Each thing with the ranks that have it, in the order of first sight.
pub(super) fn group_by_value<T: PartialEq>(
    each: impl IntoIterator<Item = (usize, T)>,
) -> Vec<(T, Vec<usize>)> {
    let mut seen: Vec<(T, Vec<usize>)> = Vec::new();
    for (rank, thing) in each {
        match seen.iter_mut().find(|(other, _)| *other == thing) {
            Some((_, ranks)) => ranks.push(rank),
            None => seen.push((thing, vec![rank])),
        }
    }
    seen
}

/// `[2, 3] on rank(s) 0, 1 and [1, 3] on rank(s) 2`; `others` says what more there is than is shown.
pub(super) fn list_values<T>(seen: &[(T, Vec<usize>)], others: &str, text: impl Fn(&T) -> String) -> String {
    let one = |(thing, ranks): &(T, Vec<usize>)| {
        let shown: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
        let more = ranks.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{} on rank(s) {}{more}", text(thing), shown.join(", "))
    };
    let mut parts: Vec<String> = seen.iter().take(SHOWN).map(one).collect();
    if seen.len() > SHOWN {
        parts.push(format!("{} {others}", seen.len() - SHOWN));
    }
    parts.join(" and ")
}

/// Every member's words, as many from each: one all-gather of 8 bytes a word.
pub(super) fn gather_words(group: &Group, device: Device, mine: Vec<i64>) -> Result<Vec<Vec<i64>>> {
    let shape = Shape::from([mine.len()]);
    let x = Tensor::from_slice(&mine, shape.clone())?.to_device(device)?;
    let all = group.all_gather(&x, &vec![shape; group.len()])?;
    if device == Device::Meta {
        // A dry run's peers are taken to say the same.
        return Ok(vec![mine; all.len()]);
    }
    all.iter().map(|x| x.to_vec::<i64>()).collect()
}

/// Every member's text, for an error: two all-gathers.
pub(super) fn gather_texts(group: &Group, device: Device, mine: &str) -> Result<Vec<String>> {
    let lens = gather_words(group, device, vec![mine.len() as i64])?;
    let shapes: Vec<Shape> = lens.iter().map(|len| Shape::from([len[0] as usize])).collect();
    let x = Tensor::from_slice(mine.as_bytes(), [mine.len()])?.to_device(device)?;
    let all = group.all_gather(&x, &shapes)?;
    all.iter().map(|x| Ok(String::from_utf8_lossy(&x.to_vec::<u8>()?).into_owned())).collect()
}
