// Random categories by weight. src/ops/random/multinomial.rs documents the method.
#include "draws.cuh"
#include "parameters.cuh"

DEVICE bool is_weight(f64 w) { return w >= 0.0 && w < inf_f64(); }

// ---- with replacement: a warp a row --------------------------------------------------------------------------------

// Writes the sums of the weights from category 0 on, in ascending order, and returns the last one. The definition is
// one chain of additions, so every lane computes all sums and keeps its own.
template <class T>
DEVICE f64 sums_of(const T* weights, u64 k, f64* sums, u64 row, Fault* fault) {
  u32 lane = threadIdx.x % 32;
  f64 sum = 0.0, next = lane < k ? (f64)widen(weights[lane]) : 0.0;
  for (u64 base = 0; base < k; base += 32) {
    u64 at = base + lane, after = at + 32;
    f64 weight = next, mine = 0.0;
    next = after < k ? (f64)widen(weights[after]) : 0.0;
    if (!is_weight(weight)) report_parameter(fault, MULTINOMIAL_WEIGHT, row * k + at, weight);
    UNROLL
    for (u32 i = 0; i < 32; i++) {
      sum += __shfl_sync(0xffffffffu, weight, i);
      mine = i == lane ? sum : mine;
    }
    if (at < k) sums[at] = mine;
  }
  return sum;
}

// Returns the number of sums that are at most u; the sums ascend.
DEVICE u64 sums_below(const f64* sums, u64 k, f64 u) {
  u64 low = 0, high = k;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (sums[middle] <= u) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// `place` is the results' region, which has whole rows; each warp has k numbers of `scratch`.
template <class T>
DEVICE void with_replacement(const T* weights, i64* out, f64* scratch, Place place, Draw draw, u64 rows, u64 k,
                             u64 samples, Fault* fault) {
  u64 warp = thread_index() / 32, warps = threads_len() / 32;
  u32 lane = threadIdx.x % 32;
  f64* sums = scratch + warp * k;
  weights += place.offset / samples * k;
  out += place.offset;
  for (u64 row = warp; row < rows; row += warps) {
    u64 first_row = index_of(place, row * samples) / samples;
    f64 sum = sums_of(weights + row * k, k, sums, first_row, fault);
    if (!(sum > 0.0 && sum < inf_f64())) report_parameter(fault, MULTINOMIAL_SUM, first_row, sum);
    __syncwarp();
    for (u64 s = lane; s < samples; s += 32) {
      u64 at = row * samples + s;
      f64 u = unit_f64(pair_of(draw, index_of(place, at))) * sum;
      u64 category = sums_below(sums, k, u);
      // The index is past the end only if a fault was reported.
      out[at] = (i64)(category < k ? category : k - (k > 0));
    }
    __syncwarp();
  }
}

// ---- without replacement: a block a row ----------------------------------------------------------------------------

// Sorts `len` (key, category) pairs by key, then category, with Batcher's bitonic sort; `len` is a power of two.
DEVICE void sort(u64* keys, u32* categories, u32 len) {
  for (u32 size = 2; size <= len; size *= 2) {
    for (u32 stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < len / 2; i += blockDim.x) {
        u32 a = 2 * i - (i & (stride - 1)), b = a + stride;
        u64 x = keys[a], y = keys[b];
        u32 p = categories[a], q = categories[b];
        bool after = x > y || (x == y && p > q);
        if (after == ((a & size) == 0)) {
          keys[a] = y;
          keys[b] = x;
          categories[a] = q;
          categories[b] = p;
        }
      }
    }
  }
  __syncthreads();
}

// `place` is the weights' region, which has whole rows. Each block has `len` keys and categories of scratch; `len` is
// a power of two and at least k.
template <class T>
DEVICE void without(const T* weights, i64* out, u64* all_keys, u32* all_categories, Place place, Draw draw, u64 rows,
                    u32 k, u32 len, u32 samples, Fault* fault) {
  SHARED u32 positive_len;
  u64* keys = all_keys + (u64)blockIdx.x * len;
  u32* categories = all_categories + (u64)blockIdx.x * len;
  weights += place.offset;
  out += place.offset / k * samples;
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    if (threadIdx.x == 0) positive_len = 0;
    __syncthreads();
    u32 positive = 0;
    for (u32 c = threadIdx.x; c < len; c += blockDim.x) {
      u64 key = ~(u64)0;
      if (c < k) {
        u64 e = index_of(place, row * k + c);
        f64 weight = widen(weights[row * k + c]);
        if (!is_weight(weight)) report_parameter(fault, MULTINOMIAL_WEIGHT, e, weight);
        if (weight > 0.0) {
          // Arrival times are not negative, so their bits have the same order.
          key = bits_of(unit_exponential(pair_of(draw, e)) / weight);
          positive++;
        }
      }
      keys[c] = key;
      categories[c] = c;
    }
    atomicAdd(&positive_len, positive);
    sort(keys, categories, len);
    if (threadIdx.x == 0 && positive_len < samples) {
      report_parameter(fault, MULTINOMIAL_POSITIVE, index_of(place, row * k) / k, positive_len);
    }
    for (u32 s = threadIdx.x; s < samples; s += blockDim.x) out[row * samples + s] = categories[s];
    __syncthreads();
  }
}

#define ENTRIES(T)                                                                                                  \
  KERNEL(with_replacement_##T, 128,                                                                                 \
         (const T* weights, i64* out, f64* scratch, Place place, Draw draw, u64 rows, u64 k, u64 samples,            \
          Fault* fault)) {                                                                                          \
    with_replacement(weights, out, scratch, place, draw, rows, k, samples, fault);                                  \
  }                                                                                                                 \
  KERNEL(without_##T, 512,                                                                                          \
         (const T* weights, i64* out, u64* keys, u32* categories, Place place, Draw draw, u64 rows, u32 k, u32 len,  \
          u32 samples, Fault* fault)) {                                                                             \
    without(weights, out, keys, categories, place, draw, rows, k, len, samples, fault);                             \
  }
FLOATS(ENTRIES)
