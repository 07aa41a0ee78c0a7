//! A map with a bound on its length, for results that can be computed again.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// Results by their keys. A full cache is emptied before it takes another key, so that a program whose keys change at
/// every call does not fill the memory.
pub(crate) struct BoundedCache<K, V, const ENTRIES_LEN: usize = 8192>(FxHashMap<K, V>);

impl<K, V, const ENTRIES_LEN: usize> Default for BoundedCache<K, V, ENTRIES_LEN> {
    fn default() -> Self {
        BoundedCache(FxHashMap::default())
    }
}

impl<K: Hash + Eq, V, const ENTRIES_LEN: usize> BoundedCache<K, V, ENTRIES_LEN> {
    #[inline]
    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key)
    }

    /// Returns the entry of a key, which `make` makes if there is none.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        if self.0.len() >= ENTRIES_LEN && !self.0.contains_key(&key) {
            self.0.clear();
        }
        self.0.entry(key).or_insert_with(make)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_is_emptied_by_a_new_key_alone() {
        let mut cache = BoundedCache::<usize, usize, 3>::default();
        for key in 0..3 {
            assert_eq!(*cache.get_or_insert_with(key, || 10 * key), 10 * key);
        }
        *cache.get_or_insert_with(1, || unreachable!("the key is known")) += 1;
        assert_eq!([0, 1, 2, 3].map(|key| cache.get(&key).copied()), [Some(0), Some(11), Some(20), None]);
        cache.get_or_insert_with(3, || 30);
        assert_eq!([0, 1, 2, 3].map(|key| cache.get(&key).copied()), [None, None, None, Some(30)]);
    }
}
