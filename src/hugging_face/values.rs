//! The values of config.json by key, checked as they are read.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::VERB;
use crate::error::{Error, Result};

/// The largest size of a model: products of three sizes fit into a `usize`.
const LARGEST: u64 = 1 << 20;
/// The largest number of positions.
const LONGEST: u64 = 1 << 31;

/// An object of a config.json, and the place where it stands.
pub(super) struct ConfigValues<'a> {
    map: &'a Map<String, Value>,
    path: PathBuf,
    /// The key of the object, followed by a dot, or nothing for the outermost object.
    prefix: String,
}

impl<'a> ConfigValues<'a> {
    pub fn new(map: &'a Map<String, Value>, path: &Path) -> ConfigValues<'a> {
        ConfigValues { map, path: path.to_path_buf(), prefix: String::new() }
    }

    /// Returns a value, or `None` if the key is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns `true` if the key is there, with null or any other value.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns `true` if the object has no keys.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Returns the keys.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(|key| &key[..])
    }

    /// Returns the object of a key, or `None` if the key is absent or null.
    pub fn object(&self, key: &str) -> Result<Option<ConfigValues<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(ConfigValues {
                map,
                path: self.path.clone(),
                prefix: format!("{}{key}.", self.prefix),
            })),
            Some(other) => Err(self.wrong(key, other, "an object")),
        }
    }

    /// Returns a size of at least 1.
    pub fn size(&self, key: &str) -> Result<usize> {
        match self.get(key) {
            Some(value) => self.as_size(key, value),
            None => Err(self.absent(key)),
        }
    }

    /// Returns a size, or `default` if the key is absent or null.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |value| self.as_size(key, value))
    }

    /// Returns a number of layers or other things, also 0, or `default` if the key is absent or null.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key).map(|value| (value, value.as_u64())) {
            None => Ok(default),
            Some((_, Some(n))) if n <= LARGEST => Ok(n as usize),
            Some((value, _)) => Err(self.wrong(key, value, "a number from 0 to 2^20")),
        }
    }

    fn as_size(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n) if (1..=LARGEST).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, value, "a size from 1 to 2^20")),
        }
    }

    /// Returns a number of positions of at least 1.
    pub fn length(&self, key: &str) -> Result<usize> {
        match self.get(key).map(|value| (value, value.as_u64())) {
            Some((_, Some(n))) if (1..=LONGEST).contains(&n) => Ok(n as usize),
            Some((value, _)) => Err(self.wrong(key, value, "a number of positions from 1 to 2^31")),
            None => Err(self.absent(key)),
        }
    }

    /// Returns a number of positions, `default` if the key is absent, or `None` if the value is null.
    pub fn length_unless_null(&self, key: &str, default: Option<usize>) -> Result<Option<usize>> {
        match (self.has(key), self.get(key)) {
            (false, _) => Ok(default),
            (true, None) => Ok(None),
            (true, Some(_)) => self.length(key).map(Some),
        }
    }

    /// Returns a positive number.
    pub fn number(&self, key: &str) -> Result<f64> {
        match self.get(key) {
            Some(value) => self.as_number(key, value),
            None => Err(self.absent(key)),
        }
    }

    /// Returns a positive number, or `default` if the key is absent or null.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        self.get(key).map_or(Ok(default), |value| self.as_number(key, value))
    }

    /// Returns a positive number, `default` if the key is absent, or `None` if the value is null.
    pub fn number_unless_null(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        if self.has(key) { self.optional_number(key) } else { Ok(default) }
    }

    /// Returns a positive number, or `None` if the key is absent or null.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|value| self.as_number(key, value)).transpose()
    }

    fn as_number(&self, key: &str, value: &Value) -> Result<f64> {
        match value.as_f64() {
            Some(x) if x > 0.0 && x.is_finite() => Ok(x),
            _ => Err(self.wrong(key, value, "a positive number")),
        }
    }

    /// Returns a probability below 1, `default` if the key is absent, or 0 if the value is null.
    pub fn probability(&self, key: &str, default: f64) -> Result<f64> {
        if !self.has(key) {
            return Ok(default);
        }
        let Some(value) = self.get(key) else { return Ok(0.0) };
        match value.as_f64() {
            Some(x) if (0.0..1.0).contains(&x) => Ok(x),
            _ => Err(self.wrong(key, value, "a probability below 1")),
        }
    }

    /// Returns a flag, or `default` if the key is absent or null.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, other, "true or false")),
        }
    }

    /// Returns a text, or `None` if the key is absent or null.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, other, "a text")),
        }
    }

    /// Returns a list of texts, or `None` if the key is absent or null.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        match texts {
            Some(texts) => Ok(Some(texts)),
            None => Err(self.wrong(key, value, "a list of texts")),
        }
    }

    /// Refuses a value other than `wanted`; an absent key has it.
    pub fn expect_flag(&self, key: &str, wanted: bool) -> Result<()> {
        match self.flag(key, wanted)? == wanted {
            true => Ok(()),
            false => Err(self.unsupported(key, &format!("only {wanted} is built"))),
        }
    }

    /// Returns the refusal of a value that no operator or module of this crate can express.
    pub fn unsupported(&self, key: &str, rule: &str) -> Error {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        let given = format!("{}{key}: {} in {}", self.prefix, shorten(value), self.path.display());
        Error::unsupported(VERB, rule, given, "")
    }

    /// Returns the refusal of a key that this crate does not read, because models that do compute something else.
    pub fn unread(&self, key: &str, rule: &str) -> Error {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        let given = format!("{}{key}: {} in {}", self.prefix, shorten(value), self.path.display());
        Error::unsupported(VERB, rule, given, "remove the key if the model was trained without it")
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> Error {
        let given = format!("{}{key}: {} in {}", self.prefix, shorten(value), self.path.display());
        Error::invalid(VERB, format!("the value is not {wanted}"), given, "")
    }

    fn absent(&self, key: &str) -> Error {
        let given = format!("no {}{key} in {}", self.prefix, self.path.display());
        Error::invalid(VERB, "a key is absent", given, "")
    }
}

/// Returns a value's JSON, cut after 80 characters.
fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
