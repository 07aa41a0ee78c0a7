//! Token files: the same global batches on every mesh, no sample lost or repeated when ranks come and go, and refusals.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::data::{DataPosition, PackedBatch, Packing, TokenWidth, TokenWriter, Tokens, TokensConfig};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::rng::{Draw, Generator, Permutation};
use isoshard::tensor::storage;

/// A file in the temporary folder, which is removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(bytes: &[u8]) -> Temporary {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("isoshard-suite-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::write(&path, bytes).expect("the temporary folder can be written");
        Temporary(path)
    }

    fn tokens(width: TokenWidth, tokens: impl IntoIterator<Item = u32>) -> Temporary {
        let file = Temporary::new(&[]);
        let mut writer = TokenWriter::create(&file.0, width).unwrap();
        writer.write(&tokens.into_iter().collect::<Vec<_>>()).unwrap();
        writer.finish().unwrap();
        file
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Two files in which each token is its own number: 35 and 12 windows of 4.
fn numbered() -> [Temporary; 2] {
    [(0, 143), (1000, 1050)].map(|(from, to)| Temporary::tokens(TokenWidth::U16, from..to))
}

fn paths(files: &[Temporary]) -> Vec<PathBuf> {
    files.iter().map(|file| file.0.clone()).collect()
}

const CONFIG: TokensConfig = TokensConfig {
    vocabulary: 1050,
    block: 4,
    batch: 5,
    shuffle: Some(7),
    packing: Packing::Windows,
    width: None,
    read_ahead: 2,
    compare_all: false,
};
const SAMPLES: usize = 47;

/// The first token of each row of the numbered files' epochs, by the definition of the order.
fn expected_rows(epochs: u64) -> Vec<i64> {
    let seed = Generator::new(7).child("data.tokens").seed();
    let starts: Vec<i64> = (0..35).map(|w| 4 * w).chain((0..12).map(|w| 1000 + 4 * w)).collect();
    let epoch = |number| {
        let order = Permutation::new(Draw { seed, number }, SAMPLES as u64);
        let starts = &starts;
        (0..SAMPLES as u64).map(move |i| starts[order.at(i).unwrap() as usize]).collect::<Vec<_>>()
    };
    (0..epochs).flat_map(epoch).collect()
}

/// Reads batches on a mesh: all tokens and targets, and the position after them.
fn batches(
    (axes, layout): (&'static str, &'static str),
    config: TokensConfig,
    from: Option<DataPosition>,
    count: usize,
    paths: &[PathBuf],
) -> (Vec<[Vec<i64>; 2]>, DataPosition) {
    let ranks = isoshard::placement::Mesh::parse(axes, 0).unwrap().rank_len();
    let paths = paths.to_vec();
    let run = move |rank| {
        let mesh = DeviceMesh::parse(&rank, axes)?;
        let mut tokens = Tokens::open(&paths, config)?;
        from.map_or(Ok(()), |position| tokens.restore(position))?;
        let mut all = Vec::new();
        for _ in 0..count {
            let (x, y) = tokens.next_batch(&mesh, layout)?;
            assert_eq!(x.layout(), &layout.parse()?);
            all.push([x.full_tensor()?.to_vec()?, y.full_tensor()?.to_vec()?]);
        }
        Ok((all, tokens.position()))
    };
    let mut outcomes = spmd(ranks, run).unwrap_or_else(|e| panic!("{axes}: {e}"));
    let first = outcomes.remove(0);
    assert!(outcomes.iter().all(|other| *other == first), "{axes}: the ranks agree");
    first
}

const MESHES: [(&str, &str); 9] = [
    ("1", "()"),
    ("dp=2", "(S0)"),
    ("dp=3", "(S0)"),
    ("dp=4", "(S0)"),
    ("dp=7", "(S0)"),
    ("tp=2", "(R)"),
    ("sp=3", "(S1)"),
    ("dp=2,tp=2", "(S0, S1)"),
    ("dp=2,fsdp=2", "(S0, S0)"),
];

#[test]
fn every_mesh_gets_the_same_batches() {
    let files = numbered();
    let rows = expected_rows(3);
    for mesh in MESHES {
        for read_ahead in [0, 3] {
            let config = TokensConfig { read_ahead, ..CONFIG };
            let (all, position) = batches(mesh, config, None, 21, &paths(&files));
            for (batch, [x, y]) in all.iter().enumerate() {
                let starts = &rows[5 * batch..5 * batch + 5];
                let want = |shift: i64| -> Vec<i64> {
                    starts.iter().flat_map(|&s| (s + shift..s + shift + 4).collect::<Vec<_>>()).collect()
                };
                assert_eq!((x, y), (&want(0), &want(1)), "{mesh:?}, batch {batch}");
            }
            assert_eq!((position.epoch, position.sample), (2, 11), "{mesh:?}");
        }
    }
}

/// Four ranks, then three, then two, then one, each with another batch size, in the middle of epochs: every sample of
/// two epochs comes once per epoch.
#[test]
fn no_sample_is_lost_or_repeated_when_ranks_come_and_go() {
    let files = numbered();
    let mut position: Option<DataPosition> = None;
    let mut seen = Vec::new();
    let legs = [("dp=4", 5, 4), ("dp=3", 7, 3), ("dp=2", 4, 10), ("dp=4", 3, 1), ("1", 13, 1)];
    for (axes, batch, count) in legs {
        let config = TokensConfig { batch, ..CONFIG };
        let layout = if axes == "1" { "()" } else { "(S0)" };
        // The position travels as text, as in a checkpoint.
        let from = position.map(|p| p.to_string().parse().unwrap());
        let (all, after) = batches((axes, layout), config, from, count, &paths(&files));
        seen.extend(all.iter().flat_map(|[x, _]| x.chunks(4).map(|row| row[0])));
        position = Some(after);
    }
    assert_eq!(seen.len(), 2 * SAMPLES + 3);
    assert_eq!(seen, expected_rows(3)[..seen.len()]);
    let epochs: Vec<BTreeSet<i64>> =
        seen[..2 * SAMPLES].chunks(SAMPLES).map(|e| e.iter().copied().collect()).collect();
    assert!(epochs.iter().all(|epoch| epoch.len() == SAMPLES), "each sample once in each epoch");
    assert_ne!(seen[..SAMPLES], seen[SAMPLES..2 * SAMPLES], "epochs differ in order");
    let position = position.unwrap();
    assert_eq!((position.epoch, position.sample), (2, 3));
    let json = serde_json::to_string(&position).unwrap();
    assert_eq!(serde_json::from_str::<DataPosition>(&json).unwrap(), position);
}

#[test]
fn a_batch_may_be_longer_than_an_epoch() {
    let files = numbered();
    let config = TokensConfig { batch: 100, ..CONFIG };
    let (all, position) = batches(("dp=3", "(S0)"), config, None, 1, &paths(&files));
    let starts: Vec<i64> = all[0][0].chunks(4).map(|row| row[0]).collect();
    assert_eq!(starts, expected_rows(3)[..100]);
    assert_eq!((position.epoch, position.sample), (2, 6));
}

#[test]
fn unshuffled_windows_follow_the_files() {
    let file = Temporary::tokens(TokenWidth::U32, (0..15).map(|i| 70_000 + i));
    let config =
        TokensConfig { vocabulary: 80_000, shuffle: None, width: None, batch: 2, block: 6, ..CONFIG };
    let (all, _) = batches(("1", "()"), config, None, 1, &paths(&[file]));
    assert_eq!(all[0][0], (70_000..70_012).collect::<Vec<i64>>());
    assert_eq!(all[0][1], (70_001..70_013).collect::<Vec<i64>>());
}

/// The ranks whose rows hold a token outside the vocabulary fail; the others read nothing of those rows.
#[test]
fn each_rank_reads_only_its_rows() {
    // 6 windows of 4, one batch: the bad token stands in rows 3 to 5, which are rank 1's.
    let file = Temporary::tokens(TokenWidth::U16, (0..25).map(|i| if i == 17 { 500 } else { i }));
    let path = file.0.clone();
    for read_ahead in [0, 1] {
        let path = path.clone();
        let run = move |rank: isoshard::comm::Rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let config = TokensConfig { vocabulary: 100, shuffle: None, batch: 6, read_ahead, ..CONFIG };
            let mut tokens = Tokens::open(&[&path], config)?;
            let before = tokens.position();
            let read = tokens.next_batch(&mesh, "(S0)");
            Ok((read.map(|_| ()).map_err(|e| e.to_string()), tokens.position() == before))
        };
        let mut outcomes = spmd(2, run).unwrap();
        assert_eq!(outcomes.remove(0), (Ok(()), false));
        let (said, unmoved) = outcomes.remove(0);
        let said = said.unwrap_err();
        let want = format!(
            "tokens: a token is outside the vocabulary of 100; got token 500 at 17 of {}; give the vocabulary and the \
             width of the file",
            file.0.display()
        );
        assert_eq!((said, unmoved), (want, true));
    }
}

/// Changes the settings and the files of a rank.
type Change = fn(usize, &mut TokensConfig, &mut Vec<PathBuf>);

/// Reads two batches on two ranks whose settings and files `differ` changes, and returns each rank's refusal of the
/// first.
fn first_refusals(
    files: &[Temporary],
    differ: impl Fn(usize, &mut TokensConfig, &mut Vec<PathBuf>) + Send + Sync + 'static,
) -> Vec<Option<String>> {
    let all = paths(files);
    let run = move |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let (mut config, mut paths) = (CONFIG, all.clone());
        differ(rank.rank(), &mut config, &mut paths);
        let mut tokens = Tokens::open(&paths, config)?;
        if let Err(e) = tokens.next_batch(&mesh, "(S0)") {
            return Ok(Some(e.to_string()));
        }
        let before = mesh.received_bytes();
        tokens.next_batch(&mesh, "(S0)")?;
        assert_eq!(mesh.received_bytes(), before);
        Ok(None)
    };
    spmd(2, run).unwrap()
}

/// The first batch compares the ranks; later ones send nothing.
#[test]
fn ranks_with_another_order_are_found() {
    let files = numbered();
    let found = |differ: Change| first_refusals(&files, differ);
    assert_eq!(found(|rank, config, _| config.read_ahead = rank), [None, None]);
    let others: [(Change, [&str; 2]); 5] = [
        (|rank, config, _| config.shuffle = Some(rank as u64), ["shuffle Some(0)", "shuffle Some(1)"]),
        (|rank, config, _| config.batch += rank, ["5 rows of 4", "6 rows of 4"]),
        (|rank, config, _| config.compare_all = rank == 0, ["compare_all true", "compare_all false"]),
        (|rank, _, paths| paths.rotate_left(rank), ["143 tokens", "50 tokens"]),
        (|rank, _, paths| paths.truncate(2 - rank), ["2 file(s)", "1 file(s)"]),
    ];
    for (differ, told) in others {
        let refused = found(differ).map_texts();
        let rule = "tokens: the ranks have different token files, settings or positions; got ";
        assert!(refused[0].starts_with(rule) && refused[0] == refused[1], "{refused:?}");
        for (rank, told) in told.into_iter().enumerate() {
            let (of_rank, _) =
                refused[0].split_once(&format!(" on rank(s) {rank}")).expect("it names the rank");
            assert!(of_rank.rsplit(" and ").next().is_some_and(|text| text.contains(told)), "{refused:?}");
        }
    }
}

/// Files that differ in the middle, or in one byte between the samples, which a full comparison alone finds.
#[test]
fn ranks_whose_files_differ_in_the_middle_are_found() {
    let file = |at: Option<usize>| {
        let tokens = (0..200_000).map(|i| if Some(i) == at { 1 } else { i as u32 % 7 });
        Temporary::tokens(TokenWidth::U16, tokens)
    };
    let ends = [0, 1, 199_999].map(|at| (at, false));
    let middle = [100_000, 100_002].map(|at| (at, false));
    for (at, all) in ends.into_iter().chain(middle).chain([(30_000, true)]) {
        // A token that is not 1 already.
        let at = (at..).find(|at| at % 7 != 1).unwrap().min(199_999);
        let files = [file(None), file(Some(at))];
        let find = |compare_all| {
            first_refusals(&files, move |rank, config, paths| {
                *paths = vec![paths[rank].clone()];
                config.compare_all = compare_all;
            })
        };
        if all {
            assert_eq!(find(false), [None, None], "the samples miss it");
        }
        let refused = find(all).map_texts();
        assert!(refused[0] == refused[1], "{refused:?}");
        for (rank, file) in files.iter().enumerate() {
            let told = format!("in {} on rank(s) {rank}", file.0.display());
            assert!(
                refused[0].contains("200000 tokens, fingerprint ") && refused[0].contains(&told),
                "{refused:?}"
            );
        }
    }
}

/// The texts of refusals that are there.
trait Texts {
    fn map_texts(self) -> Vec<String>;
}

impl Texts for Vec<Option<String>> {
    fn map_texts(self) -> Vec<String> {
        self.into_iter().map(|text| text.expect("it is refused")).collect()
    }
}

#[test]
fn files_and_settings_that_do_not_fit_are_refused_by_name() {
    let refused = |bytes: &[u8], config: TokensConfig| {
        let file = Temporary::new(bytes);
        let said = Tokens::open(&[&file.0], config).unwrap_err().to_string();
        said.replace(&file.0.display().to_string(), "FILE")
    };
    let wide = TokensConfig { vocabulary: 1 << 17, ..CONFIG };
    let documents = TokensConfig { packing: Packing::Documents { end_of_text: 0 }, ..CONFIG };
    for (bytes, config, want) in [
        (
            &[][..],
            CONFIG,
            "tokens: a token file is empty; got 0 bytes in FILE; write tokens with TokenWriter",
        ),
        (
            &[1, 0, 2],
            CONFIG,
            "tokens: a file of 2-byte tokens has another number of bytes; got 3 bytes in FILE; give the width that the \
             file was written with",
        ),
        (
            &[1, 0, 0, 0, 2, 0],
            wide,
            "tokens: a file of 4-byte tokens has another number of bytes; got 6 bytes in FILE; give the width that the \
             file was written with",
        ),
        (
            &[0; 8],
            CONFIG,
            "tokens: a file is shorter than a window of 4 + 1 tokens; got 4 tokens in FILE; give a smaller block",
        ),
        (&[0; 8], documents, "tokens: no document has a token to predict; got FILE"),
        (
            &[1, 0, 255, 255],
            documents,
            "tokens: a token is outside the vocabulary of 1050; got token 65535 at 1 of FILE; give the vocabulary and \
             the width of the file",
        ),
        (
            &[0; 20],
            TokensConfig { packing: Packing::DocumentWindows { end_of_text: 1050 }, ..CONFIG },
            "tokens: the end of text is a token; got 1050 of 1050",
        ),
        (
            &[0; 20],
            TokensConfig { batch: 0, ..CONFIG },
            "tokens: a batch has rows and a row has tokens; got 0 rows of 4",
        ),
        (
            &[0; 20],
            TokensConfig { block: 0, ..CONFIG },
            "tokens: a batch has rows and a row has tokens; got 5 rows of 0",
        ),
        (
            &[0; 20],
            TokensConfig { block: usize::MAX, ..documents },
            "tokens: a batch has more tokens than memory; got 5 rows of 18446744073709551615",
        ),
        (
            &[0; 20],
            TokensConfig { batch: usize::MAX, ..CONFIG },
            "tokens: a batch has more tokens than memory; got 18446744073709551615 rows of 4",
        ),
        (
            &[0; 20],
            TokensConfig { batch: 1 << 31, block: 1 << 31, ..documents },
            "tokens: a batch has more tokens than memory; got 2147483648 rows of 2147483648",
        ),
        (
            &[0; 20],
            TokensConfig { read_ahead: usize::MAX, ..CONFIG },
            "tokens: at most 1024 batches are read ahead; got 18446744073709551615",
        ),
    ] {
        assert_eq!(refused(bytes, config), want);
    }
    let none: [PathBuf; 0] = [];
    assert_eq!(
        Tokens::open(&none, CONFIG).unwrap_err().to_string(),
        "tokens: wants at least one token file; got none"
    );
    let missing = Tokens::open(&["no/such.bin"], CONFIG).unwrap_err().to_string();
    assert!(missing.starts_with("tokens: cannot access the file; got no/such.bin: "), "{missing}");
}

#[test]
fn files_of_wide_tokens_are_not_read_as_narrow_ones() {
    let wide = Temporary::tokens(TokenWidth::U32, (0..1000).map(|i| i % 50));
    let open = |file: &Temporary, width| Tokens::open(&[&file.0], TokensConfig { width, ..CONFIG });
    let text = |file: &Temporary, said: String| said.replace(&file.0.display().to_string(), "FILE");
    assert_eq!(
        text(&wide, open(&wide, None).unwrap_err().to_string()),
        "tokens: a file of 16-bit tokens looks like one of 32-bit tokens; got 0 as each second token in 4000 bytes of \
         FILE; give the width: U32, or U16 if it is right"
    );
    assert_eq!(open(&wide, Some(TokenWidth::U32)).unwrap().samples(), 249);
    assert_eq!(open(&wide, Some(TokenWidth::U16)).unwrap().samples(), 499);
    // Few tokens, nothing but zeros, tokens of a tiny vocabulary, and many zeros show nothing.
    assert!(open(&Temporary::tokens(TokenWidth::U32, 0..255), None).is_ok());
    assert!(open(&Temporary::tokens(TokenWidth::U32, 0..256), None).is_err());
    for token in [|_| 0, |i| i % 3, |i| if i % 3 == 0 { 0 } else { i % 50 }, |i: u32| i * i % 1000] {
        assert!(open(&Temporary::tokens(TokenWidth::U16, (0..4000).map(token)), None).is_ok());
    }
}

/// Shares of zeros count, not single tokens, and at the beginning, in the middle and at the end.
#[test]
fn headers_do_not_hide_the_width() {
    let of = |each: usize, header: &[u8], token: &dyn Fn(usize) -> u64| {
        let tokens = (0..100_000).flat_map(|i| token(i).to_le_bytes()[..each].to_vec());
        Temporary::new(&header.iter().copied().chain(tokens).collect::<Vec<u8>>())
    };
    let small = |i: usize| (i * i % 997 + i % 50) as u64;
    let refused = |file: &Temporary, vocabulary| {
        let config = TokensConfig { vocabulary, ..CONFIG };
        Tokens::open(&[&file.0], config).map(drop).expect_err("it is refused").to_string()
    };
    let header: Vec<u8> = (0..128u8).map(|i| i.wrapping_mul(7) | 1).collect();
    // 32-bit tokens of a vocabulary beyond 65,536, some of them 0; behind headers of several lengths; one odd token.
    let some_zero = |i: usize| if i.is_multiple_of(10) { 0 } else { small(i) };
    let large = |i: usize| if i.is_multiple_of(3) { 120_000 + small(i) } else { small(i) };
    let odd = |i: usize| if i == 5000 { 1 << 20 } else { small(i) };
    for (header, token) in [
        (&header[..0], &small as &dyn Fn(usize) -> u64),
        (&header[..], &small),
        (&header[..6], &small),
        (&[], &some_zero),
        (&[], &large),
        (&[], &odd),
    ] {
        let said = refused(&of(4, header, token), 50_000);
        assert!(said.contains("a file of 16-bit tokens looks like one of 32-bit tokens"), "{said}");
    }
    // 64-bit tokens, NumPy's own width.
    let wide = of(8, &[], &small);
    for (vocabulary, rule) in [
        (50_000, "a file of 16-bit tokens looks like one of 64-bit tokens; got 0 as three of four tokens in"),
        (100_000, "a file of 32-bit tokens looks like one of 64-bit tokens; got 0 as each second token in"),
    ] {
        let said = refused(&wide, vocabulary);
        assert!(said.contains(rule) && said.contains("write them anew with TokenWriter"), "{said}");
    }
    for (each, vocabulary) in [(2, 50_000), (4, 100_000)] {
        let file = of(each, &header, &small);
        assert!(Tokens::open(&[&file.0], TokensConfig { vocabulary, ..CONFIG }).is_ok(), "{each}");
    }
}

/// The files that users have and that are no tokens.
#[test]
fn other_formats_are_refused_by_name() {
    let body: Vec<u8> = (0..4096u32).flat_map(|i| (i * i % 1000).to_le_bytes()).collect();
    let with = |start: &[u8]| [start, &body].concat();
    let header = br#"{"wte.weight":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]}}"#;
    let json = r#"{"text": "to be or not to be"}"#.repeat(100);
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let mut llm_c = words(&[20_240_520, 1, 8192]);
    llm_c.resize(1024, 0);
    let mut tar = with(&[]);
    tar[257..262].copy_from_slice(b"ustar");
    for (bytes, name) in [
        (with(b"\x93NUMPY\x01\x00v\x00{'descr': '<u4', 'fortran_order': False}"), "an array of NumPy (.npy)"),
        (with(b"PK\x03\x04\x14\x00"), "a zip archive"),
        (with(b"\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\x03"), "a file packed by gzip"),
        (with(b"\x28\xb5\x2f\xfd"), "a file packed by zstd"),
        (with(b"PAR1"), "a Parquet file"),
        (with(b"ARROW1\x00\x00"), "an Arrow file"),
        (with(b"\xff\xff\xff\xff\x10\x01\x00\x00"), "an Arrow stream"),
        (with(b"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
        ([&with(b"\x80\x04\x95\x00\x40\x00\x00\x00\x00\x00\x00")[..], b"."].concat(), "a pickle of Python"),
        ([&with(b"\x80\x02]q\x00")[..], b"."].concat(), "a pickle of Python"),
        ([&words(&[header.len() as u32, 0]), &header[..], &body].concat(), "safetensors"),
        (with(b"GGUF\x03\x00\x00\x00"), "a model (GGUF)"),
        ([&llm_c[..], &body].concat(), "tokens behind a header of llm.c"),
        (tar, "a tar archive"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n\n".to_vec(),
            "a pointer of Git LFS",
        ),
        (json.into_bytes(), "text"),
        ("né à Paris, \u{4f60}\u{597d}\n".repeat(5000).into_bytes(), "text"),
    ] {
        let file = Temporary::new(&bytes);
        for width in [None, Some(TokenWidth::U16)] {
            let config = TokensConfig { vocabulary: 50_000, width, ..CONFIG };
            let said = Tokens::open(&[&file.0], config).map(drop).expect_err(name).to_string();
            let rule = format!("tokens: a token file has tokens alone, and no other format; got {name}");
            assert!(said.starts_with(&rule) && said.contains("; "), "{name}: {said}");
        }
    }
    // Tokens that begin as some of these do.
    for start in [[640, 93], [0x8b1f, 9], [20_240, 1], [8, 0]] {
        let file =
            Temporary::tokens(TokenWidth::U16, start.into_iter().chain((0..4000).map(|i| i * i % 1000)));
        assert!(Tokens::open(&[&file.0], TokensConfig { vocabulary: 50_000, ..CONFIG }).is_ok(), "{start:?}");
    }
}

/// Two files with the same length, beginning and end: packed documents depend on the bytes in between.
#[test]
fn positions_compare_every_byte_of_packed_documents() {
    let file = |at: usize| {
        let tokens = (0..20_000).map(|i| if i == at || i % 9 == 8 { 0 } else { 1 });
        Temporary::tokens(TokenWidth::U16, tokens)
    };
    let (one, other) = (file(10_000), file(10_001));
    for (packing, differ) in [
        (Packing::Documents { end_of_text: 0 }, true),
        (Packing::DocumentWindows { end_of_text: 0 }, false),
        (Packing::Windows, false),
    ] {
        let open = |file: &Temporary| Tokens::open(&[&file.0], TokensConfig { packing, ..CONFIG }).unwrap();
        let position = open(&one).position();
        assert_eq!(open(&one).restore(position), Ok(()));
        assert_eq!(open(&other).restore(position).is_err(), differ, "{packing:?}");
    }
}

#[test]
fn positions_that_do_not_exist_are_refused() {
    let files = numbered();
    let mut tokens = Tokens::open(&paths(&files), CONFIG).unwrap();
    let DataPosition { order, .. } = tokens.position();
    for (epoch, sample) in [(0, SAMPLES as u64), (u64::MAX, 0), (u64::MAX / 47, 46), (1 << 60, 1)] {
        let said = tokens.restore(DataPosition { epoch, sample, order }).unwrap_err().to_string();
        assert!(said.starts_with("tokens: there is no such position; got tokens:"), "{said}");
    }
    let said = tokens.restore(DataPosition { epoch: 0, sample: 0, order: !order }).unwrap_err().to_string();
    assert!(said.starts_with("tokens: the position is one of other files"), "{said}");
    for config in [
        TokensConfig { block: 5, ..CONFIG },
        TokensConfig { shuffle: Some(8), ..CONFIG },
        TokensConfig { shuffle: None, ..CONFIG },
        TokensConfig { packing: Packing::DocumentWindows { end_of_text: 3 }, ..CONFIG },
    ] {
        let other = Tokens::open(&paths(&files), config).unwrap();
        assert!(tokens.restore(other.position()).is_err(), "{config:?}");
    }
    let more = Tokens::open(&paths(&files), TokensConfig { batch: 9, read_ahead: 0, ..CONFIG }).unwrap();
    assert_eq!(tokens.restore(more.position()), Ok(()), "the batch size does not decide the order");
    for text in [
        "",
        "tokens",
        "tokens:1:2",
        "tokens:1:2:3",
        "tokens:01:2:0000000000000003",
        "tokens:1:2:000000000000000A",
        "tokens:1:2:0000000000000003:",
        "tokens:1:2:0000000000000003 ",
        "tokens:-1:2:0000000000000003",
        "token:1:2:0000000000000003",
    ] {
        assert!(text.parse::<DataPosition>().is_err(), "{text:?}");
    }
}

#[test]
fn layouts_that_do_not_fit_are_refused() {
    let files = numbered();
    let all = paths(&files);
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut tokens = Tokens::open(&all, CONFIG)?;
        let said = tokens.next_batch(&mesh, "(P(sum))").unwrap_err().to_string();
        assert!(said.starts_with("tokens: a batch is not Partial; got "), "{said}");
        assert!(tokens.next_batch(&mesh, "(S2)").is_err());
        assert!(tokens.next_batch(&mesh, "(S0, S0)").is_err());
        let said = tokens.next_packed_batch(&mesh, "(S0)").unwrap_err().to_string();
        assert!(said.starts_with("tokens: these rows know no documents; got Packing::Windows"), "{said}");
        assert_eq!(tokens.position().sample, 0);
        // Another layout in mid-epoch goes on with the same samples.
        let mut rows = Vec::new();
        for layout in ["(S0)", "(S1)", "(R)", "(S0)", "(RS(0..1; 4,1))", "(RS(0..2; 3,17))"] {
            let (x, _) = tokens.next_batch(&mesh, layout)?;
            rows.extend(x.full_tensor()?.to_vec::<i64>()?.chunks(4).map(|row| row[0]));
        }
        assert_eq!(rows, expected_rows(1)[..30]);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// A clone shares the files and has its own position.
#[test]
fn clones_go_on_by_themselves() {
    let files = numbered();
    let opened = Tokens::open(&paths(&files), CONFIG).unwrap();
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
        let mut first = opened.clone();
        let read = |tokens: &mut Tokens| -> Result<Vec<i64>> {
            tokens.next_batch(&mesh, "(S0)")?.0.full_tensor()?.to_vec()
        };
        read(&mut first)?;
        let mut second = first.clone();
        assert_eq!(read(&mut first)?, read(&mut second)?);
        assert_eq!(opened.position().sample, 0);
        Ok(())
    };
    spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Documents of these lengths. Each ends with 0; the other tokens are numbered.
fn documents(lens: &[usize], last_ends: bool) -> Vec<u32> {
    let mut next = 0;
    let mut all = Vec::new();
    for &len in lens {
        all.extend((1..len).map(|_| {
            next += 1;
            next
        }));
        all.push(0);
    }
    if !last_ends {
        all.pop();
    }
    all
}

/// All rows of an epoch: tokens, targets, documents and positions of each.
fn packed_epoch(ranks: usize, tokens: &[u32], config: TokensConfig) -> Vec<[Vec<i64>; 4]> {
    let file = Temporary::tokens(TokenWidth::U16, tokens.iter().copied());
    let path = file.0.clone();
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        let mut tokens = Tokens::open(&[&path], config)?;
        let mut rows = Vec::new();
        while rows.len() < tokens.samples() as usize {
            let PackedBatch { tokens: x, targets, documents, positions } =
                tokens.next_packed_batch(&mesh, "(S0)")?;
            let all = [x, targets, documents, positions].map(|t: DTensor| t.full_tensor());
            let all = all.into_iter().map(|t| t?.to_vec::<i64>()).collect::<Result<Vec<_>>>()?;
            for row in 0..config.batch {
                let cut = |k: usize| all[k][row * config.block..(row + 1) * config.block].to_vec();
                rows.push([cut(0), cut(1), cut(2), cut(3)]);
            }
        }
        rows.truncate(tokens.samples() as usize);
        Ok(rows)
    };
    spmd(ranks, run).unwrap_or_else(|e| panic!("{e}")).remove(0)
}

#[test]
fn documents_are_packed_whole_and_lose_no_token() {
    let lens = [5, 1, 9, 2, 23, 3, 3, 8, 1, 4, 12, 6];
    for last_ends in [true, false] {
        let text = documents(&lens, last_ends);
        let config =
            TokensConfig { packing: Packing::Documents { end_of_text: 0 }, block: 8, batch: 3, ..CONFIG };
        let rows = packed_epoch(1, &text, config);
        for ranks in [2, 3, 4] {
            assert_eq!(packed_epoch(ranks, &text, config), rows, "{ranks} ranks");
        }
        let mut predicted = Vec::new();
        for [tokens, targets, documents, positions] in &rows {
            let mut last = (-1, -1);
            for k in 0..8 {
                let (document, position) = (documents[k], positions[k]);
                assert!(
                    (document, position) == (last.0 + 1, 0) || (document, position) == (last.0, last.1 + 1)
                );
                last = (document, position);
                if targets[k] == -100 {
                    assert!(
                        tokens[k] == 0 && targets[k..].iter().all(|&t| t == -100),
                        "padding is at the end"
                    );
                    continue;
                }
                predicted.push((tokens[k], targets[k]));
                if k > 0 && position > 0 {
                    assert_eq!(tokens[k], targets[k - 1], "a document goes on");
                }
            }
        }
        // Each pair of neighbours within a document is predicted once.
        let mut want: Vec<(i64, i64)> = text
            .windows(2)
            .filter(|pair| pair[0] != 0)
            .map(|pair| (pair[0].into(), pair[1].into()))
            .collect();
        want.sort();
        predicted.sort();
        assert_eq!(predicted, want);
        // The lengths to predict are 4, 8, 1, 22 as 8 + 8 + 6, 2, 2, 7, 3, 11 as 8 + 3, and 5 (or 4): 65 (or 64) in
        // all.
        assert_eq!(rows.len(), if last_ends { 9 } else { 8 });
    }
}

#[test]
fn windows_of_documents_tell_them_apart() {
    let text = documents(&[3, 6, 2, 5], true);
    let config = TokensConfig {
        packing: Packing::DocumentWindows { end_of_text: 0 },
        shuffle: None,
        block: 7,
        batch: 2,
        ..CONFIG
    };
    let rows = packed_epoch(2, &text, config);
    assert_eq!(
        rows,
        [
            [
                vec![1, 2, 0, 3, 4, 5, 6],
                vec![2, 0, -100, 4, 5, 6, 7],
                vec![0, 0, 0, 1, 1, 1, 1],
                vec![0, 1, 2, 0, 1, 2, 3]
            ],
            [
                vec![7, 0, 8, 0, 9, 10, 11],
                vec![0, -100, 0, -100, 10, 11, 12],
                vec![0, 0, 1, 1, 2, 2, 2],
                vec![0, 1, 0, 1, 0, 1, 2]
            ]
        ]
    );
}

/// A writer that is dropped leaves an older file as it was.
#[test]
fn a_token_file_is_whole_or_absent() {
    let file = Temporary::tokens(TokenWidth::U16, [1, 2, 3]);
    let mut writer = TokenWriter::create(&file.0, TokenWidth::U32).unwrap();
    writer.write(&[9; 100_000]).unwrap();
    // An unfinished file, and its lock.
    let hidden = || {
        let start = format!(".{}.", file.0.file_name().unwrap().to_str().unwrap());
        let beside = fs::read_dir(file.0.parent().unwrap()).unwrap().flatten();
        beside.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start)).count()
    };
    assert_eq!(hidden(), 2);
    drop(writer);
    assert_eq!(hidden(), 0);
    assert_eq!(fs::read(&file.0).unwrap(), [1, 0, 2, 0, 3, 0]);
}

/// A file that another program shortens is found at the next batch, with and without reading ahead.
#[test]
fn a_file_that_becomes_shorter_is_refused() {
    for read_ahead in [0, 1] {
        let file = Temporary::tokens(TokenWidth::U16, 0..1000);
        let path = file.0.clone();
        let run = move |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let mut tokens = Tokens::open(&[&path], TokensConfig { read_ahead, ..CONFIG })?;
            tokens.next_batch(&mesh, "()")?;
            // The thread waits with the next batch in its hand.
            std::thread::sleep(std::time::Duration::from_millis(50));
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
            let mut said = String::new();
            for _ in 0..3 {
                if let Err(e) = tokens.next_batch(&mesh, "()") {
                    said = e.to_string();
                    break;
                }
            }
            assert!(
                said.starts_with("tokens: a token file became shorter while it was open; got 10 of"),
                "{said}"
            );
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Batches are the rank's own tensors: its limit counts them, also those that are read ahead, and a batch without room
/// is an error that moves nothing.
#[test]
fn batches_without_room_are_errors() {
    let files = numbered();
    for read_ahead in [0, 1, 3] {
        let all = paths(&files);
        let run = move |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let config = TokensConfig { batch: 1000, read_ahead, ..CONFIG };
            let mut tokens = Tokens::open(&all, config)?;
            tokens.next_batch(&mesh, "()")?; // 64,000 bytes
            let before = tokens.position();
            // Drops what was read ahead.
            tokens.restore(before)?;
            storage::trim_pool();
            storage::set_memory_limit(storage::pool_stats().live_bytes + 20_000);
            let said = tokens.next_batch(&mesh, "()").unwrap_err().to_string();
            assert!(said.contains("memory: cpu has no room; got i64[1000, 4] of 32000 bytes"), "{said}");
            assert_eq!(tokens.position(), before);
            // Room for one batch is enough.
            storage::set_memory_limit(storage::pool_stats().live_bytes + 80_000);
            tokens.next_batch(&mesh, "()")?;
            tokens.next_batch(&mesh, "()")?;
            assert_eq!((tokens.position().epoch, tokens.position().sample), (63, 39));
            storage::set_memory_limit(usize::MAX);
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Open token files take no descriptors: mapped files are closed.
#[cfg(target_os = "linux")]
#[test]
fn many_files_take_no_descriptors() {
    let file = Temporary::tokens(TokenWidth::U16, (0..100).map(|i| i % 9));
    let target = fs::canonicalize(&file.0).unwrap();
    let all = vec![file.0.clone(); 2000];
    let opened = [Packing::Windows, Packing::Documents { end_of_text: 0 }]
        .map(|packing| Tokens::open(&all, TokensConfig { packing, ..CONFIG }).unwrap());
    let descriptors =
        fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| fs::read_link(entry.path()));
    assert_eq!(descriptors.flatten().filter(|path| *path == target).count(), 0);
    assert_eq!(opened[0].samples(), 2000 * 24);
}
