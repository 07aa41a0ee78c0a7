//! The dense tensor: its fields, views, text, conversions to arrays, and the parts of a shared buffer.

pub(super) mod display;
pub(super) mod interop;
pub(super) mod parts;
pub(super) mod tensor;
pub(super) mod views;
