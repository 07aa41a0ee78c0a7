//! One rank's work for a save: its file, then, on the first rank, the index and the rename that makes the checkpoint
//! visible.
//!
//! Ranks meet through the folder and not through communication, so a save may run on a thread of its own while the
//! program communicates. All files are written in a folder aside. A rank that is done adds a report there, or its
//! error. The first rank waits for all reports, writes the index last, flushes, and renames the folder. A checkpoint is
//! therefore whole or absent, whenever the program ends.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::index::{INDEX, Index, PieceFile, SavedPiece};
use super::piece_file::{PieceSource, WrittenFile, write_file};
use crate::error::{Error, Result};

const VERB: &str = "save";
/// The time that the first rank still waits for reports once the program has given up a save, or ends.
const AFTER_GIVING_UP: Duration = Duration::from_secs(5);
/// The end of the name of a folder whose save has not ended.
pub(super) const UNFINISHED: &str = ".unfinished";

/// One rank's work for a save. It may run on any thread.
pub(super) struct SaveJob {
    /// The folder that the checkpoint will be.
    pub dir: PathBuf,
    /// The folder in which it is written.
    pub aside: PathBuf,
    /// The rank's position in the mesh.
    pub position: usize,
    pub pieces: Vec<PieceSource>,
    /// The first rank's part of the work.
    pub commit: Option<Commit>,
}

/// The first rank's part of a save.
pub(super) struct Commit {
    /// The index, without files and pieces.
    pub index: Index,
    /// The ranks of the mesh, by position.
    pub ranks: Vec<usize>,
    /// The longest time to wait for a rank's report after this rank's own file is written.
    pub patience: Duration,
}

impl SaveJob {
    /// Writes this rank's pieces and reports.
    pub fn write(&mut self) -> Result<()> {
        let file = self.aside.join(file_name(self.position));
        let written = match self.pieces.is_empty() {
            true => Ok(None),
            false => write_file(&file, self.pieces.iter().collect()).map(Some),
        };
        // The snapshot's memory is not needed any more.
        self.pieces = Vec::new();
        let reported = written.and_then(|written| {
            let text = serde_json::to_vec(&written).map_err(Error::other)?;
            publish(&self.aside, &report_name(self.position, "json"), &text)
        });
        if let Err(error) = &reported {
            // On a full disk there is room for the report only after this.
            let _ = fs::remove_file(&file);
            let _ = publish(&self.aside, &report_name(self.position, "failed"), error.to_string().as_bytes());
        }
        reported
    }

    /// On the first rank, makes the checkpoint visible once all ranks have reported, or removes what was written; on
    /// other ranks, does nothing. Waits for a short while only once `given_up` is set.
    pub fn commit(self, given_up: &AtomicBool) -> Result<()> {
        let Some(commit) = self.commit else { return Ok(()) };
        let committed = commit.run(&self.aside, &self.dir, given_up);
        if committed.is_err() {
            let _ = fs::remove_dir_all(&self.aside);
        }
        committed
    }

    /// Removes, on the first rank, what was written.
    pub fn abandon(&self) {
        if self.commit.is_some() {
            let _ = fs::remove_dir_all(&self.aside);
        }
    }
}

impl Commit {
    fn run(mut self, aside: &Path, dir: &Path, given_up: &AtomicBool) -> Result<()> {
        let reports = self.reports(aside, given_up)?;
        let mut pieces: BTreeMap<String, Vec<SavedPiece>> = BTreeMap::new();
        for (position, report) in reports.into_iter().enumerate() {
            let Some(report) = report else { continue };
            let number = self.index.files.len();
            let (bytes, header_crc32) = (report.bytes, report.header_crc32);
            self.index.files.push(PieceFile { name: file_name(position), bytes, header_crc32 });
            for piece in report.pieces {
                let saved = SavedPiece {
                    file: number,
                    key: piece.key,
                    start: piece.start,
                    shape: piece.shape,
                    blocks: piece.blocks,
                };
                pieces.entry(piece.tensor).or_default().push(saved);
            }
        }
        for (name, tensor) in &mut self.index.tensors {
            tensor.pieces = pieces.remove(name).unwrap_or_default();
        }
        let text = serde_json::to_vec(&self.index).map_err(Error::other)?;
        // The reader's checks: no checkpoint becomes visible that they would refuse.
        Index::parse(&text)?;
        for position in 0..self.ranks.len() {
            let report = aside.join(report_name(position, "json"));
            fs::remove_file(&report).map_err(|e| Error::io(VERB, &report, e))?;
        }
        let path = aside.join(INDEX);
        write_flushed(&path, &text).map_err(|e| Error::io(VERB, &path, e))?;
        let rename = || {
            File::open(aside)?.sync_all()?;
            fs::rename(aside, dir)?;
            File::open(parent(dir))?.sync_all()
        };
        rename().map_err(|e| Error::io(VERB, dir, e))
    }

    /// Waits for every rank's report: until the patience ends, or for a short while once the program has given up.
    fn reports(&self, aside: &Path, given_up: &AtomicBool) -> Result<Vec<Option<WrittenFile>>> {
        // A patience that ends after the clock's last instant is one of a century.
        let century = Duration::from_secs(3_155_760_000);
        let mut end = Instant::now() + self.patience.min(century);
        let (mut pause, mut hurried) = (Duration::from_micros(100), false);
        let mut reports = Vec::with_capacity(self.ranks.len());
        while reports.len() < self.ranks.len() {
            let position = reports.len();
            if let Ok(text) = fs::read_to_string(aside.join(report_name(position, "failed"))) {
                let given = format!("rank {}: {text}", self.ranks[position]);
                let rule = "a rank could not write its part";
                return Err(Error::invalid(VERB, rule, given, "no checkpoint was made"));
            }
            let path = aside.join(report_name(position, "json"));
            match fs::read(&path) {
                Ok(text) => {
                    reports.push(serde_json::from_slice(&text).map_err(Error::other)?);
                    continue;
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io(VERB, &path, e)),
            }
            if !hurried && given_up.load(Ordering::Relaxed) {
                (end, hurried) = (end.min(Instant::now() + AFTER_GIVING_UP), true);
            }
            if Instant::now() > end {
                let is_missing = |&p: &usize| !aside.join(report_name(p, "json")).exists();
                let missing = (0..self.ranks.len()).filter(is_missing).map(|p| self.ranks[p].to_string());
                let given = format!("no report of rank(s) {}", missing.collect::<Vec<_>>().join(", "));
                return Err(Error::invalid(VERB, "ranks did not write their parts in time", given, ""));
            }
            sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(reports)
    }
}

/// Makes the folder in which a save is written, and removes what earlier saves of the same checkpoint left.
pub(super) fn make_aside(dir: &Path, aside: &Path) -> Result<()> {
    if dir.exists() {
        let given = dir.display().to_string();
        return Err(Error::invalid(
            VERB,
            "a checkpoint is saved to a new folder",
            given,
            "choose another name",
        ));
    }
    let failed = |e: std::io::Error| Error::io(VERB, aside, e);
    make_folders(parent(dir)).map_err(failed)?;
    let stem = aside_stem(dir)?;
    for entry in fs::read_dir(parent(dir)).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix(&stem).and_then(|rest| rest.strip_suffix(UNFINISHED));
        if number.is_some_and(|number| number.len() == 16 && number.bytes().all(|b| b.is_ascii_hexdigit())) {
            fs::remove_dir_all(entry.path()).map_err(failed)?;
        }
    }
    fs::create_dir(aside).map_err(failed)
}

/// Makes a folder and those above it, and flushes the entry of each.
fn make_folders(dir: &Path) -> std::io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    make_folders(parent(dir))?;
    match fs::create_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(e),
        _ => File::open(parent(dir))?.sync_all(),
    }
}

/// Returns the folder in which the save with this number is written. The number keeps the files of a save that was
/// killed apart from those of the next.
pub(super) fn aside(dir: &Path, number: u64) -> Result<PathBuf> {
    Ok(dir.with_file_name(format!("{}{number:016x}{UNFINISHED}", aside_stem(dir)?)))
}

fn aside_stem(dir: &Path) -> Result<String> {
    let name = dir.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        let given = dir.display().to_string();
        Error::invalid(VERB, "the path ends with a folder's name in UTF-8", given, "")
    })?;
    Ok(format!(".{name}."))
}

fn parent(dir: &Path) -> &Path {
    dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn file_name(position: usize) -> String {
    format!("part-{position:05}.safetensors")
}

fn report_name(position: usize, ending: &str) -> String {
    format!("part-{position:05}.{ending}")
}

/// Writes a file that others see whole or not at all.
fn publish(dir: &Path, name: &str, text: &[u8]) -> Result<()> {
    let (path, writing) = (dir.join(name), dir.join(format!("{name}.writing")));
    write_flushed(&writing, text)
        .and_then(|()| fs::rename(&writing, &path))
        .map_err(|e| Error::io(VERB, &path, e))
}

fn write_flushed(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text)?;
    file.sync_all()
}
