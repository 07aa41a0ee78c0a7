//! Tensors that share one block of memory and are written separately: the parts of a buffer.
//!
//! Views of a tensor share its buffer, so none can be written in place while another is held. [`Tensor::cut`] makes tensors
//! of their own instead: each has some of the buffer's bytes alone. While nothing writes them, [`Tensor::joined`] reads all
//! of them as one tensor, without copying. A unit of parameters is stored so, and collectives receive into such parts.

use super::tensor::Tensor;
use crate::error::Result;
use crate::tensor::result_places::{Place, offer};
use crate::tensor::storage::Buffer;
use crate::tensor::{Shape, sort_by_key};

impl Tensor {
    /// Returns tensors over parts of this tensor's buffer, which are written in place each by itself: one of each shape, from
    /// the element `start` on, for each pair. The parts lie one after the other; elements between them are kept and not
    /// written. Copies the elements first if another tensor shares the buffer.
    ///
    /// # Errors
    /// Returns an error if such a copy finds no room.
    pub(crate) fn cut(mut self, parts: &[(usize, Shape)]) -> Result<Vec<Tensor>> {
        let (size, dtype) = (self.dtype.size_bytes(), self.dtype);
        if !self.is_unique() || self.offset != 0 {
            self = self.to_owned_copy()?;
        }
        let range = |(start, shape): &(usize, Shape)| {
            start.saturating_mul(size)..start.saturating_add(shape.numel()).saturating_mul(size)
        };
        let ranges: Vec<_> = parts.iter().map(range).collect();
        let buffers = match std::sync::Arc::try_unwrap(self.storage) {
            Ok(buffer) => buffer.cut(&ranges),
            Err(_) => unreachable!("it was made unique above"),
        };
        let shapes = parts.iter().map(|(_, shape)| shape.clone());
        Ok(buffers
            .into_iter()
            .zip(shapes)
            .map(|(part, shape)| Tensor::from_buffer(part, dtype, shape))
            .collect())
    }

    /// Returns the elements of a tensor that was [cut](Tensor::cut) into `parts` as a tensor of one dim, which shares them,
    /// or `None` if these are not all the parts, whole and in their order, each from the given element on.
    pub(crate) fn joined<'a>(parts: impl IntoIterator<Item = (usize, &'a Tensor)>) -> Option<Tensor> {
        let mut dtype = None;
        let storage = |(start, x): (usize, &Tensor)| {
            let is_whole = x.len_bytes() == x.storage.len_bytes() && x.is_contiguous();
            let is_alike = is_whole && *dtype.get_or_insert(x.dtype) == x.dtype;
            is_alike.then(|| (start * x.dtype.size_bytes(), x.storage.clone()))
        };
        let buffer = Buffer::joined(parts.into_iter().map(storage).collect::<Option<_>>()?)?;
        let dtype = dtype?;
        let len = buffer.len_bytes() / dtype.size_bytes();
        Some(Tensor::from_buffer(buffer, dtype, [len].into()))
    }
}

/// Tensors that are all the parts of one block of memory.
pub(crate) struct CutBlock {
    /// The elements of the block, and those between its parts.
    pub whole: Tensor,
    /// In the order of the block, the number of each part among the tensors that were given, its first element and its shape.
    parts: Vec<(usize, usize, Shape)>,
}

impl CutBlock {
    /// Returns the blocks whose parts are all among these tensors, whole. While a block is held, its parts are not written in
    /// place.
    pub fn of(tensors: &[&Tensor]) -> Vec<CutBlock> {
        let part = |(number, x): (usize, &&Tensor)| {
            let (block, index, start) = x.storage.part()?;
            Some((block, index, (number, start / x.dtype.size_bytes(), x.shape.clone())))
        };
        let mut found: Vec<_> = tensors.iter().enumerate().filter_map(part).collect();
        sort_by_key(&mut found, |(block, index, _)| (*block, *index));
        let block = |of: &[(usize, usize, (usize, usize, Shape))]| {
            let whole = Tensor::joined(of.iter().map(|(_, _, (i, start, _))| (*start, tensors[*i])))?;
            Some(CutBlock { whole, parts: of.iter().map(|(_, _, part)| part.clone()).collect() })
        };
        found.chunk_by(|a, b| a.0 == b.0).filter_map(block).collect()
    }

    /// Cuts another tensor as this block is cut, and returns the parts with the numbers of this one's.
    pub fn cut_alike(&self, other: Tensor) -> Result<Vec<(usize, Tensor)>> {
        let ranges: Vec<_> = self.parts.iter().map(|(_, start, shape)| (*start, shape.clone())).collect();
        Ok(self.parts.iter().map(|(i, ..)| *i).zip(other.cut(&ranges)?).collect())
    }
}

/// Runs `f`, whose allocations take tensors of `places`. Each place fills a buffer that nothing else holds. Returns the result
/// of `f`, and the places that were not taken, at their positions. Places that are offered outside do not count within.
pub(crate) fn with_places<T>(places: Vec<Tensor>, f: impl FnOnce() -> T) -> (T, Vec<Option<Tensor>>) {
    let shapes: Vec<Shape> = places.iter().map(|x| x.shape.clone()).collect();
    let place = |x: Tensor| {
        assert!(x.is_contiguous() && x.len_bytes() == x.storage.len_bytes(), "a place fills its buffer");
        Place { numel: x.numel(), dtype: x.dtype, storage: x.storage }
    };
    let (result, left) = offer(places.into_iter().map(place).collect(), f);
    let tensor = |(place, shape): (Option<Place>, Shape)| {
        let Place { storage, dtype, .. } = place?;
        Some(Tensor { storage, dtype, strides: shape.strides(), shape, offset: 0 })
    };
    (result, left.into_iter().zip(shapes).map(tensor).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Device, meta, storage};

    fn address(x: &Tensor) -> usize {
        x.data::<f32>().expect("f32").as_ptr() as usize
    }

    #[test]
    fn parts_are_written_in_place_while_others_are_read() {
        let whole =
            Tensor::build([10], |out: &mut [f32]| out.iter_mut().zip(0..).for_each(|(x, i)| *x = i as f32));
        let at = address(&whole);
        let mut parts = whole.cut(&[(0, [2, 2].into()), (4, [0].into()), (5, [3].into())]).unwrap();
        assert_eq!([0, 2].map(|i| address(&parts[i]) - at), [0, 20]);
        let other = parts[2].clone();
        assert!(parts[0].is_unique() && !parts[2].is_unique());
        parts[0].make_mut::<f32>().unwrap().fill(-1.0);
        assert_eq!((address(&parts[0]), other.to_vec::<f32>().unwrap()), (at, vec![5.0, 6.0, 7.0]));
        assert_eq!(parts[2].data::<f32>().unwrap().len(), 3, "a part ends where the next one may begin");
        assert!(!parts[0].shares_storage(&parts[2]) && !parts[0].owns_buffer());
        drop(other);
        parts[2].make_mut::<f32>().unwrap()[0] = 9.0;
        let mut joined = Tensor::joined([0, 4, 5].into_iter().zip(&parts)).unwrap();
        assert_eq!(joined.to_vec::<f32>().unwrap(), [-1.0, -1.0, -1.0, -1.0, 4.0, 9.0, 6.0, 7.0, 8.0, 9.0]);
        // While they are joined, a write copies: neither the parts nor what is read moves.
        assert!(!parts[0].is_unique() && !joined.is_unique());
        parts[0].make_mut::<f32>().unwrap().fill(3.0);
        joined.make_mut::<f32>().unwrap()[1] = 2.0;
        assert_ne!(address(&parts[0]), at);
        assert_eq!(joined.to_vec::<f32>().unwrap()[..2], [-1.0, 2.0]);
    }

    #[test]
    fn only_all_parts_in_their_order_are_joined() {
        let cut = || Tensor::zeros(DType::F32, [4]).cut(&[(0, [1].into()), (1, [3].into())]).unwrap();
        let (parts, others) = (cut(), cut());
        assert!(Tensor::joined([(0, &parts[0]), (1, &parts[1])]).is_some());
        assert!(Tensor::joined([(0, &parts[0])]).is_none() && Tensor::joined([]).is_none());
        assert!(Tensor::joined([(1, &parts[1]), (0, &parts[0])]).is_none(), "another order");
        assert!(Tensor::joined([(0, &parts[0]), (2, &parts[1])]).is_none(), "another position");
        assert!(Tensor::joined([(0, &parts[0]), (1, &others[1])]).is_none(), "another buffer's");
        let some = parts[1].narrow(0, 0, 2).unwrap();
        assert!(Tensor::joined([(0, &parts[0]), (1, &some)]).is_none(), "not all of a part");
        assert!(Tensor::joined([(0, &Tensor::zeros(DType::F32, [4]))]).is_none(), "never cut");
    }

    #[test]
    fn blocks_are_those_whose_parts_are_all_there() {
        let cut = |value: f32| {
            let whole = Tensor::build([5], |out: &mut [f32]| out.fill(value));
            whole.cut(&[(0, [1, 2].into()), (3, [2].into())]).unwrap()
        };
        let (a, b, alone) = (cut(1.0), cut(2.0), Tensor::zeros(DType::F32, [3]));
        let blocks = CutBlock::of(&[&a[1], &alone, &b[0], &a[0]]);
        assert_eq!(blocks.len(), 1, "a part of the second block is missing");
        assert_eq!(blocks[0].whole.to_vec::<f32>().unwrap(), [1.0; 5]);
        let other = Tensor::build([5], |out: &mut [i64]| out.iter_mut().zip(0..).for_each(|(x, i)| *x = i));
        let parts = blocks[0].cut_alike(other).unwrap();
        let found = parts.iter().map(|(i, part)| (*i, part.notation(), part.to_vec::<i64>().unwrap()));
        let wanted = [(3, "i64[1, 2]".into(), vec![0, 1]), (0, "i64[2]".into(), vec![3, 4])];
        assert_eq!(found.collect::<Vec<_>>(), wanted);
        assert_eq!(CutBlock::of(&[&a[0], &b[1], &a[1], &b[0]]).len(), 2);
        assert!(CutBlock::of(&[&a[0], &a[0]]).is_empty() && CutBlock::of(&[]).is_empty());
    }

    #[test]
    fn memory_is_freed_with_the_last_part() {
        std::thread::spawn(|| {
            let mut parts =
                Tensor::zeros(DType::U8, [4096]).cut(&[(0, [1].into()), (64, [2].into())]).unwrap();
            assert_eq!(storage::pool_stats().live_bytes, 4096);
            drop(parts.pop());
            let joined = Tensor::joined([(0, &parts[0])]);
            assert!(joined.is_none() && storage::pool_stats().live_bytes == 4096);
            drop(parts);
            assert_eq!(storage::pool_stats().live_bytes, 0);
            let whole = Tensor::zeros_on(Device::Meta, DType::U8, [100]).unwrap();
            let parts = whole.cut(&[(0, [40].into()), (40, [60].into())]).unwrap();
            assert_eq!((meta::memory_stats().live_bytes, parts[1].notation()), (100, "u8[60]".into()));
            assert!(Tensor::joined([0, 40].into_iter().zip(&parts)).unwrap().is_meta());
            drop(parts);
            assert_eq!(meta::memory_stats().live_bytes, 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_shared_tensor_is_copied_before_it_is_cut() {
        let whole = Tensor::zeros(DType::F32, [4]);
        let mut parts = whole.clone().cut(&[(0, [4].into())]).unwrap();
        parts[0].make_mut::<f32>().unwrap().fill(1.0);
        assert_eq!(whole.to_f64_vec(), [0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "parts lie one after the other")]
    fn parts_do_not_overlap() {
        let _ = Tensor::zeros(DType::F32, [4]).cut(&[(0, [3].into()), (2, [2].into())]);
    }

    /// The last element's byte would be the first one's again.
    #[test]
    #[should_panic(expected = "parts lie one after the other")]
    fn parts_are_inside_the_whole() {
        let _ = Tensor::zeros(DType::F32, [4]).cut(&[(0, [1 << 62].into())]);
    }

    #[test]
    fn the_first_allocation_that_fits_takes_a_place() {
        let address = |x: &Tensor| x.data::<f32>().map(|x| x.as_ptr() as usize).unwrap();
        let places = Tensor::zeros(DType::F32, [5]).cut(&[(0, [2].into()), (2, [3].into())]).unwrap();
        let at: Vec<usize> = places.iter().map(address).collect();
        let (made, left) = with_places(places, || {
            let other = Tensor::full(DType::F32, [4], 1.0);
            let (inner, _) = with_places(Vec::new(), || Tensor::zeros(DType::F32, [3]));
            let own = Tensor::full(DType::F32, [3, 1], 2.0);
            [other, inner, own, Tensor::zeros(DType::F32, [3]), Tensor::zeros(DType::F64, [2])]
        });
        assert_eq!(
            made.iter().take(4).map(|x| address(x) == at[1]).collect::<Vec<_>>(),
            [false, false, true, false]
        );
        assert_eq!(left.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
        assert_ne!(address(&Tensor::zeros(DType::F32, [2])), at[0], "nothing is offered any more");
        let unwound =
            std::panic::catch_unwind(|| with_places(vec![Tensor::zeros(DType::F32, [7])], || panic!("no")));
        assert!(unwound.is_err());
        assert_ne!(address(&Tensor::zeros(DType::F32, [7])), at[1]);
    }
}
