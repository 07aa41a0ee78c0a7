//! `diagonal`: a diagonal of two dims, as a view; and `diag_embed`, its derivative, which writes one.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{Shape, Tensor};

/// A diagonal of a matrix of two dims `rows` and `columns`: the elements whose column is their row plus `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixDiagonal {
    /// The dim of rows.
    pub rows: usize,
    /// The dim of columns.
    pub columns: usize,
    /// The column of the element in row 0; if it is negative, its negative is the row of the element in column 0.
    pub offset: isize,
}

impl MatrixDiagonal {
    /// Returns the number of elements of the diagonal of a matrix.
    pub(crate) fn len(&self, rows: usize, columns: usize) -> usize {
        let (row, column) = self.start();
        rows.saturating_sub(row).min(columns.saturating_sub(column))
    }

    /// Returns the row and column of the first element.
    pub(crate) fn start(&self) -> (usize, usize) {
        (self.offset.min(0).unsigned_abs(), self.offset.max(0).unsigned_abs())
    }

    /// Returns the dims other than the matrix's, of a tensor with `ndim` dims.
    fn others(&self, ndim: usize) -> impl Iterator<Item = usize> + '_ {
        (0..ndim).filter(|d| *d != self.rows && *d != self.columns)
    }

    fn expect_dims(&self, verb: &str, x: &Meta, ndim: usize) -> Result<()> {
        if self.rows != self.columns && self.rows.max(self.columns) < ndim {
            return Ok(());
        }
        let given = format!("dims {} and {} of {ndim}, for {x}", self.rows, self.columns);
        Err(Error::invalid(verb, "wants two dims of the tensor", given, ""))
    }
}

/// The diagonal of two dims, which are not sharded, as the last dim of a view. Applied by
/// [`DTensor::diagonal`](crate::dtensor::DTensor::diagonal).
///
/// ```
/// use isoshard::{ops::{Diagonal, MatrixDiagonal, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let of = MatrixDiagonal { rows: 0, columns: 1, offset: 0 };
/// assert_eq!(eval_whole(&Diagonal { of }, &[x])?[0].to_f64_vec(), [1.0, 4.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Diagonal {
    /// The diagonal.
    pub of: MatrixDiagonal,
}

/// Zeros with a diagonal: the last dim of the operand, which is not sharded, becomes the diagonal of two dims of the
/// result. The derivative of [`Diagonal`]. Applied by [`DTensor::diag_embed`](crate::dtensor::DTensor::diag_embed).
///
/// ```
/// use isoshard::{ops::{DiagEmbed, MatrixDiagonal, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// let of = MatrixDiagonal { rows: 0, columns: 1, offset: 1 };
/// let y = eval_whole(&DiagEmbed { of, extents: (2, 3) }, &[x])?;
/// assert_eq!(y[0].to_f64_vec(), [0.0, 1.0, 0.0, 0.0, 0.0, 2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DiagEmbed {
    /// The diagonal, by dims of the result.
    pub of: MatrixDiagonal,
    /// The number of rows and of columns.
    pub extents: (usize, usize),
}

impl Op for Diagonal {
    fn name(&self) -> &'static str {
        "diagonal"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        self.of.expect_dims(self.name(), x, x.shape.len())?;
        let len = self.of.len(x.shape[self.of.rows], x.shape[self.of.columns]);
        let shape = self.of.others(x.shape.len()).map(|d| x.shape[d]).chain([len]).collect();
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = self.of.others(ins[0].shape.len()).enumerate();
        let mut rows: Vec<Row> =
            others.map(|(to, d)| Row::new([AxisPlacement::S(d)], [AxisPlacement::S(to)])).collect();
        rows.extend(Algebra::Structural.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![ins[0].diagonal(self.of.offset, self.of.rows, self.of.columns)?])
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let x = &g.input_meta(0).shape;
        let embed = DiagEmbed { of: self.of, extents: (x[self.of.rows], x[self.of.columns]) };
        let dy = g.grad(0);
        let dx = g.apply(embed, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

impl Op for DiagEmbed {
    fn name(&self) -> &'static str {
        "diag_embed"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        let ((rows, columns), ndim) = (self.extents, x.shape.len() + 1);
        self.of.expect_dims(self.name(), x, ndim)?;
        let Some((&len, others)) = x.shape.split_last().filter(|(n, _)| **n == self.of.len(rows, columns))
        else {
            let given = format!("{x} for the diagonal {} of a {rows} x {columns} matrix", self.of.offset);
            return Err(Error::invalid(self.name(), "the last dim is not the diagonal", given, ""));
        };
        debug_assert!(len <= rows.min(columns));
        let mut others = others.iter();
        let extent = |d: usize| match d {
            d if d == self.of.rows => rows,
            d if d == self.of.columns => columns,
            _ => *others.next().expect("two dims are the matrix's"),
        };
        let shape: Shape = (0..ndim).map(extent).collect();
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// A partial sum is accepted, since zeros add nothing. A partial maximum is not, since the zeros would count as
    /// values.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = self.of.others(ins[0].shape.len() + 1).enumerate();
        let cut = others.map(|(from, d)| Row::new([AxisPlacement::S(from)], [AxisPlacement::S(d)]));
        cut.chain([Row::same(AxisPlacement::SUM, 1).exact()]).collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let mut out = Tensor::zeros_on(x.device(), x.dtype(), at.outs[0].local().clone())?;
        let all = out.strides().to_vec();
        let (row, column) = (all[self.of.rows], all[self.of.columns]);
        let to: Vec<usize> = self.of.others(all.len()).map(|d| all[d]).chain([row + column]).collect();
        let (first_row, first_column) = self.of.start();
        x.copy_block(&mut out, x.shape(), (0, x.strides()), (first_row * row + first_column * column, &to))?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.eval(ins, at)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(Diagonal { of: self.of }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let of = |rows, columns, offset| MatrixDiagonal { rows, columns, offset };
    let embed = |of, extents| DiagEmbed { of, extents };
    vec![
        Sample::new(Diagonal { of: of(0, 1, 0) }, [Input::ints([5, 3])]),
        Sample::new(Diagonal { of: of(2, 0, -1) }, [Input::ints([3, 5, 4])]),
        Sample::new(Diagonal { of: of(0, 1, 7) }, [Input::ints([3, 3])]),
        Sample::new(embed(of(0, 1, 0), (5, 3)), [Input::ints([3])]),
        Sample::new(embed(of(2, 0, -1), (4, 3)), [Input::ints([5, 3])]),
        Sample::new(embed(of(0, 1, 3), (3, 3)), [Input::ints([0])]),
    ]
}
