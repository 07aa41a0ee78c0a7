//! Measures the errors of mathematical functions in units in the last place, as docs/functions.md states them.
//!
//! `cargo bench --bench accuracy`, with `-- --json` for one JSON line per function and dtype.

use isoshard::tensor::DType;

#[path = "../tests/common/accuracy.rs"]
mod accuracy;

use accuracy::{largest_f64, largest_narrow, references};

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    for reference in references() {
        let (name, arity) = (&reference.name, reference.operands.len());
        let narrow =
            [DType::F32, DType::F16, DType::BF16].map(|dtype| (dtype, largest_narrow(name, arity, dtype)));
        for (dtype, error) in [(DType::F64, largest_f64(&reference))].into_iter().chain(narrow) {
            let (ulps, at) = (error.ulps, &error.at[..arity]);
            if json {
                println!(
                    "{{\"bench\":\"accuracy\",\"case\":\"{name} {dtype}\",\"value\":{ulps:.4},\"unit\":\"ulp\",\"at\":{at:?}}}"
                );
            } else {
                println!("{name:<10} {dtype:<5} {ulps:>8.4} ulp at {at:?}");
            }
        }
    }
}
