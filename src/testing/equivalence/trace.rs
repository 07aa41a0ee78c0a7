//! The tensors that a run recorded, and their comparison with a single rank's.

use super::counterexample::Finding;
use crate::dtensor::Reduction;
use crate::placement::Spec;
use crate::tensor::{DType, Tensor};
use crate::testing::values::magnitude;

/// The records of one rank.
pub(super) struct Trace {
    pub entries: Vec<TraceEntry>,
    pub usage: Usage,
    /// The table of calls.
    pub calls: String,
}

/// A rank's use of the network and of its processor, by the program alone.
pub(super) struct Usage {
    pub received_bytes: u64,
    /// Its share of the operators' operations.
    pub flops: u64,
}

/// One recorded tensor on one rank.
pub(super) struct TraceEntry {
    pub step: usize,
    pub path: String,
    /// The recorded spec, without `Partial`.
    pub spec: Spec,
    /// The spec of the program's tensor, as text.
    pub given: String,
    pub local: Tensor,
}

/// Returns the first difference between the ranks' records and a single rank's, in the order of recording.
pub(super) fn compare(ranks: &[Trace], single: &Trace, mode: Reduction, bound: f64) -> Option<Finding> {
    let len = ranks.iter().map(|trace| trace.entries.len()).max().unwrap_or(0).max(single.entries.len());
    for at in 0..len {
        let name = |trace: &Trace| trace.entries.get(at).map(|e| format!("step {}, {}", e.step, e.path));
        for (rank, trace) in ranks.iter().enumerate() {
            if name(trace) != name(single) {
                let [got, want] = [name(trace), name(single)].map(|n| n.unwrap_or_else(|| "nothing".into()));
                return Some(Finding::OtherRecords { rank, at, got, want });
            }
        }
        let want = &single.entries[at];
        let limit = match mode {
            Reduction::Exact | Reduction::Grouped(_) => None,
            // An index or a count has no rounding.
            Reduction::Fast => want.spec.dtype.is_float().then(|| bound * magnitude(&want.local)),
        };
        let whole = ElementBits::of(&want.local);
        for (rank, trace) in ranks.iter().enumerate() {
            if let Some(finding) = differs(rank, &trace.entries[at], want, &whole, limit) {
                return Some(finding);
            }
        }
    }
    None
}

fn differs(
    rank: usize,
    got: &TraceEntry,
    want: &TraceEntry,
    whole: &ElementBits,
    limit: Option<f64>,
) -> Option<Finding> {
    let place = format!("step {}, {}", want.step, want.path);
    if (got.spec.dtype, &got.spec.shape) != (want.spec.dtype, &want.spec.shape) {
        let [got, want] = [got, want].map(|e| format!("{}{}", e.spec.dtype, e.spec.shape));
        return Some(Finding::OtherShape { place, rank, got, want });
    }
    let coords = got.spec.mesh.coords_of(rank).expect("a rank of the mesh");
    let region = got.spec.region_at(&coords);
    if *got.local.shape() != region.local {
        let (got, want) = (got.local.shape().to_string(), region.local.to_string());
        return Some(Finding::OtherShape { place, rank, got, want });
    }
    let local = ElementBits::of(&got.local);
    let (mut first, mut count) = (None, 0);
    region.runs(&got.spec.shape, |global, at, len| {
        for k in 0..len {
            let (e, l) = (global as usize + k, at + k);
            if !local.fits(l, whole, e, limit) {
                count += 1;
                if first.is_none_or(|(known, _)| e < known) {
                    first = Some((e, l));
                }
            }
        }
    });
    let (e, l) = first?;
    let mut index = vec![0; got.spec.shape.len()];
    let mut rest = e;
    for (d, &n) in got.spec.shape.iter().enumerate().rev() {
        index[d] = rest % n;
        rest /= n;
    }
    Some(Finding::Differs {
        place,
        index,
        rank,
        got: local.show(l),
        want: whole.show(e),
        differing: count,
        stored: region.local.numel(),
        given: got.given.clone(),
        spec: Box::new(got.spec.clone()),
    })
}

/// A tensor's elements as bits and as numbers. All NaNs have the same bits.
struct ElementBits {
    dtype: DType,
    bits: Vec<u64>,
    numbers: Vec<f64>,
}

impl ElementBits {
    fn of(x: &Tensor) -> ElementBits {
        let numbers = x.to_f64_vec();
        let plain = |v: f64| if v.is_nan() { f64::NAN } else { v };
        let bits = match x.dtype() {
            // Wider than the 53 bits of an f64's fraction.
            DType::I64 => x.to_vec::<i64>().expect("its dtype").into_iter().map(|v| v as u64).collect(),
            DType::F64 => numbers.iter().map(|v| plain(*v).to_bits()).collect(),
            DType::F32 => {
                let of = |v: &f64| if v.is_nan() { f32::NAN } else { *v as f32 };
                numbers.iter().map(|v| u64::from(of(v).to_bits())).collect()
            }
            DType::F16 => {
                numbers.iter().map(|v| u64::from(half::f16::from_f64(plain(*v)).to_bits())).collect()
            }
            DType::BF16 => {
                numbers.iter().map(|v| u64::from(half::bf16::from_f64(plain(*v)).to_bits())).collect()
            }
            DType::I32 | DType::U8 | DType::Bool => numbers.iter().map(|v| *v as i64 as u64).collect(),
        };
        ElementBits { dtype: x.dtype(), bits, numbers }
    }

    fn fits(&self, at: usize, other: &ElementBits, e: usize, limit: Option<f64>) -> bool {
        let (got, want) = (self.numbers[at], other.numbers[e]);
        self.bits[at] == other.bits[e]
            || limit.is_some_and(|limit| {
                got == want || (got - want).abs() <= limit || got.is_nan() && want.is_nan()
            })
    }

    fn show(&self, at: usize) -> String {
        if !self.dtype.is_float() {
            return (self.bits[at] as i64).to_string();
        }
        let digits = 2 * self.dtype.size_bytes();
        format!("{:e} (0x{:0digits$x})", self.numbers[at], self.bits[at])
    }
}
