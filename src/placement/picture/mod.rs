//! Pictures of layouts: as text, and as SVG.

mod grid;
mod svg;
mod text;

pub(crate) use svg::{colour, write_label};
