//! The blocks that stay on one rank, by path pattern.

use crate::comm::path_matches;
use crate::error::{Error, Result};
use crate::placement::Spec;
use crate::tensor::Shape;

/// A block: elements of a parameter that lie on one rank.
///
/// If tensor or expert parallelism cuts a parameter first, blocks are counted in the part that is left to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Each element by itself: the shortest shards.
    Element,
    /// This number of rows, counted over all leading dims. A vector has rows of one element.
    Rows(usize),
    /// A matrix of the last two dims, such as an expert's. A vector is one block.
    Matrix,
    /// Tiles that are quantised together, for matrices whose rows are multiples of `columns`. All tiles beside each
    /// other stay together, since a part of a row is no run of elements.
    Tile {
        /// The rows of a tile.
        rows: usize,
        /// The columns of a tile.
        columns: usize,
    },
}

/// The blocks of parameters, by path pattern: rows, unless a pattern says otherwise.
///
/// ```
/// use isoshard::fsdp::{Block, BlockPolicy};
/// let policy = BlockPolicy::new(Block::Element).set("h.*.mlp.**", Block::Rows(32));
/// assert_eq!(policy.of("h.3.mlp.up.weight"), Block::Rows(32));
/// assert_eq!(policy.of("wte.weight"), Block::Element);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPolicy {
    default: Block,
    rules: Vec<(String, Block)>,
}

impl Default for BlockPolicy {
    /// Returns the policy of single rows.
    fn default() -> BlockPolicy {
        BlockPolicy::new(Block::Rows(1))
    }
}

impl BlockPolicy {
    /// Returns a policy with one block for all parameters.
    ///
    /// ```
    /// use isoshard::fsdp::{Block, BlockPolicy};
    /// assert_eq!(BlockPolicy::new(Block::Rows(1)), BlockPolicy::default());
    /// ```
    pub fn new(block: Block) -> BlockPolicy {
        BlockPolicy { default: block, rules: Vec::new() }
    }

    /// Sets the block of parameters whose path matches a pattern of [`Params::matching`](crate::nn::Params::matching). Later
    /// patterns override earlier ones.
    ///
    /// ```
    /// use isoshard::fsdp::{Block, BlockPolicy};
    /// let policy = BlockPolicy::default().set("**", Block::Element).set("h.**", Block::Matrix);
    /// assert_eq!([policy.of("wte"), policy.of("h.0.w")], [Block::Element, Block::Matrix]);
    /// ```
    pub fn set(mut self, pattern: &str, block: Block) -> BlockPolicy {
        self.rules.push((pattern.into(), block));
        self
    }

    /// Returns the block of a parameter.
    ///
    /// ```
    /// use isoshard::fsdp::{Block, BlockPolicy};
    /// assert_eq!(BlockPolicy::default().of("h.0.mlp.up.weight"), Block::Rows(1));
    /// ```
    pub fn of(&self, path: &str) -> Block {
        let rule = self.rules.iter().rev().find(|(pattern, _)| path_matches(pattern, path));
        rule.map_or(self.default, |(_, block)| *block)
    }

    /// Returns the patterns.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|(pattern, _)| &pattern[..])
    }
}

impl Block {
    /// Returns the number of elements of a block of a rank's part of a parameter, before FSDP cuts it.
    ///
    /// # Errors
    /// Refuses blocks of no elements, and tiles that rows do not hold a whole number of.
    pub(super) fn numel(self, path: &str, local: &Shape) -> Result<usize> {
        let columns = if local.len() > 1 { local[local.len() - 1] } else { 1 };
        let refuse = |rule: &str| {
            Err(Error::invalid("fully_shard", rule, format!("{self:?} for {local} at {path}"), ""))
        };
        let rows = |n: usize| match n.checked_mul(columns.max(1)) {
            Some(0) | None => refuse("a block has at least one element, and no more than usize counts"),
            Some(numel) => Ok(numel),
        };
        match self {
            Block::Element => Ok(1),
            Block::Rows(n) => rows(n),
            Block::Matrix => Ok(local[local.len().saturating_sub(2)..].iter().product::<usize>().max(1)),
            Block::Tile { rows: n, columns: c } => {
                if c == 0 || !columns.is_multiple_of(c) {
                    return refuse("rows hold a whole number of tiles");
                }
                rows(n)
            }
        }
    }

    /// Refuses blocks that do not stay whole between indices of dim 0, at which a parameter is cut that other axes cut into
    /// unequal parts.
    pub(super) fn expect_whole_between_rows(self, path: &str, spec: &Spec) -> Result<()> {
        self.numel(path, &spec.local_shape_at(&vec![0; spec.mesh.ndim()]))?;
        let stays = match self {
            Block::Element | Block::Rows(1) | Block::Tile { rows: 1, .. } => true,
            Block::Matrix => spec.shape.len() > 2,
            Block::Rows(_) | Block::Tile { .. } => false,
        };
        if stays {
            return Ok(());
        }
        let rule = "a parameter that the plan cuts into unequal parts is cut by rows, so larger blocks would not stay whole";
        let given = format!("{self:?} for {spec} at {path}");
        let remedy = "cut it evenly in the plan, or give it Block::Rows(1)";
        Err(Error::unsupported("fully_shard", rule, given, remedy))
    }
}
