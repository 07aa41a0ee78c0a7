//! Places of the rows of gradients in the buffers of the results.

use isoshard_kernels::attention::RowPlaces;

use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Returns the operands' places if they lie in one buffer `[batch, length, heads, d]`, which has the heads of all
/// three in any order: parts of one product's result.
fn places_in_one_buffer(operands: [&Tensor; 3]) -> Option<[RowPlaces; 3]> {
    let [batch, _, len, d] = dims(operands[0]);
    let heads = operands.iter().map(|x| x.shape()[1]).sum::<usize>();
    let lies_there = |x: &Tensor| {
        let s = x.strides();
        let shape = [batch, x.shape()[1], len, d];
        let steps = s[0] == len * heads * d && s[2] == heads * d && s[3] == 1;
        dims(x) == shape
            && x.shares_storage(operands[0])
            && steps
            && [s[1], x.offset()].iter().all(|n| n.is_multiple_of(d))
    };
    if d == 0 || !operands.iter().all(|x| lies_there(x)) {
        return None;
    }
    let steps = |x: &Tensor| [0, 1, 2].map(|dim| x.strides()[dim] / d);
    let places = operands.map(|x| RowPlaces { first: x.offset() / d, steps: steps(x) });
    let of_heads = |(place, x): (&RowPlaces, &&Tensor)| {
        let place = *place;
        (0..x.shape()[1]).map(move |h| place.at([0, h], 0).0)
    };
    let mut rows: Vec<usize> = places.iter().zip(&operands).flat_map(of_heads).collect();
    rows.sort_unstable();
    rows.into_iter().eq(0..heads).then_some(places)
}

/// Buffers for the gradients of three operands: one, in which they lie as the operands do in theirs, so that joining them
/// needs no copy; or a buffer `[batch, length, heads, d]` for each, so that merging its heads needs none.
pub(super) struct GradientBuffers(pub(super) Vec<Tensor>);

impl GradientBuffers {
    /// Returns buffers for the gradients of these operands, and the places of their rows.
    pub(super) fn of(operands: [&Tensor; 3], dtype: DType) -> (GradientBuffers, [RowPlaces; 3]) {
        if let Some(places) = places_in_one_buffer(operands) {
            let numel = operands.iter().map(|x| x.numel()).sum::<usize>();
            return (GradientBuffers(vec![Tensor::uninit(dtype, [numel])]), places);
        }
        let shapes = operands.map(dims);
        let room = |[b, h, len, d]: [usize; 4]| Tensor::uninit(dtype, [b, len, h, d]);
        (GradientBuffers(shapes.into_iter().map(room).collect()), shapes.map(RowPlaces::packed))
    }

    /// Returns the gradients, of the operands' shapes.
    pub(super) fn gradients(self, operands: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let [q, k, v] = match &self.0[..] {
            [all] => operands.map(|x| all.viewed_like(x)),
            own => [0, 1, 2].map(|i| own[i].transpose(1, 2)),
        };
        Ok([q?, k?, v?])
    }
}

fn dims(x: &Tensor) -> [usize; 4] {
    [0, 1, 2, 3].map(|dim| x.shape()[dim])
}

#[cfg(test)]
mod tests {
    use super::super::CpuAttention;
    use super::*;

    #[test]
    fn gradients_lie_as_parts_of_a_buffer_do() {
        let whole = Tensor::zeros(DType::F32, [2, 5, 3, 12]).permute(&[0, 2, 1, 3]).unwrap();
        let part = |start, len| whole.narrow(3, start, len).unwrap();
        let [q, k, v] = [part(0, 4), part(4, 4), part(8, 4)];
        let places = places_in_one_buffer([&q, &k, &v]).unwrap();
        assert_eq!(places[1], RowPlaces { first: 1, steps: [45, 3, 9] });
        let (buffers, of) = GradientBuffers::of([&q, &k, &v], DType::F32);
        assert_eq!(of, places);
        let gradients = buffers.gradients([&q, &k, &v]).unwrap();
        let joined = Tensor::whole_of(&gradients, 3).unwrap();
        assert_eq!((joined.shape(), joined.strides()), (whole.shape(), whole.strides()));

        // Not all of a buffer, one part twice, or parts of several buffers.
        let other = Tensor::zeros(DType::F32, [2, 5, 3, 12]).permute(&[0, 2, 1, 3]).unwrap();
        for refused in [[&q, &k, &k], [&q, &k, &part(9, 3)], [&q, &k, &other.narrow(3, 8, 4).unwrap()]] {
            assert_eq!(places_in_one_buffer(refused), None);
        }
        let (buffers, of) = GradientBuffers::of([&q, &k, &k], DType::F32);
        assert_eq!(of, [RowPlaces { first: 0, steps: [15, 1, 3] }; 3]);
        assert!(buffers.gradients([&q, &k, &k]).unwrap()[0].transpose(1, 2).unwrap().is_contiguous());
    }
    /// Gradients in one buffer have the bits of those in three, with infinities and NaNs that some queries see, too.
    #[test]
    fn results_do_not_depend_on_the_buffers() {
        let [len, d] = [70, 4];
        // One element of a key in the first entry of the batch.
        for odd in [0.5, f32::INFINITY, f32::NAN] {
            let value = |i: usize| ((i * 7919 + 5) % 1009) as f32 / 500.0 - 1.0;
            let mut all: Vec<f32> = (0..2 * len * 8 * d).map(value).collect();
            all[(40 * 8 + 5) * d] = odd;
            let all = Tensor::from_vec(all, [2, len, 8, d]).unwrap().transpose(1, 2).unwrap();
            let parts = [(0, 4), (4, 2), (6, 2)].map(|(start, heads)| all.narrow(1, start, heads).unwrap());
            assert!(places_in_one_buffer(parts.each_ref()).is_some());
            let run = |[q, k, v]: [&Tensor; 3]| {
                let call = CpuAttention::causal("attention", 0, 0.5);
                let (o, lse) = call.forward(q, k, v).unwrap();
                let grad = Tensor::full(DType::F32, o.shape().clone(), 0.25);
                let grads = call.backward([q, k, v], (&o, &lse), &grad).unwrap();
                [o].iter().chain(&grads).map(Tensor::to_f64_vec).collect::<Vec<_>>()
            };
            let own = parts.each_ref().map(|x| x.to_owned_copy().unwrap());
            let (one, three) = (run(parts.each_ref()), run(own.each_ref()));
            let bits = |x: &[Vec<f64>]| x.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one), bits(&three), "{odd}");
            // `[2, 4, len, d]`: queries before that key do not see it, later ones do.
            let rows =
                |range: std::ops::Range<usize>| one[0][2 * len * d..][range.start * d..range.end * d].iter();
            assert!(
                rows(0..40).all(|x| x.is_finite())
                    && (odd.is_finite() || !rows(40..len).all(|x| x.is_finite()))
            );
        }
    }
}
