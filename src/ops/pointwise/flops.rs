//! Counts the operations of a formula from its text, at compile time.

use crate::ops::Work;

/// The number of operations of each function that formulas call, by name.
pub(super) type KnownFlops = &'static [(&'static str, u64)];

/// Returns the number of operations of a formula, as [`Work`] counts them: 1 per operator, and [`word`] per called
/// function. An operator followed by a number or by the name of a constant is constant arithmetic and counts 0.
///
/// # Panics
/// Panics, at compile time, if the formula calls an unknown function.
pub(super) const fn operations(formula: &str, known: KnownFlops) -> u64 {
    let text = formula.as_bytes();
    let (mut at, mut sum) = (0, 0);
    while at < text.len() {
        let end = token_end(text, at);
        let next = next_byte(text, end);
        if is_operator(text[at]) {
            let constant = next.is_ascii_uppercase() || next.is_ascii_digit();
            sum += if constant { 0 } else { 1 };
        } else if text[at].is_ascii_alphabetic() && next == b'(' {
            sum += word(text.split_at(end).0.split_at(at).1, known);
        }
        at = end;
    }
    sum
}

/// Returns the number of operations of a called function.
const fn word(name: &[u8], known: KnownFlops) -> u64 {
    match name {
        b"of" | b"wide" | b"inf" | b"nan" => 0,
        b"exp" | b"ln" | b"tanh" | b"erf" | b"bell" | b"mills" | b"sigmoid" => Work::SPECIAL,
        b"sin" | b"cos" | b"tan" | b"asin" | b"acos" | b"atan" | b"atan2" => Work::SPECIAL,
        b"sinh" | b"cosh" | b"asinh" | b"acosh" | b"atanh" | b"lgamma" | b"digamma" | b"trigamma" => {
            Work::SPECIAL
        }
        b"exp2" | b"expm1" | b"log1p" | b"log1p_unit" | b"log2" | b"log10" => Work::SPECIAL,
        b"cbrt" | b"erfc" | b"erfinv" => Work::SPECIAL,
        b"pow_abs" => 2 * Work::SPECIAL,
        b"fma" => 2,
        b"sqrt" | b"recip" | b"abs" | b"floor" | b"copysign" | b"negative" | b"add" | b"sub" | b"mul" => 1,
        b"max" | b"min" | b"select" | b"is_nan" | b"ceil" | b"trunc" | b"round" => 1,
        b"fmod" | b"remainder" | b"floor_div" => 1,
        b"bit_and" | b"bit_or" | b"bit_xor" | b"bit_not" | b"shift_left" | b"shift_right" => 1,
        _ => {
            let mut i = 0;
            while i < known.len() {
                if equal(name, known[i].0.as_bytes()) {
                    return known[i].1;
                }
                i += 1;
            }
            panic!("a formula calls a function whose operations are not known: add it to `word`")
        }
    }
}

/// Returns the end of the token that starts at `at`: a name, a number, an operator, or one other byte.
const fn token_end(text: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < text.len()
        && ((is_name(text[at]) && is_name(text[end])) || (is_operator(text[at]) && is_operator(text[end])))
    {
        end += 1;
    }
    end
}

/// Returns the first byte from `at` on that is not a space, or 0 at the end.
const fn next_byte(text: &[u8], mut at: usize) -> u8 {
    while at < text.len() && text[at].is_ascii_whitespace() {
        at += 1;
    }
    if at < text.len() { text[at] } else { 0 }
}

/// Returns true for the bytes of names and numbers.
const fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.'
}

const fn is_operator(byte: u8) -> bool {
    matches!(byte, b'+' | b'-' | b'*' | b'/' | b'<' | b'>' | b'=' | b'!' | b'&' | b'|')
}

const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_and_words_count_and_constants_do_not() {
        let count = |text| operations(text, &[("twice", 7)]);
        assert_eq!(count("add(x, y)"), 1);
        assert_eq!(count("x / y"), 1);
        assert_eq!(count("fma(b * b, of(V * C), of(-1e-4))"), 3);
        assert_eq!(count("a && !is_nan (x) || x <= of(inf())"), 5);
        assert_eq!(count("-twice(exp(x))"), 8 + Work::SPECIAL);
    }

    #[test]
    #[should_panic(expected = "not known")]
    fn an_unknown_word_is_refused() {
        operations("haversine(x)", &[]);
    }
}
