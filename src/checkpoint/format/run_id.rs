//! The identity of a run, which tells its checkpoints from those of another run in the same folder.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number that a run draws at its first save; in JSON, 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct RunId(pub u64);

/// The run to which a save belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Run {
    /// A new run, and its identity once it has begun to save. The folder has no other run's checkpoints.
    New(Option<RunId>),
    /// A run that has saved, or that goes on from a checkpoint. Checkpoints of earlier versions, and those that are
    /// saved outside of a folder of checkpoints, have no identity: they count as one run without a name.
    Of(Option<RunId>),
}

impl Run {
    pub fn id(self) -> Option<RunId> {
        match self {
            Run::New(id) | Run::Of(id) => id,
        }
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl RunId {
    pub fn parse(text: &str) -> Option<RunId> {
        let digits = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        u64::from_str_radix(text, 16).ok().filter(|_| digits).map(RunId)
    }
}

impl Serialize for RunId {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RunId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<RunId, D::Error> {
        let text = String::deserialize(deserializer)?;
        RunId::parse(&text).ok_or_else(|| de::Error::custom("a run has 16 hexadecimal digits"))
    }
}
