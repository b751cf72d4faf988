// The memory that tables on the host use, and calls for which there is no memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/memory_limit.h"
#include "cc/table/table.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Progression;

TableOptions Options(const std::string& name, int64_t dim) {
  TableOptions options;
  options.name = name;
  options.dim = dim;
  return options;
}

// The bytes of this process's address space; 0 if there is no /proc.
size_t AddressSpace() {
  unsigned long pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) return 0;
  std::fclose(file);
  return pages * 4096;
}

TEST(TableMemory, AddressSpaceIsReservedAsNeeded) {
  constexpr size_t kTables = 2000;
  SerialExec exec;
  const size_t before = AddressSpace();
  if (before == 0) GTEST_SKIP() << "no /proc";
  std::vector<std::unique_ptr<Table>> tables(kTables);
  for (size_t t = 0; t < kTables; ++t) {
    const Status status = Table::Create(Options("t" + std::to_string(t), 64), &tables[t]);
    ASSERT_TRUE(status.ok()) << t << ": " << status.message();
    ASSERT_TRUE(tables[t]->AttachState(exec, {"adagrad", {64}, {0.1f}}).ok());
  }
  const size_t empty = (AddressSpace() - before) / kTables;
  EXPECT_LT(empty, size_t{2} << 20);  // 1,024 rows of 524 bytes are 0.5 MiB
  std::vector<RowId> rows(3000);
  for (size_t t = 0; t < kTables; t += 100) {
    const std::vector<uint64_t> keys = Progression(t, rows.size());
    ASSERT_TRUE(tables[t]->FindOrInsert(exec, {keys.data(), keys.size()}, 1, rows.data()).ok());
    EXPECT_EQ(tables[t]->stats().evictions, 0u);
    tables[t]->CheckInvariants();
  }
}

size_t charge_most = 0;   // the bytes that all tables together may use
size_t charged_most = 0;  // the most that they have used
bool MayCharge(size_t bytes) {
  if (ChargedMemory() + bytes > charge_most) return false;
  charged_most = std::max(charged_most, ChargedMemory() + bytes);
  return true;
}
class LimitedMemory {
 public:
  explicit LimitedMemory(size_t most) {
    charge_most = ChargedMemory() + most;
    charged_most = ChargedMemory();
    SetMemoryFault(MayCharge);
  }
  ~LimitedMemory() { SetMemoryFault(nullptr); }
};

// A table without max_capacity returns an error if memory runs out. It does not evict.
TEST(TableMemory, UnboundedTablesEvictNothing) {
  SerialExec exec;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(Options("unbounded", 16), &table).ok());
  constexpr size_t kBatch = 5000;
  std::vector<RowId> rows(kBatch);
  Tick tick = 0;
  size_t held = 0;
  Status status;
  {
    const LimitedMemory limited(size_t{16} << 20);
    while (status.ok()) {
      const std::vector<uint64_t> keys = Progression(held, kBatch);
      status = table->FindOrInsert(exec, {keys.data(), kBatch}, ++tick, rows.data());
      if (status.ok()) held += kBatch;
      ASSERT_LT(held, size_t{1} << 20) << "the limit has no effect";
    }
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_NE(status.message().find("unbounded"), std::string::npos) << status.message();
    table->CheckInvariants();
    EXPECT_EQ(table->size(), held);
    EXPECT_EQ(table->stats().evictions, 0u);
    // Calls on existing rows still succeed.
    const std::vector<uint64_t> keys = Progression(held - kBatch, kBatch);
    EXPECT_TRUE(table->FindOrInsert(exec, {keys.data(), kBatch}, ++tick, rows.data()).ok());
  }
  const std::vector<uint64_t> all = Progression(0, held + kBatch);
  rows.resize(all.size());
  EXPECT_TRUE(table->FindOrInsert(exec, {all.data(), all.size()}, ++tick, rows.data()).ok());
  EXPECT_EQ(table->size(), all.size());
  EXPECT_EQ(table->stats().evictions, 0u);
}

// AttachState moves rows inside their arena, so there is never a second copy of the table.
TEST(TableMemory, AttachStateNeedsNoSecondCopy) {
  SerialExec exec;
  for (const size_t held : {size_t{0}, size_t{200000}}) {
    TableOptions options = Options("t", 32);
    options.init_capacity = 200000;
    std::unique_ptr<Table> table;
    ASSERT_TRUE(Table::Create(options, &table).ok());
    const std::vector<uint64_t> keys = Progression(0, held);
    std::vector<RowId> rows(held);
    ASSERT_TRUE(table->FindOrInsert(exec, {keys.data(), held}, 1, rows.data()).ok());
    for (const int64_t width : {32, 64, 0, 32}) {
      const size_t stride = table->layout().stride + static_cast<size_t>(width) * 4;
      const LimitedMemory limited(size_t{1} << 30);
      StateSpec spec{"width " + std::to_string(width), {}, {}};
      if (width != 0) spec = {spec.optimizer, {width}, {0.5f}};
      const size_t before = ChargedMemory();
      ASSERT_TRUE(table->AttachState(exec, spec).ok());
      const size_t whole = 200000 * stride;
      EXPECT_LT(charged_most - before, whole / 2 + whole / 4) << width;
      table->CheckInvariants();
    }
    EXPECT_EQ(table->size(), held);
  }
}

// If there is no memory for the wider rows, nothing changes.
TEST(TableMemory, AttachStateWithoutMemory) {
  SerialExec exec;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(Options("t", 4), &table).ok());
  ASSERT_TRUE(table->AttachState(exec, {"a", {4}, {0.5f}}).ok());
  const std::vector<uint64_t> keys = Progression(0, 50000);
  std::vector<RowId> rows(keys.size());
  ASSERT_TRUE(table->FindOrInsert(exec, {keys.data(), keys.size()}, 1, rows.data()).ok());
  {
    const LimitedMemory limited(0);
    EXPECT_EQ(table->AttachState(exec, {"b", {400}, {0.25f}}).code(), Code::kResourceExhausted);
  }
  EXPECT_EQ(table->state_spec().optimizer, "a");
  EXPECT_EQ(table->layout().state_width, 4);
  table->CheckInvariants();
  std::vector<float> vectors(keys.size() * 4), state(keys.size() * 4);
  const std::unique_ptr<bool[]> found(new bool[keys.size()]);
  table->ReadRows(exec, {keys.data(), keys.size()}, vectors.data(), state.data(), found.get());
  EXPECT_EQ(state, std::vector<float>(state.size(), 0.5f));
}

}  // namespace
}  // namespace dynemb
