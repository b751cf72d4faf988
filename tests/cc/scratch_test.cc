#include "cc/table/scratch.h"

#include <gtest/gtest.h>

#include <memory>

#include "tests/cc/failing_allocations.h"

namespace dynemb {
namespace {

// If memory to keep an object runs out, the object is freed, and the lease's destructor does not
// throw.
TEST(ScratchPool, FreesObjectsThatItCannotKeep) {
  ScratchPool<int> pool;
  {
    const auto lease = pool.Take();
    *lease = 7;
    failing::left = 0;
  }
  failing::left = failing::kNever;
  EXPECT_EQ(*pool.Take(), 0);
  *pool.Take() = 8;
  EXPECT_EQ(*pool.Take(), 8);
}

TEST(ScratchPool, TakeThrowsIfMemoryRunsOut) {
  ScratchPool<int> pool;
  EXPECT_THROW(failing::WithAllocations(0, [&] { pool.Take(); }), std::bad_alloc);
  EXPECT_EQ(*pool.Take(), 0);
}

}  // namespace
}  // namespace dynemb
