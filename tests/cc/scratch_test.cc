#include "cc/table/scratch.h"

#include <gtest/gtest.h>

#include <memory>

#include "tests/cc/failing_allocations.h"

namespace dynemb {
namespace {

// An object that the pool has no memory to keep goes, without an exception from a destructor.
TEST(ScratchPool, GivesUpWhatItCannotKeep) {
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

TEST(ScratchPool, TakesNothingWithoutMemory) {
  ScratchPool<int> pool;
  EXPECT_THROW(failing::WithAllocations(0, [&] { pool.Take(); }), std::bad_alloc);
  EXPECT_EQ(*pool.Take(), 0);
}

}  // namespace
}  // namespace dynemb
