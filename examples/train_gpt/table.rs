//! The table's lines, and numbers as people read them.

use std::fmt;
use std::time::Duration;

/// The heads of the table's columns.
pub const HEADER: &str = "  step      loss  validation    tokens/s  time left      memory";

/// A line of the table.
pub struct TableRow {
    /// The number of steps that are done.
    pub step: usize,
    /// The mean loss of the steps since the line before.
    pub loss: f64,
    /// The validation loss, if this step ends with a validation.
    pub validation: Option<f64>,
    pub tokens_per_s: f64,
    pub left: Duration,
    /// The most memory in use so far, if the system tells.
    pub memory_bytes: Option<u64>,
}

impl fmt::Display for TableRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let validation = self.validation.map_or_else(String::new, |loss| format!("{loss:.4}"));
        let memory = self.memory_bytes.map_or_else(|| "-".into(), bytes);
        write!(
            f,
            "{:>6}{:>10.4}{validation:>12}{:>12}{:>11}{memory:>12}",
            self.step,
            self.loss,
            thousands(self.tokens_per_s.round() as u64),
            clock(self.left),
        )
    }
}

/// Writes `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let groups = std::iter::once(&digits[..first])
        .chain((first..digits.len()).step_by(3).map(|i| &digits[i..i + 3]))
        .filter(|group| !group.is_empty());
    groups.collect::<Vec<_>>().join(",")
}

/// Writes a number of bytes in the largest unit, of 1000 of the one below, that leaves at least 1.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} bytes");
    }
    let (mut value, mut unit) = (n as f64 / 1e3, 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    let decimals = if value < 9.95 { 1 } else { 0 };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// Writes a duration as `m:ss` or `h:mm:ss`.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Writes a duration in the unit in which people plan: `0.4 s`, `58 s`, `12 min`, `3.4 h`.
pub fn about(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        ..9.95 => format!("{seconds:.1} s"),
        ..119.5 => format!("{seconds:.0} s"),
        ..7170.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_their_heads() {
        let row = TableRow {
            step: 1200,
            loss: 1.73456,
            validation: Some(1.9),
            tokens_per_s: 27_512.4,
            left: Duration::from_secs(24),
            memory_bytes: Some(74_145_792),
        };
        let lines = [HEADER.to_string(), row.to_string()];
        let want = "  step      loss  validation    tokens/s  time left      memory\n  \
                      1200    1.7346      1.9000      27,512       0:24       74 MB";
        assert_eq!(lines.join("\n"), want);
        let row = TableRow { validation: None, memory_bytes: None, loss: f64::NAN, step: 7, ..row };
        assert_eq!(row.to_string(), "     7       NaN                  27,512       0:24           -");
    }

    #[test]
    fn numbers_as_people_read_them() {
        let grouped = [0, 7, 999, 1000, 12_345, 1_234_567].map(thousands);
        assert_eq!(grouped, ["0", "7", "999", "1,000", "12,345", "1,234,567"]);
        let sizes =
            [0, 999, 1000, 9949, 9950, 999_499, 999_500, 7_200_000, 3_000_000_000_000_000_000].map(bytes);
        let want =
            ["0 bytes", "999 bytes", "1.0 kB", "9.9 kB", "10 kB", "999 kB", "1.0 MB", "7.2 MB", "3000 PB"];
        assert_eq!(sizes, want);
        let clocks = [0.4, 59.6, 3599.0, 3600.0, 90_061.0].map(|s| clock(Duration::from_secs_f64(s)));
        assert_eq!(clocks, ["0:00", "1:00", "59:59", "1:00:00", "25:01:01"]);
        let plans = [0.04, 9.9, 58.4, 119.6, 7000.0, 12_240.0].map(|s| about(Duration::from_secs_f64(s)));
        assert_eq!(plans, ["0.0 s", "9.9 s", "58 s", "2 min", "117 min", "3.4 h"]);
    }
}
