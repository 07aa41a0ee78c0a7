//! Faults that kernels report because they cannot return an error, e.g. an index out of range.
//!
//! A kernel writes its first fault to a few bytes of its stream, and continues as if the value were valid. The next
//! read of a value on that stream finds the fault and returns it as an error. The code and the text of a fault stand
//! beside the operator's launch, which says what its kernel may report.

use std::sync::Mutex;

use crate::error::Error;

/// The size of `struct Fault` of `kernels/cuda/iso.cuh`, in bytes.
pub(in crate::tensor) const FAULT_BYTES: usize = 16;

/// The faults of all kernels that the process has launched.
static KNOWN: Mutex<Vec<&Fault>> = Mutex::new(Vec::new());

/// A fault that the kernels of an operator may report.
#[derive(Debug)]
pub(crate) struct Fault {
    /// The number that the kernel reports. No two faults of the crate have the same, and none has 0.
    pub code: u32,
    /// The operator.
    verb: &'static str,
    /// The rule that the value breaks.
    rule: &'static str,
    /// The name of the value, e.g. `index`. If it begins with `for`, the fault's number is a position and not the
    /// value.
    what: &'static str,
}

impl Fault {
    /// Makes the fault of an index out of range.
    pub(crate) const fn index(code: u32, verb: &'static str) -> Fault {
        Fault { code, verb, rule: "an index leaves its dim", what: "index" }
    }

    /// Makes the fault of two rows with one slot.
    pub(crate) const fn slot(code: u32, verb: &'static str, rule: &'static str) -> Fault {
        Fault { code, verb, rule, what: "slot" }
    }

    /// Makes the fault of an element whose value is out of range; the kernel reports its position.
    pub(crate) const fn element(code: u32, verb: &'static str, rule: &'static str) -> Fault {
        Fault { code, verb, rule, what: "for element" }
    }

    /// Makes the fault of a row of weights; the kernel reports the row.
    pub(crate) const fn row(code: u32, verb: &'static str, rule: &'static str) -> Fault {
        Fault { code, verb, rule, what: "for row" }
    }
}

/// Notes that a kernel may report `faults`.
pub(crate) fn expect(faults: &[&'static Fault]) {
    let mut known = KNOWN.lock().expect("no thread panics with the list");
    for fault in faults {
        if !known.iter().any(|f| f.code == fault.code) {
            known.push(fault);
        }
    }
}

/// Returns the error that the bytes report, or `None` if there is none.
pub(in crate::tensor) fn read(bytes: [u8; FAULT_BYTES]) -> Option<Error> {
    let code = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    let found = f32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
    let value = i64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
    if code == 0 {
        return None;
    }
    let known = KNOWN.lock().expect("no thread panics with the list");
    Some(match known.iter().find(|fault| fault.code == code) {
        Some(f) if f.what.starts_with("for") => {
            Error::invalid(f.verb, f.rule, format!("{found} {} {value}", f.what), "")
        }
        Some(f) => Error::invalid(f.verb, f.rule, format!("{} {value}", f.what), ""),
        None => {
            Error::invalid("kernel", "reported a fault that has no name", format!("code {code}, {value}"), "")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_launched_kernels_have_their_texts() {
        static RATE: Fault = Fault::element(9_001, "draw", "a rate is positive");
        let bytes = |code: u32| {
            let mut bytes = [0; FAULT_BYTES];
            bytes[..4].copy_from_slice(&code.to_le_bytes());
            bytes[4..8].copy_from_slice(&(-2f32).to_le_bytes());
            bytes[8..].copy_from_slice(&7i64.to_le_bytes());
            bytes
        };
        assert!(read(bytes(0)).is_none());
        assert!(read(bytes(9_001)).unwrap().to_string().contains("code 9001, 7"));
        expect(&[&RATE]);
        let text = read(bytes(9_001)).unwrap().to_string();
        assert!(text.contains("a rate is positive") && text.contains("-2 for element 7"), "{text}");
    }
}
