//! Writing weights: one tensor after another is gathered and written, so no rank ever holds the model.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::agreement::agree;
use super::config::CONFIG_FILE;
use super::format::HuggingFaceFormat;
use super::names::{HEAD, PieceRange};
use super::weight_files::{INDEX_FILE, ONE_FILE};
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};
use crate::files::{UnfinishedFolder, draw_number, is_taken, or_vanished};
use crate::nn::Params;
use crate::tensor::{DType, Device, Shape, Tensor, safetensors_dtype, sort_by_key};

const VERB: &str = "save_hugging_face";
/// The size of a shard if the caller names none: that of `transformers`.
const SHARD_BYTES: u64 = 50_000_000_000;
/// The bytes that are written between two comparisons of the ranks' outcomes, so that a failure of the writer ends the
/// call on all ranks before everything has been gathered.
const AGREED_BYTES: usize = 256 << 20;

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
    /// Refuses a folder that exists, or that another program has made meanwhile, and parameters that are not those of the
    /// format, such as adapters: [`Decoder::merge_lora`](crate::nn::Decoder::merge_lora) first. Returns an error if a rank
    /// fails, has no room for a tensor, or cannot write a file. The parameters stay, so they can be saved elsewhere;
    /// [`HuggingFaceFormat::expect_new`] refuses a folder before a long training.
    pub fn save(&self, params: &Params, dir: impl AsRef<Path>) -> Result<()> {
        self.save_shards(params, dir, SHARD_BYTES)
    }

    /// Checks that [`HuggingFaceFormat::save`] will be able to begin: `dir` is no folder yet, and its parent takes one. Call it when
    /// a run starts, so that a name that is taken does not end the run after its last step. All ranks call it together, and
    /// fail together.
    ///
    /// ```
    /// use isoshard::{hugging_face::HuggingFaceFormat, prelude::*};
    /// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/llama2");
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let format = HuggingFaceFormat::read(dir)?;
    ///     let refused = format.check_target(&mesh, dir).unwrap_err().to_string();
    ///     assert!(refused.contains("the folder exists"), "{refused}");
    ///     format.check_target(&mesh, std::env::temp_dir().join("isoshard-a-new-name"))
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a folder that exists and a path that names none; returns an error if the parent takes no folder, or if a rank fails.
    pub fn check_target(&self, mesh: &DeviceMesh, dir: impl AsRef<Path>) -> Result<()> {
        let writes = mesh.mesh().ranks().next() == Some(mesh.mesh().rank());
        let begun = if writes { create_beside(dir.as_ref()).map(drop) } else { Ok(()) };
        agree(mesh, VERB, begun, self.fingerprint())
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
        let create = || writes.then(|| create_beside(dir)).transpose();
        let begun = self.expect_same_pieces(VERB, params).and_then(|()| create());
        let folder = agree(mesh, VERB, begun, self.fingerprint())?;
        let shards = shards(self.written(), max_shard_bytes);
        let mut export = Export { format: self, params, folder, unagreed_bytes: 0, written: Ok(()) };
        let files = export.write_shards(&shards)?;
        // The folder is there when any rank returns.
        agree(mesh, VERB, export.finish(&shards, files), 0)
    }

    /// Refuses a folder that [`HuggingFaceFormat::save`] could not make: one that exists, or whose parent cannot be
    /// written. For the start of a fine-tune, so that it does not end with a refusal. All ranks of the mesh call this; the
    /// first rank looks. Communicates some bytes per rank, and leaves nothing behind but the folders above.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, hugging_face::HuggingFaceFormat};
    /// let error = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     HuggingFaceFormat::expect_new(&mesh, std::env::temp_dir().join("my-model"))?;
    ///     HuggingFaceFormat::expect_new(&mesh, std::env::temp_dir())
    /// });
    /// let error = error.unwrap_err().to_string();
    /// assert!(error.starts_with("rank 0: save_hugging_face: the folder exists; got "), "{error}");
    /// ```
    ///
    /// # Errors
    /// Refuses a folder that exists. Returns an error if it cannot be made, on every rank.
    pub fn expect_new(mesh: &DeviceMesh, dir: impl AsRef<Path>) -> Result<()> {
        let looks = mesh.mesh().ranks().next() == Some(mesh.mesh().rank());
        let looked = looks.then(|| create_beside(dir.as_ref())).transpose();
        agree(mesh, VERB, looked, 0).map(drop)
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
        sort_by_key(&mut tensors, |t| (std::cmp::Reverse(t.dtype.size_bytes()), t.name));
        tensors
    }
}

/// The writing of all files: on the first rank into a folder, on the others nowhere.
struct Export<'a> {
    format: &'a HuggingFaceFormat,
    params: &'a Params,
    folder: Option<UnfinishedFolder>,
    /// The bytes that were written since the ranks compared their outcomes.
    unagreed_bytes: usize,
    /// The outcome of this rank since then.
    written: Result<()>,
}

impl Export<'_> {
    /// Gathers all tensors, and writes them on the rank that has the folder. Returns the file of each tensor.
    ///
    /// After an error of its own, the rank that writes goes on to gather until the ranks compare their outcomes.
    fn write_shards(&mut self, shards: &[Vec<WrittenTensor<'_>>]) -> Result<BTreeMap<String, Value>> {
        let mut files = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => ONE_FILE.to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
            };
            let path = self.folder.as_ref().map(|folder| folder.path().join(&name));
            let mut file = match path.map(|path| ShardWriter::create(path, shard)).transpose() {
                Ok(file) => file,
                Err(e) => {
                    self.note(Err(e));
                    None
                }
            };
            for tensor in shard {
                if let (Some(whole), Some(file)) = (self.gather(tensor)?, &mut file) {
                    let mut write = || file.write(whole.cast(tensor.dtype)?.as_bytes()?);
                    self.note(write());
                }
                self.unagreed_bytes += tensor.bytes();
                if self.unagreed_bytes >= AGREED_BYTES {
                    self.agree()?;
                }
                files.insert(tensor.name.to_string(), Value::from(&name[..]));
            }
            if let Some(file) = file {
                self.note(file.finish());
            }
            self.agree()?;
        }
        Ok(files)
    }

    /// Gathers a tensor of the files as f32. Returns it on the rank that writes, if that has room for it.
    fn gather(&mut self, tensor: &WrittenTensor<'_>) -> Result<Option<Tensor>> {
        let format = self.format;
        // In the pool, so that the limit of memory counts it. A lack of room must not end this rank's gathering.
        let room =
            self.folder.is_some().then(|| Tensor::zeros_on(Device::Cpu, DType::F32, tensor.shape.clone()));
        let mut whole = room.transpose().unwrap_or_else(|e| {
            self.note(Err(e));
            None
        });
        for part in &format.tensors[tensor.source].parts {
            let values = part_values(self.params, part)?;
            if let Some(whole) = &mut whole {
                self.note(copy_part(part, &values, whole));
            }
        }
        Ok(whole)
    }

    /// Keeps the first error.
    fn note(&mut self, done: Result<()>) {
        if self.written.is_ok() {
            self.written = done;
        }
    }

    /// Returns the error of any rank on all ranks. If something has removed the folder, that is the error.
    fn agree(&mut self) -> Result<()> {
        let mut outcome = std::mem::replace(&mut self.written, Ok(()));
        if let Some(folder) = &self.folder {
            outcome =
                outcome.and_then(|()| folder.expect(VERB)).map_err(|e| or_vanished(VERB, folder.path(), e));
        }
        self.unagreed_bytes = 0;
        agree(self.params.mesh(), VERB, outcome, 0)
    }

    /// Writes the index and the config, and gives the folder its name.
    fn finish(self, shards: &[Vec<WrittenTensor<'_>>], files: BTreeMap<String, Value>) -> Result<()> {
        let Some(folder) = self.folder else { return Ok(()) };
        let lost = |e| or_vanished(VERB, folder.path(), e);
        if shards.len() > 1 {
            let bytes: usize = shards.iter().flatten().map(WrittenTensor::bytes).sum();
            let metadata = json!({ "total_parameters": self.params.numel(), "total_size": bytes });
            write_json(&folder, INDEX_FILE, &json!({ "metadata": metadata, "weight_map": files }))
                .map_err(lost)?;
        }
        write_json(&folder, CONFIG_FILE, &Value::Object(self.format.config.json.clone())).map_err(lost)?;
        folder.name(VERB)
    }
}

/// Copies the values of a part of a piece to their places in a tensor of the files.
fn copy_part(part: &PieceRange, values: &Tensor, whole: &mut Tensor) -> Result<()> {
    let values = values.to_device(Device::Cpu)?.contiguous()?;
    let (values, whole) = (values.as_slice::<f32>()?, whole.make_mut::<f32>()?);
    part.rows(part.first, part.first + part.numel(), |element, in_tensor, step, len| {
        let row = values[element - part.first..][..len].iter();
        row.enumerate().for_each(|(i, x)| whole[in_tensor + i * step] = *x);
    });
    Ok(())
}

/// Returns the values of a part of a piece on every rank.
fn part_values(params: &Params, part: &PieceRange) -> Result<Tensor> {
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
            let dtype = safetensors_dtype(tensor.dtype);
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

/// Makes the folder in which files are written before it gets its name.
fn create_beside(dir: &Path) -> Result<UnfinishedFolder> {
    if dir.file_name().is_none() {
        return Err(Error::invalid(VERB, "the path names no folder", dir.display().to_string(), ""));
    }
    if is_taken(dir) {
        let given = dir.display().to_string();
        return Err(Error::invalid(VERB, "the folder exists", given, "choose another name"));
    }
    let made = draw_number().and_then(|number| UnfinishedFolder::create(dir, number, None));
    made.map_err(|e| Error::io(VERB, dir, e))
}

fn write_json(folder: &UnfinishedFolder, name: &str, value: &Value) -> Result<()> {
    let path = folder.path().join(name);
    let write = || {
        let mut file = File::create(&path)?;
        file.write_all(format!("{value:#}\n").as_bytes())?;
        file.sync_all()
    };
    write().map_err(|e| Error::io(VERB, &path, e))
}
