//! Values gathered from all ranks, and how an error message lists them.

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use super::device_mesh::DeviceMesh;
use crate::comm::Group;
use crate::error::{CallId, CommFault, Error, Result};
use crate::tensor::{Device, Shape, Tensor, hash_words};

/// The number of ranks, and of values, that an error message lists; it counts the rest.
pub(in crate::dtensor) const SHOWN: usize = 8;

/// Groups ranks by value: each distinct value with the ranks that have it, in order of first appearance.
pub(in crate::dtensor) fn group_by_value<T: PartialEq>(
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
pub(in crate::dtensor) fn list_values<T>(
    seen: &[(T, Vec<usize>)],
    others: &str,
    text: impl Fn(&T) -> String,
) -> String {
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
pub(in crate::dtensor) fn gather_words(
    group: &Group,
    device: Device,
    mine: Vec<i64>,
) -> Result<Vec<Vec<i64>>> {
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
pub(in crate::dtensor) fn gather_texts(group: &Group, device: Device, mine: &str) -> Result<Vec<String>> {
    let lens = gather_words(group, device, vec![mine.len() as i64])?;
    if device == Device::Meta {
        return Ok(vec![mine.into(); group.len()]);
    }
    let shapes: Vec<Shape> = lens.iter().map(|len| Shape::from([len[0] as usize])).collect();
    let x = Tensor::from_slice(mine.as_bytes(), [mine.len()])?.to_device(device)?;
    let all = group.all_gather(&x, &shapes)?;
    all.iter().map(|x| Ok(String::from_utf8_lossy(&x.to_vec::<u8>()?).into_owned())).collect()
}

/// A thing that must be equal on all ranks.
pub(crate) struct SameOnRanks {
    /// The rule that ranks break if it differs.
    pub rule: &'static str,
    pub hash: u64,
    /// The text that an error shows.
    pub shown: String,
    /// The change that would make it equal.
    pub remedy: &'static str,
}

impl SameOnRanks {
    pub fn new(rule: &'static str, value: impl Hash, shown: String) -> SameOnRanks {
        let mut hasher = FxHasher::default();
        value.hash(&mut hasher);
        SameOnRanks { rule, hash: hasher.finish(), shown, remedy: "pass equal arguments on all ranks" }
    }
}

/// A list of things that must be equal on all ranks, each known by a hash.
pub(crate) struct ListOnRanks<'a> {
    /// The rule that ranks break if a thing differs, and what to do.
    pub rule: &'static str,
    pub remedy: &'static str,
    /// The name of the things, but for the first `others`, if the lists differ in length.
    pub noun: &'static str,
    pub others: usize,
    pub hashes: &'a [u64],
    /// Describes the thing of this number, which is there on every rank.
    pub shown: &'a dyn Fn(usize) -> String,
}

impl ListOnRanks<'_> {
    /// Returns the words that ranks gather for [`DeviceMesh::expect_same_lists`].
    pub fn words(&self) -> Vec<i64> {
        vec![self.hashes.len() as i64, hash_words(self.hashes.iter().copied()) as i64]
    }
}

impl DeviceMesh {
    /// Refuses lists that differ between ranks, with the same text on all ranks: one all-gather of 16 bytes per rank.
    pub(crate) fn expect_same_list(&self, verb: &str, list: &ListOnRanks<'_>) -> Result<()> {
        let (group, device) = (self.all_ranks()?, self.device());
        let all = gather_words(&group, device, list.words())?;
        self.expect_same_lists(verb, list, &all)
    }

    /// Refuses lists that differ between ranks, with the same text on all ranks. `all` are the words of every rank's
    /// list; sends nothing if they are equal. Otherwise an all-gather of 8 bytes per thing, and two for a text, find
    /// the first thing that differs.
    pub(crate) fn expect_same_lists(
        &self,
        verb: &str,
        list: &ListOnRanks<'_>,
        all: &[Vec<i64>],
    ) -> Result<()> {
        if all.iter().all(|words| *words == all[0]) {
            return Ok(());
        }
        let (group, device) = (self.all_ranks()?, self.device());
        let ranks = || group.ranks().iter().copied();
        let refused = |told: String| Err(Error::invalid(verb, list.rule, told, list.remedy));
        if all.iter().any(|words| words[0] != all[0][0]) {
            let lens = group_by_value(ranks().zip(all.iter().map(|words| words[0])));
            let told = |len: &i64| format!("{} {}", len - list.others as i64, list.noun);
            return refused(list_values(&lens, "others", told));
        }
        let mine = list.hashes.iter().map(|&hash| hash as i64).collect();
        let hashes = gather_words(&group, device, mine)?;
        let differs = |k: &usize| hashes.iter().any(|of| of[*k] != hashes[0][*k]);
        let Some(first) = (0..list.hashes.len()).find(differs) else { return Ok(()) };
        let texts = gather_texts(&group, device, &(list.shown)(first))?;
        refused(list_values(&group_by_value(ranks().zip(texts)), "others", String::clone))
    }

    /// Refuses things that differ between ranks, and an error of some rank, with the same text on all ranks: one
    /// all-gather of `8 + 8 N` bytes per rank, and two more for the text of an error. A single rank sends nothing.
    pub(crate) fn expect_same_on_ranks<T, const N: usize>(
        &self,
        verb: &str,
        mine: Result<T>,
        things: impl FnOnce(&T) -> [SameOnRanks; N],
    ) -> Result<T> {
        let (group, device) = (self.all_ranks()?, self.device());
        if group.len() == 1 {
            return mine;
        }
        let things = mine.as_ref().ok().map(things);
        let hash_of = |k: usize| things.as_ref().map_or(0, |all| all[k].hash as i64);
        let words = [i64::from(mine.is_ok())].into_iter().chain((0..N).map(hash_of)).collect();
        let all = gather_words(&group, device, words)?;
        let tell = |text: &str| -> Result<Vec<(String, Vec<usize>)>> {
            let told = gather_texts(&group, device, text)?;
            Ok(group_by_value(group.ranks().iter().copied().zip(told)))
        };
        if all.iter().any(|words| words[0] == 0) {
            let text = mine.as_ref().err().map(|e| e.to_string()).unwrap_or_default();
            let told: Vec<_> = tell(&text)?.into_iter().filter(|(text, _)| !text.is_empty()).collect();
            return match mine {
                // One error on all ranks follows from what they share.
                Err(e) if told.iter().map(|(_, ranks)| ranks.len()).eq([group.len()]) => Err(e),
                mine => Err(failed_on(verb, &told, mine.is_ok())),
            };
        }
        let Some((things, k)) =
            things.zip((0..N).find(|k| all.iter().any(|words| words[k + 1] != all[0][k + 1])))
        else {
            return mine;
        };
        let mut told = tell(&things[k].shown)?;
        if told.len() == 1 {
            // The texts do not show the difference.
            told = group_by_value(group.ranks().iter().copied().zip(&all).map(|(rank, words)| {
                (rank, format!("{} with hash {:016x}", things[k].shown, words[k + 1] as u64))
            }));
        }
        let told = list_values(&told, "others", String::clone);
        Err(Error::invalid(verb, things[k].rule, told, things[k].remedy))
    }

    /// Gathers every rank's words, or returns an error with the same text on every rank if one rank brings an error:
    /// all-gathers of some bytes per rank. On ranks that bring none, the error is an echo ([`Error::is_echo`]).
    pub(crate) fn agree(&self, verb: &str, mine: Result<Vec<i64>>) -> Result<Vec<Vec<i64>>> {
        let (group, device) = (self.all_ranks()?, self.device());
        let text = mine.as_ref().err().map(|e| e.to_string()).unwrap_or_default();
        let all = gather_texts(&group, device, &text)?;
        let failed: Vec<(usize, String)> =
            group.ranks().iter().copied().zip(all).filter(|(_, text)| !text.is_empty()).collect();
        if failed.is_empty() {
            return gather_words(&group, device, mine?);
        }
        Err(failed_on(verb, &group_by_value(failed), mine.is_ok()))
    }
}

/// Returns the error of a call that failed on the ranks of `told`. `is_peer` is for a rank that did not fail itself: its
/// error has the same text, and is an echo, so that a program's end is told by a rank that failed.
fn failed_on(verb: &str, told: &[(String, Vec<usize>)], is_peer: bool) -> Error {
    let error = match told {
        [(text, ranks)] if ranks.len() == 1 => {
            Error::invalid(verb, format!("rank {} failed", ranks[0]), text.clone(), "")
        }
        _ => Error::invalid(verb, "some ranks failed", list_values(told, "others", String::clone), ""),
    };
    if !is_peer {
        return error;
    }
    let (cause, rank) = told.first().map_or((String::new(), 0), |(text, ranks)| (text.clone(), ranks[0]));
    let fault = CommFault::PeerFailed { id: CallId::new(verb.to_string(), 0, "all ranks"), rank, cause };
    Error::other(FailureOfPeers { error, fault })
}

/// The failure of other ranks, in the words of those ranks.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
struct FailureOfPeers {
    error: Error,
    #[source]
    fault: CommFault,
}
