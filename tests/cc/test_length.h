// How long tests of random calls run.
#ifndef DYNEMB_TESTS_CC_TEST_LENGTH_H_
#define DYNEMB_TESTS_CC_TEST_LENGTH_H_

#include <cstddef>
#include <cstdlib>
#include <string>

#include "tests/cc/sanitizers.h"

namespace dynemb {

// n, times the factor in the environment variable TABLE_TEST_LONGER (`make soak`).
inline size_t Longer(size_t n) {
  const char* factor = std::getenv("TABLE_TEST_LONGER");
  return factor == nullptr ? n : n * std::stoul(factor);
}

// Whether tests that could try all of many places, such as the allocations of a call, try each of
// them, and not only the first and some of the others.
inline bool TriesAll() { return std::getenv("TABLE_TEST_LONGER") != nullptr; }

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_TEST_LENGTH_H_
