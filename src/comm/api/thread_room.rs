//! The number of ranks for whose threads the system has room.
//!
//! A thread that starts without room for its signal stack ends the process: nothing can catch that. So a world that does not
//! fit is refused before its first thread.

use std::fs;

use crate::error::{Error, Result};

/// The stack size of a rank's thread.
pub(super) const STACK_BYTES: usize = 8 << 20;

/// Mappings of memory per thread: its stack, the stack of its signal handler, and a guard page of each.
const MAPPINGS_EACH: usize = 4;

/// Bytes of address space per thread besides its stack.
const OTHER_BYTES: usize = 128 << 10;

/// Bytes of stacks of ended threads that the system's library may keep and use again; they count as used.
const KEPT_BYTES: usize = 40 << 20;

/// The number of ranks up to which mappings are not counted: any system has room for so many.
const FEW_RANKS: usize = 1024;

/// The room that the system leaves to this process; `None` if it tells no limit.
#[derive(Debug, Default, PartialEq)]
struct ThreadRoom {
    mappings: Option<usize>,
    address_bytes: Option<usize>,
}

/// Checks that the system has room for `ranks` threads with stacks of `stack_bytes`. If it tells no limits, a thread
/// that does not start tells.
///
/// # Errors
/// Refuses a larger number.
pub(super) fn check_room(ranks: usize, stack_bytes: usize) -> Result<()> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{name}")).ok();
    let most = ThreadRoom::of(ranks, read).most_threads(stack_bytes);
    if ranks <= most {
        return Ok(());
    }
    let given = format!("{ranks} ranks, each with a stack of {} MiB; room for {most}", stack_bytes >> 20);
    let remedy = "use fewer ranks or a DryRun, or raise vm.max_map_count or the limit of address space";
    Err(Error::unsupported("spmd", "the system has no room for the threads of so many ranks", given, remedy))
}

impl ThreadRoom {
    fn of(ranks: usize, read: impl Fn(&str) -> Option<String>) -> ThreadRoom {
        let mappings = || {
            let most: usize = read("sys/vm/max_map_count")?.trim().parse().ok()?;
            // Tensors, libraries and the allocator have the rest.
            Some((most - most / 8).saturating_sub(read("self/maps")?.lines().count()))
        };
        let address_bytes = || {
            let limits = read("self/limits")?;
            let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
            let limit: usize = limit.split_whitespace().next()?.parse().ok()?;
            let status = read("self/status")?;
            let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
            let used: usize = used.split_whitespace().next()?.parse().ok()?;
            Some(limit.saturating_sub(used.saturating_mul(1024)).saturating_add(KEPT_BYTES))
        };
        let mappings = if ranks <= FEW_RANKS { None } else { mappings() };
        ThreadRoom { mappings, address_bytes: address_bytes() }
    }

    fn most_threads(&self, stack_bytes: usize) -> usize {
        let by_mappings = self.mappings.map(|all| all / MAPPINGS_EACH);
        let by_bytes = self.address_bytes.map(|all| all / (stack_bytes + OTHER_BYTES));
        by_mappings.into_iter().chain(by_bytes).min().unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_follows_from_what_the_system_tells() {
        let tell = |name: &str| {
            let text = match name {
                "sys/vm/max_map_count" => "65530\n",
                "self/maps" => "one\ntwo\n",
                "self/limits" => {
                    "Max cpu time  unlimited  unlimited  seconds\nMax address space  1000000000  unlimited  bytes\n"
                }
                "self/status" => "Name:\tx\nVmSize:\t  500000 kB\n",
                _ => return None,
            };
            Some(text.to_string())
        };
        let room = ThreadRoom::of(20_000, tell);
        assert_eq!(room, ThreadRoom { mappings: Some(57_337), address_bytes: Some(529_943_040) });
        assert_eq!((room.most_threads(8 << 20), room.most_threads(0)), (62, 4043));
        let plenty = ThreadRoom { address_bytes: None, ..room };
        assert_eq!(plenty.most_threads(8 << 20), 14_334);
        assert_eq!(ThreadRoom::of(2, tell).mappings, None, "few ranks have room");
        let unlimited = |name: &str| {
            (name == "self/limits").then(|| "Max address space  unlimited  unlimited  bytes".into())
        };
        assert_eq!(ThreadRoom::of(20_000, unlimited).most_threads(1), usize::MAX);
        assert!(check_room(1, 8 << 20).is_ok());
    }
}
