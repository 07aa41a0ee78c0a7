//! The graph of ranks that wait for each other: its cycles, and the ranks at the ends of its chains.

use std::collections::{HashMap, HashSet};

use crate::error::{CallId, Wait};

/// Returns the shortest chain of waits that starts with `rank` waiting in call `id` for one of `absent` and returns
/// to `rank`, if there is one.
///
/// `waits` returns the calls in which a given rank waits, each with the ranks that have not come to it.
pub(crate) fn cycle(
    rank: usize,
    id: &CallId,
    absent: &[usize],
    mut waits: impl FnMut(usize) -> Vec<(CallId, Vec<usize>)>,
) -> Option<Vec<Wait>> {
    // A breadth-first search, so each rank is visited once, on a shortest path.
    let first = |&on: &usize| (Wait { rank, id: id.clone(), waits_for: on }, None);
    let mut reached: Vec<(Wait, Option<usize>)> = absent.iter().map(first).collect();
    let mut seen: HashSet<usize> = absent.iter().copied().collect();
    let mut at = 0;
    while at < reached.len() {
        let on = reached[at].0.waits_for;
        for (id, absent) in waits(on) {
            if absent.contains(&rank) {
                let last = Wait { rank: on, id, waits_for: rank };
                return Some(chain(&reached, at, last));
            }
            for next in absent {
                if seen.insert(next) {
                    reached.push((Wait { rank: on, id: id.clone(), waits_for: next }, Some(at)));
                }
            }
        }
        at += 1;
    }
    None
}

/// Returns the chain of waits up to entry `at`, followed by `last`.
fn chain(reached: &[(Wait, Option<usize>)], at: usize, last: Wait) -> Vec<Wait> {
    let steps = std::iter::successors(Some(at), |&i| reached[i].1);
    let mut waits: Vec<Wait> = steps.map(|i| reached[i].0.clone()).collect();
    waits.reverse();
    waits.push(last);
    waits
}

/// A rank's place in the graph of waits.
#[derive(Debug, Default)]
pub(crate) struct RankWaits {
    /// The calls in which the rank waits, or has just given up to wait, each with the ranks that it waits for.
    pub waits: Vec<(CallId, Vec<usize>)>,
    /// True if the rank's own error names the rank itself.
    pub is_cause: bool,
}

/// The ranks that are to blame for a call that does not complete, and the waits that lead to them.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Blame {
    /// The ranks for which the absent ones wait in the end, ascending. If all of these wait for each other, the absent
    /// ones.
    pub ranks: Vec<usize>,
    /// The waits of the absent ranks and of those that they wait for, the ones that lead to a rank to blame first.
    pub elsewhere: Vec<Wait>,
}

/// Follows the waits of the ranks that are absent from a call of `rank` to the ranks that wait for none.
pub(crate) fn blame(rank: usize, absent: &[usize], mut waits: impl FnMut(usize) -> RankWaits) -> Blame {
    let mut queue = absent.to_vec();
    // The waits of the rank itself are known.
    let mut seen: HashSet<usize> = absent.iter().copied().chain([rank]).collect();
    let mut found: HashMap<usize, Vec<(CallId, Vec<usize>)>> = HashMap::new();
    let mut roots = Vec::new();
    let mut at = 0;
    while let Some(&rank) = queue.get(at) {
        at += 1;
        let RankWaits { mut waits, is_cause } = waits(rank);
        waits.iter_mut().for_each(|(_, on)| on.retain(|&other| other != rank));
        waits.retain(|(_, on)| !on.is_empty());
        if is_cause || waits.is_empty() {
            roots.push(rank);
        }
        queue.extend(waits.iter().flat_map(|(_, on)| on).copied().filter(|&next| seen.insert(next)));
        found.insert(rank, waits);
    }
    roots.sort_unstable();
    let (mut last, mut before) = (Vec::new(), Vec::new());
    for rank in queue {
        let Some(waits) = found.remove(&rank) else { continue };
        let to_root = |(id, on): &(CallId, Vec<usize>)| {
            let root = on.iter().find(|on| roots.binary_search(on).is_ok())?;
            Some(Wait { rank, id: id.clone(), waits_for: *root })
        };
        match waits.iter().find_map(to_root) {
            Some(wait) => last.push(wait),
            None => {
                before.extend(waits.into_iter().next().map(|(id, on)| Wait { rank, id, waits_for: on[0] }))
            }
        }
    }
    last.append(&mut before);
    if roots.is_empty() {
        roots.extend(absent);
    }
    Blame { ranks: roots, elsewhere: last }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_cycle_is_found_if_there_is_one() {
        let id = |seq| CallId::new("barrier", seq, "g");
        // Rank 0 waits for 1 and 2, 1 for 3, 3 for 0, and 2 for 4, which does not wait.
        let waits = |rank: usize| match rank {
            1 => vec![(id(1), vec![3])],
            2 => vec![(id(2), vec![4])],
            3 => vec![(id(3), vec![2, 0])],
            _ => vec![],
        };
        let found = cycle(0, &id(0), &[2, 1], waits).unwrap();
        let found: Vec<_> = found.iter().map(|w| (w.rank, w.id.seq, w.waits_for)).collect();
        assert_eq!(found, [(0, 0, 1), (1, 1, 3), (3, 3, 0)]);
        assert_eq!(cycle(0, &id(0), &[2], waits), None);
        assert_eq!(cycle(0, &id(0), &[], waits), None);
        // A cycle without the rank is not reported, and the search ends.
        assert_eq!(cycle(0, &id(0), &[5], |rank| vec![(id(9), vec![11 - rank])]), None);
    }

    #[test]
    fn ranks_that_wait_for_none_are_to_blame() {
        let id = |seq| CallId::new("barrier", seq, "g");
        let of = |edges: &'static [(usize, &'static [usize])]| {
            move |rank: usize| RankWaits {
                waits: edges
                    .iter()
                    .filter(|(from, _)| *from == rank)
                    .map(|(from, on)| (id(*from as u64), on.to_vec()))
                    .collect(),
                is_cause: rank == 9,
            }
        };
        let check = |absent: &[usize], edges, ranks: &[usize], path: &[(usize, usize)]| {
            let found = blame(0, absent, of(edges));
            let waits: Vec<_> = found.elsewhere.iter().map(|wait| (wait.rank, wait.waits_for)).collect();
            assert_eq!((&found.ranks[..], &waits[..]), (ranks, path), "{edges:?}");
        };
        check(&[1], &[], &[1], &[]);
        // A chain; the last of its waits is shown first.
        check(&[1], &[(1, &[2]), (2, &[3])], &[3], &[(2, 3), (1, 2)]);
        // One of two absent ranks waits. If a rank has come meanwhile, the wait for it counts no more.
        check(&[1, 5], &[(1, &[2]), (2, &[])], &[2, 5], &[(1, 2)]);
        // The rank in whose name the question is asked, 0, waits, too.
        check(&[1], &[(0, &[1]), (1, &[0, 4])], &[4], &[(1, 4)]);
        // Ranks in a cycle wait; without any other, the absent ones are named.
        check(&[1], &[(1, &[2]), (2, &[1])], &[1], &[(1, 2), (2, 1)]);
        check(&[1, 3], &[(1, &[2]), (2, &[1])], &[3], &[(1, 2), (2, 1)]);
        // A rank whose error names itself and others, and a wait for itself.
        check(&[9], &[(9, &[2, 9])], &[2, 9], &[(9, 2)]);
        check(&[1], &[(1, &[1])], &[1], &[]);
    }
}
