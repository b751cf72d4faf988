// Whether this is compiled for a sanitizer, under which everything is many times slower.
#ifndef DYNEMB_TESTS_CC_SANITIZED_H_
#define DYNEMB_TESTS_CC_SANITIZED_H_

namespace dynemb {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SANITIZED_H_
