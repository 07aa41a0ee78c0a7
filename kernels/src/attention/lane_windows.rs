//! Windows of queries that are the lanes of a vector.

use std::ops::Range;

/// The number of queries side by side, and of keys whose exponentials are computed in one go.
pub(super) const LANES: usize = 16;

/// The windows of [`LANES`] queries, in keys from a block's first one on.
#[derive(Clone, Debug)]
pub(super) struct LaneWindows {
    from: [i32; LANES],
    to: [i32; LANES],
    /// The range of the keys that any of the queries sees.
    any: [usize; 2],
    /// The range of the keys that all queries see.
    all: [usize; 2],
}

/// The number of the queries that see a cell: [`LANES`] keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// No query sees any of its keys.
    None,
    /// Some keys are seen by some queries.
    Some,
    /// All queries see all its keys.
    All,
}

impl LaneWindows {
    /// Returns these windows, each with its first key and the key after its last. Those of missing queries are empty.
    pub(super) fn new(windows: [[usize; 2]; LANES]) -> LaneWindows {
        let seeing = || windows.iter().filter(|[from, to]| from < to);
        let any = [seeing().map(|w| w[0]).min(), seeing().map(|w| w[1]).max()];
        let all = [windows.iter().map(|w| w[0]).max(), windows.iter().map(|w| w[1]).min()];
        LaneWindows {
            from: windows.map(|w| w[0] as i32),
            to: windows.map(|w| w[1] as i32),
            any: any.map(|bound| bound.unwrap_or(0)),
            all: all.map(|bound| bound.expect("there are lanes")),
        }
    }

    /// Returns the window of a query.
    pub(super) fn of(&self, lane: usize) -> Range<usize> {
        self.from[lane] as usize..self.to[lane] as usize
    }

    /// Returns how many queries see the keys of a cell.
    #[inline(always)]
    pub(super) fn seen(&self, cell: usize) -> Seen {
        let (from, to) = (cell * LANES, (cell + 1) * LANES);
        if to <= self.any[0] || self.any[1] <= from {
            Seen::None
        } else if self.all[0] <= from && to <= self.all[1] {
            Seen::All
        } else {
            Seen::Some
        }
    }

    /// Returns true for each query that sees a key.
    #[inline(always)]
    pub(super) fn see(&self, key: usize) -> [bool; LANES] {
        let (key, mut seen) = (key as i32, [false; LANES]);
        for (seen, (&from, &to)) in seen.iter_mut().zip(self.from.iter().zip(&self.to)) {
            *seen = (from <= key) & (key < to);
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_classed_by_their_keys() {
        for seed in 0..2000usize {
            let window = |lane: usize| {
                // Near each other, so that all see most keys, or far apart.
                let apart = [lane % (1 + seed % 7), seed * (lane % 5) * 31 % 60][seed % 2];
                let from = seed * 31 % 60 + apart;
                let len = [0, 3, 40, 90][(seed + lane * (seed % 3)) % 4];
                [from, from + len]
            };
            let windows: [[usize; 2]; LANES] = std::array::from_fn(window);
            let lanes = LaneWindows::new(windows);
            for cell in 0..10 {
                let keys = cell * LANES..(cell + 1) * LANES;
                let seen: Vec<bool> = keys.clone().flat_map(|key| lanes.see(key)).collect();
                let want: Vec<bool> =
                    keys.flat_map(|key| windows.map(|[from, to]| (from..to).contains(&key))).collect();
                assert_eq!(seen, want);
                match lanes.seen(cell) {
                    Seen::None => assert!(seen.iter().all(|seen| !seen), "{windows:?}, cell {cell}"),
                    Seen::All => assert!(seen.iter().all(|seen| *seen), "{windows:?}, cell {cell}"),
                    Seen::Some => assert!(seen.iter().any(|seen| !seen), "{windows:?}, cell {cell}"),
                }
            }
        }
    }
}
