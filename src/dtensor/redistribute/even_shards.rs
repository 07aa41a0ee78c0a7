//! The positions of several tensors in one buffer of equal shards, such as the parameters of a unit of FSDP.
//!
//! The buffer has a shard of `shard_len` elements per member of a group, and each tensor lies in it as a run: the parts of
//! the members that hold it follow each other across the ends of shards, without a gap. So each member sends its shard as it
//! is, and what arrives is the tensors themselves. [`ShardPlanner`](crate::fsdp::ShardPlanner) makes layouts for which there
//! are such positions; the rule that every tensor is cut into equal parts has none, except for one tensor.

use super::lower::{ExchangeStage, FoldStage};
use super::redistribution::ExchangeKind;
use crate::dtensor::redistribute::exchange_piece::ExchangePiece;
use crate::error::Result;
use crate::tensor::{DType, Device, Shape, Tensor, sort_by_key};

/// Shards are multiples of as many elements if the tensors leave a choice: 16 bytes of 16-bit elements.
const ALIGN: usize = 8;

/// The most padding in a buffer, as a divisor of the tensors' elements.
const PADDING: usize = 16;

/// Returns true if a buffer of so many elements may have so many between its tensors. One with more is sent tensor by tensor.
pub(crate) fn may_be_padding(padding: usize, buffer_len: usize) -> bool {
    padding <= buffer_len.saturating_sub(padding) / PADDING
}

/// The positions of tensors in a buffer of equal shards.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct EvenShards {
    /// The elements of a shard.
    pub shard_len: usize,
    pub members_len: usize,
    /// The position of each tensor in the whole buffer.
    pub starts: Vec<usize>,
    /// The tensors in the order of their positions.
    order: Vec<usize>,
    lens: Vec<MemberLens>,
}

/// The lengths of the parts of a tensor. Only the first and the last are less than a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemberLens {
    /// The first and the last member that hold elements.
    first: usize,
    last: usize,
    first_len: usize,
    last_len: usize,
    /// The elements of each member between them, which are equally many.
    middle_len: usize,
}

impl MemberLens {
    /// Returns the lengths of a tensor's parts, or `None` if those between the first and the last differ.
    fn new(lens: impl Iterator<Item = usize>) -> Option<MemberLens> {
        let mut own: Option<MemberLens> = None;
        let mut after = 0;
        for (member, len) in lens.enumerate() {
            match &mut own {
                None if len == 0 => {}
                None => {
                    own = Some(MemberLens {
                        first: member,
                        last: member,
                        first_len: len,
                        last_len: len,
                        middle_len: 0,
                    })
                }
                Some(_) if len == 0 => after += 1,
                // A member without elements lies before this one.
                Some(_) if after > 0 => return None,
                Some(own) => {
                    if own.last > own.first {
                        if own.middle_len != 0 && own.middle_len != own.last_len {
                            return None;
                        }
                        own.middle_len = own.last_len;
                    }
                    (own.last, own.last_len) = (member, len);
                }
            }
        }
        own.or(Some(MemberLens { first: 0, last: 0, first_len: 0, last_len: 0, middle_len: 0 }))
    }

    /// Returns the lengths of the parts of a tensor that every member of a group gathers, or `None` if the parts do not
    /// follow each other in it.
    pub(super) fn of_gather(x: &ExchangeStage) -> Option<MemberLens> {
        if x.out.nodes != 1 {
            return None;
        }
        if let ExchangeKind::Broadcast { root } = x.kind {
            let len = x.shapes[root].numel();
            return MemberLens::new((0..x.shapes.len()).map(|k| if k == root { len } else { 0 }));
        }
        let mut end = 0;
        for (piece, shape) in x.take.iter().zip(&x.shapes) {
            let len = shape.numel();
            if piece.numel() != len || (len > 0 && piece.run_in_receiver() != Some(end)) {
                return None;
            }
            end += len;
        }
        MemberLens::new(x.shapes.iter().map(Shape::numel))
    }

    /// Returns the lengths of the parts into which a tensor is reduced, or `None` if they do not follow each other in it.
    pub(super) fn of_reduction(fold: &FoldStage) -> Option<MemberLens> {
        let mut end = 0;
        for piece in &fold.give {
            let len = piece.numel();
            if len > 0 && piece.run_in_sender() != Some(end) {
                return None;
            }
            end += len;
        }
        MemberLens::new(fold.give.iter().map(ExchangePiece::numel))
    }

    /// Returns the lengths of a tensor that one member holds alone.
    pub(super) fn whole(len: usize) -> Option<MemberLens> {
        MemberLens::new([len].into_iter())
    }

    /// Returns the elements that a member holds.
    fn on(&self, member: usize) -> usize {
        match member {
            m if m == self.first => self.first_len,
            m if m == self.last => self.last_len,
            m if m > self.first && m < self.last => self.middle_len,
            _ => 0,
        }
    }

    fn numel(&self) -> usize {
        (self.first..=self.last).map(|member| self.on(member)).sum()
    }
}

impl EvenShards {
    /// Returns the positions of tensors with parts of these lengths, or `None` if there are none, or if the padding would be
    /// more than a sixteenth of the elements.
    pub fn new(members_len: usize, lens: Vec<MemberLens>) -> Option<EvenShards> {
        let mut used = vec![0; members_len];
        let mut middle_len = 0;
        for tensor in &lens {
            (tensor.first..=tensor.last).for_each(|member| used[member] += tensor.on(member));
            middle_len = middle_len.max(tensor.middle_len);
        }
        let most = used.iter().copied().max()?;
        // One member's shard is all-reduced, not cut.
        let fixed = middle_len > 0 || members_len == 1;
        let shard_len = if fixed { most } else { most.next_multiple_of(ALIGN) };
        let total: usize = used.iter().sum();
        let is_full = |tensor: &MemberLens| tensor.middle_len == 0 || tensor.middle_len == shard_len;
        let padded = shard_len.checked_mul(members_len)?;
        if total == 0 || !may_be_padding(padded - total, padded) || !lens.iter().all(is_full) {
            return None;
        }
        let mut order: Vec<usize> = (0..lens.len()).collect();
        sort_by_key(&mut order, |&i| (lens[i].first, lens[i].last, i));
        // Tensors that begin on a member follow the one that ends there. One that goes on ends with the shard.
        let mut ends = vec![0; members_len];
        let mut is_crossed = vec![false; members_len];
        let mut starts = vec![0; lens.len()];
        for &i in &order {
            let MemberLens { first, last, first_len, last_len, .. } = lens[i];
            if first == last {
                starts[i] = first * shard_len + ends[first];
                ends[first] += first_len;
                continue;
            }
            if is_crossed[first..last].contains(&true) {
                return None;
            }
            is_crossed[first..last].fill(true);
            starts[i] = (first + 1) * shard_len - first_len;
            ends[last] = last_len;
        }
        Some(EvenShards { shard_len, members_len, starts, order, lens })
    }

    /// Returns the tensors that a member holds elements of, in the order in which they lie in its shard, with their positions
    /// there.
    pub fn parts_of(&self, member: usize) -> impl Iterator<Item = (usize, usize)> {
        let shard_start = member * self.shard_len;
        let held = self.order.iter().filter(move |&&i| self.lens[i].on(member) > 0);
        held.map(move |&i| (i, self.starts[i].saturating_sub(shard_start)))
    }

    /// Returns the tensors that have elements, in the order in which they lie in the whole buffer.
    pub fn tensors(&self) -> impl Iterator<Item = usize> {
        self.order.iter().copied().filter(|&i| self.numel_of(i) > 0)
    }

    /// Returns the elements of the whole buffer.
    pub fn buffer_len(&self) -> usize {
        self.members_len * self.shard_len
    }

    /// Returns the number of elements of a tensor.
    pub fn numel_of(&self, tensor: usize) -> usize {
        self.lens[tensor].numel()
    }

    /// Returns the bytes that a member receives if all gather the buffer.
    pub fn received_bytes(&self, dtype: DType) -> u64 {
        dtype.bytes_of((self.members_len - 1).saturating_mul(self.shard_len))
    }

    /// Returns tensors for the parts of all members, which lie one after the other.
    ///
    /// # Errors
    /// Returns an error if there is no room.
    pub fn rooms(&self, device: Device, dtype: DType) -> Result<Vec<Tensor>> {
        let shards: Vec<(usize, Shape)> =
            (0..self.members_len).map(|member| (member * self.shard_len, [self.shard_len].into())).collect();
        Tensor::uninit_on(device, dtype, [self.buffer_len()])?.cut(&shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(members: usize, lens: &[&[usize]]) -> Option<EvenShards> {
        let lens = lens.iter().map(|lens| MemberLens::new(lens.iter().copied()));
        EvenShards::new(members, lens.collect::<Option<_>>()?)
    }

    #[test]
    fn tensors_run_across_the_ends_of_shards() {
        let x = even(3, &[&[0, 2, 0], &[5, 8, 1], &[3, 0, 0]]);
        assert_eq!(x, None, "a full shard has no room for another tensor");
        let x = even(3, &[&[0, 0, 2], &[5, 8, 1], &[3, 0, 0], &[0, 0, 4], &[0, 0, 0]]).unwrap();
        assert_eq!((x.shard_len, &x.starts[..]), (8, &[17, 3, 0, 19, 3][..]));
        assert_eq!(x.parts_of(0).collect::<Vec<_>>(), [(2, 0), (1, 3)]);
        assert_eq!(x.parts_of(1).collect::<Vec<_>>(), [(1, 0)]);
        assert_eq!(x.parts_of(2).collect::<Vec<_>>(), [(1, 0), (0, 1), (3, 3)]);
        assert_eq!((x.numel_of(1), x.numel_of(4), x.received_bytes(DType::BF16)), (14, 0, 32));
        // A gap lies before a tensor that goes on, and after one that does not.
        let x = even(2, &[&[8, 0], &[7, 16]]).unwrap();
        assert_eq!((x.shard_len, x.starts), (16, vec![0, 9]));
    }

    #[test]
    fn tensors_cut_into_equal_parts_have_no_positions() {
        assert!(even(2, &[&[8, 8]]).is_some());
        assert_eq!(even(2, &[&[4, 4], &[4, 4]]), None, "two tensors go on from one shard");
        assert_eq!(even(3, &[&[4, 0, 4]]), None, "a member in between has none");
        assert_eq!(even(4, &[&[1, 2, 3, 1]]), None, "shards in between differ");
        assert_eq!(even(3, &[&[4, 8, 4], &[0, 9, 0]]), None, "a shard in between is not full");
        assert_eq!(even(4, &[&[100, 0, 0, 0]]), None, "padding");
        assert_eq!(even(2, &[&[0, 0]]), None);
    }
}
