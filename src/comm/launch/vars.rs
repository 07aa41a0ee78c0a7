//! Reading environment variables, with errors that name them.

use std::net::IpAddr;

use crate::error::{Error, Result};

/// A source of variables. An empty variable counts as absent.
pub(in crate::comm) struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl<'a> Vars<'a> {
    pub(in crate::comm) fn new(get: &'a dyn Fn(&str) -> Option<String>) -> Vars<'a> {
        Vars(get)
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
    }

    /// Returns a variable that may be absent but not empty, because an empty one is a mistake.
    pub(super) fn text_or_absent(&self, name: &str) -> Result<Option<String>> {
        match ((self.0)(name), self.text(name)) {
            (Some(_), None) => Err(refused(
                "a variable is set and empty",
                format!("{name}="),
                "give it its value, the same on all ranks, or unset it",
            )),
            (_, text) => Ok(text),
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Returns a variable's number, if it is set.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            refused("a variable is not a number", format!("{name}={text}"), "set it to a number from 0 on")
        })
    }

    /// Returns the first of `names` that is set, with its number.
    pub(super) fn first_number<'n>(&self, names: &[&'n str]) -> Result<Option<(&'n str, usize)>> {
        for &name in names {
            if let Some(n) = self.number(name)? {
                return Ok(Some((name, n)));
            }
        }
        Ok(None)
    }

    /// Returns a number that must be set because some of `given` are.
    pub(super) fn needed(&self, name: &str, given: &[&str]) -> Result<usize> {
        self.number(name)?.ok_or_else(|| self.absent(name, given))
    }

    /// Returns a variable's port, if it is set.
    pub(in crate::comm) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(port) = self.number(name)? else { return Ok(None) };
        match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(refused(
                "a port is not from 1 to 65535",
                format!("{name}={port}"),
                "choose one that is free on rank 0's machine",
            )),
        }
    }

    /// Returns a variable's IP address, if it is set.
    pub(super) fn address(&self, name: &str) -> Result<Option<IpAddr>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            refused(
                "a variable is not an IP address",
                format!("{name}={text}"),
                "for example 10.0.0.1, or 0.0.0.0 for all",
            )
        })
    }

    /// Returns the error about a missing variable, which lists those of `given` that are set.
    pub(super) fn absent(&self, name: &str, given: &[&str]) -> Error {
        let set = given.iter().filter_map(|g| Some(format!("{g}={}", self.text(g)?)));
        let set: Vec<String> = set.collect();
        refused(
            "a variable is missing next to those that are set",
            format!("{} without {name}", set.join(", ")),
            "start all ranks by one launcher, or unset what is left over",
        )
    }
}

/// Returns an error about the environment.
pub(super) fn refused(rule: &str, given: String, remedy: &str) -> Error {
    Error::invalid("launch", rule, given, remedy)
}
