//! Failures and differences of single ranks, which end a call on all ranks.

use std::path::Path;

use super::VERB;
use super::format::HuggingFaceFormat;
use super::weight_files::WeightFiles;
use crate::base::Fnv1a;
use crate::dtensor::{DeviceMesh, ListOnRanks};
use crate::error::{Error, Result};
use crate::tensor::{Device, hash_words};

/// Returns this rank's value if no rank brings an error and all ranks bring equal words; otherwise an error on every
/// rank. All-gathers of some bytes per rank.
pub(super) fn agree<T>(mesh: &DeviceMesh, verb: &str, mine: Result<T>, word: u64) -> Result<T> {
    // A dry run has no peers.
    if mesh.device() == Device::Meta {
        return mine;
    }
    let told = mine.as_ref().map(|_| vec![word as i64]).map_err(Error::clone);
    let all = mesh.agree(verb, told);
    let (mine, all) = (mine?, all?);
    match all.iter().position(|words| *words != all[0]) {
        None => Ok(mine),
        Some(other) => {
            let given = format!("positions 0 and {other} of {}", mesh.mesh());
            let remedy = "give all ranks the same folder";
            Err(Error::invalid(verb, "the ranks read different configs or tensors", given, remedy))
        }
    }
}

/// Returns an error on every rank if one brings an error, or if ranks read different configs, or tensors of different
/// names, dtypes, shapes or, by samples or by all bytes, elements; it names the first thing that differs, and the ranks.
/// All-gathers of some bytes per rank, and of 8 bytes per tensor if something differs.
pub(super) fn agree_on_files(
    mesh: &DeviceMesh,
    mine: Result<(&HuggingFaceFormat, &WeightFiles)>,
    all: bool,
) -> Result<()> {
    // A dry run has no peers.
    if mesh.device() == Device::Meta {
        return mine.map(drop);
    }
    let files = mine.as_ref().ok().copied();
    let hashes = files.map_or_else(Vec::new, |(format, files)| format.hashes(files, all));
    let shown = |k: usize| files.map_or_else(String::new, |(format, files)| format.shown(files, k, &hashes));
    let list = ListOnRanks {
        rule: "the ranks read different configs or tensors",
        remedy: "give all ranks the same folder",
        noun: "tensor(s)",
        others: 2,
        hashes: &hashes,
        shown: &shown,
    };
    let words = mesh.agree(VERB, mine.as_ref().map(|_| list.words()).map_err(Error::clone));
    // An error of this rank says more than that of all.
    mine?;
    mesh.expect_same_lists(VERB, &list, &words?)
}

impl HuggingFaceFormat {
    /// Compares every byte of the weights in a folder, and its config, over the ranks of a mesh. All ranks call this
    /// together, and each reads the files whole. [`HuggingFaceFormat::load`] compares samples alone.
    ///
    /// Communicates some bytes per rank, and 8 bytes per tensor if something differs.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, hugging_face::HuggingFaceFormat};
    /// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/llama2");
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     HuggingFaceFormat::compare_all(&mesh, dir)
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`HuggingFaceFormat::read`] refuses, and ranks that read different files; the error names the first
    /// tensor that differs and the ranks that have each of its values.
    pub fn compare_all(mesh: &DeviceMesh, dir: impl AsRef<Path>) -> Result<()> {
        let _busy = mesh.rank().busy("comparing weights");
        let opened = HuggingFaceFormat::open_folder(dir.as_ref());
        let read = opened.as_ref().map(|(format, files)| (format, files)).map_err(Error::clone);
        agree_on_files(mesh, read, true)
    }

    /// Returns a hash of the config, one of the second head, and one of each tensor.
    fn hashes(&self, files: &WeightFiles, all: bool) -> Vec<u64> {
        let text = |text: &str| hash_words(text.bytes().map(u64::from));
        let config = serde_json::Value::Object(self.config.json.clone()).to_string();
        let mut hashes = vec![text(&config), text(&format!("{:?}", self.second_head))];
        let tensors = files.tensors().zip(files.hashes(all));
        hashes.extend(tensors.map(|((name, tensor), hash)| {
            hash_words([text(&format!("{name} {:?} {}", tensor.dtype, tensor.shape)), hash])
        }));
        hashes
    }

    /// Describes the thing of a number in [`HuggingFaceFormat::hashes`].
    fn shown(&self, files: &WeightFiles, k: usize, hashes: &[u64]) -> String {
        let dir = files.dir().display();
        match k.checked_sub(2).and_then(|k| files.tensors().nth(k)) {
            Some((name, tensor)) => {
                format!(
                    "{name}{} of {:?}, fingerprint {:016x}, in {dir}",
                    tensor.shape, tensor.dtype, hashes[k]
                )
            }
            None => format!("config.json, fingerprint {:016x}, in {dir}", hashes[k]),
        }
    }

    /// Returns a hash (FNV-1a, 64 bits) of the config, and of the tensors' names, dtypes and shapes.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hash = Fnv1a::new();
        hash.add(serde_json::Value::Object(self.config.json.clone()).to_string().bytes());
        for (tensor, dtype) in self.tensors.iter().zip(&self.dtypes) {
            hash.add(format!("{} {dtype} {};", tensor.name, tensor.shape).bytes());
        }
        hash.add(format!("{:?}", self.second_head).bytes());
        hash.value()
    }
}
