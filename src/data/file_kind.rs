//! Files that are no token files, or have wider tokens, known by their bytes.

/// The bytes at the beginning, in the middle and at the end of a file that show the width of its tokens.
const PROBE: usize = 1 << 14;
/// The number of tokens of twice the width from which on they are told from narrower ones.
const PROBE_LEAST: usize = 256;
/// Tokens below this are very small: the upper halves of 32-bit tokens of vocabularies of up to 262,144.
const SMALL: u32 = 4;
/// The bytes at a place of a file that show text.
const TEXT_PROBE: usize = 4096;
/// The shortest file that is taken for text.
const TEXT_LEAST: usize = 64;

/// A format that is not that of token files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OtherFormat {
    pub name: &'static str,
    pub remedy: &'static str,
}

const TO_FILE: &str = "write the array's numbers with tofile of NumPy, or tokens with TokenWriter";
const UNPACK: &str = "unpack it first";
const WRITE: &str = "write its tokens with TokenWriter";

/// Formats by the bytes with which their files begin. Each has four or more, which the first tokens of a file hardly
/// are.
const BEGINNINGS: [(&[u8], &str, &str); 18] = [
    (b"\x93NUMPY", "an array of NumPy (.npy)", TO_FILE),
    (b"PK\x03\x04", "a zip archive (.npz, .zip or .pt)", TO_FILE),
    (b"PK\x05\x06", "an empty zip archive", TO_FILE),
    (b"\x28\xb5\x2f\xfd", "a file packed by zstd", UNPACK),
    (b"\xfd7zXZ\x00", "a file packed by xz", UNPACK),
    (b"BZh91AY&SY", "a file packed by bzip2", UNPACK),
    (b"\x04\x22\x4d\x18", "a file packed by lz4", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", UNPACK),
    (b"PAR1", "a Parquet file", WRITE),
    (b"ARROW1\x00\x00", "an Arrow file", WRITE),
    (b"FEA1", "a Feather file", WRITE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", WRITE),
    (b"GGUF", "a model (GGUF)", "give token files, and read models with hugging_face"),
    (b"MMIDIDX\x00\x00", "an index of Megatron (.idx)", "give the .bin file beside it"),
    (b"TNTIDX\x00\x00", "an index of fairseq (.idx)", "give the .bin file beside it"),
    (b"SQLite format 3\x00", "a database (SQLite)", WRITE),
    (b"%PDF-", "a PDF document", "encode its text with Tokenizer::encode_file"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", "fetch the file by git lfs pull"),
];

/// Returns the format of a file that is no token file.
pub(super) fn other_format(bytes: &[u8]) -> Option<OtherFormat> {
    let begins = |(start, ..): &&(&[u8], _, _)| bytes.starts_with(start) && bytes.len() > start.len();
    if let Some(&(_, name, remedy)) = BEGINNINGS.iter().find(begins) {
        return Some(OtherFormat { name, remedy });
    }
    let format_if = |found: bool, name, remedy| found.then_some(OtherFormat { name, remedy });
    let read = "give token files, and read models with hugging_face";
    format_if(is_gzip(bytes), "a file packed by gzip", UNPACK)
        .or_else(|| format_if(is_pickle(bytes), "a pickle of Python", TO_FILE))
        .or_else(|| format_if(is_arrow_stream(bytes), "an Arrow stream", WRITE))
        .or_else(|| format_if(is_safetensors(bytes), "safetensors", read))
        .or_else(|| {
            format_if(is_llm_c(bytes), "tokens behind a header of llm.c", "cut off the first 1,024 bytes")
        })
        .or_else(|| format_if(is_tar(bytes), "a tar archive", UNPACK))
        .or_else(|| format_if(is_text(bytes), "text", "encode it with Tokenizer::encode_file"))
}

/// The method is always deflate, and the flags have five bits.
fn is_gzip(bytes: &[u8]) -> bool {
    bytes.len() >= 18 && bytes.starts_with(b"\x1f\x8b\x08") && bytes[3] < 32 && matches!(bytes[8], 0 | 2 | 4)
}

/// A pickle begins with its protocol and ends with a full stop. From protocol 4 on a frame follows, with its length.
fn is_pickle(bytes: &[u8]) -> bool {
    if bytes.last() != Some(&b'.') {
        return false;
    }
    match bytes {
        [0x80, 4 | 5, 0x95, rest @ ..] => {
            let Some((len, framed)) = rest.split_first_chunk() else { return false };
            u64::from_le_bytes(*len) <= framed.len() as u64
        }
        [0x80, 2 | 3, code, ..] => b"]}(cX\x8aK".contains(code),
        _ => false,
    }
}

/// A mark, and the length of the first message, padded to words of eight bytes.
fn is_arrow_stream(bytes: &[u8]) -> bool {
    let Some((mark, rest)) = bytes.split_first_chunk::<4>() else { return false };
    let Some((len, rest)) = rest.split_first_chunk() else { return false };
    let len = u32::from_le_bytes(*len) as usize;
    *mark == [0xff; 4] && len > 0 && len.is_multiple_of(8) && len <= rest.len()
}

/// The length of a JSON object, and the object.
fn is_safetensors(bytes: &[u8]) -> bool {
    let Some((len, rest)) = bytes.split_first_chunk() else { return false };
    let header = usize::try_from(u64::from_le_bytes(*len)).ok().and_then(|len| rest.get(..len));
    header.is_some_and(|header| header.starts_with(b"{\"") && header.trim_ascii_end().ends_with(b"}"))
}

/// A header of 256 words: a mark with the version, and the number of tokens.
fn is_llm_c(bytes: &[u8]) -> bool {
    let word = |i: usize| bytes.get(4 * i..4 * i + 4)?.try_into().ok().map(u32::from_le_bytes);
    let (Some(20_240_520 | 20_240_801), Some(tokens)) = (word(0), word(2)) else { return false };
    let body = bytes.len().saturating_sub(1024);
    [2, 4].iter().any(|each| (tokens as usize).checked_mul(*each) == Some(body))
}

fn is_tar(bytes: &[u8]) -> bool {
    bytes.len().is_multiple_of(512) && bytes.get(257..262) == Some(b"ustar")
}

/// Text at the beginning, in the middle and at the end: UTF-8 without control characters. The zeros of small tokens,
/// and most bytes of others, are none.
fn is_text(bytes: &[u8]) -> bool {
    let is_text_at = |start: usize| {
        let place = &bytes[start..bytes.len().min(start + TEXT_PROBE)];
        // A place begins and ends within characters.
        let skipped = place.iter().take(3).take_while(|&&byte| byte & 0xc0 == 0x80).count();
        let place = &place[skipped..];
        let text = match str::from_utf8(place) {
            Ok(text) => text,
            Err(e) if e.error_len().is_none() => {
                str::from_utf8(&place[..e.valid_up_to()]).unwrap_or_default()
            }
            Err(_) => return false,
        };
        text.chars().all(|c| !c.is_control() || "\n\r\t\x0c".contains(c))
    };
    let last = bytes.len().saturating_sub(TEXT_PROBE);
    bytes.len() >= TEXT_LEAST && [0, last / 2, last].into_iter().all(is_text_at)
}

/// Returns the factor by which the tokens of a file seem wider than `width` bytes, 2 or 4, and the number of bytes that
/// show it: of each two (or four) tokens next to each other, one is seldom 0, and the others nearly always are, as the
/// upper parts of numbers; or the others are nearly always very small, and the one seldom is.
pub(super) fn wider_tokens(bytes: &[u8], width: usize) -> Option<(usize, usize)> {
    if bytes.len() < 2 * width * PROBE_LEAST {
        return None;
    }
    // The places begin where four tokens do, so that their tokens are counted alike.
    let last = bytes.len().saturating_sub(PROBE);
    let starts = [0, last / 2, last].map(|start| start / (4 * width) * (4 * width));
    let (mut counts, mut zeros, mut small, mut end) = ([0u64; 4], [0u64; 4], [0u64; 4], 0);
    let mut sampled = 0;
    for start in starts {
        // Places of a short file overlap.
        let start = start.max(end);
        end = bytes.len().min(start + PROBE).max(end);
        sampled += end - start;
        for (index, token) in bytes[start..end].chunks_exact(width).enumerate() {
            let token = token.iter().rev().fold(0u32, |token, &byte| token << 8 | u32::from(byte));
            counts[index % 4] += 1;
            zeros[index % 4] += u64::from(token == 0);
            small[index % 4] += u64::from(token < SMALL);
        }
    }
    let factor = |found: [u64; 4]| {
        let share = |part: u64, most: bool| move |(n, all): (u64, u64)| (n * 20 >= all * part) == most;
        let pairs = [0, 1, 2, 3].map(|k| (found[k], counts[k]));
        // At least 19 of 20, and fewer than 10 of 20.
        let (often, seldom) = (pairs.map(share(19, true)), pairs.map(share(10, false)));
        let is = |wanted: [bool; 4]| often == wanted && seldom == wanted.map(|often| !often);
        let (no, yes) = (false, true);
        if is([no, yes, no, yes]) || is([yes, no, yes, no]) {
            return Some(2);
        }
        [[no, yes, yes, yes], [yes, no, yes, yes], [yes, yes, no, yes], [yes, yes, yes, no]]
            .into_iter()
            .any(is)
            .then_some(4)
    };
    factor(zeros).or_else(|| factor(small)).map(|factor| (factor, sampled))
}
