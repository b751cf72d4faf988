// Exact: memory of exactly the required size. CountingSession: counts the work that is given to a
// device. For device_route_test and device_requests_test.
#ifndef DYNEMB_TESTS_CC_COUNTING_SESSION_H_
#define DYNEMB_TESTS_CC_COUNTING_SESSION_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/simulated/simulated_tables.h"

namespace dynemb {

// An array without spare room, so that the address sanitizer detects accesses beyond its end. It is
// filled with garbage.
template <class T>
struct Exact {
  explicit Exact(size_t size) : n(size), p(new T[size]) {
    std::memset(p.get(), 0x5A, n * sizeof(T));
  }
  explicit Exact(const std::vector<T>& values) : Exact(values.size()) {
    std::copy(values.begin(), values.end(), p.get());
  }
  std::vector<T> values() const { return {p.get(), p.get() + n}; }
  size_t n;
  std::unique_ptr<T[]> p;
};

// Counts launches, copies, fills and sorts.
template <class Device>
class CountingSession : public Device::Session {
 public:
  using Base = typename Device::Session;
  using Base::Base;
  template <class Body>
  void ForEach(size_t n, const Body& body) {
    ++work;
    Base::ForEach(n, body);
  }
  void Copy(void* to, const void* from, size_t bytes) {
    ++work;
    Base::Copy(to, from, bytes);
  }
  void Fill(void* p, uint8_t byte, size_t bytes) {
    ++work;
    Base::Fill(p, byte, bytes);
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int bits) {
    ++work;
    for (size_t i = 0; i < n; ++i) EXPECT_LT(keys[i], uint64_t{1} << bits) << "bits are ignored";
    EXPECT_LE(bits, 40);
    Base::SortPairs(keys, values, n, bits);
  }
  size_t work = 0;
};

// Under thread sanitizer, emulated warps starve all other threads.
#if defined(__SANITIZE_THREAD__)
using CountedDevices = testing::Types<ThreadsDevice>;
#elif defined(__SANITIZE_ADDRESS__)
using CountedDevices = testing::Types<NarrowTeamsDevice>;
#else
using CountedDevices = testing::Types<ThreadsDevice, NarrowTeamsDevice, WideTeamsDevice>;
#endif

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_COUNTING_SESSION_H_
