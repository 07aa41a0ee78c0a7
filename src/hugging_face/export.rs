//! Writing weights: one tensor after another is gathered and written, so no rank ever holds the model.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::agreement::agree;
use super::config::CONFIG_FILE;
use super::format::{HuggingFaceFormat, file_dtype};
use super::names::{HEAD, NamedTensor, PiecePart};
use super::weight_files::{INDEX_FILE, ONE_FILE};
use crate::error::{Error, Result};
use crate::nn::Params;
use crate::tensor::{DType, Device, Shape, Tensor};

const VERB: &str = "save_hugging_face";
/// The size of a shard if the caller names none: that of `transformers`.
const SHARD_BYTES: u64 = 50_000_000_000;

/// A tensor to be written: its name, dtype and shape, and the number of the tensor whose values it has.
struct WrittenTensor<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a Shape,
    source: usize,
}

impl HuggingFaceFormat {
    /// Writes parameters into a new folder as `transformers` reads them: `model.safetensors`, or shards and their index
    /// if the weights have more than 50 GB, and `config.json`.
    ///
    /// Tensors that were loaded and not changed since have the bytes that they had. Every rank of the mesh calls this;
    /// the first rank writes. Each tensor is gathered and written before the next: each rank receives the elements that
    /// it lacks of one tensor at a time. The files are written beside the folder, flushed and renamed at the end, so
    /// the folder is whole or absent. Buffers that the loaded files had are left out, as `transformers` leaves them out.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, rng::Init, tensor::DType};
    /// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, nn::{Params, Plan}};
    /// # let folder = std::env::temp_dir().join(format!("isoshard-save-{}", std::process::id()));
    /// # let _ = std::fs::remove_dir_all(&folder);
    /// # let dir = folder.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let text = r#"{"model_type": "gpt2", "vocab_size": 5, "n_embd": 2, "n_layer": 1, "n_head": 1, "n_positions": 3}"#;
    ///     let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::BF16)?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     for path in ["wte", "wpe", "h.0.attn_norm"] {
    ///         params.root().child(path).param("weight", [5, 2], Init::Ones)?;
    ///     }
    ///     let refused = format.save(&params, &dir).unwrap_err().to_string();
    ///     assert!(refused.starts_with("save_hugging_face: a tensor and its parameter differ in size"), "{refused}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a folder that exists, and parameters that are not those of the format. Returns an error if a rank fails
    /// or a file cannot be written.
    pub fn save(&self, params: &Params, dir: impl AsRef<Path>) -> Result<()> {
        self.save_shards(params, dir, SHARD_BYTES)
    }

    /// Writes parameters as [`HuggingFaceFormat::save`] does, in shards of at most `max_shard_bytes` bytes each, except
    /// that a larger tensor has a shard of its own.
    ///
    /// ```no_run
    /// # fn example(params: &isoshard::nn::Params) -> isoshard::Result<()> {
    /// use isoshard::hugging_face::HuggingFaceFormat;
    /// let format = HuggingFaceFormat::read("llama-3.1-8b")?;
    /// format.save_shards(params, "tuned", 5 << 30) // 5 GiB
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`HuggingFaceFormat::save`].
    pub fn save_shards(&self, params: &Params, dir: impl AsRef<Path>, max_shard_bytes: u64) -> Result<()> {
        let dir = dir.as_ref();
        let mesh = params.mesh();
        let writes = mesh.mesh().ranks().next() == Some(mesh.mesh().rank());
        let _no_grad = mesh.no_grad();
        let _busy = writes.then(|| mesh.rank().busy("writing weights"));
        let create = || writes.then(|| UnfinishedFolder::create(dir)).transpose();
        let begun = self.expect_same_pieces(VERB, params).and_then(|()| create());
        let folder = agree(mesh, VERB, begun, self.fingerprint())?;
        let done = self.write_shards(params, folder, max_shard_bytes, dir);
        // The folder is there when any rank returns.
        agree(mesh, VERB, done, 0)
    }

    /// Gathers all tensors, and writes them on the rank that has the folder. After an error of writing, that rank
    /// gathers the other tensors as well, because the other ranks do.
    fn write_shards(
        &self,
        params: &Params,
        mut folder: Option<UnfinishedFolder>,
        max_shard_bytes: u64,
        dir: &Path,
    ) -> Result<()> {
        let writes = folder.is_some();
        let shards = shards(self.written(), max_shard_bytes);
        let mut index = BTreeMap::new();
        let mut written = Ok(());
        for (number, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => ONE_FILE.to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
            };
            let path = folder.as_ref().filter(|_| written.is_ok()).map(|folder| folder.path.join(&name));
            let mut file = match path.map(|path| ShardWriter::create(path, shard)).transpose() {
                Ok(file) => file,
                Err(e) => {
                    written = Err(e);
                    None
                }
            };
            for tensor in shard {
                let bytes = self.gather(params, tensor, writes)?;
                if let (Ok(()), Some(file), Some(bytes)) = (&written, &mut file, bytes) {
                    written = file.write(&bytes);
                }
                index.insert(tensor.name.to_string(), name.clone());
            }
            if let (Ok(()), Some(file)) = (&written, file) {
                written = file.finish();
            }
        }
        written?;
        if let Some(folder) = &mut folder {
            if shards.len() > 1 {
                let bytes: usize = shards.iter().flatten().map(WrittenTensor::bytes).sum();
                let metadata = json!({ "total_parameters": params.numel(), "total_size": bytes });
                folder.write_json(INDEX_FILE, &json!({ "metadata": metadata, "weight_map": index }))?;
            }
            folder.write_json(CONFIG_FILE, &Value::Object(self.config.json.clone()))?;
            folder.rename(dir)?;
        }
        Ok(())
    }

    /// Returns the tensors to be written: wide dtypes first, so that each tensor is aligned, then by name.
    fn written(&self) -> Vec<WrittenTensor<'_>> {
        let one = |source: usize, name, dtype| {
            let shape = &self.tensors[source].shape;
            WrittenTensor { name, dtype, shape, source }
        };
        let own = (0..self.tensors.len()).map(|i| one(i, &self.tensors[i].name[..], self.dtypes[i]));
        let second = self.second_head.map(|(source, dtype)| one(source, HEAD, dtype));
        let mut tensors: Vec<_> = own.chain(second).collect();
        tensors.sort_by_key(|t| (std::cmp::Reverse(t.dtype.size_bytes()), t.name));
        tensors
    }

    /// Gathers a tensor of the files. Returns its bytes on the rank that writes.
    fn gather(&self, params: &Params, tensor: &WrittenTensor<'_>, writes: bool) -> Result<Option<Vec<u8>>> {
        let NamedTensor { parts, .. } = &self.tensors[tensor.source];
        let mut whole: Vec<f32> = if writes { vec![0.0; tensor.shape.numel()] } else { Vec::new() };
        for part in parts {
            let values = part_values(params, part)?;
            if writes {
                let values = values.to_device(Device::Cpu)?.contiguous()?;
                let values = values.as_slice::<f32>()?;
                part.rows(part.first, part.first + part.numel(), |at, in_tensor, step, len| {
                    let row = values[at - part.first..][..len].iter();
                    row.enumerate().for_each(|(i, x)| whole[in_tensor + i * step] = *x);
                });
            }
        }
        if !writes {
            return Ok(None);
        }
        let whole = Tensor::from_vec(whole, tensor.shape.clone())?.cast(tensor.dtype)?;
        Ok(Some(whole.as_bytes()?.to_vec()))
    }
}

/// Returns the values of a part of a piece on every rank.
fn part_values(params: &Params, part: &PiecePart) -> Result<Tensor> {
    let (id, piece) = params.find_piece(&part.path).expect("compared with the parameters");
    let piece = piece.of(params.value(id))?;
    if part.numel() == piece.shape().numel() {
        return piece.full_tensor();
    }
    // One of several matrices.
    let each = part.numel() / part.dims[0];
    piece.slice(0, part.first / each, part.dims[0])?.full_tensor()
}

impl WrittenTensor<'_> {
    fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size_bytes()
    }
}

/// Divides tensors into shards of at most `most` bytes, in their order.
fn shards(tensors: Vec<WrittenTensor<'_>>, most: u64) -> Vec<Vec<WrittenTensor<'_>>> {
    let mut shards: Vec<Vec<WrittenTensor<'_>>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        let bytes = tensor.bytes() as u64;
        if filled + bytes > most && filled > 0 {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        shards.last_mut().expect("there is a first").push(tensor);
    }
    shards
}

/// A safetensors file that is written tensor by tensor.
struct ShardWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl ShardWriter {
    /// Writes the header: its length in 8 bytes, little-endian, and JSON, padded so that the tensors are aligned.
    fn create(path: PathBuf, tensors: &[WrittenTensor<'_>]) -> Result<ShardWriter> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut start = 0;
        for tensor in tensors {
            let end = start + tensor.bytes();
            let dtype = file_dtype(tensor.dtype).expect("checked when the format was made");
            let info = json!({ "dtype": dtype, "shape": tensor.shape[..], "data_offsets": [start, end] });
            header.insert(tensor.name.into(), info);
            start = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let failed = |e: std::io::Error| Error::io(VERB, &path, e);
        let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
        file.write_all(&(text.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        Ok(ShardWriter { path, file })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io(VERB, &self.path, e))
    }

    fn finish(self) -> Result<()> {
        let failed = |e: std::io::Error| Error::io(VERB, &self.path, e);
        self.file.into_inner().map_err(|e| failed(e.into_error()))?.sync_all().map_err(failed)
    }
}

/// The folder in which files are written before it gets its name. It is removed unless it gets it.
struct UnfinishedFolder {
    path: PathBuf,
    renamed: bool,
}

impl Drop for UnfinishedFolder {
    fn drop(&mut self) {
        if !self.renamed {
            // The call fails already; the next one removes what is left.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

impl UnfinishedFolder {
    fn create(dir: &Path) -> Result<UnfinishedFolder> {
        let refused = |rule: &str, remedy: &str| {
            Err(Error::invalid(VERB, rule, dir.display().to_string(), remedy.to_string()))
        };
        let Some(name) = dir.file_name() else { return refused("the path names no folder", "") };
        if dir.exists() {
            return refused("the folder exists", "choose another name");
        }
        let path = dir.with_file_name(format!(".{}.unfinished", name.to_string_lossy()));
        // A run that was killed has left it.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(|e| Error::io(VERB, &path, e))?;
        }
        fs::create_dir_all(&path).map_err(|e| Error::io(VERB, &path, e))?;
        Ok(UnfinishedFolder { path, renamed: false })
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<()> {
        let path = self.path.join(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(format!("{value:#}\n").as_bytes())?;
            file.sync_all()
        };
        write().map_err(|e| Error::io(VERB, &path, e))
    }

    fn rename(&mut self, dir: &Path) -> Result<()> {
        let mut rename = || {
            File::open(&self.path)?.sync_all()?;
            fs::rename(&self.path, dir)?;
            self.renamed = true;
            let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(parent)?.sync_all()
        };
        rename().map_err(|e| Error::io(VERB, dir, e))
    }
}
