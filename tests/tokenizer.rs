//! Tokenizers on text files: pieces of a file have the tokens of the whole text.

use std::fs;

use isoshard::data::{TokenWidth, TokenWriter, Tokenizer};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

#[path = "../src/data/text_cuts.rs"]
mod text_cuts;

use text_cuts::{PATTERNS, last_cut};

/// A file of more than one piece has the tokens of its whole text, and the text comes back.
#[test]
fn a_file_in_pieces_has_the_tokens_of_the_whole_text() {
    let page = include_str!("../examples/train_gpt/handbook.txt").repeat(9);
    let ends = "end.\n\n  end\n\n\nend\t\n 42\r\n\u{1f980}\n<|endoftext|>\n";
    // Lines that end in punctuation; words that end in vowel signs.
    let chinese = "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\n".repeat(70_000);
    let hindi = "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} \u{915}\u{940}\u{964}\n\n".repeat(50_000);
    let folder = std::env::temp_dir().join(format!("isoshard-pieces-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let [file, bin, json] = ["text.txt", "tokens.bin", "tokenizer.json"].map(|name| folder.join(name));
    for text in [page + ends, chinese, hindi] {
        assert!(text.len() > 1 << 20);
        fs::write(&file, &text).unwrap();
        let tokenizer = Tokenizer::train(&[&file], 280).unwrap();
        tokenizer.save(&json).unwrap();
        let first = fs::read(&json).unwrap();
        Tokenizer::train_on_text(&text, 280).unwrap().save(&json).unwrap();
        assert!(fs::read(&json).unwrap() == first, "the same text gives the same tokenizer");

        let mut writer = TokenWriter::create(&bin, TokenWidth::U32).unwrap();
        let len = Tokenizer::load(&json).unwrap().encode_file(&file, &mut writer).unwrap();
        assert_eq!(writer.finish().unwrap(), len);
        let tokens = tokenizer.encode(&text).unwrap();
        assert!(tokens.len() < text.len() && tokens.iter().all(|&token| token < 280));
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        assert!(fs::read(&bin).unwrap() == bytes);
        assert!(tokenizer.decode(&tokens).unwrap() == text);
    }
    fs::remove_dir_all(folder).unwrap();
}

/// Random texts of characters that the patterns treat differently: at each cut, the words of the two parts are those
/// of the whole text.
/// Files without end, which were read until the memory was full.
#[cfg(unix)]
#[test]
fn a_tokenizer_is_a_regular_file_of_some_length() {
    let said = |path: &std::path::Path| Tokenizer::load(path).unwrap_err().to_string();
    let dir = std::env::temp_dir();
    for path in ["/dev/zero".as_ref(), &*dir] {
        let said = said(path);
        assert!(said.starts_with("tokenizer: ") && said.ends_with(": it is no regular file"), "{said}");
    }
    let long = dir.join(format!("isoshard-long-{}.json", std::process::id()));
    fs::File::create(&long).unwrap().set_len(2 << 30).unwrap();
    let said = said(&long);
    fs::remove_file(&long).unwrap();
    assert!(said.starts_with("tokenizer: the file has more than 268435456 bytes; got "), "{said}");
}

#[test]
fn parts_have_the_words_of_the_whole_text() {
    let alphabet =
        ['a', 's', '1', ' ', '\n', '\r', '\t', '.', '\'', '/', '\u{915}', '\u{93f}', '\u{4f60}', '\u{3002}'];
    let mut state = 1_u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((state >> 33) as usize) % n
    };
    let splits = PATTERNS.map(|pattern| {
        Split::new(SplitPattern::Regex(pattern.into()), SplitDelimiterBehavior::Isolated, false).unwrap()
    });
    let words = |split: &Split, text: &str| -> Vec<String> {
        let mut parts = PreTokenizedString::from(text);
        split.pre_tokenize(&mut parts).unwrap();
        let parts = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        parts.into_iter().map(|(word, ..)| word.to_string()).collect()
    };
    let mut cuts = 0;
    for _ in 0..5_000 {
        let text: String = (0..8).map(|_| alphabet[below(alphabet.len())]).collect();
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        let mut places: Vec<usize> = ends.filter_map(|end| last_cut(&text[..end], 0)).collect();
        places.dedup();
        for split in &splits {
            let whole = words(split, &text);
            for &place in &places {
                let (left, right) = text.split_at(place);
                assert_eq!([words(split, left), words(split, right)].concat(), whole, "{text:?} at {place}");
                cuts += 1;
            }
        }
    }
    assert!(cuts > 5_000, "{cuts}");
}
