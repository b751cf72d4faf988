// Require: for checks of invariants in tests.
#ifndef DYNEMB_TABLE_REQUIRE_H_
#define DYNEMB_TABLE_REQUIRE_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace dynemb {

// Aborts the process with a message unless `holds`. `where` is the number of the object concerned.
inline void Require(bool holds, const char* what, uint64_t where = 0) {
  if (holds) return;
  std::fprintf(stderr, "invariant broken: %s (%llu)\n", what,
               static_cast<unsigned long long>(where));
  std::abort();
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_REQUIRE_H_
