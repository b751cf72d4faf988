// The rule of SumGradients and GatherGradient (cc/device) for the order of a sum's terms, which
// determines its bits; and a session that counts the work given to the device.
#ifndef DYNEMB_TESTS_CC_DEVICE_GRADIENT_MODEL_H_
#define DYNEMB_TESTS_CC_DEVICE_GRADIENT_MODEL_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/cc/backward_model.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {

constexpr size_t kChunk = 256;

inline bool SameBits(const float* a, const float* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(float)) == 0;
}

// The term that the id at position i adds.
inline float TermOf(const Case& c, size_t i, size_t column) {
  const UpstreamTask& t = c.task;
  const size_t bag = c.bag_of[i], at = bag * static_cast<size_t>(t.dim) + column;
  float x = c.upstream[at];
  float scale = BagScale(t.combiner, c.bags, t.weights, bag);
  if (scale == 0.0f) x = 0.0f;
  if (t.weights != nullptr) scale *= t.weights[i];
  if (t.combiner == Combiner::kMax && t.argmax[at] != static_cast<int32_t>(i)) return 0.0f;
  return scale * x;
}

// The rule: sums of 256 consecutive terms, which are then added in order.
inline float SumInChunks(const std::vector<float>& terms) {
  float sum = 0.0f;
  for (size_t begin = 0; begin < terms.size(); begin += kChunk) {
    float chunk = terms[begin];
    for (size_t i = begin + 1; i < std::min(begin + kChunk, terms.size()); ++i) chunk += terms[i];
    sum = begin == 0 ? chunk : sum + chunk;
  }
  return sum;
}

class CountingSession : public ThreadsDevice::Session {
 public:
  using Base = ThreadsDevice::Session;
  using Base::Base;
  int launches = 0;
  std::vector<int> sorted_bits;
  std::vector<size_t> quads;  // of ForRows

  template <class Body>
  void ForEach(size_t n, const Body& body) {
    launches += n != 0;
    Base::ForEach(n, body);
  }
  template <class Body>
  void ForRows(size_t n, size_t row_quads, const Body& body) {
    launches += n != 0;
    quads.push_back(row_quads);
    Base::ForRows(n, row_quads, body);
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int bits) {
    sorted_bits.push_back(bits);
    Base::SortPairs(keys, values, n, bits);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_GRADIENT_MODEL_H_
