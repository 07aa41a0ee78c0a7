//! Tensors as text: their values for people to read, and one line for errors and debuggers.

use std::fmt;

use half::{bf16, f16};

use super::tensor::Tensor;
use crate::tensor::dtype::for_dtype;
use crate::tensor::{DType, Device, Element, Scalar};

/// A tensor with more elements prints [`EDGE`] indices at either end of each dim, and `...` between them.
const PRINTED_WHOLE: usize = 1000;
const EDGE: usize = 3;
/// Decimals of an element if the caller names no precision.
const DECIMALS: usize = 4;
const LINE_WIDTH: usize = 75;

/// Prints the values as NumPy's `str` does, then dtype and shape on a line of their own.
///
/// Columns are aligned, values are rounded to four decimals, and a tensor of more than 1000 elements is summarised. A
/// float tensor prints in scientific notation if its values need it: if the largest is more than 1000 times the
/// smallest (zeros aside), if the smallest is below 0.0001, or if the largest is at least 1e8 (f64), 1e6 (f32), 1e3
/// (f16) or 1e2 (bf16). A precision, as in `{:.2}`, prints exactly that many decimals. A tensor without dims prints all
/// its digits.
///
/// A tensor on a device is copied to the processor first. If that fails, the text names the device and the reason.
/// [`Tensor::notation`] gives dtype and shape alone.
///
/// ```
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![0.1f32, -2.25, 3.0, 4.123456, 50.0, 6.0], [2, 3])?;
/// assert_eq!(
///     x.to_string(),
///     "[[ 0.1    -2.25    3.    ]\n \
///       [ 4.1235 50.      6.    ]]\n\
///      f32[2, 3]"
/// );
/// assert_eq!(format!("{:.1}", x.narrow(0, 0, 1)?), "[[ 0.1 -2.2  3.0]]\nf32[1, 3]");
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match self.device() {
            Device::Meta => return write!(f, "{} on {}", self.notation(), self.device()),
            Device::Cpu | Device::Cuda(_) => self.to_device(Device::Cpu).and_then(|t| t.contiguous()),
        };
        let host = match host {
            Ok(host) => host,
            Err(e) => return write!(f, "{} on {}: {e}", self.notation(), self.device()),
        };
        write!(f, "{}\n{}", Brackets::of(&host, f.precision()), self.notation())?;
        if self.device() == Device::Cpu { Ok(()) } else { write!(f, " on {}", self.device()) }
    }
}

/// Prints one line: dtype, shape and the first few values, each as the shortest text that reads back as the same value.
///
/// The values of a tensor on a device are left out: text that is printed while looking for a fault must neither wait
/// for the device nor fail.
///
/// ```
/// use isoshard::tensor::Tensor;
/// assert_eq!(format!("{:?}", Tensor::from_vec(vec![0.1f32, 2.0], [2])?), "f32[2] {0.1, 2}");
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        if self.device() != Device::Cpu {
            return write!(f, "{} on {}", self.notation(), self.device());
        }
        let places: Vec<usize> = (0..self.numel().min(SHOWN)).collect();
        let shown: Vec<String> =
            numbers(&self.packed(), &places).into_iter().map(|x| exact_text(self.dtype(), x)).collect();
        let more = if self.numel() > SHOWN { ", …" } else { "" };
        write!(f, "{} {{{}{more}}}", self.notation(), shown.join(", "))
    }
}

/// The elements of a contiguous tensor at these places.
fn numbers(x: &Tensor, places: &[usize]) -> Vec<Scalar> {
    for_dtype!(any x.dtype(), T => {
        let values: &[T] = x.as_slice().expect("contiguous, of dtype T, in the processor's memory");
        places.iter().map(|&at| Scalar::from(values[at])).collect()
    })
}

/// The shortest text that reads back as `x`.
fn exact_text(dtype: DType, x: Scalar) -> String {
    let x = match x {
        Scalar::Float(x) => shortest(dtype, x),
        Scalar::Integer(x) if dtype == DType::Bool => return (x != 0).to_string(),
        Scalar::Integer(x) => return x.to_string(),
    };
    let magnitude = x.abs();
    if (1e-5..1e16).contains(&magnitude) || magnitude == 0.0 || !x.is_finite() {
        format!("{x}")
    } else {
        format!("{x:e}")
    }
}

/// The number, of those that round to `exact` in its own dtype, that has the fewest digits.
fn shortest(dtype: DType, exact: f64) -> f64 {
    let read = |text: String| text.parse::<f64>().expect("a number reads back");
    let of_half = |round: fn(f64) -> f64| {
        let mut rounded = (0..5).map(|digits| read(format!("{exact:.digits$e}")));
        rounded.find(|&short| round(short) == exact).unwrap_or(exact)
    };
    match dtype {
        DType::F32 => read(format!("{:e}", exact as f32)),
        DType::F16 => of_half(|x| <f16 as Element>::from_f64(x).to_f64()),
        DType::BF16 => of_half(|x| <bf16 as Element>::from_f64(x).to_f64()),
        DType::F64 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => exact,
    }
}

/// Elements in nested brackets, with aligned columns.
struct Brackets<'a> {
    shape: &'a [usize],
    summarised: bool,
    /// The texts of the elements that are shown, row-major, and the number of those already written.
    cells: Vec<String>,
    written: usize,
    out: String,
}

impl Brackets<'_> {
    fn of(x: &Tensor, precision: Option<usize>) -> String {
        let (dtype, shape) = (x.dtype(), &x.shape()[..]);
        if shape.is_empty() {
            let value = numbers(x, &[0]);
            return match (value[0], precision) {
                (Scalar::Float(x), Some(digits)) if x.is_finite() => format!("{x:.digits$}"),
                (Scalar::Float(x), None) if x.is_finite() => format!("{:?}", shortest(dtype, x)),
                _ => Column::of(dtype, &value, precision)[0].trim().to_string(),
            };
        }
        if x.numel() == 0 {
            return "[]".into();
        }
        let summarised = x.numel() > PRINTED_WHOLE;
        let mut shown = vec![0];
        for &n in shape {
            let indices = indices(n, summarised);
            let below = |at: usize| indices.iter().flatten().map(move |i| at * n + i);
            shown = shown.into_iter().flat_map(below).collect();
        }
        let cells = Column::of(dtype, &numbers(x, &shown), precision);
        let mut brackets = Brackets { shape, summarised, cells, written: 0, out: String::new() };
        brackets.write_dim(0, LINE_WIDTH);
        brackets.out
    }

    /// Writes the dims from `dim` on, within `width` columns.
    fn write_dim(&mut self, dim: usize, width: usize) {
        let indices = indices(self.shape[dim], self.summarised);
        let indent = " ".repeat(dim + 1);
        self.out.push('[');
        if dim + 1 == self.shape.len() {
            self.write_row(&indices, &indent, width.saturating_sub(1));
        } else {
            let between = "\n".repeat(self.shape.len() - dim - 1) + &indent;
            for (k, index) in indices.iter().enumerate() {
                self.out.push_str(if k == 0 { "" } else { &between });
                match index {
                    Some(_) => self.write_dim(dim + 1, width.saturating_sub(1)),
                    None => self.out.push_str("..."),
                }
            }
        }
        self.out.push(']');
    }

    /// Writes the elements of the last dim, on further lines if they do not fit in one.
    fn write_row(&mut self, indices: &[Option<usize>], indent: &str, width: usize) {
        let mut line_len = indent.len();
        for (k, index) in indices.iter().enumerate() {
            let word = match index {
                Some(_) => {
                    self.written += 1;
                    self.cells[self.written - 1].as_str()
                }
                None => "...",
            };
            if line_len > indent.len() && line_len + word.chars().count() > width {
                self.out.truncate(self.out.trim_end().len());
                self.out.push('\n');
                self.out.push_str(indent);
                line_len = indent.len();
            }
            self.out.push_str(word);
            line_len += word.chars().count();
            if k + 1 < indices.len() {
                self.out.push(' ');
                line_len += 1;
            }
        }
    }
}

/// The indices of a dim that are shown; `None` stands for those left out.
fn indices(n: usize, summarised: bool) -> Vec<Option<usize>> {
    if !summarised || n <= 2 * EDGE {
        return (0..n).map(Some).collect();
    }
    let last = (n - EDGE..n).map(Some);
    (0..EDGE).map(Some).chain([None]).chain(last).collect()
}

/// The common form of all elements that are shown.
struct Column {
    scientific: bool,
    /// The most decimals of an element, and whether each element has as many.
    decimals: usize,
    padded: bool,
    /// Digits of the exponent, in scientific notation.
    exponent_len: usize,
}

/// A number's text: what stands before the point, after it, and its exponent with its sign.
struct NumberText {
    whole: String,
    fraction: String,
    exponent: String,
}

impl Column {
    /// The texts of `values`, all of one width.
    fn of(dtype: DType, values: &[Scalar], precision: Option<usize>) -> Vec<String> {
        match dtype {
            DType::F32 | DType::F64 | DType::F16 | DType::BF16 => {
                let floats: Vec<f64> = values.iter().map(|x| x.to_f64()).collect();
                Column::of_floats(dtype, &floats, precision)
            }
            // NumPy prints a boolean in five columns, whatever stands beside it.
            DType::Bool => values
                .iter()
                .map(|x| format!("{:>5}", if x.to_f64() == 0.0 { "False" } else { "True" }))
                .collect(),
            DType::I64 | DType::I32 | DType::U8 => {
                right_aligned(values.iter().map(|x| format!("{x:?}")).collect())
            }
        }
    }

    fn of_floats(dtype: DType, values: &[f64], precision: Option<usize>) -> Vec<String> {
        let numbers: Vec<(f64, f64)> = values.iter().map(|&x| (x, shortest(dtype, x))).collect();
        let finite = || numbers.iter().filter(|(x, _)| x.is_finite());
        let sizes = finite().map(|(x, _)| x.abs()).filter(|x| *x > 0.0);
        let (least, most) = sizes.fold((f64::INFINITY, 0.0f64), |(lo, hi), x| (lo.min(x), hi.max(x)));
        let limit = match dtype {
            DType::F32 => 1e6,
            DType::F16 => 1e3,
            DType::BF16 => 1e2,
            DType::F64 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => 1e8,
        };
        let column = Column {
            scientific: most > 0.0 && (most >= limit || least < 1e-4 || most / least > 1000.0),
            decimals: precision.unwrap_or(DECIMALS),
            padded: precision.is_some(),
            exponent_len: 0,
        };
        // The first pass finds how many digits the column needs.
        let parts: Vec<NumberText> = finite().map(|&number| column.parts(number)).collect();
        let longest = |text: fn(&NumberText) -> &str| parts.iter().map(|p| text(p).len()).max().unwrap_or(0);
        let fraction_len = longest(|p| &p.fraction);
        let column = Column {
            decimals: fraction_len,
            padded: column.padded || column.scientific,
            exponent_len: longest(|p| &p.exponent).saturating_sub(1),
            ..column
        };
        let texts = numbers.iter().map(|&(exact, short)| {
            if exact.is_nan() {
                return "nan".to_string();
            }
            if exact.is_infinite() {
                return if exact > 0.0 { "inf".into() } else { "-inf".into() };
            }
            let NumberText { whole, fraction, exponent } = column.parts((exact, short));
            match exponent.split_at_checked(1) {
                Some((sign, digits)) => {
                    format!("{whole}.{fraction}e{sign}{digits:0>width$}", width = column.exponent_len)
                }
                None => format!("{whole}.{fraction:fraction_len$}"),
            }
        });
        right_aligned(texts.collect())
    }

    /// A finite number, rounded to this column's decimals: `exact` if it has more, else `short`, whose digits are
    /// fewest.
    fn parts(&self, (exact, short): (f64, f64)) -> NumberText {
        let digits = format!("{short:e}");
        let (mantissa, power) = digits.split_once('e').expect("scientific notation has an exponent");
        let mantissa_len = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len());
        let power: i64 = power.parse().expect("an exponent is a number");
        if self.scientific {
            let text = format!("{exact:.*e}", mantissa_len.min(self.decimals));
            let (mantissa, power) = text.split_once('e').expect("scientific notation has an exponent");
            let power: i64 = power.parse().expect("an exponent is a number");
            let sign = if power < 0 { '-' } else { '+' };
            self.split(mantissa, format!("{sign}{:02}", power.abs()))
        } else {
            let len = (mantissa_len as i64 - power).max(0) as usize;
            self.split(&format!("{exact:.*}", len.min(self.decimals)), String::new())
        }
    }

    fn split(&self, mantissa: &str, exponent: String) -> NumberText {
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let fraction = match self.padded {
            true => format!("{fraction:0<width$}", width = self.decimals),
            false => fraction.trim_end_matches('0').to_string(),
        };
        NumberText { whole: whole.into(), fraction, exponent }
    }
}

fn right_aligned(texts: Vec<String>) -> Vec<String> {
    let width = texts.iter().map(String::len).max().unwrap_or(0);
    texts.into_iter().map(|text| format!("{text:>width$}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn prints<T: Element>(values: impl IntoIterator<Item = T>, shape: &[usize], want: &str) {
        let x = Tensor::from_vec(values.into_iter().collect(), shape).unwrap();
        let shape = x.shape();
        assert_eq!(x.to_string(), format!("{}\n{}{shape}", want.trim_start_matches('\n'), T::DTYPE));
    }

    /// The texts are those that NumPy 2.4 prints.
    #[test]
    fn floats_print_as_numpy_prints_them() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        prints(
            [0.1f32, -2.25, 3.0, 4.123456, 50.0, 6.0],
            &[2, 3],
            "[[ 0.1    -2.25    3.    ]\n [ 4.1235 50.      6.    ]]",
        );
        prints([1.0f32, 2.0, 3.0, 4.0], &[2, 2], "[[1. 2.]\n [3. 4.]]");
        prints([0.0f32; 3], &[3], "[0. 0. 0.]");
        prints([-0.0f32, 0.5], &[2], "[-0.   0.5]");
        prints([1.5, nan, -inf, inf], &[4], "[ 1.5  nan -inf  inf]");
        prints([nan, inf], &[2], "[nan inf]");
        prints([1.0f64 / 3.0, 2.0 / 3e3], &[2], "[0.3333 0.0007]");
    }

    #[test]
    fn floats_of_many_sizes_print_scientifically_as_numpy_prints_them() {
        prints([1e-5f32, 1.0, 1000.0], &[3], "[1.e-05 1.e+00 1.e+03]");
        prints([0.001f32, 1000.0], &[2], "[1.e-03 1.e+03]");
        prints([0.001f32, 1000.1], &[2], "[1.0000e-03 1.0001e+03]");
        prints([1e8f32, 2.5e8], &[2], "[1.0e+08 2.5e+08]");
        prints([99_999_999.0f64, 1.0], &[2], "[1.e+08 1.e+00]");
        prints([0.0f32, 1e-7, -3.25e-7], &[3], "[ 0.00e+00  1.00e-07 -3.25e-07]");
        prints([1e-7, f32::NAN, -f32::INFINITY], &[3], "[1.e-07    nan   -inf]");
        prints([1.0 / 3.0 * 1e-200, -2.5e200f64], &[2], "[ 3.3333e-201 -2.5000e+200]");
        prints([1e100f64, 1e-100, 0.0], &[3], "[1.e+100 1.e-100 0.e+000]");
        prints([5e-5f64, 0.00015, 0.12345], &[3], "[5.0000e-05 1.5000e-04 1.2345e-01]");
        prints([0.1f32, 65504.0, 1.0].map(f16::from_f32), &[3], "[1.00e-01 6.55e+04 1.00e+00]");
        // NumPy has no bf16: as many digits as tell its values apart.
        prints([0.1f32, 3.140625, 1.0].map(bf16::from_f32), &[3], "[0.1  3.14 1.  ]");
    }

    #[test]
    fn integers_and_booleans_print_as_numpy_prints_them() {
        prints([1i64, -20, 300, 4], &[2, 2], "[[  1 -20]\n [300   4]]");
        prints([i64::MIN, 7], &[2], "[-9223372036854775808                    7]");
        prints([0u8, 255, 7], &[3], "[  0 255   7]");
        prints([true, false, false, false], &[2, 2], "[[ True False]\n [False False]]");
        prints([true, true], &[2], "[ True  True]");
    }

    #[test]
    fn shapes_print_as_numpy_prints_them() {
        let cube = "[[[ 0.  1.]\n  [ 2.  3.]\n  [ 4.  5.]]\n\n [[ 6.  7.]\n  [ 8.  9.]\n  [10. 11.]]]";
        prints((0..12).map(|i| i as f32), &[2, 3, 2], cube);
        prints([0f32; 0], &[0, 3], "[]");
        prints([0.1f32], &[], "0.1");
        prints([1.0f32 / 3.0], &[], "0.33333334");
        prints([3.0f64], &[], "3.0");
        prints([-7i32], &[], "-7");
        prints([true], &[], "True");
        prints(0..1001, &[1001], "[   0    1    2 ...  998  999 1000]");
        let matrix = "
[[0.0000e+00 1.2500e-01 2.5000e-01 ... 3.3750e+00 3.5000e+00 3.6250e+00]
 [3.7500e+00 3.8750e+00 4.0000e+00 ... 7.1250e+00 7.2500e+00 7.3750e+00]
 [7.5000e+00 7.6250e+00 7.7500e+00 ... 1.0875e+01 1.1000e+01 1.1125e+01]
 ...
 [1.3875e+02 1.3888e+02 1.3900e+02 ... 1.4212e+02 1.4225e+02 1.4238e+02]
 [1.4250e+02 1.4262e+02 1.4275e+02 ... 1.4588e+02 1.4600e+02 1.4612e+02]
 [1.4625e+02 1.4638e+02 1.4650e+02 ... 1.4962e+02 1.4975e+02 1.4988e+02]]";
        prints((0..1200).map(|i| i as f32 / 8.0), &[40, 30], matrix);
        let cube = "
[[[  0   1   2]
  [  3   4   5]]

 [[  6   7   8]
  [  9  10  11]]

 [[ 12  13  14]
  [ 15  16  17]]

 ...

 [[582 583 584]
  [585 586 587]]

 [[588 589 590]
  [591 592 593]]

 [[594 595 596]
  [597 598 599]]]";
        prints((0..1200).map(|i| i % 600), &[200, 2, 3], cube);
        let wrapped = "
[0.     0.1429 0.2857 0.4286 0.5714 0.7143 0.8571 1.     1.1429 1.2857
 1.4286 1.5714 1.7143 1.8571 2.     2.1429 2.2857 2.4286 2.5714 2.7143]";
        prints((0..20).map(|i| i as f32 / 7.0), &[20], wrapped);
    }

    #[test]
    fn a_precision_gives_every_value_as_many_decimals() {
        let x = Tensor::from_vec(vec![0.1f32, -2.25, f32::NAN, 40.0], [2, 2]).unwrap();
        assert_eq!(format!("{x:.2}"), "[[ 0.10 -2.25]\n [  nan 40.00]]\nf32[2, 2]");
        assert_eq!(format!("{x:.0}"), "[[ 0. -2.]\n [nan 40.]]\nf32[2, 2]");
        let x = Tensor::from_vec(vec![1e-9f64, -2.5], [2]).unwrap();
        assert_eq!(format!("{x:.1}"), "[ 1.0e-09 -2.5e+00]\nf64[2]");
        assert_eq!(format!("{:.3}", Tensor::scalar(2.0f32 / 3.0)), "0.667\nf32[]");
    }

    #[test]
    fn debug_is_one_line_of_values_that_read_back() {
        let debug = |x: Tensor| format!("{x:?}");
        let x = Tensor::from_vec(vec![0.1f32, 1.0 / 3.0, -3.0, 1e-8, 1e30, 0.0], [2, 3]).unwrap();
        assert_eq!(debug(x.clone()), "f32[2, 3] {0.1, 0.33333334, -3, 1e-8, 1e30, 0}");
        assert_eq!(debug(x.transpose(0, 1).unwrap()), "f32[3, 2] {0.1, 1e-8, 0.33333334, 1e30, -3, 0}");
        assert_eq!(
            debug(Tensor::from_vec([0.1f32, 2.0].map(bf16::from_f32).to_vec(), [2]).unwrap()),
            "bf16[2] {0.1, 2}"
        );
        assert_eq!(debug(Tensor::from_vec(vec![true, false], [2]).unwrap()), "bool[2] {true, false}");
        let long = Tensor::from_vec((0..9).collect::<Vec<i64>>(), [9]).unwrap();
        assert_eq!(debug(long), "i64[9] {0, 1, 2, 3, 4, 5, 6, 7, …}");
        assert_eq!(debug(Tensor::scalar(f64::NAN)), "f64[] {NaN}");
        let absent = Tensor::zeros_on(Device::Meta, DType::F32, [4]).unwrap();
        assert_eq!((absent.to_string(), debug(absent)), ("f32[4] on meta".into(), "f32[4] on meta".into()));
    }
}
