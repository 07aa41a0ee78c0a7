//! Reading lists of bounded length from untrusted input.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a list of at most `N` items, for `#[serde(deserialize_with)]`. A longer list is refused at item `N + 1`.
pub(in crate::comm) fn at_most<'de, const N: usize, T, D>(from: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    from.deserialize_seq(AtMost::<N, T>(PhantomData))
}

struct AtMost<const N: usize, T>(PhantomData<T>);

impl<'de, const N: usize, T: Deserialize<'de>> Visitor<'de> for AtMost<N, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {N}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            if items.len() == N {
                return Err(A::Error::invalid_length(N + 1, &self));
            }
            items.push(item);
        }
        Ok(items)
    }
}
