//! Values gathered from all ranks, and how an error message lists them.

use super::device_mesh::DeviceMesh;
use crate::comm::Group;
use crate::error::{Error, Result};
use crate::tensor::{Device, Shape, Tensor};

/// The number of ranks, and of values, that an error message lists; it counts the rest.
pub(super) const SHOWN: usize = 8;

/// Groups ranks by value: each distinct value with the ranks that have it, in order of first appearance.
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

/// Formats values with their ranks: `[2, 3] on rank(s) 0, 1 and [1, 3] on rank(s) 2`. `others` names the values
/// beyond the first [`SHOWN`].
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

/// Gathers every member's integers; all members pass equally many. One all-gather of 8 bytes per integer.
pub(super) fn gather_words(group: &Group, device: Device, mine: Vec<i64>) -> Result<Vec<Vec<i64>>> {
    let shape = Shape::from([mine.len()]);
    let x = Tensor::from_slice(&mine, shape.clone())?.to_device(device)?;
    let all = group.all_gather(&x, &vec![shape; group.len()])?;
    if device == Device::Meta {
        // A dry run has no peers: they are assumed to agree.
        return Ok(vec![mine; all.len()]);
    }
    all.iter().map(|x| x.to_vec::<i64>()).collect()
}

/// Gathers every member's text, for an error message: two all-gathers.
pub(super) fn gather_texts(group: &Group, device: Device, mine: &str) -> Result<Vec<String>> {
    let lens = gather_words(group, device, vec![mine.len() as i64])?;
    if device == Device::Meta {
        return Ok(vec![mine.into(); group.len()]);
    }
    let shapes: Vec<Shape> = lens.iter().map(|len| Shape::from([len[0] as usize])).collect();
    let x = Tensor::from_slice(mine.as_bytes(), [mine.len()])?.to_device(device)?;
    let all = group.all_gather(&x, &shapes)?;
    all.iter().map(|x| Ok(String::from_utf8_lossy(&x.to_vec::<u8>()?).into_owned())).collect()
}

impl DeviceMesh {
    /// Gathers every rank's words, or returns the same error on every rank if one rank brings an error: all-gathers of
    /// some bytes per rank.
    pub(crate) fn agree(&self, verb: &str, mine: Result<Vec<i64>>) -> Result<Vec<Vec<i64>>> {
        let (group, device) = (self.all_ranks()?, self.device());
        let text = mine.as_ref().err().map(|e| e.to_string()).unwrap_or_default();
        let all = gather_texts(&group, device, &text)?;
        let failed: Vec<(usize, String)> =
            group.ranks().iter().copied().zip(all).filter(|(_, text)| !text.is_empty()).collect();
        if failed.is_empty() {
            return gather_words(&group, device, mine?);
        }
        let told = list_values(&group_by_value(failed), "others", String::clone);
        Err(Error::invalid(verb, "some ranks failed", told, ""))
    }
}
