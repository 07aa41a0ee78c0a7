//! Saving: each rank writes its pieces into one safetensors file, and rank 0 the index, last.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::{Dtype, View};

use super::index::{INDEX, Index, PieceFile, PieceIndex, TensorIndex};
use super::tree::CheckpointTree;
use super::writers::{WrittenPiece, plan_writers};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::{Region, Spec};
use crate::tensor::{DType, Shape, Tensor};

const VERB: &str = "checkpoint";

impl CheckpointTree {
    /// Saves the tree into a new folder.
    ///
    /// Every element is written once, by a rank that stores it, and replicas share the work. The files are written
    /// beside the folder, flushed to the disk, and renamed at the end: the folder is whole or absent. All ranks of the
    /// mesh call this together. Communicates the reductions of `Partial` tensors, and some bytes per rank.
    ///
    /// # Errors
    /// Refuses a folder that exists. Returns the same error on every rank if a rank cannot write.
    pub fn save(&self, mesh: &DeviceMesh, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        let reduced = |x: &DTensor| match x.layout().has_partial() {
            true => x.redistribute(x.layout().reduced()),
            false => Ok(x.clone()),
        };
        let tensors: Vec<DTensor> = self.tensors().map(|(_, x)| reduced(x)).collect::<Result<_>>()?;
        let specs: Vec<Spec> = tensors.iter().map(|x| x.spec().clone()).collect();
        let plan = plan_writers(&specs);
        let me = mesh.mesh().ranks().position(|rank| rank == mesh.mesh().rank()).expect("in the mesh");
        let aside = aside(dir)?;
        all_ok(mesh, if me == 0 { begin(dir, &aside) } else { Ok(()) })?;
        let names: Vec<&str> = self.tensors().map(|(name, _)| name).collect();
        let file = format!("rank-{me:05}.safetensors");
        let written = write_pieces(&aside.join(&file), &names, &tensors, &plan, me);
        let outcome = written.as_ref().map(|(bytes, crc)| vec![*bytes as i64, i64::from(*crc)]);
        let files = gather(mesh, outcome.map_err(Clone::clone))?;
        let end =
            if me == 0 { finish(dir, &aside, &self.index(&names, &specs, &plan, &files)) } else { Ok(()) };
        all_ok(mesh, end)
    }

    fn index(&self, names: &[&str], specs: &[Spec], plan: &[WrittenPiece], files: &[Vec<i64>]) -> Index {
        let mut index = Index::new();
        let file = |(rank, words): (usize, &Vec<i64>)| PieceFile {
            name: format!("rank-{rank:05}.safetensors"),
            bytes: words[0] as u64,
            crc32: words[1] as u32,
        };
        index.files = files.iter().enumerate().map(file).collect();
        index.values = self.values().clone();
        for (tensor, (name, spec)) in names.iter().zip(specs).enumerate() {
            let pieces = plan.iter().filter(|piece| piece.tensor == tensor).enumerate();
            let piece = |(number, piece): (usize, &WrittenPiece)| PieceIndex {
                file: piece.writer,
                key: key(name, number),
                start: piece.start.to_vec(),
                shape: piece.len.to_vec(),
            };
            let (dtype, shape) = (spec.dtype.name().to_string(), spec.shape.to_vec());
            let of = TensorIndex { dtype, shape, pieces: pieces.map(piece).collect() };
            index.tensors.insert((*name).into(), of);
        }
        index
    }
}

/// Returns the name of a piece in its file.
fn key(tensor: &str, number: usize) -> String {
    format!("{tensor}#{number}")
}

/// Returns the folder in which the files are written.
fn aside(dir: &Path) -> Result<PathBuf> {
    let name = dir
        .file_name()
        .ok_or_else(|| Error::invalid(VERB, "the path names a folder", dir.display().to_string(), ""))?;
    Ok(dir.with_file_name(format!(".{}.unfinished", name.to_string_lossy())))
}

fn begin(dir: &Path, aside: &Path) -> Result<()> {
    if dir.exists() {
        return Err(Error::invalid(
            VERB,
            "the folder is new",
            dir.display().to_string(),
            "choose another name",
        ));
    }
    // A save that was killed has left it.
    if aside.exists() {
        fs::remove_dir_all(aside).map_err(|e| Error::io(VERB, aside, e))?;
    }
    fs::create_dir_all(aside).map_err(|e| Error::io(VERB, aside, e))
}

fn finish(dir: &Path, aside: &Path, index: &Index) -> Result<()> {
    let text = serde_json::to_string(index).map_err(Error::other)?;
    let path = aside.join(INDEX);
    let write = || {
        let mut file = File::create(&path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        File::open(aside)?.sync_all()?;
        fs::rename(aside, dir)?;
        let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent)?.sync_all()
    };
    write().map_err(|e| Error::io(VERB, &path, e))
}

/// A piece as safetensors writes it.
struct PieceView {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Tensor,
}

impl View for PieceView {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes.as_bytes().expect("it is contiguous, in memory"))
    }

    fn data_len(&self) -> usize {
        self.bytes.len_bytes()
    }
}

/// Writes this rank's pieces. Returns the file's length and its checksum.
fn write_pieces(
    path: &Path,
    names: &[&str],
    tensors: &[DTensor],
    plan: &[WrittenPiece],
    me: usize,
) -> Result<(u64, u32)> {
    let mut views: Vec<(String, PieceView)> = Vec::new();
    for (tensor, x) in tensors.iter().enumerate() {
        let pieces = plan.iter().filter(|piece| piece.tensor == tensor).enumerate();
        for (number, piece) in pieces.filter(|(_, piece)| piece.writer == me) {
            let bytes = piece_of(x, piece)?;
            let view = PieceView { dtype: dtype_of(x.dtype()), shape: piece.len.to_vec(), bytes };
            views.push((key(names[tensor], number), view));
        }
    }
    let failed = |e: std::io::Error| Error::io(VERB, path, e);
    let bytes = safetensors::serialize(views, None).map_err(Error::other)?;
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(&bytes).map_err(failed)?;
    file.into_inner().map_err(|e| failed(e.into_error()))?.sync_all().map_err(failed)?;
    Ok((bytes.len() as u64, crc32fast::hash(&bytes)))
}

/// Returns the elements of a box that this rank stores.
fn piece_of(x: &DTensor, piece: &WrittenPiece) -> Result<Tensor> {
    let local = x.local().contiguous()?.to_device(crate::tensor::Device::Cpu)?;
    let region = x.tensor_meta().window().region.clone();
    let wanted = Region::of_box(piece.start.clone(), Shape::from(piece.len.to_vec()));
    super::copy::copy_overlap(&local, &region, &wanted)
}

pub(super) fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

/// Gathers every rank's words, or returns the first rank's error on every rank.
fn gather(mesh: &DeviceMesh, mine: Result<Vec<i64>>) -> Result<Vec<Vec<i64>>> {
    mesh.agree(VERB, mine)
}

fn all_ok(mesh: &DeviceMesh, mine: Result<()>) -> Result<()> {
    gather(mesh, mine.map(|()| Vec::new())).map(drop)
}
