// Selects the tests that do not run under sanitizers, in which everything is many times slower.
#ifndef DYNEMB_TESTS_CC_SANITIZERS_H_
#define DYNEMB_TESTS_CC_SANITIZERS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <initializer_list>
#include <vector>

namespace dynemb {

// Whether this is compiled for the address sanitizer, alone or with UBSan.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kUnderAsan = true;
#else
constexpr bool kUnderAsan = false;
#endif

// Whether this is compiled for the thread sanitizer.
#if defined(__SANITIZE_THREAD__)
constexpr bool kUnderTsan = true;
#else
constexpr bool kUnderTsan = false;
#endif

constexpr bool kSanitized = kUnderAsan || kUnderTsan;

// The kinds in the array `all` that a suite runs for: if `few`, only the kinds at the indexes
// `kept`.
//   INSTANTIATE_TEST_SUITE_P(Host, Suite, ::testing::ValuesIn(OnlyIf(kSanitized, {0, 4}, kKinds)));
template <class T, size_t kNumber>
std::vector<T> OnlyIf(bool few, std::initializer_list<size_t> kept, const T (&all)[kNumber]) {
  if (!few) return std::vector<T>(all, all + kNumber);
  std::vector<T> some;
  for (const size_t i : kept) some.push_back(all[i]);
  return some;
}

}  // namespace dynemb

#define DYNEMB_SKIP_IF(condition, why)    \
  do {                                    \
    if (condition) GTEST_SKIP() << (why); \
  } while (false)

// The first statement of a test that does not run under a sanitizer. `why` is the reason.
#define SKIP_UNDER_ASAN(why) DYNEMB_SKIP_IF(::dynemb::kUnderAsan, why)
#define SKIP_UNDER_TSAN(why) DYNEMB_SKIP_IF(::dynemb::kUnderTsan, why)
#define SKIP_UNDER_SANITIZERS(why) DYNEMB_SKIP_IF(::dynemb::kSanitized, why)

#endif  // DYNEMB_TESTS_CC_SANITIZERS_H_
