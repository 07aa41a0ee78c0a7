//! Attention and its derivatives: the kernels over heads of queries, keys and values.
//!
//! Queries are processed in blocks. A block computes the scores of the leaves of 32 keys that any of its
//! queries sees, and masks the keys that a query does not see. Sums over keys follow
//! [`SplitRule::PowerOfTwo`](crate::summation::SplitRule::PowerOfTwo), in
//! which masked keys change no sum. So an output row, and the gradient of its query, depends only on the query and on
//! the keys that it sees: sharding queries, heads or batch changes no bit, and neither do keys that are masked or
//! appended. The gradients of keys and values are sums over the given queries
//! [along the reduction tree](backward).
//!
//! The scores of a block lie [by queries](score_rows), or [by keys](score_columns) where windows alone decide what a query sees, without
//! dropout. By keys, products leave out what windows hide, in [`bands`].

mod backward;
mod backward_plan;
mod bands;
mod bias;
mod call;
mod forward;
mod heads;
mod key_parts;
mod key_rows;
mod lane_windows;
mod query_block;
mod query_sums;
mod score_columns;
mod score_rows;
mod scores;
mod scratch;
mod window;

pub use backward::AttentionPass;
pub use bias::BiasSum;
pub use call::{AttentionDropout, AttentionKernel, KeepKeys};
pub use heads::{Heads, RowPlaces};
pub use scores::{BroadcastRows, DocumentRows, ScoreInputs};
pub use window::WindowRule;

use crate::gemm::Gemm;

/// An element type of attention: f32 or f64. Each group of `heads / groups` neighbouring heads of queries uses one head of keys
/// and values. No element of a result is -0.
///
/// ```
/// use isoshard_kernels::attention::{Attention, AttentionKernel, Heads, ScoreInputs, WindowRule};
/// let scores = ScoreInputs::new(WindowRule { before: None, after: Some(0) }, None, None, None, None);
/// let attention = AttentionKernel { q_start: 0, scale: 1.0, dropout: None, scores };
/// let (q, v) = ([0.0f64; 6], [1.0, 5.0]);
/// let q = Heads::new(&q, [1, 1, 2, 3], [6, 6, 3, 1]);
/// let v = Heads::new(&v, [1, 1, 2, 1], [2, 2, 1, 1]);
/// let (mut o, mut lse) = ([0.0; 2], [f64::NEG_INFINITY; 2]);
/// f64::attention(&attention, [q, q, v], &mut o, &mut lse);
/// assert_eq!((o, format!("{lse:.3?}")), ([1.0, 3.0], "[0.000, 0.693]".to_string())); // ln 1, ln 2
/// ```
pub trait Attention: Gemm {
    /// Writes the output `[batch, queries, heads, dv]`, and the logarithm of each row's sum of exponentials `[batch, heads,
    /// queries]`, which is -inf at first. A query without keys gives 0 and -inf.
    ///
    /// # Panics
    /// Panics if an element lies outside its slice.
    fn attention(
        call: &AttentionKernel<'_, Self>,
        qkv: [Heads<'_, Self>; 3],
        o: &mut [Self],
        lse: &mut [Self],
    );

    /// Writes the gradients of queries, keys and values to the [places](RowPlaces) of each: in one buffer, or in one of each.
    ///
    /// # Panics
    /// Panics if an element lies outside its slice.
    fn attention_backward(
        call: &AttentionKernel<'_, Self>,
        pass: &AttentionPass<'_, Self>,
        buffers: &mut [&mut [Self]],
        places: [RowPlaces; 3],
    );

    /// Writes the gradient of a bias of the scores with an element for each key to `data`, which is 0 at first.
    ///
    /// # Panics
    /// Panics if an element lies outside its slice.
    fn attention_bias_backward(
        call: &AttentionKernel<'_, Self>,
        pass: &AttentionPass<'_, Self>,
        sum: &BiasSum,
        data: &mut [Self],
    );
}

macro_rules! attention {
    ($($t:ty)*) => {$(
        impl Attention for $t {
            fn attention(
                call: &AttentionKernel<'_, $t>,
                qkv: [Heads<'_, $t>; 3],
                o: &mut [$t],
                lse: &mut [$t],
            ) {
                call.forward(qkv, o, lse);
            }

            fn attention_backward(
                call: &AttentionKernel<'_, $t>,
                pass: &AttentionPass<'_, $t>,
                buffers: &mut [&mut [$t]],
                places: [RowPlaces; 3],
            ) {
                call.backward(pass, buffers, places);
            }

            fn attention_bias_backward(
                call: &AttentionKernel<'_, $t>,
                pass: &AttentionPass<'_, $t>,
                sum: &BiasSum,
                data: &mut [$t],
            ) {
                call.bias_backward(pass, sum, data);
            }
        }
    )*};
}
attention!(f32 f64);
