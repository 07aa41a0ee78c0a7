//! The memory of an index of packed documents.

use isoshard::data::{Packing, TokenWidth, TokenWriter, Tokens, TokensConfig};
use isoshard::testing::values::SplitMix;

use super::{LIVE, peak_of};

/// A rank keeps a bit more than eight bytes per document, and takes little more while it packs them.
#[test]
fn packed_documents_take_eight_bytes_each() {
    const DOCUMENTS: usize = 200_000;
    let path = std::env::temp_dir().join(format!("isoshard-alloc-documents-{}", std::process::id()));
    let mut writer = TokenWriter::create(&path, TokenWidth::U16).expect("the folder can be written");
    let mut random = SplitMix(7);
    for _ in 0..DOCUMENTS {
        let mut document = vec![1; 2 + random.below(60)];
        document.push(0);
        writer.write(&document).expect("the folder can be written");
    }
    writer.finish().expect("the folder can be written");
    let packing = Packing::Documents { end_of_text: 0 };
    let config = TokensConfig { packing, ..TokensConfig::new(10, 512, 4, 7) };
    let before = LIVE.get();
    let (tokens, peak) = peak_of(|| Tokens::open(&[&path], config).expect("it is a token file"));
    let kept = (LIVE.get() - before) as usize;
    std::fs::remove_file(path).expect("it was written");
    assert!(tokens.samples() > 10_000);
    println!("packed documents: {kept} bytes kept, {peak} at the most, for {DOCUMENTS}");
    assert!(kept < 9 * DOCUMENTS, "{kept} bytes are kept");
    // A list that grows is copied here into one of twice its length.
    assert!(peak < 24 * DOCUMENTS, "{peak} bytes at the most");
}
