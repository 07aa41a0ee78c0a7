//! The intended differences from PyTorch, each with its reason.

use super::{Compared, Found};

/// An intended difference.
pub struct Difference {
    pub operators: &'static [&'static str],
    pub of: Part,
    /// The condition, in words.
    pub when: &'static str,
    pub here: &'static str,
    pub torch: &'static str,
    pub reason: &'static str,
    /// The condition, for an element that differs.
    pub condition: fn(&Found) -> bool,
}

/// The tensors of a call that an intended difference concerns.
pub enum Part {
    Results,
    Gradients,
    Gradient(usize),
}

impl Part {
    pub fn text(&self) -> String {
        match self {
            Part::Results => "result".into(),
            Part::Gradients => "gradient".into(),
            Part::Gradient(k) => format!("gradient of operand {k}"),
        }
    }
}

impl Difference {
    /// Returns true if this difference covers the element.
    pub fn covers(&self, found: &Found) -> bool {
        let part = match (&self.of, found.compared) {
            (Part::Results, Compared::Result(_)) | (Part::Gradients, Compared::Gradient(_)) => true,
            (Part::Gradient(k), Compared::Gradient(g)) => *k == g,
            _ => false,
        };
        part && self.operators.contains(&found.case.op.as_str()) && (self.condition)(found)
    }
}

/// The page's table.
pub const DIFFERENCES: &[Difference] = &[];
