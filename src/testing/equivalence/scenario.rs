//! One run of a program: its mesh, and the choices that the harness made for it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh};

/// A mesh, and the seed, sizes and layouts with which a program ran on it.
///
/// `Display` writes it in one line, which [`Equivalence::replay`](crate::testing::Equivalence::replay) reads.
///
/// ```
/// use isoshard::testing::Scenario;
/// let text = "dp=2,tp=2 | seed 3 | n = 5 | x = (S0, R)";
/// let scenario: Scenario = text.parse()?;
/// assert_eq!(scenario.sizes, [("n".to_string(), 5)]);
/// assert_eq!(scenario.to_string(), text);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The mesh's axes and their lengths.
    pub axes: Vec<(String, usize)>,
    /// The seed of values, sizes and layouts that are not listed.
    pub seed: u64,
    /// Extents by name.
    pub sizes: Vec<(String, usize)>,
    /// Layouts by the tensor's name.
    pub layouts: Vec<(String, Layout)>,
}

impl Scenario {
    /// Returns the scenario on a mesh of this notation, such as `dp=2,tp=2`, with everything else drawn from the seed.
    ///
    /// ```
    /// use isoshard::testing::Scenario;
    /// let scenario = Scenario::new("dp=2,tp=3", 7)?;
    /// assert_eq!(scenario.to_string(), "dp=2,tp=3 | seed 7");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses text that is no mesh.
    pub fn new(mesh: &str, seed: u64) -> Result<Scenario> {
        let mesh = Mesh::parse(mesh, 0)?;
        let axes = (0..mesh.ndim()).map(|a| (mesh.axis_name(a).to_string(), mesh.axis_len(a))).collect();
        Ok(Scenario { axes, seed, sizes: Vec::new(), layouts: Vec::new() })
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// # use isoshard::testing::Scenario;
    /// assert_eq!(Scenario::new("dp=2,tp=3", 1)?.rank_len(), 6);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank_len(&self) -> usize {
        self.axes.iter().map(|(_, len)| len).product()
    }

    /// Returns the scenario of a single rank: the same axes, each with one rank, and the same seed and sizes.
    pub(crate) fn single_rank(&self) -> Scenario {
        let axes = self.axes.iter().map(|(name, _)| (name.clone(), 1)).collect();
        Scenario { axes, layouts: Vec::new(), ..self.clone() }
    }

    /// Returns the mesh in the notation `dp=2,tp=2`.
    pub(super) fn mesh(&self) -> String {
        let axes: Vec<String> = self.axes.iter().map(|(name, len)| format!("{name}={len}")).collect();
        if axes.is_empty() { "1".into() } else { axes.join(",") }
    }

    pub(super) fn size(&self, name: &str) -> Option<usize> {
        self.sizes.iter().find(|(n, _)| n == name).map(|(_, size)| *size)
    }

    pub(super) fn layout(&self, name: &str) -> Option<&Layout> {
        self.layouts.iter().find(|(n, _)| n == name).map(|(_, layout)| layout)
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} | seed {}", self.mesh(), self.seed)?;
        self.sizes.iter().try_for_each(|(name, size)| write!(f, " | {name} = {size}"))?;
        self.layouts.iter().try_for_each(|(name, layout)| write!(f, " | {name} = {layout}"))
    }
}

impl FromStr for Scenario {
    type Err = Error;

    fn from_str(text: &str) -> Result<Scenario> {
        let unread = || {
            let remedy = "write dp=2,tp=2 | seed 3 | n = 5 | x = (S0, R), as a failed test prints it";
            Error::invalid("scenario", "cannot be read", format!("{text:?}"), remedy)
        };
        let mut parts = text.split('|').map(str::trim);
        let mesh = parts.next().unwrap_or_default();
        let seed = parts.next().and_then(|p| p.strip_prefix("seed ")?.parse().ok()).ok_or_else(unread)?;
        let mut scenario = Scenario::new(mesh, seed)?;
        for part in parts {
            let (name, value) = part.split_once(" = ").ok_or_else(unread)?;
            match value.starts_with('(') {
                true => scenario.layouts.push((name.into(), value.parse()?)),
                false => scenario.sizes.push((name.into(), value.parse().map_err(|_| unread())?)),
            }
        }
        Ok(scenario)
    }
}
