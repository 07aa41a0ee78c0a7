//! The embedded sources of `kernels/`.

/// The compiler's options, the same for every kernel: IEEE arithmetic as it is written.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

macro_rules! embed {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*] };
}

/// The headers, by the name under which sources include them.
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// The sources, by file name: one an operator, and a few that several share.
pub fn programs() -> &'static [(&'static str, &'static str)] {
    PROGRAMS
}

/// The text of `kernels/<name>.cu`.
pub(super) fn program(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|(file, _)| file.strip_suffix(".cu") == Some(name)).map(|(_, text)| *text)
}

const HEADERS: &[(&str, &str)] = embed! {
    "iso.cuh"
};

const PROGRAMS: &[(&str, &str)] = embed! {};
