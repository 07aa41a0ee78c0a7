//! Reading weights: each rank copies the elements of its own shards from the mapped files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::VERB;
use super::agreement::{agree, agree_on_files};
use super::format::{HuggingFaceFormat, list};
use super::names::{PieceRange, parts_by_piece};
use super::weight_files::WeightFiles;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::tensor::{DType, Tensor};

impl HuggingFaceFormat {
    /// Fills parameters with the weights in a folder. Each rank reads only the elements of its own shards, by memory
    /// map, and casts f16 and bf16 to f32. All ranks call this together: they compare configs, headers and samples of
    /// the weights, at most 4,096 places of 256 bytes, by some bytes per rank, and fail together; no parameter changes
    /// then. So a rank holds its shards twice at the end of this call. The files must not change meanwhile.
    /// [`HuggingFaceFormat::compare_all`] compares all bytes.
    ///
    /// The parameters' pieces have the paths that [`HuggingFaceFormat::pieces`] lists.
    ///
    /// ```no_run
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, hugging_face::HuggingFaceFormat, nn::{Params, Plan}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     // ... modules of your own declare the parameters ...
    ///     HuggingFaceFormat::read("my-model")?.load("my-model", &mut params)
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses files that differ from this format, parameters that no tensor fills, tensors that no parameter stores,
    /// each by name, and ranks that read different files. Refuses a plan with a pattern that matches no parameter and
    /// no adapter of one before a weight is read. Returns an error if there is no room.
    pub fn load(&self, dir: impl AsRef<Path>, params: &mut Params) -> Result<()> {
        let mesh = params.mesh().clone();
        let _busy = mesh.rank().busy("reading weights");
        let opened = self.open(dir.as_ref()).and_then(|files| {
            params.expect_plan_matches()?;
            Ok(files)
        });
        let read = opened.as_ref().map(|files| (self, files)).map_err(Error::clone);
        agree_on_files(&mesh, read, false)?;
        let files = opened?;
        let values = agree(&mesh, VERB, self.values(&files, params), 0)?;
        values.into_iter().try_for_each(|(id, value)| params.set(id, value))
    }

    /// Maps the files of a folder, and refuses those that differ from this format.
    fn open(&self, dir: &Path) -> Result<WeightFiles> {
        let files = WeightFiles::open(dir)?;
        if HuggingFaceFormat::of_files(self.config.clone(), &files)? == *self {
            return Ok(files);
        }
        let (rule, given) =
            ("the files have other names or dtypes than the format", dir.display().to_string());
        Err(Error::invalid(VERB, rule, given, ""))
    }

    /// Fills the parameters of a new model.
    pub(super) fn fill(&self, files: &WeightFiles, params: &mut Params) -> Result<()> {
        self.expect_same_pieces(VERB, params)?;
        let parts = parts_by_piece(&self.tensors);
        let sources = self.sources(files);
        for id in params.ids() {
            let value = self.read_param(params, id, &parts, &sources)?;
            params.set(id, value)?;
        }
        Ok(())
    }

    /// Returns the parameters' values in the files.
    fn values(&self, files: &WeightFiles, params: &Params) -> Result<Vec<(ParamId, DTensor)>> {
        self.expect_same_pieces(VERB, params)?;
        let parts = parts_by_piece(&self.tensors);
        let sources = self.sources(files);
        params.ids().map(|id| Ok((id, self.read_param(params, id, &parts, &sources)?))).collect()
    }

    fn sources<'a>(&self, files: &'a WeightFiles) -> Vec<TensorSource<'a>> {
        (self.tensors.iter().zip(&self.dtypes))
            .map(|(tensor, dtype)| TensorSource {
                dtype: *dtype,
                bytes: files.bytes(files.get(&tensor.name).expect("the format was compared with the files")),
            })
            .collect()
    }

    /// Refuses, in the name of `verb`, pieces that no tensor has, tensors whose pieces no parameter has, and pieces of
    /// another size.
    pub(super) fn expect_same_pieces(&self, verb: &str, params: &Params) -> Result<()> {
        let mut sizes = self.piece_sizes();
        let mut unfilled = Vec::new();
        for piece in params.ids().flat_map(|id| params.pieces(id)) {
            let wanted = piece.shape().numel();
            match sizes.remove(piece.path()) {
                None => unfilled.push(piece.path()),
                Some(n) if n == wanted => {}
                Some(n) => {
                    let given = format!("{}{} and {n} element(s)", piece.path(), piece.shape());
                    return Err(Error::invalid(verb, "a tensor and its parameter differ in size", given, ""));
                }
            }
        }
        let is_adapter = |path: &&&str| path.ends_with(".lora_a") || path.ends_with(".lora_b");
        let adapters: Vec<&str> = unfilled.iter().filter(is_adapter).copied().collect();
        if !adapters.is_empty() {
            let rule = "the model has adapters, which its files do not have";
            let remedy = "call merge_lora first, and pass the parameters that it returns";
            return Err(Error::invalid(verb, rule, list(&adapters), remedy));
        }
        let unstored: Vec<&str> = sizes.into_keys().collect();
        match (&unfilled[..], &unstored[..]) {
            ([], []) => Ok(()),
            ([], names) => {
                Err(Error::invalid(verb, "the model lacks parameters of the files", list(names), ""))
            }
            (names, _) => {
                Err(Error::invalid(verb, "the files lack parameters of the model", list(names), ""))
            }
        }
    }

    fn read_param(
        &self,
        params: &Params,
        id: ParamId,
        parts: &BTreeMap<&str, Vec<(usize, &PieceRange)>>,
        sources: &[TensorSource<'_>],
    ) -> Result<DTensor> {
        let old = params.value(id);
        let region = &old.tensor_meta().window().region;
        let pieces: Vec<_> = params.pieces(id).iter().map(|piece| (piece, &parts[piece.path()])).collect();
        let mut local =
            Tensor::try_uninit(DType::F32, region.local.clone()).map_err(|e| e.at(params.path(id)))?;
        let out = local.make_mut::<f32>()?;
        region.runs(old.shape(), |start, local, len| {
            let start = start as usize;
            for (piece, parts) in &pieces {
                for run in piece.runs(start..start + len) {
                    let offset = local + (run.param_start - start);
                    copy(
                        parts,
                        sources,
                        run.piece_start..run.piece_start + run.len,
                        &mut out[offset..offset + run.len],
                    );
                }
            }
        });
        DTensor::from_local(old.mesh(), local, old.shape().clone(), old.layout().clone())
            .map_err(|e| e.at(params.path(id)))
    }
}

/// A tensor of a mapped file.
struct TensorSource<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// Copies a range of a piece's elements into `out`.
fn copy(
    parts: &[(usize, &PieceRange)],
    sources: &[TensorSource<'_>],
    elements: Range<usize>,
    out: &mut [f32],
) {
    let Range { start, end } = elements;
    let first = parts.partition_point(|(_, part)| part.first + part.numel() <= start);
    for (number, part) in parts[first..].iter().take_while(|(_, part)| part.first < end) {
        let source = &sources[*number];
        part.rows(start, end, |element, in_tensor, step, len| {
            source.read(in_tensor, step, &mut out[element - start..element - start + len]);
        });
    }
}

impl TensorSource<'_> {
    /// Reads elements `first`, `first + step`, ... as f32.
    fn read(&self, first: usize, step: usize, out: &mut [f32]) {
        let bytes = &self.bytes[first * self.dtype.size_bytes()..];
        match self.dtype {
            DType::F32 => read_words(bytes, step, out, f32::from_le_bytes),
            DType::F16 => read_words(bytes, step, out, |b| half::f16::from_le_bytes(b).to_f32()),
            DType::BF16 => read_words(bytes, step, out, |b| half::bf16::from_le_bytes(b).to_f32()),
            DType::F64 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => unreachable!("refused by name"),
        }
    }
}

fn read_words<const N: usize>(bytes: &[u8], step: usize, out: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    let words = bytes.as_chunks::<N>().0;
    match step {
        1 => out.iter_mut().zip(words).for_each(|(out, word)| *out = read(*word)),
        _ => out.iter_mut().zip(words.iter().step_by(step)).for_each(|(out, word)| *out = read(*word)),
    }
}
