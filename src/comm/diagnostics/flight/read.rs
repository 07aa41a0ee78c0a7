//! Reading records from files.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::record::RankRecord;
use super::report::FlightReport;
use super::write::{VERSION, file_name};
use crate::error::{Error, Result};
use crate::tensor::{open_regular, sort_by_key};

const VERB: &str = "flight";
/// The largest record in bytes: 256 calls in 256 groups of 8192 ranks each.
const MAX_BYTES: u64 = 16 << 20;

/// Reads the records that the ranks of one world left in `dir`, and says which rank left the others and in which
/// call.
///
/// ```
/// use isoshard::comm::{Spmd, flight};
/// let dir = std::env::temp_dir().join(format!("isoshard-read-{}", std::process::id()));
/// let failed = Spmd::new(2).flight_dir(&dir).run(|rank| {
///     if rank.rank() == 0 { rank.world().barrier() } else { Ok(()) } // rank 1 returns early
/// });
/// assert!(failed.is_err());
/// let report = flight::read(&dir)?;
/// println!("{report}");
/// assert_eq!(report.incomplete[0].waiting, [0]);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns [`Error::Io`] if a file cannot be read. Refuses files that are not records of this version, and a folder
/// without records or with records of two worlds. Other files are ignored.
pub fn read(dir: &Path) -> Result<FlightReport> {
    let io = |path: &Path, e: io::Error| Error::io(VERB, path, e);
    let mut records: Vec<RankRecord> = Vec::new();
    // Equal lists of members are stored once.
    let mut members: HashSet<Arc<[usize]>> = HashSet::new();
    for entry in fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let path = entry.map_err(|e| io(dir, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !(name.starts_with("rank-") && name.ends_with(".json")) {
            continue;
        }
        let refused = |why: String| refuse(&path.display().to_string(), &why);
        let bytes = first_bytes(&path).map_err(|e| io(&path, e))?;
        let mut record = record(&bytes).map_err(refused)?;
        if name != file_name(record.rank) {
            return Err(refused(format!("the record is that of rank {}", record.rank)));
        }
        for group in &mut record.groups {
            match members.get(&group.ranks) {
                Some(known) => group.ranks = known.clone(),
                None => drop(members.insert(group.ranks.clone())),
            }
        }
        records.push(record);
    }
    sort_by_key(&mut records, |record| record.rank);
    let Some(first) = records.first() else {
        return Err(refuse(&dir.display().to_string(), "there are no files rank-<k>.json"));
    };
    if let Some(other) = records.iter().find(|record| record.world_len != first.world_len) {
        let (a, b) = (first, other);
        let why = format!(
            "rank {} counts {} ranks, rank {} counts {}: these are of several worlds",
            a.rank, a.world_len, b.rank, b.world_len
        );
        return Err(refuse(&dir.display().to_string(), &why));
    }
    Ok(FlightReport::new(records))
}

fn refuse(path: &str, why: &str) -> Error {
    Error::invalid(VERB, "not a flight record of this version", format!("{path}: {why}"), "")
}

/// Reads a file up to one byte more than a record may have.
fn first_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[derive(Deserialize)]
#[serde(expecting = "a flight record")]
struct Version {
    isoshard_flight: u64,
}

/// Returns the record in a file's bytes, or the reason why they are none.
fn record(bytes: &[u8]) -> Result<RankRecord, String> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let Version { isoshard_flight: version } = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if version != VERSION {
        return Err(format!("it is of version {version}, this reader's is {VERSION}"));
    }
    let record: RankRecord = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    record.check()?;
    Ok(record)
}
