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

use crate::checkpoint::format::index::{INDEX, Index, PieceFile, SavedPiece};
use crate::checkpoint::format::index_file::index_text;
use crate::checkpoint::format::piece_file::{PieceSource, WrittenFile, write_file};
use crate::checkpoint::format::run_id::RunId;
use crate::checkpoint::format::runs::refuse_others;
use crate::error::{Error, Result};
use crate::files::{UnfinishedFolder, is_taken, or_vanished, parent, vanished};

const VERB: &str = "save";
/// The time that the first rank still waits for reports once the program has given up a save, or ends.
const AFTER_GIVING_UP: Duration = Duration::from_secs(5);
/// The time that the first rank still waits for reports once it knows that they are written: a network's file system may
/// show them late.
const AFTER_ALL_WROTE: Duration = Duration::from_secs(120);

/// The news of the program that shortens the wait of the first rank for reports.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct SaveNews {
    /// Other ranks will not report any more, or the program ends.
    pub given_up: AtomicBool,
    /// All ranks have reported.
    pub all_wrote: AtomicBool,
}

impl SaveNews {
    /// Returns the news of a save whose ranks have all reported.
    pub fn of_written() -> SaveNews {
        SaveNews { all_wrote: AtomicBool::new(true), ..SaveNews::default() }
    }
}

/// One rank's work for a save. It may run on any thread.
pub(in crate::checkpoint) struct SaveJob {
    /// The folder that the checkpoint will be.
    pub dir: PathBuf,
    /// The folder in which it is written, which the first rank has made.
    pub aside: PathBuf,
    /// The rank's position in the mesh.
    pub position: usize,
    /// The run that saves.
    pub run: Option<RunId>,
    pub pieces: Vec<PieceSource>,
    /// The first rank's part of the work.
    pub commit: Option<Commit>,
}

/// The first rank's part of a save.
pub(in crate::checkpoint) struct Commit {
    /// The index, without files and pieces.
    pub index: Index,
    /// The ranks of the mesh, by position.
    pub ranks: Vec<usize>,
    /// The longest time to wait for a rank's report after this rank's own file is written.
    pub patience: Duration,
    /// The folder in which the save is written; it is removed with this value unless the save succeeds.
    pub folder: UnfinishedFolder,
    /// `true` if the save takes the place of an older checkpoint.
    pub replaces: bool,
    /// `true` if no other run may have saved beside it.
    pub is_first: bool,
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
        let Err(error) = reported else { return Ok(()) };
        let error = or_vanished(VERB, &self.aside, error);
        // On a full disk there is room for the report only after this.
        let _ = fs::remove_file(&file);
        let _ = publish(&self.aside, &report_name(self.position, "failed"), error.to_string().as_bytes());
        Err(error)
    }

    /// On the first rank, makes the checkpoint visible once all ranks have reported; on other ranks, does nothing. Waits
    /// for a short while only once `news` says so. After an error the files stay until the job is dropped, since
    /// other ranks may still write.
    pub fn commit(&mut self, news: &SaveNews) -> Result<()> {
        let Some(commit) = &mut self.commit else { return Ok(()) };
        commit.write_index(news).map_err(|e| or_vanished(VERB, &self.aside, e))?;
        if commit.is_first {
            refuse_others(parent(&self.dir), commit.index.run)?;
        }
        match self.commit.take() {
            Some(commit) if commit.replaces => commit.folder.replace(VERB),
            Some(commit) => commit.folder.name(VERB),
            None => Ok(()),
        }
    }

    /// Removes, on the first rank, what was written.
    pub fn abandon(&mut self) {
        self.commit = None;
    }
}

impl Commit {
    /// Waits for all ranks' reports, and writes the index of what they wrote.
    fn write_index(&mut self, news: &SaveNews) -> Result<()> {
        let reports = self.reports(news)?;
        let aside = self.folder.path();
        let mut pieces: BTreeMap<String, Vec<SavedPiece>> = BTreeMap::new();
        for (position, report) in reports.into_iter().enumerate() {
            let Some(report) = report else { continue };
            let number = self.index.files.len();
            let file = aside.join(file_name(position));
            fs::metadata(&file).map_err(|e| Error::io(VERB, &file, e))?;
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
        let text = index_text(&self.index)?;
        for position in 0..self.ranks.len() {
            let report = aside.join(report_name(position, "json"));
            fs::remove_file(&report).map_err(|e| Error::io(VERB, &report, e))?;
        }
        let path = aside.join(INDEX);
        write_flushed(&path, &text).map_err(|e| Error::io(VERB, &path, e))
    }

    /// Waits for every rank's report: until the patience ends, or for a short while once the program has given up.
    /// If something has removed the folder, no rank reports any more.
    fn reports(&self, news: &SaveNews) -> Result<Vec<Option<WrittenFile>>> {
        let aside = self.folder.path();
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
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => self.folder.expect(VERB)?,
                Err(e) => return Err(Error::io(VERB, &path, e)),
            }
            let gives_up = news.given_up.load(Ordering::Relaxed);
            let all_wrote = news.all_wrote.load(Ordering::Relaxed);
            if !hurried && (gives_up || all_wrote) {
                let rest = if gives_up { AFTER_GIVING_UP } else { AFTER_ALL_WROTE };
                (end, hurried) = (end.min(Instant::now() + rest), true);
            }
            if Instant::now() > end {
                // Reports that were written and are not there have been removed.
                if all_wrote {
                    return Err(vanished(VERB, aside));
                }
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

/// Refuses a place that is taken, unless the save replaces what is there.
pub(in crate::checkpoint) fn expect_free(dir: &Path, replaces: bool) -> Result<()> {
    if replaces || !is_taken(dir) {
        return Ok(());
    }
    let remedy = "choose another name, or see replace_steps of CheckpointFolder";
    Err(Error::invalid(VERB, "a checkpoint is saved to a new folder", dir.display().to_string(), remedy))
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
