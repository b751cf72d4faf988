// A session that counts the work that is given to a device.
#ifndef DYNEMB_TESTS_CC_COUNTING_SESSION_H_
#define DYNEMB_TESTS_CC_COUNTING_SESSION_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/simulated/simulated_tables.h"

namespace dynemb {

template <class Device = ThreadsDevice>
class CountingSession : public Device::Session {
 public:
  using Base = typename Device::Session;
  using Base::Base;

  int launches = 0;              // ForEach and ForRows, on at least one item
  size_t copied = 0;             // bytes
  std::vector<size_t> quads;     // of each ForRows
  std::vector<int> sorted_bits;  // of each SortPairs
  size_t calls = 0;              // all, also those on no items

  template <class Body>
  void ForEach(size_t n, const Body& body) {
    ++calls;
    launches += n != 0;
    Base::ForEach(n, body);
  }
  template <class Body>
  void ForRows(size_t n, size_t of_row, const Body& body) {
    ++calls;
    launches += n != 0;
    quads.push_back(of_row);
    Base::ForRows(n, of_row, body);
  }
  void Copy(void* to, const void* from, size_t bytes) {
    ++calls;
    copied += bytes;
    Base::Copy(to, from, bytes);
  }
  void Fill(void* p, uint8_t byte, size_t bytes) {
    ++calls;
    Base::Fill(p, byte, bytes);
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int bits) {
    ++calls;
    sorted_bits.push_back(bits);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(uint64_t{keys[i]} >> (bits / 2) >> ((bits + 1) / 2), 0u) << "bits are ignored";
    }
    Base::SortPairs(keys, values, n, bits);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_COUNTING_SESSION_H_
