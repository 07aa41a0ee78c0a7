//! Writing records to files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::record::RankRecord;
use crate::files::write_whole;

/// The environment variable that names the folder of records.
const DIR_VARIABLE: &str = "ISOSHARD_FLIGHT_DIR";
/// The version of the file format.
pub(super) const VERSION: u64 = 3;

/// Returns the folder that the environment names, if any.
pub(in crate::comm::diagnostics) fn dir_from_env() -> Option<PathBuf> {
    env::var_os(DIR_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

/// Returns the file name of a rank's record.
pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank}.json")
}

/// Writes a record to its file in `dir`, completely or not at all.
pub(in crate::comm::diagnostics) fn write(record: &RankRecord, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    write_whole(&dir.join(file_name(record.rank)), &[&text(record)?])
}

/// A record with the version of its format.
#[derive(Serialize)]
struct Versioned<'a> {
    isoshard_flight: u64,
    #[serde(flatten)]
    record: &'a RankRecord,
}

/// Returns a record as one JSON object with one line per group and call.
fn text(record: &RankRecord) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut to = Serializer::with_formatter(&mut text, Lines { depth: 0 });
    Versioned { isoshard_flight: VERSION, record }.serialize(&mut to)?;
    text.push(b'\n');
    Ok(text)
}

/// A JSON formatter without spaces that starts a line for each item of the outermost object's lists.
struct Lines {
    depth: usize,
}

impl Formatter for Lines {
    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.depth += 1;
        to.write_all(b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.depth -= 1;
        to.write_all(b"}")
    }

    fn begin_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.depth += 1;
        to.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.depth -= 1;
        to.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b"," })?;
        to.write_all(if self.depth == 2 { b"\n" } else { b"" })
    }
}
