// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), and the counter that each element reads, as in
// src/rng/{philox,draw}.rs.
#pragma once
#include "iso.cuh"

// The numbers of one operator, as the host passes them (rng::cuda::DrawArg): Philox's key, and the upper half of the
// counter at attempt 0, which is the draw's number, below 2^48.
struct Draw {
  u32 key[2];
  u64 high;
};

// The four words of a block.
struct Words {
  u32 word[4];

  // Words 2i and 2i + 1 as one number, the earlier in the low half: element i of a 64-bit draw.
  DEVICE u64 pair(int i) const { return (u64)word[2 * i] | (u64)word[2 * i + 1] << 32; }
};

// A block of an attempt. Element e of a 32-bit draw reads word e mod 4 of block e div 4; of a 64-bit draw, pair e mod 2
// of block e div 2.
DEVICE Words philox(Draw draw, u64 block, u32 attempt = 0) {
  u32 k0 = draw.key[0], k1 = draw.key[1];
  u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)draw.high, c3 = (u32)(draw.high >> 32) | attempt << 16;
  UNROLL
  for (int round = 0; round < 10; round++) {
    // One wide multiplication each.
    u64 p0 = (u64)c0 * 0xd2511f53u, p1 = (u64)c2 * 0xcd9e8d57u;
    c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
    c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1;
    c3 = (u32)p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// Word i of a block, for an i known at run time: avoids an array in memory.
DEVICE u32 word_at(Words words, u32 i) {
  u32 low = i & 1 ? words.word[1] : words.word[0], high = i & 1 ? words.word[3] : words.word[2];
  return i & 2 ? high : low;
}

// The word of element e of a 32-bit draw. Code that needs neighbours computes their block once instead.
DEVICE u32 word_of(Draw draw, u64 e) { return word_at(philox(draw, e >> 2), (u32)e & 3); }

// The pair of element e of a 64-bit draw.
DEVICE u64 pair_of(Draw draw, u64 e) {
  Words words = philox(draw, e >> 1);
  return e & 1 ? words.pair(1) : words.pair(0);
}

// The upper 24 bits as a fraction.
DEVICE f32 unit_f32(u32 word) { return (f32)(i32)(word >> 8) * (1.0f / 16777216.0f); }

// The upper 53 bits as a fraction.
DEVICE f64 unit_f64(u64 pair) { return (f64)(i64)(pair >> 11) * (1.0 / 9007199254740992.0); }
