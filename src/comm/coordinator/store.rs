//! A key-value store by which ranks exchange small values: names of communicators, numbers of groups.

use std::collections::HashMap;

/// The prefix of keys whose value is a number that the store assigns, from 0 on; every rank that asks gets the same
/// one.
const NUMBERED: &str = "#";
const KEY_BYTES: usize = 4096;
const VALUE_BYTES: usize = 4096;
/// The bytes of keys and values that one rank may store.
const BUDGET_BYTES: usize = 8 << 20;
/// The approximate size of an entry without its key and value.
const ENTRY_BYTES: usize = 96;

/// Values by key, and the ranks that wait for them.
#[derive(Debug)]
pub(super) struct KeyValueStore {
    values: HashMap<String, Vec<u8>>,
    /// The number of keys with an assigned number.
    numbered: u64,
    asked: HashMap<String, Vec<usize>>,
    /// Per rank, the bytes that it has stored.
    held: Vec<usize>,
}

impl KeyValueStore {
    pub fn new(world_len: usize) -> KeyValueStore {
        KeyValueStore { values: HashMap::new(), numbered: 0, asked: HashMap::new(), held: vec![0; world_len] }
    }

    /// Stores a value, and returns the ranks that have asked for it.
    ///
    /// # Errors
    /// Refuses a second, different value for a key, a key with the prefix of assigned numbers, and values beyond the
    /// limits.
    pub fn put(&mut self, from: usize, key: &str, value: &[u8]) -> Result<Vec<usize>, String> {
        if value.len() > VALUE_BYTES {
            return Err(format!(
                "it puts {} bytes under one key, but at most {VALUE_BYTES} are allowed",
                value.len()
            ));
        }
        if key.starts_with(NUMBERED) {
            return Err("it puts a value in the place of a number".into());
        }
        match self.values.get(key) {
            Some(kept) if kept == value => return Ok(vec![]),
            Some(_) => return Err("it puts another value under a key".into()),
            None => self.charge(from, key, value.len())?,
        }
        self.values.insert(key.into(), value.into());
        Ok(self.asked.remove(key).unwrap_or_default())
    }

    /// Returns the value of a key. If there is none, remembers that the rank has asked.
    ///
    /// # Errors
    /// Same as [`KeyValueStore::put`].
    pub fn get(&mut self, from: usize, key: &str) -> Result<Option<&[u8]>, String> {
        if !self.values.contains_key(key) {
            self.charge(from, key, 0)?;
            if !key.starts_with(NUMBERED) {
                let asked = self.asked.entry(key.into()).or_default();
                if !asked.contains(&from) {
                    asked.push(from);
                }
                return Ok(None);
            }
            self.values.insert(key.into(), self.numbered.to_le_bytes().into());
            self.numbered += 1;
        }
        Ok(self.values.get(key).map(Vec::as_slice))
    }

    fn charge(&mut self, from: usize, key: &str, len: usize) -> Result<(), String> {
        if key.len() > KEY_BYTES {
            return Err(format!(
                "it names a key of {} bytes, but at most {KEY_BYTES} are allowed",
                key.len()
            ));
        }
        let held = &mut self.held[from];
        *held += ENTRY_BYTES + key.len() + len;
        if *held > BUDGET_BYTES {
            return Err(format!("it leaves more than {BUDGET_BYTES} bytes under keys"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_handed_to_whoever_asks() {
        let mut store = KeyValueStore::new(2);
        assert_eq!(store.get(1, "k"), Ok(None));
        assert_eq!(store.put(0, "k", &[3]), Ok(vec![1]));
        assert_eq!(store.get(0, "k"), Ok(Some(&[3][..])));
        assert_eq!(store.put(1, "k", &[3]), Ok(vec![]));
        assert_eq!(store.put(1, "k", &[4]).unwrap_err(), "it puts another value under a key");
        assert_eq!(store.get(1, "k"), Ok(Some(&[3][..])));
        (0..3).for_each(|_| assert_eq!(store.get(0, "later"), Ok(None)));
        assert_eq!(store.put(1, "later", &[5]), Ok(vec![0]), "asked three times, told once");
        assert!(store.put(1, "#b", &[5]).unwrap_err().contains("in the place of a number"));
        for (rank, key, number) in [(1, "#b", 0u64), (0, "#a", 1), (0, "#b", 0), (1, "#a", 1)] {
            assert_eq!(store.get(rank, key), Ok(Some(&number.to_le_bytes()[..])), "whoever asks first");
        }
    }

    #[test]
    fn a_rank_fills_no_more_than_its_budget() {
        let mut store = KeyValueStore::new(2);
        let filled = (0..1 << 20).find_map(|i| store.put(1, &format!("key {i}"), &[0; 1000]).err());
        assert_eq!(filled.unwrap(), "it leaves more than 8388608 bytes under keys");
        let kept: usize = store.values.iter().map(|(key, value)| key.len() + value.len()).sum();
        assert!(kept < BUDGET_BYTES);
        assert!(store.put(0, "k", &[0; 4096]).is_ok(), "the others have their own");
        assert!(store.put(0, "k", &[0; 4097]).unwrap_err().contains("4097 bytes under one key"));
        assert!(store.get(0, &"k".repeat(5000)).unwrap_err().contains("a key of 5000 bytes"));
        let mut asked = KeyValueStore::new(1);
        assert!((0..1 << 20).any(|i| asked.get(0, &i.to_string()).is_err()), "questions count too");
    }
}
