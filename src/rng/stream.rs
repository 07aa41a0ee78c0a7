//! A draw as a `rand_core` generator, for distributions of other crates.

use rand_core::{Infallible, SeedableRng, TryRng};

use super::{Draw, Generator, bits32};

const BUFFER_LEN: usize = 128;

/// The words of one draw in order, as a `rand_core` generator: word `i` is element `i` of [`bits32`].
///
/// For use on the host, equal on every rank. A distribution may consume any number of words per value, so a stream cannot be
/// split over ranks.
///
/// ```
/// use isoshard::rng::{Generator, Stream};
/// use rand_core::Rng;
/// let mut stream = Stream::new(Generator::new(1).next_draw());
/// let first = stream.next_u32();
/// stream.seek(0);
/// assert_eq!(stream.next_u32(), first);
/// ```
#[derive(Clone)]
pub struct Stream {
    draw: Draw,
    /// The index of `buffer[0]`.
    start: u64,
    used_len: usize,
    buffer: [u32; BUFFER_LEN],
}

impl Stream {
    /// Creates a stream of the draw's words, from the first on.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Stream, bits32};
    /// use rand_core::Rng;
    /// let draw = Generator::new(1).next_draw();
    /// let mut words = [0; 2];
    /// bits32(draw, 0, &mut words);
    /// assert_eq!(Stream::new(draw).next_u32(), words[0]);
    /// ```
    pub fn new(draw: Draw) -> Stream {
        Stream {
            draw,
            start: 0u64.wrapping_sub(BUFFER_LEN as u64),
            used_len: BUFFER_LEN,
            buffer: [0; BUFFER_LEN],
        }
    }

    /// Returns the draw.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Stream};
    /// let draw = Generator::new(1).next_draw();
    /// assert_eq!(Stream::new(draw).draw(), draw);
    /// ```
    pub fn draw(&self) -> Draw {
        self.draw
    }

    /// Returns the index of the next word.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Stream};
    /// use rand_core::Rng;
    /// let mut stream = Stream::new(Generator::new(1).next_draw());
    /// stream.next_u64();
    /// assert_eq!(stream.position(), 2);
    /// ```
    pub fn position(&self) -> u64 {
        self.start.wrapping_add(self.used_len as u64)
    }

    /// Continues from word `position`.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Stream};
    /// let mut stream = Stream::new(Generator::new(1).next_draw());
    /// stream.seek(1 << 40);
    /// assert_eq!(stream.position(), 1 << 40);
    /// ```
    pub fn seek(&mut self, position: u64) {
        self.start = position.wrapping_sub(BUFFER_LEN as u64);
        self.used_len = BUFFER_LEN;
    }

    #[inline]
    fn word(&mut self) -> u32 {
        if self.used_len == BUFFER_LEN {
            self.start = self.position();
            self.used_len = 0;
            bits32(self.draw, self.start, &mut self.buffer);
        }
        self.used_len += 1;
        self.buffer[self.used_len - 1]
    }
}

impl Generator {
    /// Returns the next draw as a `rand_core` generator, for distributions of other crates on the host. Equal on every rank.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// use rand_distr::{Distribution, Zipf};
    /// let mut stream = Generator::new(3).child("lengths").next_stream();
    /// let length: f64 = Zipf::new(1024.0, 1.1).expect("sound").sample(&mut stream);
    /// assert!((1.0..=1024.0).contains(&length));
    /// ```
    pub fn next_stream(&mut self) -> Stream {
        Stream::new(self.next_draw())
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("draw", &self.draw).field("position", &self.position()).finish()
    }
}

impl TryRng for Stream {
    type Error = Infallible;

    #[inline]
    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok(self.word())
    }

    /// Returns two words, the earlier one in the low half.
    #[inline]
    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let low = self.word();
        Ok(u64::from(low) | u64::from(self.word()) << 32)
    }

    /// Writes words in little-endian order. Drops the rest of the last word.
    fn try_fill_bytes(&mut self, dst: &mut [u8]) -> Result<(), Infallible> {
        for bytes in dst.chunks_mut(4) {
            bytes.copy_from_slice(&self.word().to_le_bytes()[..bytes.len()]);
        }
        Ok(())
    }
}

impl SeedableRng for Stream {
    type Seed = [u8; 8];

    /// The first draw of the child "stream" of a generator with this seed (little-endian), so that it meets no
    /// draw of the generator itself.
    fn from_seed(seed: [u8; 8]) -> Stream {
        Stream::seed_from_u64(u64::from_le_bytes(seed))
    }

    /// Seeds from a number, as `from_seed` does.
    fn seed_from_u64(seed: u64) -> Stream {
        Stream::new(Generator::new(seed).child("stream").next_draw())
    }
}

#[cfg(test)]
mod tests {
    use rand_core::Rng;

    use super::*;

    #[test]
    fn reads_the_draws_words() {
        let draw = Draw { seed: 5, number: 6 };
        let mut words = [0u32; 300];
        bits32(draw, 0, &mut words);
        let mut stream = Stream::new(draw);
        assert_eq!([(); 300].map(|()| stream.next_u32()), words);
        assert_eq!(stream.position(), 300);
        stream.seek(127);
        assert_eq!(stream.next_u64(), u64::from(words[127]) | u64::from(words[128]) << 32);
        let mut bytes = [0u8; 6];
        stream.fill_bytes(&mut bytes);
        assert_eq!(bytes[..4], words[129].to_le_bytes());
        assert_eq!(bytes[4..], words[130].to_le_bytes()[..2]);
        assert_eq!(stream.position(), 131, "the rest of a word that bytes began is dropped");
    }

    #[test]
    fn seeding_meets_no_draw_of_the_generator() {
        let mut stream = Stream::seed_from_u64(1);
        assert_eq!(stream.clone().next_u64(), Stream::from_seed(1u64.to_le_bytes()).next_u64());
        assert_ne!(stream.next_u32(), Stream::new(Generator::new(1).next_draw()).next_u32());
    }
}
