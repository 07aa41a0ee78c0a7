//! The process that writes a file, so that another process can tell whether it lives.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process, as its host knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Owner {
    /// The host's name, for people.
    pub host: String,
    /// The start of the host's kernel and the namespace of its processes: two containers may have equal names and equal
    /// numbers of processes.
    pub place: String,
    pub pid: u32,
    /// The start of the process in ticks since that of the kernel: numbers of processes come again.
    pub started: u64,
}

impl Owner {
    /// Returns this process. Its place is empty if the system does not tell it.
    pub fn this() -> Owner {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_string());
        let host = read("/proc/sys/kernel/hostname").unwrap_or_else(|_| "unknown".into());
        let (boot, namespace) = (read("/proc/sys/kernel/random/boot_id"), fs::read_link("/proc/self/ns/pid"));
        let pid = std::process::id();
        let known = boot.ok().zip(namespace.ok()).zip(start_of(pid));
        let (place, started) = known.map_or((String::new(), 0), |((boot, namespace), started)| {
            (format!("{boot} {}", namespace.display()), started)
        });
        Owner { host, place, pid, started }
    }

    /// Returns whether the process lives, or `None` if that cannot be told here.
    pub fn is_alive(&self) -> Option<bool> {
        let this = Owner::this();
        let is_near = !this.place.is_empty() && this.place == self.place;
        is_near.then(|| start_of(self.pid) == Some(self.started))
    }
}

/// Returns the start of a process of this host, or `None` if there is none or it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, which may contain anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // A zombie does nothing any more.
    if matches!(state, "Z" | "X") {
        return None;
    }
    // The state is the third field, the start the 22nd.
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_is_alive_until_its_number_is_gone_or_another_ones() {
        let this = Owner::this();
        assert_eq!(this.is_alive(), Some(true));
        assert_eq!(Owner { started: this.started + 1, ..this.clone() }.is_alive(), Some(false));
        assert_eq!(Owner { place: "another kernel".into(), ..this.clone() }.is_alive(), None);
        let mut child =
            std::process::Command::new("sleep").arg("60").spawn().expect("there is such a program");
        let started = start_of(child.id()).expect("it runs");
        let of_child = Owner { pid: child.id(), started, ..this };
        assert_eq!(of_child.is_alive(), Some(true));
        child.kill().expect("it runs");
        // Dead before it is waited for, too.
        let begin = std::time::Instant::now();
        while of_child.is_alive() == Some(true) && begin.elapsed().as_secs() < 20 {
            std::thread::yield_now();
        }
        assert_eq!(of_child.is_alive(), Some(false));
        child.wait().expect("it was killed");
        assert_eq!(of_child.is_alive(), Some(false));
    }
}
