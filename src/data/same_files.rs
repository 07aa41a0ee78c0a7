//! The comparison of files, settings and position over the ranks of a mesh.

use super::config::TokensConfig;
use super::source::TokenSource;
use crate::dtensor::{DeviceMesh, ListOnRanks};
use crate::error::Result;
use crate::tensor::hash_words;

/// The number of things that are compared before the files.
const BEFORE_FILES: usize = 2;

impl TokenSource {
    /// Refuses other files, settings or positions on some ranks, with the same error on all: an all-gather of 16 bytes
    /// per rank, and a few more if they differ. `next` is the next sample.
    pub fn expect_same_on_ranks(&self, mesh: &DeviceMesh, next: u64) -> Result<()> {
        let &TokensConfig { vocabulary, block, batch, shuffle, packing, width, compare_all, .. } =
            self.config();
        let settings = format!(
            "{batch} rows of {block} tokens below {vocabulary}, shuffle {shuffle:?}, {packing:?}, width {width:?}, \
             compare_all {compare_all}"
        );
        let (files, samples) = (self.files(), self.len());
        let mut hashes = vec![hash_words(settings.bytes().map(u64::from)), hash_words([next, samples])];
        hashes.extend(files.iter().map(|file| file.fingerprint(compare_all)));
        hashes.push(self.order);
        let shown = |k: usize| match k.checked_sub(BEFORE_FILES).map(|k| files.get(k)) {
            None if k == 0 => settings.clone(),
            None => format!("epoch {}, sample {} of {samples}", next / samples, next % samples),
            Some(Some(file)) => {
                let (len, path, hash) = (file.len(), file.path().display(), hashes[k]);
                format!("{len} tokens, fingerprint {hash:016x}, in {path}")
            }
            // Packed documents see bytes between the samples, too.
            Some(None) => format!("files of the order {:016x}", self.order),
        };
        mesh.expect_same_list(
            "tokens",
            &ListOnRanks {
                rule: "the ranks have different token files, settings or positions",
                remedy: "give all ranks the same",
                noun: "file(s)",
                others: BEFORE_FILES + 1,
                hashes: &hashes,
                shown: &shown,
            },
        )
    }
}
