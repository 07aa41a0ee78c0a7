//! Pieces: the maps that a parameter holds, one or several that are stored together.

use std::ops::Range;

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// Several linear maps of one input that are stored as one parameter, so that the input's gradient is one contraction.
///
/// The maps' outputs are interleaved in groups: group `g` holds the first map's next rows, then the second map's, and so
/// on. A shard of whole groups has rows of every map that belong together, and a cut between groups falls on a node of
/// the reduction tree.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, Plan}, rng::Init};
/// spmd(1, |rank| {
///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
///     // Two groups, each with four rows of queries, two of keys and two of values.
///     let maps = FusedMaps::new(2, [("q", 4), ("k", 2), ("v", 2)])?;
///     let qkv = params.root().child("attn").child("qkv").fused_param("weight", &maps, &[5], Init::Ones)?;
///     assert_eq!(params.value(qkv).shape()[..], [2, 8, 5]);
///     let pieces: Vec<_> = params.pieces(qkv).iter().map(|p| (p.path(), p.shape().to_string())).collect();
///     assert_eq!(pieces[0], ("attn.q.weight", "[8, 5]".to_string()));
///     assert_eq!(pieces[2], ("attn.v.weight", "[4, 5]".to_string()));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedMaps {
    groups: usize,
    /// The name of each map and its rows per group.
    maps: Vec<(String, usize)>,
}

impl FusedMaps {
    /// Returns the description of maps by name and rows per group.
    ///
    /// ```
    /// use isoshard::nn::FusedMaps;
    /// assert!(FusedMaps::new(3, [("gate", 32), ("up", 32)]).is_ok());
    /// assert!(FusedMaps::new(3, [("gate", 32), ("gate", 32)]).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses no maps, and two maps of one name.
    pub fn new<'a>(groups: usize, maps: impl IntoIterator<Item = (&'a str, usize)>) -> Result<FusedMaps> {
        let maps: Vec<(String, usize)> = maps.into_iter().map(|(name, rows)| (name.into(), rows)).collect();
        let twice = (1..maps.len()).find(|&i| maps[..i].iter().any(|(name, _)| *name == maps[i].0));
        if maps.is_empty() || twice.is_some() {
            let names: Vec<&str> = maps.iter().map(|(name, _)| &name[..]).collect();
            return Err(Error::invalid(
                "fused_maps",
                "wants one or more maps with different names",
                format!("{names:?}"),
                "",
            ));
        }
        Ok(FusedMaps { groups, maps })
    }

    /// Returns the number of groups.
    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of rows of all maps together in one group.
    pub(crate) fn rows_per_group(&self) -> usize {
        self.maps.iter().map(|(_, rows)| rows).sum()
    }

    /// Returns the maps' rows per group, in their order.
    pub(in crate::nn) fn rows(&self) -> Vec<usize> {
        self.maps.iter().map(|(_, rows)| *rows).collect()
    }

    /// Returns the maps' paths if their parameters are declared in the scope `path`: their names in place of its last
    /// part.
    pub(in crate::nn) fn paths(&self, path: &str) -> Vec<String> {
        let parent = path.rsplit_once('.').map_or(String::new(), |(parent, _)| format!("{parent}."));
        self.maps.iter().map(|(name, _)| format!("{parent}{name}")).collect()
    }

    /// Returns the shape of the parameter `name` of the scope `path` that holds the maps, and its pieces.
    pub(in crate::nn) fn layout_of(
        &self,
        path: &str,
        name: &str,
        inputs: &[usize],
    ) -> (Shape, Vec<ParamPiece>) {
        let paths = self.paths(path);
        let (groups, group_rows) = (self.groups, self.rows_per_group());
        let mut shape = match inputs {
            [] => vec![groups * group_rows],
            _ => vec![groups, group_rows],
        };
        shape.extend(inputs);
        let of_param = Shape::from(shape);
        let mut next = 0;
        let pieces = self.rows().into_iter().zip(paths).map(|(rows, path)| {
            let own = next..next + rows;
            next = own.end;
            let mut shape = vec![groups * rows];
            shape.extend(inputs);
            ParamPiece {
                path: format!("{path}.{name}"),
                shape: shape.into(),
                param_shape: of_param.clone(),
                groups,
                group_rows,
                rows: own,
                row: inputs.iter().product(),
            }
        });
        let pieces = pieces.collect();
        (of_param, pieces)
    }
}

/// A tensor as users and files know it, and its place in the parameter that stores it.
///
/// A parameter that is not fused is its only piece. A piece of a fused parameter is the weight or the bias of one map,
/// and its path names the map: the parameter `h.0.attn.qkv.weight` has the pieces `h.0.attn.q.weight`,
/// `h.0.attn.k.weight` and `h.0.attn.v.weight`. The pieces cover each element of their parameter once.
///
/// All indices are global and row-major, those of the piece's own shape or of the parameter's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamPiece {
    path: String,
    shape: Shape,
    param_shape: Shape,
    groups: usize,
    /// The rows of the whole parameter in one group.
    group_rows: usize,
    /// The piece's rows in each group.
    rows: Range<usize>,
    /// The elements of a row.
    row: usize,
}

/// A range of a piece's elements that are consecutive in the parameter too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRun {
    /// The first element of the range in the piece.
    pub piece_start: usize,
    /// The first element of the range in the parameter.
    pub param_start: usize,
    /// The number of elements.
    pub len: usize,
}

impl ParamPiece {
    /// Returns the piece's path, such as `h.0.attn.q.weight`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().child("head").param("weight", [4, 2], Init::Ones)?;
    ///     assert_eq!(params.pieces(w)[0].path(), "head.weight"); // not fused
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the piece's global shape: `[outputs, inputs]` for a weight, `[outputs]` for a bias.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let maps = FusedMaps::new(3, [("gate", 2), ("up", 2)])?;
    ///     let bias = params.root().child("gate_up").fused_param("bias", &maps, &[], Init::Zeros)?;
    ///     assert_eq!(params.pieces(bias)[1].shape()[..], [6]);
    ///     assert_eq!(params.pieces(bias)[1].path(), "up.bias");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the index in the parameter of the piece's element `element`.
    #[cfg(test)]
    pub(super) fn param_index(&self, element: usize) -> usize {
        let block = self.block().max(1);
        element / block * self.group() + self.rows.start * self.row + element % block
    }

    /// Returns the piece's elements among the elements `range` of the parameter, as runs that are consecutive in both,
    /// in rising order. A rank asks for each run of its shard ([`Region::runs`](crate::placement::Region::runs)).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, PieceRun, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let maps = FusedMaps::new(2, [("gate", 1), ("up", 1)])?;
    ///     let w = params.root().child("gate_up").fused_param("weight", &maps, &[3], Init::Ones)?;
    ///     let runs: Vec<PieceRun> = params.pieces(w)[0].runs(2..12).collect();
    ///     assert_eq!(runs[0], PieceRun { piece_start: 2, param_start: 2, len: 1 });
    ///     assert_eq!(runs[1], PieceRun { piece_start: 3, param_start: 6, len: 3 });
    ///     assert_eq!(runs.len(), 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = PieceRun> + use<> {
        let (group, block, offset) = (self.group().max(1), self.block(), self.rows.start * self.row);
        let groups = range.start / group..range.end.div_ceil(group).min(self.groups);
        groups.filter_map(move |g| {
            let own = g * group + offset..g * group + offset + block;
            let (start, end) = (own.start.max(range.start), own.end.min(range.end));
            let run = PieceRun {
                piece_start: g * block + start.saturating_sub(own.start),
                param_start: start,
                len: end.saturating_sub(start),
            };
            (run.len > 0).then_some(run)
        })
    }

    /// Returns the piece of a tensor that has the parameter's shape: of its value, of its gradient, or of an optimizer's
    /// state. A shard of whole groups is cut without communication; of other layouts, each rank fetches what it lacks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{FusedMaps, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("gate_up.weight", "tp", 0), 7)?;
    ///     let maps = FusedMaps::new(4, [("gate", 2), ("up", 2)])?;
    ///     let w = params.root().child("gate_up").fused_param("weight", &maps, &[3], Init::Ones)?;
    ///     let up = params.pieces(w)[1].of(params.value(w))?;
    ///     assert_eq!(up.spec().to_string(), "f32[8, 3]@(tp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of another shape; returns an error if a rank fails.
    pub fn of(&self, x: &DTensor) -> Result<DTensor> {
        if *x.shape() != self.param_shape {
            let given = format!("{} for {}", x.spec(), self.param_shape);
            let rule = format!("wants a tensor of the parameter's shape for the piece {}", self.path);
            return Err(Error::invalid("piece", rule, given, ""));
        }
        if self.rows.len() == self.group_rows {
            return x.reshape(self.shape.clone());
        }
        let mut grouped = vec![self.groups, self.group_rows];
        grouped.extend(&self.shape[1..]);
        x.reshape(grouped)?.slice(1, self.rows.start, self.rows.len())?.reshape(self.shape.clone())
    }

    /// Returns the elements of one group of the parameter.
    fn group(&self) -> usize {
        self.group_rows * self.row
    }

    /// Returns the piece's elements in one group, which are consecutive.
    fn block(&self) -> usize {
        self.rows.len() * self.row
    }

    /// Returns the only piece of a parameter that is not fused.
    pub(in crate::nn) fn whole(path: &str, shape: &Shape) -> ParamPiece {
        let row = shape.numel();
        ParamPiece {
            path: path.into(),
            shape: shape.clone(),
            param_shape: shape.clone(),
            groups: 1,
            group_rows: 1,
            rows: 0..1,
            row,
        }
    }
}
