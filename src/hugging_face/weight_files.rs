//! The weights of a folder: safetensors files, mapped into memory, whose numbers are checked before they are used.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::VERB;
use crate::error::{Error, Result};
use crate::tensor::{Shape, expect_room, hash_all, hash_samples, open_regular};

/// The file that describes a model.
pub(super) const CONFIG_FILE: &str = "config.json";
/// The file of a model that is saved in one piece.
pub(super) const ONE_FILE: &str = "model.safetensors";
/// The file that says which tensor is in which shard.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The longest index that is read, in bytes.
const INDEX_BYTES: u64 = 64 << 20;
/// The bytes of memory that a byte of JSON takes once it is parsed, at most if it is no list of short numbers.
const PARSED_BYTES: usize = 16;

/// The most places of all files together whose bytes are compared over the ranks, and the bytes of each.
const SAMPLES: usize = 4096;
const SAMPLE_BYTES: usize = 256;

/// The tensors of a folder's safetensors files, by name.
pub(super) struct WeightFiles {
    dir: PathBuf,
    maps: Vec<Mmap>,
    tensors: BTreeMap<String, FileTensor>,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub(super) struct FileTensor {
    /// The number of the file.
    file: usize,
    pub dtype: Dtype,
    pub shape: Shape,
    /// The first byte in the file, and the byte after the last.
    range: (usize, usize),
}

impl WeightFiles {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names. Reads headers only.
    ///
    /// # Errors
    /// Refuses a folder without either, names that leave the folder, headers that do not describe their files, and an
    /// index that differs from the files.
    pub fn open(dir: &Path) -> Result<WeightFiles> {
        let mut files = WeightFiles { dir: dir.to_path_buf(), maps: Vec::new(), tensors: BTreeMap::new() };
        if dir.join(ONE_FILE).exists() {
            files.add(ONE_FILE.into(), None)?;
            return Ok(files);
        }
        let path = dir.join(INDEX_FILE);
        if !path.exists() {
            let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
            let remedy = match pickled.iter().find(|name| dir.join(name).exists()) {
                Some(name) => {
                    format!("{name} is a pickle: load it in Python, and save_pretrained writes safetensors")
                }
                None => "save_pretrained of transformers writes them".into(),
            };
            let rule = format!("the folder has neither {ONE_FILE} nor {INDEX_FILE}");
            return Err(Error::invalid(VERB, rule, dir.display().to_string(), remedy));
        }
        let index: ShardIndex = parse_json(&path, INDEX_BYTES)?;
        let mut names: Vec<&String> = index.weight_map.0.values().collect();
        names.sort();
        names.dedup();
        names.iter().try_for_each(|name| check_file_name(&path, name))?;
        for name in names {
            files.add(name.clone(), Some(&index.weight_map.0))?;
        }
        match index.weight_map.0.iter().find(|(name, _)| !files.tensors.contains_key(*name)) {
            Some((tensor, file)) => {
                Err(refuse("the index names a tensor that the file lacks", &dir.join(file), tensor))
            }
            None => Ok(files),
        }
    }

    /// Maps a file and adds its tensors. `index`, if there is one, assigns each tensor to this file.
    fn add(&mut self, name: String, index: Option<&BTreeMap<String, String>>) -> Result<()> {
        let path = self.dir.join(&name);
        let file = open_regular(&path).map_err(|e| Error::io(VERB, &path, e))?;
        // SAFETY: the map is read-only. Changing the file of a mapped model is documented as a fault of the caller.
        let bytes = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(VERB, &path, e))?;
        let damaged = |e: safetensors::SafeTensorError| {
            refuse("the file is not whole safetensors", &path, &e.to_string())
        };
        if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
            let (rule, given) = ("the file is a pointer of Git LFS", path.display().to_string());
            return Err(Error::invalid(VERB, rule, given, "fetch the weights by git lfs pull"));
        }
        // Headers of files that are none may have any length, which is refused then.
        let header = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len)).min(bytes.len() as u64);
        expect_room((header as usize).saturating_mul(PARSED_BYTES), "the header of a file of weights")?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
        let data = header + 8;
        for (tensor, info) in metadata.tensors() {
            match index.map(|index| index.get(&tensor)) {
                Some(None) => return Err(refuse("the index lacks a tensor of the file", &path, &tensor)),
                Some(Some(other)) if *other != name => {
                    let given = format!("{tensor}, in the index in {other}");
                    return Err(refuse(
                        "a file has a tensor that the index has in another file",
                        &path,
                        &given,
                    ));
                }
                Some(Some(_)) | None => {}
            }
            let range = (data + info.data_offsets.0, data + info.data_offsets.1);
            let shape = Shape::from(info.shape.clone());
            self.tensors
                .insert(tensor, FileTensor { file: self.maps.len(), dtype: info.dtype, shape, range });
        }
        self.maps.push(bytes);
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the tensors with their names, in the order of names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &FileTensor)> {
        self.tensors.iter().map(|(name, tensor)| (&**name, tensor))
    }

    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    pub fn get(&self, name: &str) -> Option<&FileTensor> {
        self.tensors.get(name)
    }

    /// Returns a hash of each tensor's elements, in the order of names: of all of them, or of samples. These are the
    /// first, the last and the middle bytes of each tensor, but of at most [`SAMPLES`] places of all files together.
    pub fn hashes(&self, all: bool) -> Vec<u64> {
        let (each, step) = match SAMPLES / self.len().max(1) {
            0 => (1, self.len().div_ceil(SAMPLES)),
            each => (each.min(3), 1),
        };
        let hash = |(number, tensor): (usize, &FileTensor)| match all {
            true => hash_all(self.bytes(tensor)),
            false if number % step != 0 => 0,
            // A single sample is that in the middle.
            false if each == 1 => {
                let bytes = self.bytes(tensor);
                hash_samples(&bytes[bytes.len() / 2..], 1, SAMPLE_BYTES)
            }
            false => hash_samples(self.bytes(tensor), each, SAMPLE_BYTES),
        };
        self.tensors.values().enumerate().map(hash).collect()
    }

    /// Returns a tensor's elements, row-major.
    pub fn bytes(&self, tensor: &FileTensor) -> &[u8] {
        &self.maps[tensor.file][tensor.range.0..tensor.range.1]
    }
}

/// The part of `model.safetensors.index.json` that is read.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: UniqueKeys,
}

/// A JSON object whose keys differ; `serde_json` alone would keep the last of two equal keys.
struct UniqueKeys(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(input: D) -> std::result::Result<UniqueKeys, D::Error> {
        struct WeightMapVisitor;

        impl<'de> Visitor<'de> for WeightMapVisitor {
            type Value = UniqueKeys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names of tensors and files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<UniqueKeys, A::Error> {
                let mut keys = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if keys.contains_key(&key) {
                        return Err(A::Error::custom(format!("{key} stands twice")));
                    }
                    keys.insert(key, value);
                }
                Ok(UniqueKeys(keys))
            }
        }

        input.deserialize_map(WeightMapVisitor)
    }
}

/// Refuses a path at which no model can be: it wants a folder with a config.json.
pub(super) fn expect_folder(dir: &Path) -> Result<()> {
    let given = dir.display().to_string();
    let refused = |rule: &str, remedy: String| Err(Error::invalid(VERB, rule, &*given, remedy));
    if !dir.exists() {
        // A name of the hub has an owner and a model.
        let is_name = given.split('/').count() == 2 && !given.starts_with(['.', '/', '~']);
        let remedy = match is_name {
            true => format!("download the model by `hf download {given} --local-dir DIR`, and give DIR"),
            false => {
                "give the folder to which save_pretrained of transformers or `hf download` has written".into()
            }
        };
        return refused("there is no such folder, and models are read from folders", remedy);
    }
    if !dir.is_dir() {
        return refused(
            "models are read from folders, and this is a file",
            "give the folder that it is in".into(),
        );
    }
    if !dir.join(CONFIG_FILE).exists() {
        let remedy =
            "give a folder with config.json and safetensors files, as save_pretrained writes them".into();
        return refused("the folder has no config.json", remedy);
    }
    Ok(())
}

/// Reads a JSON file of at most `most` bytes.
pub(super) fn parse_json<T: serde::de::DeserializeOwned>(path: &Path, most: u64) -> Result<T> {
    let failed = |e: std::io::Error| Error::io(VERB, path, e);
    let mut bytes = Vec::new();
    open_regular(path).map_err(failed)?.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        return Err(refuse(&format!("the file has more than {most} bytes"), path, ""));
    }
    expect_room(bytes.len().saturating_mul(PARSED_BYTES), "the values of a JSON file")?;
    serde_json::from_slice(&bytes)
        .map_err(|e| refuse("the file is not the JSON that is expected", path, &e.to_string()))
}

/// Refuses names of files that are more than a name, so that none leaves the folder.
fn check_file_name(index: &Path, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.ends_with(".safetensors") && !name.starts_with('.') && name.chars().all(plain) {
        return Ok(());
    }
    let rule = "a shard's name has letters, digits, - _ . only, and ends in .safetensors";
    Err(refuse(rule, index, &format!("{name:?}")))
}

/// Returns the refusal of a file.
pub(super) fn refuse(rule: &str, path: &Path, given: &str) -> Error {
    let given = if given.is_empty() { String::new() } else { format!(": {given}") };
    Error::invalid(VERB, rule, format!("{}{given}", path.display()), "")
}
