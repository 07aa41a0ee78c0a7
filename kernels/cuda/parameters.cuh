// Faults of random operators with one parameter per element, for parameters that are out of range.
#pragma once
#include "iso.cuh"

// The codes are those of src/ops/random/cuda.
enum RandomFault : u32 {
  BERNOULLI_PROBABILITY = 600,
  EXPONENTIAL_RATE = 601,
  GAMMA_SHAPE = 602,
  POISSON_RATE = 603,
  MULTINOMIAL_WEIGHT = 604,
  MULTINOMIAL_SUM = 605,
  MULTINOMIAL_POSITIVE = 606,
};

// An element's global index, and its parameter as f32.
DEVICE void report_parameter(Fault* fault, RandomFault code, u64 index, f64 found) {
  if (atomicCAS(&fault->code, 0u, (u32)code) == 0u) {
    fault->found = (f32)found;
    fault->value = (i64)index;
  }
}

DEVICE bool is_probability(f64 x) { return x >= 0.0 && x <= 1.0; }
DEVICE bool is_positive_finite(f64 x) { return x > 0.0 && x < f64_of(0x7ff0000000000000ull); }
