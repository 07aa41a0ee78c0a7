//! Files and folders that are written beside their final names, and the locks that tell whether a program still writes them.
//!
//! A file `train.bin` is written as `.train.bin.<number>.unfinished` and renamed at the end; so is a folder. The number is
//! drawn, so two programs that write one name never share a file. Beside it stands `.train.bin.<number>.lock`, which names
//! the host and the process that writes. That process touches its lock from time to time. The remains of a dead program
//! are removed by the next program that writes the same name; the files of a live one are left alone.
//!
//! A process of this host (of one kernel since it started, and of one namespace of processes) is dead if its number is
//! gone or belongs to a process with another start. Of another host only the lock's age is known: its process
//! counts as dead after ten minutes without a touch, by the clock of the file system.

mod lock;
mod names;
mod owner;
mod remains;
#[cfg(test)]
mod tests;
mod unfinished;
mod whole;

pub(crate) use names::REMOVED;
pub(crate) use remains::remove_remains;
pub(crate) use unfinished::{
    UnfinishedFile, UnfinishedFolder, draw_number, is_taken, or_vanished, parent, vanished,
};
pub(crate) use whole::write_whole;
