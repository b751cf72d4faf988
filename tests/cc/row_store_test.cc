#include "cc/table/row_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "cc/table/exec.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

TEST(RowLayout, WastesAtMostSixBytes) {
  for (const size_t key : {size_t{4}, size_t{8}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      for (const int64_t dim : {1, 2, 3, 16, 17}) {
        for (const int64_t state : {0, 1, 34}) {
          const RowLayout layout(key, dtype, dim, state);
          const size_t needed = key + 4 + layout.vector_bytes() + static_cast<size_t>(state) * 4;
          EXPECT_GE(layout.stride, needed);
          EXPECT_LE(layout.stride, needed + 6);
          EXPECT_EQ(layout.stride % 8, 0u);
          // Files have rows without this padding.
          EXPECT_GE(layout.content_bytes(), needed - layout.vector_offset);
          EXPECT_LE(layout.content_bytes(), needed - layout.vector_offset + 2);
          EXPECT_EQ(layout.vector_offset, key + 4);
          EXPECT_EQ(layout.state_offset % 4, 0u);
          EXPECT_GE(layout.state_offset, layout.vector_offset + layout.vector_bytes());
        }
      }
    }
  }
}

TEST(RowStore, HandsOutFreedRowsFirst) {
  RowStore store;
  store.Init(RowLayout(8, DType::kFloat32, 2, 0), 100);
  std::vector<RowId> ids(10);
  ASSERT_TRUE(store.Allocate(10, ids.data()).ok());
  EXPECT_EQ(std::set<RowId>(ids.begin(), ids.end()).size(), 10u);
  EXPECT_EQ(store.live(), 10u);
  EXPECT_EQ(store.high_water(), 10u);
  store.ReserveFree(2);
  store.Free(3);
  store.Free(7);
  EXPECT_EQ(store.live(), 8u);
  std::vector<RowId> more(3);
  ASSERT_TRUE(store.Allocate(3, more.data()).ok());
  EXPECT_EQ(std::set<RowId>(more.begin(), more.end()), (std::set<RowId>{3, 7, 10}));
  EXPECT_EQ(store.live(), 11u);
  EXPECT_EQ(store.high_water(), 11u);
  ASSERT_TRUE(store.Allocate(0, nullptr).ok());
}

TEST(RowStore, FreshRowsAreZeroAndDisjoint) {
  RowStore store;
  const RowLayout layout(4, DType::kBfloat16, 3, 1);
  store.Init(layout, 50000);
  std::vector<RowId> ids(50000);
  ASSERT_TRUE(store.Allocate(ids.size(), ids.data()).ok());
  const std::vector<char> zero(layout.stride);
  for (RowId id : ids) ASSERT_EQ(memcmp(store.At(id), zero.data(), layout.stride), 0);
  for (RowId id : ids) memset(store.At(id), static_cast<int>(id % 251), layout.stride);
  for (RowId id : ids) {
    ASSERT_EQ(static_cast<unsigned char>(*store.At(id)), id % 251);
    ASSERT_EQ(static_cast<unsigned char>(store.At(id)[layout.stride - 1]), id % 251);
  }
  store.Clear();
  EXPECT_EQ(store.live(), 0u);
  EXPECT_EQ(store.high_water(), 0u);
  ASSERT_TRUE(store.Allocate(ids.size(), ids.data()).ok());
  for (RowId id : ids) ASSERT_EQ(memcmp(store.At(id), zero.data(), layout.stride), 0);
}

TEST(RowStore, RefusedAllocationTakesNoRows) {
  RowStore store;
  store.Init(RowLayout(8, DType::kFloat32, 1, 0), 10);
  EXPECT_EQ(store.max_rows(), 10u);
  std::vector<RowId> ids(20, 77);
  ASSERT_TRUE(store.Allocate(6, ids.data()).ok());
  store.ReserveFree(1);
  store.Free(2);
  const Status status = store.Allocate(6, ids.data() + 6);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(store.live(), 5u);
  EXPECT_EQ(store.high_water(), 6u);
  ASSERT_TRUE(store.Allocate(5, ids.data() + 6).ok());
  EXPECT_EQ(store.live(), 10u);
  EXPECT_FALSE(store.Allocate(1, ids.data()).ok());
}

TEST(RowStore, GrowthKeepsContents) {
  RowStore store;
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  store.Init(layout, 3000000);
  std::vector<RowId> ids(1000);
  uint64_t next = 0;
  for (size_t n = 1; next < 1000000; n = std::min<size_t>(ids.size(), 2 * n)) {
    ASSERT_TRUE(store.Allocate(n, ids.data()).ok());
    for (size_t i = 0; i < n; ++i) memcpy(store.At(ids[i]), &++next, sizeof(next));
  }
  for (uint64_t r = 0; r < next; ++r) {
    uint64_t key;
    memcpy(&key, store.At(static_cast<RowId>(r)), sizeof(key));
    ASSERT_EQ(key, r + 1);
  }
}

TEST(RowStore, UnallocateUndoesAllocate) {
  RowStore store, other;
  for (RowStore* s : {&store, &other}) {
    s->Init(RowLayout(8, DType::kFloat32, 2, 0), 100);
    std::vector<RowId> ids(10);
    ASSERT_TRUE(s->Allocate(10, ids.data()).ok());
    s->ReserveFree(3);
    for (RowId id : {3, 7, 5}) s->Free(id);
  }
  for (const size_t n : {size_t{0}, size_t{2}, size_t{3}, size_t{20}}) {
    std::vector<RowId> ids(n);
    ASSERT_TRUE(store.Allocate(n, ids.data()).ok());
    store.Unallocate(n, ids.data());
    EXPECT_EQ(store.live(), 7u);
    EXPECT_EQ(store.high_water(), 10u);
  }
  std::vector<RowId> a(6), b(6);
  ASSERT_TRUE(store.Allocate(6, a.data()).ok());
  ASSERT_TRUE(other.Allocate(6, b.data()).ok());
  EXPECT_EQ(a, b);
}

TEST(RowStore, ChangeLayoutKeepsKeyTimeAndVector) {
  SerialExec exec;
  RowStore store;
  RowLayout layout(8, DType::kFloat16, 3, 0);
  store.Init(layout, 1000);
  std::vector<RowId> ids(100);
  ASSERT_TRUE(store.Allocate(100, ids.data()).ok());
  for (RowId id : ids) {
    const uint64_t key = id * 1000003ull;
    memcpy(store.At(id), &key, 8);
    *layout.update(store.At(id)) = id + 1;
    memset(layout.vector(store.At(id)), static_cast<int>(id), 6);
  }
  *layout.update(store.At(5)) = 0;
  store.ReserveFree(1);
  store.Free(5);
  for (const int64_t width : {2, 7, 0, 1}) {
    layout = RowLayout(8, DType::kFloat16, 3, width);
    const std::vector<float> initial(static_cast<size_t>(width), 1.5f);
    ASSERT_TRUE(store.ChangeLayout(exec, layout, initial.data()).ok());
    EXPECT_EQ(store.layout().stride, layout.stride);
    EXPECT_EQ(store.live(), 99u);
    for (RowId id : ids) {
      const char* row = store.At(id);
      if (id == 5) {
        EXPECT_EQ(*layout.update(row), 0u);
        continue;
      }
      const uint64_t key = id * 1000003ull;
      ASSERT_EQ(memcmp(row, &key, 8), 0);
      ASSERT_EQ(*layout.update(row), id + 1);
      ASSERT_EQ(layout.vector(row)[5], static_cast<char>(id));
      for (int64_t c = 0; c < width; ++c) ASSERT_EQ(layout.state(row)[c], 1.5f);
    }
  }
  RowId reused;
  ASSERT_TRUE(store.Allocate(1, &reused).ok());
  EXPECT_EQ(reused, 5u);
}

// Several threads move the rows inside the arena, from any width to any other.
TEST(RowStore, ChangeLayoutMovesManyRows) {
  ThreadsExec exec(4);
  for (const uint64_t rows : {uint64_t{1}, uint64_t{2}, uint64_t{30000}, uint64_t{100001}}) {
    RowStore store;
    RowLayout layout(8, DType::kFloat32, 3, 0);
    store.Init(layout, 2 * rows);
    std::vector<RowId> ids(rows);
    ASSERT_TRUE(store.Allocate(rows, ids.data()).ok());
    for (uint64_t r = 0; r < rows; ++r) {
      char* const row = store.At(static_cast<RowId>(r));
      memcpy(row, &r, sizeof(r));
      *layout.update(row) = 7;
      memset(layout.vector(row), static_cast<int>(r), 12);
    }
    for (const int64_t width : {1, 2, 40, 41, 40, 40, 3, 100, 0, 1, 0}) {
      layout = RowLayout(8, DType::kFloat32, 3, width);
      const std::vector<float> initial(static_cast<size_t>(width), static_cast<float>(width));
      ASSERT_TRUE(store.ChangeLayout(exec, layout, initial.data()).ok());
      for (uint64_t r = 0; r < rows; ++r) {
        const char* const row = store.At(static_cast<RowId>(r));
        uint64_t key;
        memcpy(&key, row, sizeof(key));
        ASSERT_EQ(key, r) << width;
        ASSERT_EQ(*layout.update(row), 7u);
        ASSERT_EQ(layout.vector(row)[0], static_cast<char>(r));
        ASSERT_EQ(layout.vector(row)[11], static_cast<char>(r));
        for (int64_t c = 0; c < width; ++c) ASSERT_EQ(layout.state(row)[c], initial[0]);
      }
    }
    // Memory that wider rows used is zero in new rows.
    ASSERT_TRUE(store.Allocate(rows, ids.data()).ok());
    const std::vector<char> zero(layout.stride);
    for (RowId id : ids) ASSERT_EQ(memcmp(store.At(id), zero.data(), layout.stride), 0);
  }
}

// Presize and Prefault do not affect ids, contents or counts, nor a change of the layout.
TEST(RowStore, PresizeAndPrefaultAffectOnlySpeed) {
  SKIP_UNDER_ASAN("a test of speed: other tests run the same code");
  SerialExec exec;
  const RowLayout layout(8, DType::kFloat32, 16, 0);
  const std::vector<float> state(4, 0.5f);
  // No rows, fewer than are used, all rows, and far more than there can be.
  for (const uint64_t presized :
       {uint64_t{0}, uint64_t{200000}, uint64_t{300000}, uint64_t{1} << 50}) {
    SCOPED_TRACE(presized);
    RowStore store;
    store.Init(layout, 300000);
    store.Presize(exec, presized);
    EXPECT_EQ(store.high_water(), 0u);
    EXPECT_EQ(store.bytes(), 0u);
    std::vector<RowId> ids(250000);
    ASSERT_TRUE(store.Allocate(ids.size(), ids.data()).ok());
    for (RowId id : ids) {
      for (size_t b = 0; b < layout.stride; ++b) ASSERT_EQ(store.At(id)[b], 0) << id;
      memset(store.At(id), static_cast<int>(1 + id % 251), layout.stride);
    }
    store.Prefault(exec);  // the rows are filled already
    ASSERT_TRUE(store.ChangeLayout(exec, RowLayout(8, DType::kFloat32, 16, 4), state.data()).ok());
    for (RowId id : ids) {
      for (size_t b = 0; b < layout.vector_offset + layout.vector_bytes(); ++b) {
        ASSERT_EQ(static_cast<unsigned char>(store.At(id)[b]), 1 + id % 251) << id;
      }
      ASSERT_EQ(store.layout().state(store.At(id))[3], 0.5f);
    }
  }
}

}  // namespace
}  // namespace dynemb
