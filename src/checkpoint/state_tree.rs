//! The state of a program: tensors and values by name.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use crate::dtensor::DTensor;
use crate::error::{Error, Result};

/// The most lists and maps that a value has around another; a reader of JSON stops at 128, and the index has some.
const MOST_DEPTH: usize = 100;

/// Named tensors and values that are saved together. Names are paths with dots: `model.h.0.attn.qkv.weight`.
///
/// ```
/// use isoshard::{checkpoint::StateTree, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut model = StateTree::new();
///     model.insert("weight", DTensor::zeros(&mesh, DType::F32, [4, 3], "(S0)")?)?;
///     let mut state = StateTree::new();
///     state.insert_tree("model", model)?;
///     state.insert_value("step", 12)?;
///     assert_eq!(state.tensor("model.weight").expect("inserted").shape()[..], [4, 3]);
///     assert_eq!(state.value("step").expect("inserted"), 12);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct StateTree {
    tensors: BTreeMap<String, DTensor>,
    values: BTreeMap<String, Value>,
}

impl StateTree {
    /// Creates an empty tree.
    ///
    /// ```
    /// use isoshard::checkpoint::StateTree;
    /// assert!(StateTree::new().is_empty());
    /// ```
    pub fn new() -> StateTree {
        StateTree::default()
    }

    /// Adds a tensor in any layout. The tree shares its elements, so a later step that updates the tensor in place writes
    /// to new memory while the tree lives.
    ///
    /// ```
    /// use isoshard::{checkpoint::StateTree, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [2], "()")?;
    ///     let mut state = StateTree::new();
    ///     state.insert("x", x.clone())?;
    ///     let refused = state.insert("x", x).unwrap_err().to_string();
    ///     assert!(refused.starts_with("state: a name is given once; got \"x\""), "{refused}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a name that is taken, is empty, begins with `__`, or ends with `#` and a number.
    pub fn insert(&mut self, name: impl Into<String>, x: DTensor) -> Result<()> {
        let name = self.free(name.into())?;
        self.tensors.insert(name, x.detach());
        Ok(())
    }

    /// Adds a value that JSON can hold. Every rank gives the same value. JSON has neither infinite numbers nor NaN:
    /// `serde_json` makes them null.
    ///
    /// ```
    /// use isoshard::{checkpoint::StateTree, rng::Generator};
    /// let mut state = StateTree::new();
    /// state.insert_value("dropout", Generator::new(7).state().to_string())?;
    /// assert_eq!(state.value("dropout").expect("inserted"), "philox4x32-10:0000000000000007:0");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a name that [`StateTree::insert`] refuses, and a value whose lists and maps are nested more than 100 deep, which
    /// could not be loaded.
    pub fn insert_value(&mut self, name: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        let (name, value) = (self.free(name.into())?, value.into());
        if !is_within(&value, MOST_DEPTH) {
            let rule = format!("the lists and maps of a value are nested at most {MOST_DEPTH} deep");
            let given = format!("a deeper value for {name:?}");
            let remedy = "flatten it, or insert its text";
            return Err(Error::invalid("state", rule, given, remedy));
        }
        self.values.insert(name, value);
        Ok(())
    }

    /// Adds everything of another tree, with `prefix` and a dot before each name.
    ///
    /// ```
    /// use isoshard::checkpoint::StateTree;
    /// let mut schedule = StateTree::new();
    /// schedule.insert_value("step", 3)?;
    /// let mut state = StateTree::new();
    /// state.insert_tree("schedule", schedule)?;
    /// assert_eq!(state.value("schedule.step").expect("inserted"), 3);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses names and values that [`StateTree::insert`] and [`StateTree::insert_value`] refuse.
    pub fn insert_tree(&mut self, prefix: &str, tree: StateTree) -> Result<()> {
        for (name, x) in tree.tensors {
            self.insert(format!("{prefix}.{name}"), x)?;
        }
        tree.values
            .into_iter()
            .try_for_each(|(name, value)| self.insert_value(format!("{prefix}.{name}"), value))
    }

    /// Returns a tensor.
    ///
    /// ```
    /// use isoshard::checkpoint::StateTree;
    /// assert!(StateTree::new().tensor("model.weight").is_none());
    /// ```
    pub fn tensor(&self, name: &str) -> Option<&DTensor> {
        self.tensors.get(name)
    }

    /// Returns a value.
    ///
    /// ```
    /// use isoshard::checkpoint::StateTree;
    /// let mut state = StateTree::new();
    /// state.insert_value("tags", vec!["a", "b"])?;
    /// assert_eq!(state.value("tags").expect("inserted")[1], "b");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// Returns the tensors with their names, in the order of names.
    ///
    /// ```
    /// use isoshard::{checkpoint::StateTree, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut state = StateTree::new();
    ///     for name in ["b", "a"] {
    ///         state.insert(name, DTensor::zeros(&mesh, DType::F32, [2], "()")?)?;
    ///     }
    ///     assert_eq!(state.tensors().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &DTensor)> {
        self.tensors.iter().map(|(name, x)| (&**name, x))
    }

    /// Returns `true` if the tree has neither tensors nor values.
    ///
    /// ```
    /// use isoshard::checkpoint::StateTree;
    /// let mut state = StateTree::new();
    /// state.insert_value("step", 0)?;
    /// assert!(!state.is_empty());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty() && self.values.is_empty()
    }

    pub(super) fn values(&self) -> &BTreeMap<String, Value> {
        &self.values
    }

    fn free(&self, name: String) -> Result<String> {
        let numbered = name.rsplit_once('#').is_some_and(|(_, end)| end.bytes().all(|b| b.is_ascii_digit()));
        if numbered || name.starts_with("__") || name.is_empty() {
            let rule = "a name neither begins with \"__\" nor ends with '#' and a number, which files use";
            return Err(Error::invalid("state", rule, format!("{name:?}"), "rename it"));
        }
        if self.tensors.contains_key(&name) || self.values.contains_key(&name) {
            let remedy = "rename one, or insert a tree under another prefix";
            return Err(Error::invalid("state", "a name is given once", format!("{name:?} twice"), remedy));
        }
        Ok(name)
    }
}

/// Returns true if lists and maps of a value are nested at most `depth` deep.
fn is_within(value: &Value, depth: usize) -> bool {
    let mut inner: Box<dyn Iterator<Item = &Value>> = match value {
        Value::Array(list) => Box::new(list.iter()),
        Value::Object(map) => Box::new(map.values()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => return true,
    };
    depth > 0 && inner.all(|value| is_within(value, depth - 1))
}

/// Prints one line per tensor, its notation, and per value.
impl fmt::Debug for StateTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.tensors().map(|(name, x)| (name, x.spec().to_string()));
        let values = self.values.iter().map(|(name, value)| (&**name, value.to_string()));
        f.debug_map().entries(tensors).entries(values).finish()
    }
}
