//! Reading records.

use std::fs;
use std::path::Path;

use super::json::{Expected, Json, parse};
use super::record::{Brought, CallRecord, RankRecord, ShapeList, State};
use super::report::Report;
use super::write::VERSION;
use crate::comm::calls::Sequence;
use crate::error::{Error, Result};

const VERB: &str = "flight";

/// Reads the records that the ranks of one world have left in `dir`, and says which rank left the others where.
///
/// ```no_run
/// println!("{}", isoshard::comm::flight::read("/tmp/flight".as_ref())?);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// [`Error::Io`] where a file cannot be read. Refuses, by name, files that are not records of this version, and a folder
/// without any or with those of two worlds. Files that are not named as records are passed over.
pub fn read(dir: &Path) -> Result<Report> {
    let io = |path: &Path, e: std::io::Error| Error::Io {
        verb: VERB,
        path: path.display().to_string(),
        reason: e.to_string(),
    };
    let mut records: Vec<RankRecord> = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let path = entry.map_err(|e| io(dir, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(rank) = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".json")) else {
            continue;
        };
        let text = fs::read_to_string(&path).map_err(|e| io(&path, e))?;
        let record = record(&text).map_err(|why| refuse(&path.display().to_string(), &why))?;
        if rank.parse() != Ok(record.rank) {
            return Err(refuse(
                &path.display().to_string(),
                &format!("the record is that of rank {}", record.rank),
            ));
        }
        records.push(record);
    }
    records.sort_by_key(|record| record.rank);
    let Some(first) = records.first() else {
        return Err(refuse(&dir.display().to_string(), "there are no files rank-<k>.json"));
    };
    if let Some(other) = records.iter().find(|r| r.world_len != first.world_len || r.rank >= r.world_len) {
        let (a, b) = (first, other);
        let why = format!(
            "rank {} counts {} ranks, rank {} counts {}: these are of several worlds",
            a.rank, a.world_len, b.rank, b.world_len
        );
        return Err(refuse(&dir.display().to_string(), &why));
    }
    Ok(Report::new(records))
}

fn refuse(path: &str, why: &str) -> Error {
    Error::invalid(VERB, "not a flight record of this version", format!("{path}: {why}"), "")
}

/// Why a text is no record.
type Why = String;

/// The record that a file holds.
fn record(text: &str) -> Result<RankRecord, Why> {
    let value = parse(text).map_err(|Expected(what, at)| format!("expected {what} at byte {at}"))?;
    let all = Fields::of(&value)?;
    if all.number("isoshard_flight")? != VERSION {
        return Err(format!(
            "it is of version {}, this reader's is {VERSION}",
            all.number("isoshard_flight")?
        ));
    }
    let group = |value: &Json| {
        let group = Fields::of(value)?;
        Ok((group.text("name")?, indices(group.list("ranks")?)?, group.number("generation")?))
    };
    let groups = all.list("groups")?.iter().map(group).collect::<Result<Vec<_>, Why>>()?;
    let calls = all.list("calls")?.iter().map(|value| call(value, &groups)).collect::<Result<_, Why>>()?;
    Ok(RankRecord {
        rank: all.index("rank")?,
        world_len: all.index("world_len")?,
        began_unix_us: all.number("began_unix_us")?,
        failed_us: all.number("failed_us")?,
        cause: all.text("cause")?,
        is_echo: all.bool("is_echo")?,
        calls_len: all.number("calls_len")?,
        calls,
    })
}

fn call(value: &Json, groups: &[(String, Vec<usize>, u64)]) -> Result<CallRecord, Why> {
    let call = Fields::of(value)?;
    let group = call.index("group")?;
    let (name, ranks, generation) = groups.get(group).ok_or_else(|| format!("no group {group}"))?;
    let sequence = match call.find("from") {
        None => Sequence::Collective,
        Some(_) => Sequence::Message { from: call.index("from")?, to: call.index("to")? },
    };
    if let Sequence::Message { from, to } = sequence
        && from.max(to) >= ranks.len()
    {
        return Err(format!("group {group} has no member {}", from.max(to)));
    }
    let state = call.text("state")?;
    Ok(CallRecord {
        number: call.number("number")?,
        group: name.clone(),
        ranks: ranks.clone(),
        generation: *generation,
        sequence,
        seq: call.number("seq")?,
        brought: brought(&call)?,
        operator: call.text("operator")?,
        state: State::ALL
            .into_iter()
            .find(|s| s.name() == state)
            .ok_or_else(|| format!("no state {state:?}"))?,
        started_us: call.number("started_us")?,
        ended_us: call.number("ended_us")?,
    })
}

fn brought(call: &Fields<'_>) -> Result<Brought, Why> {
    let name = call.text("call")?;
    Ok(Brought {
        call: Brought::CALLS
            .into_iter()
            .find(|c| *c == name)
            .ok_or_else(|| format!("no collective {name:?}"))?,
        op: call.find("op").map_or(Ok(String::new()), |_| call.text("op"))?,
        dtype: call.text("dtype")?,
        root: call.find("root").map(|_| call.index("root")).transpose()?,
        sent: shapes(call.get("sent")?)?,
        expected: shapes(call.get("expected")?)?,
    })
}

fn shapes(value: &Json) -> Result<ShapeList, Why> {
    let list = Fields::of(value)?;
    let shape = |value: &Json| match value {
        Json::List(extents) => indices(extents),
        _ => Err("a shape is no list".to_string()),
    };
    let hash = list.text("hash")?;
    Ok(ShapeList {
        len: list.index("len")?,
        alike: list.bool("alike")?,
        kept: list.list("kept")?.iter().map(shape).collect::<Result<_, Why>>()?,
        hash: u64::from_str_radix(&hash, 16).map_err(|_| format!("no hash {hash:?}"))?,
    })
}

fn indices(values: &[Json]) -> Result<Vec<usize>, Why> {
    let index = |value: &Json| match value {
        Json::Number(n) => usize::try_from(*n).map_err(|e| e.to_string()),
        _ => Err("an extent or rank is no number".to_string()),
    };
    values.iter().map(index).collect()
}

/// An object's fields, asked for by name and kind.
struct Fields<'a>(&'a [(String, Json)]);

impl<'a> Fields<'a> {
    fn of(value: &'a Json) -> Result<Self, Why> {
        match value {
            Json::Map(pairs) => Ok(Fields(pairs)),
            _ => Err("an object was expected".into()),
        }
    }

    fn find(&self, key: &str) -> Option<&'a Json> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    fn get(&self, key: &str) -> Result<&'a Json, Why> {
        self.find(key).ok_or_else(|| format!("there is no {key:?}"))
    }

    fn number(&self, key: &str) -> Result<u64, Why> {
        match self.get(key)? {
            Json::Number(n) => Ok(*n),
            _ => Err(format!("{key:?} is no number")),
        }
    }

    fn index(&self, key: &str) -> Result<usize, Why> {
        usize::try_from(self.number(key)?).map_err(|e| format!("{key:?}: {e}"))
    }

    fn bool(&self, key: &str) -> Result<bool, Why> {
        match self.get(key)? {
            Json::Bool(b) => Ok(*b),
            _ => Err(format!("{key:?} is neither true nor false")),
        }
    }

    fn text(&self, key: &str) -> Result<String, Why> {
        match self.get(key)? {
            Json::Text(text) => Ok(text.clone()),
            _ => Err(format!("{key:?} is no text")),
        }
    }

    fn list(&self, key: &str) -> Result<&'a [Json], Why> {
        match self.get(key)? {
            Json::List(values) => Ok(values),
            _ => Err(format!("{key:?} is no list")),
        }
    }
}
