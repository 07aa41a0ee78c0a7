//! A record as a file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use crate::comm::calls::{Route, Sequence};
use crate::comm::diagnostics::recorder::{Entry, Recorder, Ring};
use crate::comm::diagnostics::shapes::Shapes;

/// Where records are written on failure.
const DIR_VARIABLE: &str = "ISOSHARD_FLIGHT_DIR";
/// The form of the files. Another form has another number.
pub(super) const VERSION: u64 = 1;

/// The folder that the environment names.
pub(in crate::comm::diagnostics) fn dir_from_env() -> Option<PathBuf> {
    env::var_os(DIR_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

/// Writes `rank-<k>.json`: whole, or not at all.
pub(in crate::comm::diagnostics) fn write(
    recorder: &Recorder,
    ring: &Ring,
    dir: &Path,
    cause: (&str, bool),
) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let name = format!("rank-{}.json", recorder.rank);
    let unfinished = dir.join(format!("{name}.part"));
    fs::write(&unfinished, text(recorder, ring, cause))?;
    fs::rename(unfinished, dir.join(name))
}

/// One object, a call a line.
fn text(recorder: &Recorder, ring: &Ring, (cause, is_echo): (&str, bool)) -> String {
    let mut out = String::new();
    let failed_us = recorder.began.elapsed().as_micros();
    let Recorder { rank, world_len, began_unix_us, .. } = recorder;
    put(&mut out, format_args!("{{\"isoshard_flight\":{VERSION},\"rank\":{rank},\"world_len\":{world_len},"));
    put(&mut out, format_args!("\"began_unix_us\":{began_unix_us},\"failed_us\":{failed_us},\"cause\":"));
    quote(&mut out, cause);
    put(&mut out, format_args!(",\"is_echo\":{is_echo},\"calls_len\":{},\"groups\":[", ring.calls));
    for (i, row) in ring.groups.iter().enumerate() {
        out.push_str(if i > 0 { ",\n{\"name\":" } else { "\n{\"name\":" });
        quote(&mut out, row.name());
        put(&mut out, format_args!(",\"ranks\":{:?},\"generation\":{}}}", row.ranks(), row.generation()));
    }
    out.push_str("],\"calls\":[");
    // Oldest first: what follows the newest in the ring is the oldest.
    let newest = ring.entries.iter().position(|entry| entry.number + 1 == ring.calls).map_or(0, |at| at + 1);
    let (newer, older) = ring.entries.split_at(newest);
    for (i, entry) in older.iter().chain(newer).enumerate() {
        out.push_str(if i > 0 { ",\n" } else { "\n" });
        call(&mut out, entry);
    }
    out.push_str("\n]}\n");
    out
}

fn call(out: &mut String, entry: &Entry) {
    let Entry { number, group, seq, call, op, dtype, operator, state, .. } = entry;
    put(out, format_args!("{{\"number\":{number},\"group\":{},", group.index()));
    match entry.sequence {
        Sequence::Collective => {}
        Sequence::Message { from, to } => put(out, format_args!("\"from\":{from},\"to\":{to},")),
    }
    put(out, format_args!("\"seq\":{seq},\"call\":\"{call}\","));
    if let Some(op) = op {
        put(out, format_args!("\"op\":\"{op}\","));
    }
    if let Route::Broadcast { root } = entry.route {
        put(out, format_args!("\"root\":{root},"));
    }
    put(out, format_args!("\"dtype\":\"{dtype}\",\"sent\":"));
    shapes(out, &entry.sent);
    out.push_str(",\"expected\":");
    shapes(out, &entry.expected);
    out.push_str(",\"operator\":");
    quote(out, operator);
    let (started, ended) = (entry.started.as_micros(), entry.ended.as_micros());
    put(out, format_args!(",\"state\":\"{}\",\"started_us\":{started},\"ended_us\":{ended}}}", state.name()));
}

fn shapes(out: &mut String, shapes: &Shapes) {
    let Shapes { len, hash, alike, .. } = shapes;
    let kept: Vec<&[usize]> = shapes.kept().collect();
    put(out, format_args!("{{\"len\":{len},\"alike\":{alike},\"kept\":{kept:?},\"hash\":\"{hash:016x}\"}}"));
}

/// A text as JSON writes it.
fn quote(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if (c as u32) < 0x20 => put(out, format_args!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    out.write_fmt(what).expect("a text takes what is written to it");
}
