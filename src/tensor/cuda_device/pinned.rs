//! Pinned host buffers of a stream, kept for reuse.

use super::driver::Driver;
use super::handle::{DriverResult, Handle};
use crate::tensor::sort_by_key;

/// The pinned host buffers that a stream keeps.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    /// The address and size of each buffer, and the event after which it may be reused.
    free: Vec<(usize, usize, Option<Handle>)>,
}

/// The most buffers that are kept; the largest ones are freed first.
const KEPT_BUFFERS: usize = 16;
const MIN_BYTES: usize = 4096;

impl Pinned {
    /// Returns a buffer of at least `bytes`, and its size.
    pub fn take(&mut self, driver: &dyn Driver, bytes: usize) -> DriverResult<(*mut u8, usize)> {
        let ready = |&(_, size, event): &(usize, usize, Option<Handle>)| {
            size >= bytes && event.is_none_or(|e| driver.is_done(e).unwrap_or(false))
        };
        let found = self.free.iter().enumerate().filter(|(_, b)| ready(b)).min_by_key(|(_, b)| b.1);
        if let Some(at) = found.map(|(i, _)| i) {
            let (address, size, event) = self.free.swap_remove(at);
            event.into_iter().for_each(|e| driver.drop_event(e));
            return Ok((address as *mut u8, size));
        }
        let size = bytes.next_power_of_two().max(MIN_BYTES);
        Ok((driver.alloc_host(size)?, size))
    }

    /// Keeps a buffer for reuse after `event`.
    pub fn put(&mut self, at: *mut u8, size: usize, event: Option<Handle>) {
        self.free.push((at as usize, size, event));
    }

    /// Frees buffers beyond [`KEPT_BUFFERS`], the largest first, but none in use: for those the driver would wait.
    pub fn trim(&mut self, driver: &dyn Driver) {
        sort_by_key(&mut self.free, |b| b.1);
        while self.free.len() > KEPT_BUFFERS {
            let idle =
                |b: &(usize, usize, Option<Handle>)| b.2.is_none_or(|e| driver.is_done(e).unwrap_or(false));
            let Some(at) = self.free.iter().rposition(idle) else { return };
            let buffer = self.free.remove(at);
            Pinned::give_back(driver, buffer);
        }
    }

    /// Frees all buffers.
    pub fn clear(&mut self, driver: &dyn Driver) {
        self.free.drain(..).for_each(|buffer| Pinned::give_back(driver, buffer));
    }

    fn give_back(driver: &dyn Driver, (at, _, event): (usize, usize, Option<Handle>)) {
        event.into_iter().for_each(|e| driver.drop_event(e));
        // SAFETY: the buffer came from this driver, which waits for the work that still uses it.
        let _ = unsafe { driver.free_host(at as *mut u8) };
    }
}
