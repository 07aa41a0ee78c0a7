//! One rank's part of a batch: its place in the batch, and its elements.

use std::ops::Range;

use crate::error::Result;
use crate::placement::Region;
use crate::tensor::{DType, Shape, Tensor};

/// The elements of a batch `[batch, block]` that one rank stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BatchShard {
    region: Region,
    batch: usize,
    block: usize,
    /// True if documents are told apart.
    tagged: bool,
}

/// One rank's elements of a batch, in tensors of the thread that made them.
#[derive(Debug)]
pub(super) struct LocalBatch {
    pub tokens: Tensor,
    pub targets: Tensor,
    /// `None` unless documents are told apart, and so are the positions.
    pub documents: Option<Tensor>,
    pub positions: Option<Tensor>,
}

/// The elements of a batch while they are written.
pub(super) struct BatchLists<'a> {
    tokens: &'a mut [i64],
    targets: &'a mut [i64],
    documents: Option<&'a mut [i64]>,
    positions: Option<&'a mut [i64]>,
}

/// A token of a row, with all that a batch says about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchToken {
    pub token: i64,
    pub target: i64,
    pub document: i64,
    pub position: i64,
}

impl BatchShard {
    pub fn new(region: &Region, (batch, block): (usize, usize), tagged: bool) -> BatchShard {
        BatchShard { region: region.clone(), batch, block, tagged }
    }

    /// Calls `f(row, columns, offset of the first one in local storage)` for the parts of rows, up to the first error.
    pub fn each_row(&self, f: &mut dyn FnMut(usize, Range<usize>, usize) -> Result<()>) -> Result<()> {
        let (block, mut done) = (self.block, Ok(()));
        self.region.runs(&Shape::from([self.batch, block]), |global, mut local, mut len| {
            let mut element = global as usize;
            while len > 0 && done.is_ok() {
                let (row, column) = (element / block, element % block);
                let here = len.min(block - column);
                done = f(row, column..column + here, local);
                (element, local, len) = (element + here, local + here, len - here);
            }
        });
        done
    }
}

impl LocalBatch {
    /// Returns room for a part of a batch, with arbitrary elements. It is the calling thread's, and counts in its
    /// limit.
    ///
    /// # Errors
    /// Returns an error if there is no room.
    pub fn new(part: &BatchShard) -> Result<LocalBatch> {
        let room = || Tensor::try_uninit(DType::I64, part.region.local.clone());
        let of_documents = || part.tagged.then(room).transpose();
        Ok(LocalBatch {
            tokens: room()?,
            targets: room()?,
            documents: of_documents()?,
            positions: of_documents()?,
        })
    }

    /// Returns the elements to be written.
    pub fn lists(&mut self) -> Result<BatchLists<'_>> {
        Ok(BatchLists {
            tokens: self.tokens.make_mut()?,
            targets: self.targets.make_mut()?,
            documents: self.documents.as_mut().map(Tensor::make_mut).transpose()?,
            positions: self.positions.as_mut().map(Tensor::make_mut).transpose()?,
        })
    }
}

impl BatchLists<'_> {
    pub fn put(&mut self, index: usize, element: BatchToken) {
        self.tokens[index] = element.token;
        self.targets[index] = element.target;
        if let (Some(documents), Some(positions)) = (&mut self.documents, &mut self.positions) {
            documents[index] = element.document;
            positions[index] = element.position;
        }
    }
}
