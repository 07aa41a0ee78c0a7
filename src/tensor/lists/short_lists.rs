//! Short lists, such as dims or operands, collected and sorted by little code.
//!
//! Libraries' functions for that are made for long lists, and are compiled for each type and closure: a sort of the standard
//! library has 5 to 8 kB, and `collect` of a `SmallVec` 1 kB. Here a list is collected element by element, and only the
//! indices of a list are sorted, by one function. Long lists of numbers are sorted by the standard library.

use std::cmp::Ordering;

use smallvec::{Array, SmallVec};

/// Collects a list.
pub(crate) fn short_list<A: Array>(elements: impl IntoIterator<Item = A::Item>) -> SmallVec<A> {
    let mut list = SmallVec::new();
    elements.into_iter().for_each(|element| list.push(element));
    list
}

/// Sorts a list by `key`. Elements of equal keys keep their order.
pub(crate) fn sort_by_key<T, K: Ord>(list: &mut [T], key: impl Fn(&T) -> K) {
    sort_by(list, |a, b| key(a).cmp(&key(b)));
}

/// Sorts a list by `compare`. Equal elements keep their order.
pub(crate) fn sort_by<T>(list: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let mut order = sorted_indices(list.len(), &|a, b| compare(&list[a], &list[b]));
    // Follows each cycle of the permutation; an index that has its element becomes a cycle of its own.
    for start in 0..list.len() {
        let mut at = start;
        while order[at] != start {
            let from = std::mem::replace(&mut order[at], at);
            list.swap(at, from);
            at = from;
        }
        order[at] = at;
    }
}

/// Returns, in the order of the sorted list, the indices that its elements have in the list.
fn sorted_indices(len: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> SmallVec<[usize; 16]> {
    let mut order: SmallVec<[usize; 16]> = (0..len).collect();
    order.sort_by(|&a, &b| compare(a, b));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_as_the_standard_library_and_keeps_the_order_of_equals() {
        for len in 0..70usize {
            let list: Vec<(usize, usize)> = (0..len).map(|i| (i * 31 % 7, i * 17 % 71)).collect();
            let (mut sorted, mut want) = (list.clone(), list.clone());
            sort_by_key(&mut sorted, |x| x.0);
            want.sort_by_key(|x| x.0);
            assert_eq!(sorted, want);
            sort_by(&mut sorted, |a, b| b.1.cmp(&a.1));
            want.sort_by_key(|x| std::cmp::Reverse(x.1));
            assert_eq!(sorted, want);
        }
    }
}
