//! Tensors without elements: shape, strides and dtype over a buffer that is only counted.
//!
//! Whatever a program does to shapes and storage it does to these ([`Device::Meta`](super::Device::Meta)): views share a buffer, a fresh tensor has
//! a new one. Nothing is written, and reading an element is refused. What a program would hold is counted for the thread that
//! makes the tensors, whoever drops them.
//!
//! ```
//! use isoshard::tensor::{DType, Device, Tensor, meta};
//! let x = Tensor::zeros_on(Device::Meta, DType::F32, [1 << 20, 1 << 20])?; // 4 TiB, were there any
//! assert!(x.transpose(0, 1)?.shares_storage(&x));
//! assert_eq!(meta::memory_stats().live_bytes, 4 << 40);
//! assert!(x.to_vec::<f32>().unwrap_err().to_string().starts_with("to_device: a tensor on meta has no elements"));
//! # Ok::<(), isoshard::Error>(())
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What this thread's tensors without elements would take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes of live tensors.
    pub live_bytes: usize,
    /// The most there were at one time.
    pub peak_live_bytes: usize,
}

/// The account of the calling thread.
pub fn memory_stats() -> MemoryStats {
    METER.with(|meter| MemoryStats {
        live_bytes: meter.live.load(Ordering::Relaxed),
        peak_live_bytes: meter.peak.load(Ordering::Relaxed),
    })
}

/// Counts the peak from what lives now.
pub fn reset_memory_peak() {
    METER.with(|meter| meter.peak.store(meter.live.load(Ordering::Relaxed), Ordering::Relaxed));
}

thread_local!(static METER: Arc<Meter> = Arc::default());

#[derive(Debug, Default)]
struct Meter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

/// Bytes on a thread's account while it lives.
pub(super) struct Absent {
    meter: Arc<Meter>,
    len_bytes: usize,
}

impl Absent {
    pub(super) fn new(len_bytes: usize) -> Absent {
        let meter = METER.with(Arc::clone);
        let live = meter.live.fetch_add(len_bytes, Ordering::Relaxed).wrapping_add(len_bytes);
        meter.peak.fetch_max(live, Ordering::Relaxed);
        Absent { meter, len_bytes }
    }
}

impl Drop for Absent {
    fn drop(&mut self) {
        self.meter.live.fetch_sub(self.len_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Device, Tensor};

    #[test]
    fn views_share_and_copies_do_not() {
        let at = || memory_stats().live_bytes;
        let before = at();
        let x = Tensor::zeros_on(Device::Meta, DType::F32, [6, 4]).unwrap();
        let views = [
            x.narrow(0, 1, 3).unwrap(),
            x.permute(&[1, 0]).unwrap(),
            x.reshape([3, 8]).unwrap(),
            x.unsqueeze(1).unwrap().expand([6, 5, 4]).unwrap(),
        ];
        assert!(views.iter().all(|v| v.shares_storage(&x)));
        assert_eq!(at() - before, 96);
        let copy = views[1].contiguous().unwrap();
        assert_eq!((copy.is_contiguous(), copy.is_meta(), at() - before), (true, true, 192));
        let halves = copy.cast(DType::F16).unwrap();
        assert_eq!((halves.dtype(), at() - before), (DType::F16, 240));
        assert_eq!(format!("{halves:?}"), "f16[4, 6] on meta");
        drop(copy);
        reset_memory_peak();
        assert_eq!((at() - before, memory_stats().peak_live_bytes - before), (144, 144));
        std::thread::spawn(move || drop((x, views, halves))).join().unwrap();
        assert_eq!(at(), before, "dropped elsewhere, counted here");
    }

    #[test]
    fn elements_are_refused_by_name() {
        let x = Tensor::full_on(Device::Meta, DType::I64, [1], 3.0).unwrap();
        let said = "a tensor on meta has no elements; got i64[1]; a dry run computes shapes alone: run with data to read \
                    values";
        for (verb, e) in [
            ("to_device", x.item().unwrap_err()),
            ("to_device", x.to_vec::<i64>().unwrap_err()),
            ("to_device", x.to_device(Device::Cpu).unwrap_err()),
            ("data", x.data::<i64>().unwrap_err()),
            ("make_mut", x.clone().make_mut::<i64>().map(drop).unwrap_err()),
            ("as_bytes", x.as_bytes().map(drop).unwrap_err()),
        ] {
            assert_eq!(e.to_string(), format!("{verb}: {said}"));
        }
        let mut out = Tensor::zeros(DType::I64, [1]);
        assert!(x.copy_block(&mut out, &[1], (0, &[1]), (0, &[1])).is_err(), "nothing is made up");
        assert!(Tensor::zeros_on(Device::Meta, DType::I64, [1 << 62]).is_err());
        assert_eq!(Tensor::zeros(DType::F32, [3]).to_device(Device::Meta).unwrap().notation(), "f32[3]");
    }
}
