//! Cycles of ranks that wait for each other.

use std::collections::HashSet;

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
}
