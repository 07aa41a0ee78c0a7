//! Tensors without elements, to learn the shapes and the memory of a program without running it.
//!
//! ```
//! use isoshard::tensor::{DType, Device, Tensor, meta};
//! let x = Tensor::zeros_on(Device::Meta, DType::F32, [1 << 20, 1 << 20])?; // 4 TiB, were there any
//! assert!(x.transpose(0, 1)?.shares_storage(&x)); // takes no further memory
//! assert_eq!(meta::memory_stats().live_bytes, 4 << 40);
//! assert!(x.to_vec::<f32>().unwrap_err().to_string().starts_with("to_device: a tensor on meta has no elements"));
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! A tensor on [`Device::Meta`](super::Device::Meta) has a shape, strides and a dtype over a buffer that has no bytes.
//! Operators give it the shapes, views and buffers that they give a tensor with elements; reading an element is an
//! error. The bytes count for the thread that makes the tensor, on whatever thread it is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory that one thread's tensors without elements would take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetaMemoryStats {
    /// The bytes of all live tensors.
    pub live_bytes: usize,
    /// The largest value of `live_bytes` since the start, or since [`reset_memory_peak`].
    pub peak_live_bytes: usize,
}

/// Returns the memory that the calling thread's tensors on [`Device::Meta`](super::Device::Meta) would take.
///
/// ```
/// use isoshard::tensor::{DType, Device, Tensor, meta};
/// meta::reset_memory_peak();
/// drop(Tensor::zeros_on(Device::Meta, DType::F64, [1000])?);
/// let stats = meta::memory_stats();
/// assert_eq!((stats.live_bytes, stats.peak_live_bytes), (0, 8000));
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn memory_stats() -> MetaMemoryStats {
    METER.with(|meter| MetaMemoryStats {
        live_bytes: meter.live.load(Ordering::Relaxed),
        peak_live_bytes: meter.peak.load(Ordering::Relaxed),
    })
}

/// Sets the calling thread's peak to the bytes that are live now.
///
/// ```
/// use isoshard::tensor::{DType, Device, Tensor, meta};
/// drop(Tensor::zeros_on(Device::Meta, DType::U8, [500])?);
/// meta::reset_memory_peak();
/// assert_eq!(meta::memory_stats().peak_live_bytes, 0);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn reset_memory_peak() {
    METER.with(|meter| meter.peak.store(meter.live.load(Ordering::Relaxed), Ordering::Relaxed));
}

thread_local!(static METER: Arc<Meter> = Arc::default());

/// A thread's counters.
#[derive(Debug, Default)]
struct Meter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

/// Bytes that count for the thread that made this value, until it is dropped.
pub(super) struct CountedBytes {
    meter: Arc<Meter>,
    len_bytes: usize,
}

impl CountedBytes {
    pub(super) fn new(len_bytes: usize) -> CountedBytes {
        let meter = METER.with(Arc::clone);
        let live = meter.live.fetch_add(len_bytes, Ordering::Relaxed).wrapping_add(len_bytes);
        meter.peak.fetch_max(live, Ordering::Relaxed);
        CountedBytes { meter, len_bytes }
    }
}

impl Drop for CountedBytes {
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
