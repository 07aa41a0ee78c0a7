//! Faults that kernels report because they cannot return an error, e.g. an index out of range.
//!
//! A kernel writes its first fault to a few bytes of its stream, and continues as if the value were valid. The next
//! read of a value on that stream finds the fault and returns it as an error.

use crate::error::Error;

/// The size of `struct Fault` of `kernels/cuda/iso.cuh`, in bytes.
pub(in crate::tensor) const FAULT_BYTES: usize = 16;

/// A fault that kernels may report.
struct FaultRule {
    /// The number that the kernel reports.
    code: u32,
    /// The operator.
    verb: &'static str,
    /// The rule that the value breaks.
    rule: &'static str,
    /// The name of the value, e.g. `index`. If it begins with `for`, the fault's number is a position and not the
    /// value.
    what: &'static str,
}

/// Codes are never reused; 0 means no fault.
const RULES: &[FaultRule] = &[
    index(FaultCode::Embedding, "embedding"),
    index(FaultCode::EmbeddingGrad, "embedding_grad"),
    index(FaultCode::Gather, "gather"),
    index(FaultCode::ScatterAdd, "scatter_add"),
    index(FaultCode::CrossEntropy, "cross_entropy"),
    index(FaultCode::CrossEntropyGrad, "cross_entropy_grad"),
    index(FaultCode::Scatter, "scatter"),
    index(FaultCode::ScatterMax, "scatter_max"),
    index(FaultCode::ScatterMin, "scatter_min"),
    index(FaultCode::LastWrite, "last_write"),
    index(FaultCode::LinearIndex, "linear_index"),
    index(FaultCode::Bincount, "bincount"),
    index(FaultCode::OneHot, "one_hot"),
    index(FaultCode::ExpertSlots, "expert_slots"),
    index(FaultCode::PermuteTokens, "permute_tokens"),
    index(FaultCode::UnpermuteTokens, "unpermute_tokens"),
    FaultRule {
        code: FaultCode::EqualSlots as u32,
        verb: "permute_tokens",
        rule: "two rows have the same slot",
        what: "slot",
    },
    element(600, "bernoulli", "a probability lies in [0, 1]"),
    element(601, "exponential", "a rate is positive and finite"),
    element(602, "gamma", "a shape is positive and finite"),
    element(603, "poisson", "a rate lies between 0 and 2^50"),
    element(604, "multinomial", "weights are finite and not negative"),
    row(605, "a row's weights have a positive, finite sum"),
    row(606, "without replacement a row has as many positive weights as samples"),
];

/// The codes of operators that take indices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultCode {
    Embedding = 400,
    EmbeddingGrad,
    Gather,
    ScatterAdd,
    CrossEntropy,
    CrossEntropyGrad,
    Scatter = 420,
    ScatterMax,
    ScatterMin,
    LastWrite,
    LinearIndex,
    Bincount,
    /// Numbers from 430 on belong to the operators of `ops::create`.
    OneHot = 430,
    ExpertSlots = 450,
    PermuteTokens,
    UnpermuteTokens,
    EqualSlots,
}

const fn index(code: FaultCode, verb: &'static str) -> FaultRule {
    FaultRule { code: code as u32, verb, rule: "an index leaves its dim", what: "index" }
}

/// Makes the rule of an element whose value is out of range; the fault gives its position.
const fn element(code: u32, verb: &'static str, rule: &'static str) -> FaultRule {
    FaultRule { code, verb, rule, what: "for element" }
}

/// Makes the rule of a row of weights; the fault gives the row.
const fn row(code: u32, rule: &'static str) -> FaultRule {
    FaultRule { code, verb: "multinomial", rule, what: "for row" }
}

/// Returns the error that the bytes report, or `None` if there is none.
pub(in crate::tensor) fn read(bytes: [u8; FAULT_BYTES]) -> Option<Error> {
    let code = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    let found = f32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
    let value = i64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
    if code == 0 {
        return None;
    }
    let rule = RULES.iter().find(|r| r.code == code);
    Some(match rule {
        Some(r) if r.what.starts_with("for") => {
            Error::invalid(r.verb, r.rule, format!("{found} {} {value}", r.what), "")
        }
        Some(r) => Error::invalid(r.verb, r.rule, format!("{} {value}", r.what), ""),
        None => {
            Error::invalid("kernel", "reported a fault that has no name", format!("code {code}, {value}"), "")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_given_once_and_never_zero() {
        for (i, rule) in RULES.iter().enumerate() {
            assert!(rule.code != 0 && RULES[..i].iter().all(|r| r.code != rule.code), "{}", rule.code);
        }
        assert!(read([0; FAULT_BYTES]).is_none());
        let mut bytes = [0xff; FAULT_BYTES];
        bytes[8..].copy_from_slice(&(-7i64).to_le_bytes());
        assert!(read(bytes).unwrap().to_string().contains("-7"));
    }
}
