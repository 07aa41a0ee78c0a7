//! Places for cuts of a text that leave its tokens as they are.
//!
//! A byte-level tokenizer splits a text into words by a pattern and encodes each word by itself. So a cut changes no
//! token if a word ends there in the whole text and in its first part, and no pattern looks back. That holds in two
//! kinds of places, for each pattern of [`PATTERNS`]:
//!
//! - Before white space that follows a letter or a digit. No alternative goes on from a letter or a digit to white
//!   space, and `\s+(?!\S)`, the only one that looks ahead, does not end with a letter.
//! - After a line feed that stands alone between two characters that are no white space. It ends a word of punctuation
//!   or is a word of its own, whatever follows. `/` must not follow: some patterns add it to the punctuation.
//!
//! A combining vowel sign is `\p{M}` in these patterns, not `\p{L}`, though `char::is_alphabetic` holds for it. So
//! letters are those of a few ranges that have letters alone.

use serde_json::Value;

/// The patterns of GPT-2, Llama 3, and Qwen 2 to 3.
pub(super) const PATTERNS: [&str; 3] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Ranges of characters that are all `\p{L}`: ASCII, Latin-1 and Latin Extended-A, Greek, Cyrillic, Hebrew, Arabic,
/// Devanagari, Bengali, Tamil, Thai, Hiragana, Katakana, CJK ideographs, Hangul.
const LETTERS: [(char, char); 20] = [
    ('A', 'Z'),
    ('a', 'z'),
    ('\u{c0}', '\u{d6}'),
    ('\u{d8}', '\u{f6}'),
    ('\u{f8}', '\u{17f}'),
    ('\u{391}', '\u{3a1}'),
    ('\u{3a3}', '\u{3ce}'),
    ('\u{400}', '\u{481}'),
    ('\u{5d0}', '\u{5ea}'),
    ('\u{620}', '\u{64a}'),
    ('\u{905}', '\u{939}'),
    ('\u{995}', '\u{9a8}'),
    ('\u{bae}', '\u{bb9}'),
    ('\u{e01}', '\u{e30}'),
    ('\u{3041}', '\u{3096}'),
    ('\u{30a1}', '\u{30fa}'),
    ('\u{3400}', '\u{4db5}'),
    ('\u{4e00}', '\u{9fa5}'),
    ('\u{ac00}', '\u{d7a3}'),
    ('\u{10d0}', '\u{10fa}'),
];

/// Returns true if a character is certainly `\p{L}` or `\p{N}`.
fn is_letter_or_digit(c: char) -> bool {
    c.is_ascii_digit() || LETTERS.iter().any(|&(first, last)| (first..=last).contains(&c))
}

/// Returns the last place at `from` or later where `text` may be cut, and never its end, since more text may follow.
///
/// `from` is a character's beginning.
pub(super) fn last_cut(text: &str, from: usize) -> Option<usize> {
    let mut next = None;
    for (position, c) in text.char_indices().rev() {
        let cut = position + c.len_utf8();
        if cut < from {
            return None;
        }
        let safe = next.is_some_and(|next: char| match c {
            '\n' => {
                let before = text[..position].chars().next_back();
                before.is_some_and(|c| !c.is_whitespace()) && !next.is_whitespace() && next != '/'
            }
            _ => next.is_whitespace() && is_letter_or_digit(c),
        });
        if safe {
            return Some(cut);
        }
        next = Some(c);
    }
    None
}

/// Returns true if a tokenizer (the text of its `tokenizer.json`) gives the parts of a text that [`last_cut`] cuts the
/// tokens of the whole text: one of [`PATTERNS`] splits it into words of bytes, nothing depends on its beginning, and
/// no added token reaches over a cut.
pub(super) fn may_be_cut(settings: &Value) -> bool {
    let kind = |value: &Value| value["type"].as_str().map(str::to_string);
    let normalizer = &settings["normalizer"];
    let plain = normalizer.is_null() || kind(normalizer).as_deref() == Some("NFC");
    let pre = &settings["pre_tokenizer"];
    let steps: Vec<&Value> = match kind(pre).as_deref() {
        Some("Sequence") => {
            pre["pretokenizers"].as_array().map(|all| all.iter().collect()).unwrap_or_default()
        }
        _ => vec![pre],
    };
    let byte_level = |step: &&Value| {
        kind(step).as_deref() == Some("ByteLevel") && step["add_prefix_space"] == Value::Bool(false)
    };
    let pattern = |step: &&Value| {
        let known = step["pattern"]["Regex"].as_str().is_some_and(|regex| PATTERNS.contains(&regex));
        kind(step).as_deref() == Some("Split") && known
    };
    let digits = |step: &&Value| kind(step).as_deref() == Some("Digits");
    let splits = steps.iter().any(|s| pattern(s) || (byte_level(s) && s["use_regex"] != Value::Bool(false)));
    let bytes =
        steps.iter().any(byte_level) && steps.iter().all(|s| byte_level(s) || pattern(s) || digits(s));
    let added = settings["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let apart = added.iter().all(|token| {
        let content = token["content"].as_str().unwrap_or("\n");
        // White space at its beginning alone, such as that of a token for four spaces, stays behind a cut.
        let whole = !content.contains('\n') && !content.trim_start().contains(char::is_whitespace);
        whole && ["lstrip", "rstrip"].iter().all(|strip| token[strip] != Value::Bool(true))
    });
    plain && splits && bytes && apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_before_white_space_after_a_letter_and_after_a_lone_line_feed() {
        // `|` stands at each cut.
        for marked in [
            "one| two|\n\nthree.\n|four",
            "a|\n|b",
            "a.\n\nb. c",
            "a.\r\nb",
            "1|  2|\t3",
            "a.\n b",
            "a.\n/b",
            "a.  b|\n|\u{1f980}\n|c",
            "\nx",
            "x.\n",
            // A vowel sign is no letter; a consonant is one.
            "\u{915}\u{93f} \u{915}| \u{915}\u{94d} x",
            "\u{4f60}\u{3002}\n|\u{597d}|\n\n\u{597d}\u{3002} ",
        ] {
            let text = marked.replace('|', "");
            let mut wanted = Vec::new();
            let mut seen = 0;
            for part in marked.split('|') {
                seen += part.len();
                wanted.push(seen);
            }
            wanted.pop();
            let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
            let mut found: Vec<usize> = ends.filter_map(|end| last_cut(&text[..end], 0)).collect();
            found.dedup();
            assert_eq!(found, wanted, "{marked:?}");
            for &cut in &wanted {
                let next = cut + text[cut..].chars().next().expect("a cut is not the end").len_utf8();
                assert_eq!(last_cut(&text[..next], cut), Some(cut), "{marked:?}");
            }
            assert_eq!(last_cut(&text, text.len()), None, "{marked:?}");
        }
    }

    #[test]
    fn texts_are_cut_for_known_byte_level_tokenizers_alone() {
        let none = r#""normalizer": null, "added_tokens": []"#;
        let gpt2 =
            r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#;
        let split = |pattern: &str| {
            let split = serde_json::json!({"type": "Split", "pattern": {"Regex": pattern}});
            let bytes = r#"{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}"#;
            format!(r#"{{"type": "Sequence", "pretokenizers": [{split}, {bytes}]}}"#)
        };
        let token = |content: &str, strip: &str| {
            let token =
                serde_json::json!({"content": content, "rstrip": strip == "r", "lstrip": strip == "l"});
            format!(r#""normalizer": null, "added_tokens": [{token}]"#)
        };
        let digits = format!(r#"{{"type": "Sequence", "pretokenizers": [{{"type": "Digits"}}, {gpt2}]}}"#);
        for (pre, rest, want) in [
            (gpt2, none, true),
            (&digits, none, true),
            (&split(PATTERNS[0]), none, true),
            (&split(PATTERNS[1]), none, true),
            (&split(PATTERNS[2]), none, true),
            (&split(r"\p{L}+|\s+\p{L}+"), none, false),
            (gpt2, r#""normalizer": {"type": "NFC"}, "added_tokens": []"#, true),
            (gpt2, r#""normalizer": {"type": "Prepend", "prepend": "_"}, "added_tokens": []"#, false),
            (gpt2, &token("<m>", ""), true),
            (gpt2, &token("    ", ""), true),
            (gpt2, &token("<m>", "r"), false),
            (gpt2, &token("<m>", "l"), false),
            (gpt2, &token("a\nb", ""), false),
            (gpt2, &token("\n", ""), false),
            (gpt2, &token("<end of>", ""), false),
            (r#"{"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}"#, none, false),
            (r#"{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}"#, none, false),
            (r#"{"type": "Metaspace", "replacement": "_"}"#, none, false),
            ("null", none, false),
        ] {
            let settings = serde_json::from_str(&format!(r#"{{"pre_tokenizer": {pre}, {rest}}}"#)).unwrap();
            assert_eq!(may_be_cut(&settings), want, "{pre} {rest}");
        }
    }
}
