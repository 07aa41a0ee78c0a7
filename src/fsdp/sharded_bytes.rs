//! The bytes that a rank holds under fully sharded data parallelism, known before the first step.

use std::fmt;

use crate::error::Result;
use crate::nn::Params;
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape, sort_by};

/// The bytes that one rank holds, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardedBytes {
    /// The stored parameters, in full precision.
    pub parameters: usize,
    /// The gradients after a backward pass.
    pub gradients: usize,
    /// Parameters that are held from one update to the next, in the dtype that modules compute in.
    pub held: usize,
    /// The copy of the stored parameters in the dtype that modules compute in, if that is another one: units are gathered
    /// from it in the forward pass, and again in the backward pass. Parameters that are held have none.
    pub rounded: usize,
    /// The gathered units at most, with their padding, in a pass that uses units in the order of their declaration: the root,
    /// those that stay gathered, and two others that follow each other, or one if two are more than
    /// [`Sharding::gather_at_most`](super::Sharding::gather_at_most) says.
    pub gathered: usize,
    /// The gradients of the two largest units before they are reduced, with their padding. (A unit with more padding than a
    /// sixteenth of its parameters is sent without.)
    pub unreduced: usize,
    /// The gradients of a unit that arrive from other ranks, to be folded in a fixed order, for the longest shard. Ranks that share memory
    /// fold them where they lie, and devices reduce them on their way in fast mode: these take less.
    pub received: usize,
}

impl ShardedBytes {
    /// Returns the bytes of this rank's parameters, known before the first step. An optimizer's states take the parameters'
    /// bytes each ([`ShardedBytes::with_states`]); activations come on top.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     params.root().child("h").child(0).param("w", [8, 4], Init::Ones)?;
    ///     fully_shard(&mut params, &["h.*"], &Sharding::zero2("dp"), &BlockPolicy::default())?;
    ///     let bytes = ShardedBytes::of(&params)?;
    ///     assert_eq!((bytes.parameters, bytes.gradients, bytes.held), (64, 64, 128));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit its parameter.
    pub fn of(params: &Params) -> Result<ShardedBytes> {
        let mesh = params.mesh().mesh();
        let mut all = ShardedBytes {
            parameters: 0,
            gradients: 0,
            held: 0,
            rounded: 0,
            gathered: 0,
            unreduced: 0,
            received: 0,
        };
        let bytes = |dtype: DType, shape: &Shape, layout: &Layout| -> Result<usize> {
            let local = Spec::new(mesh, dtype, shape, layout.clone())?.local_shape();
            Ok(local.numel() * dtype.size_bytes())
        };
        let (mut unreduced, mut received) = (Vec::new(), 0);
        for unit in params.units().iter() {
            let mut gradients = 0;
            let mut widest = 1;
            for &id in unit.members.iter() {
                let value = params.value(id);
                let placement = params.placement_of(id);
                let own = |layout: &Layout| bytes(value.dtype(), value.shape(), layout);
                all.parameters += own(&placement.stored)?;
                if !params.is_frozen(id) {
                    all.gradients += own(&placement.gradient)?;
                    gradients += own(params.used_layout(id))?;
                    widest = widest.max(value.dtype().size_bytes());
                }
                let computed = |layout: &Layout| bytes(params.compute_dtype(), value.shape(), layout);
                if placement.held != placement.stored {
                    all.held += computed(&placement.held)?;
                } else if params.compute_dtype() != value.dtype() {
                    all.rounded += computed(&placement.stored)?;
                }
            }
            unreduced.push(unit.buffer_len(gradients / widest) * widest);
            received = received.max(gradients + unit.padding * widest);
        }
        sort_by(&mut unreduced, |a, b| b.cmp(a));
        all.unreduced = unreduced.iter().take(2).sum();
        all.received = if mesh.rank_len() > 1 { received } else { 0 };
        all.gathered = params.most_gathered()?;
        Ok(all)
    }

    /// Returns all bytes with `states` optimizer states per parameter: 2 for AdamW, 1 for SGD with momentum. Activations
    /// come on top.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init, tensor::DType};
    /// use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     params.compute_in(DType::BF16)?;
    ///     params.root().child("h").child(0).param("w", [8, 4], Init::Ones)?;
    ///     fully_shard(&mut params, &["h.*"], &Sharding::zero3("fsdp"), &BlockPolicy::default())?;
    ///     let bytes = ShardedBytes::of(&params)?;
    ///     assert_eq!((bytes.parameters, bytes.gradients, bytes.rounded, bytes.gathered), (64, 64, 32, 64));
    ///     assert_eq!((bytes.unreduced, bytes.received), (128, 128));
    ///     assert_eq!(bytes.with_states(2), 3 * 64 + 64 + 32 + 64 + 128 + 128);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn with_states(&self, states: usize) -> usize {
        let ShardedBytes { parameters, gradients, held, rounded, gathered, unreduced, received } = *self;
        parameters * (1 + states) + gradients + held + rounded + gathered + unreduced + received
    }
}

/// Prints a line per purpose, and the sum with AdamW's two states.
impl fmt::Display for ShardedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShardedBytes { parameters, gradients, held, rounded, gathered, unreduced, received } = *self;
        let rows = [
            ("parameters", parameters),
            ("each state of the optimizer", parameters),
            ("gradients", gradients),
            ("held parameters", held),
            ("rounded parameters", rounded),
            ("gathered units", gathered),
            ("unreduced gradients", unreduced),
            ("gradients that arrive", received),
            ("all of these, with two states, as of AdamW", self.with_states(2)),
        ];
        rows.iter().try_for_each(|(what, bytes)| writeln!(f, "{bytes:>16} bytes: {what}"))
    }
}
