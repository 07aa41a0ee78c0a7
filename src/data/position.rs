//! The position in the order of samples, as a value to save.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The position of a [`Tokens`](super::Tokens) in its order of samples, for saving and restoring.
///
/// It does not depend on the number of ranks or on the batch size. Its text names epoch, sample and the order in 16
/// hexadecimal digits; any other text is refused. Serde writes the three fields.
///
/// ```
/// use isoshard::data::DataPosition;
/// let position = DataPosition { epoch: 1, sample: 40, order: 0xbeef };
/// assert_eq!(position.to_string(), "tokens:1:40:000000000000beef");
/// assert_eq!("tokens:1:40:000000000000beef".parse::<DataPosition>()?, position);
/// assert!("tokens:1:40:beef".parse::<DataPosition>().is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DataPosition {
    /// The number of epochs that are over.
    pub epoch: u64,
    /// The number of samples of this epoch that were used.
    pub sample: u64,
    /// A hash of the block, the packing, the width, the seed, and of each file's length, first 4 KiB and last 4 KiB;
    /// with [`Packing::Documents`](super::Packing::Documents), whose rows depend on every token, of all bytes.
    pub order: u64,
}

impl fmt::Display for DataPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tokens:{}:{}:{:016x}", self.epoch, self.sample, self.order)
    }
}

impl FromStr for DataPosition {
    type Err = Error;

    /// Parses the text that `Display` writes, and no other.
    fn from_str(text: &str) -> Result<DataPosition> {
        let read = || {
            let mut parts = text.strip_prefix("tokens:")?.split(':');
            let epoch = parts.next()?.parse().ok()?;
            let sample = parts.next()?.parse().ok()?;
            let order = u64::from_str_radix(parts.next()?, 16).ok()?;
            Some(DataPosition { epoch, sample, order })
        };
        // One position has one text: signs, leading zeros and further parts are damage.
        read().filter(|position| position.to_string() == text).ok_or_else(|| {
            let remedy = "a position reads tokens:<epoch>:<sample>:<16 hexadecimal digits of the order>";
            Error::invalid("tokens", "not the text of a position", format!("{text:?}"), remedy)
        })
    }
}
