//! Contiguous runs of a box of elements that is stored with two sets of strides.

use smallvec::SmallVec;

use crate::tensor::Dims;

/// Joins runs that are adjacent in both storages, and passes the joined runs to a function.
pub(super) struct Runs<'a> {
    pending: (usize, usize, usize),
    f: &'a mut dyn FnMut(usize, usize, usize),
}

impl<'a> Runs<'a> {
    /// Creates the joiner. `f` gets `(offset in a, offset in b, length)`; the length is never 0.
    pub(super) fn new(f: &'a mut dyn FnMut(usize, usize, usize)) -> Self {
        Runs { pending: (0, 0, 0), f }
    }

    /// Adds the elements of a box, in row-major order, given an offset and strides in each storage.
    pub(super) fn add(&mut self, len: &[usize], a: (usize, &[usize]), b: (usize, &[usize])) {
        if len.contains(&0) {
            return;
        }
        let mut outer = collapse(len, a.1, b.1);
        let whole = outer.last().is_some_and(|d| d.a == 1 && d.b == 1);
        let run = if whole { outer.pop().map_or(1, |d| d.len) } else { 1 };
        let mut index = Dims::from_elem(0, outer.len());
        let (mut at_a, mut at_b) = (a.0, b.0);
        loop {
            self.push(at_a, at_b, run);
            let mut d = outer.len();
            loop {
                let Some(next) = d.checked_sub(1) else { return };
                d = next;
                index[d] += 1;
                at_a += outer[d].a;
                at_b += outer[d].b;
                if index[d] < outer[d].len {
                    break;
                }
                at_a -= outer[d].a * outer[d].len;
                at_b -= outer[d].b * outer[d].len;
                index[d] = 0;
            }
        }
    }

    /// Passes on the last run.
    pub(super) fn finish(mut self) {
        self.flush();
    }

    fn push(&mut self, a: usize, b: usize, len: usize) {
        let (start_a, start_b, done) = self.pending;
        if done > 0 && start_a + done == a && start_b + done == b {
            self.pending.2 += len;
        } else {
            self.flush();
            self.pending = (a, b, len);
        }
    }

    fn flush(&mut self) {
        let (a, b, len) = self.pending;
        if len > 0 {
            (self.f)(a, b, len);
        }
    }
}

/// The length of a dim, and its strides in both storages.
struct Dim {
    len: usize,
    a: usize,
    b: usize,
}

/// Drops dims of extent 1, and joins adjacent dims that are contiguous in both storages.
fn collapse(len: &[usize], a: &[usize], b: &[usize]) -> SmallVec<[Dim; 5]> {
    let mut dims: SmallVec<[Dim; 5]> = SmallVec::new();
    for ((&len, &a), &b) in len.iter().zip(a).zip(b).filter(|((len, _), _)| **len != 1) {
        match dims.last_mut() {
            Some(last) if last.a == a * len && last.b == b * len => *last = Dim { len: last.len * len, a, b },
            _ => dims.push(Dim { len, a, b }),
        }
    }
    dims
}
