// The contract suite of Table on the host, for every key type and vector type.
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/number_text.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

constexpr KeyType kI64 = KeyType::kInt64;
constexpr KeyType kI32 = KeyType::kInt32;
constexpr KeyType kU64 = KeyType::kUint64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBf16 = DType::kBfloat16;

// BUILD runs them serially and with 2 and 4 threads. Under sanitizers, three of the pairs have all
// key types and all vector types.
const TableKind kHostTables[] = {
    HostTable(kI64, kF32), HostTable(kI64, kF16), HostTable(kI64, kBf16),
    HostTable(kI32, kF32), HostTable(kI32, kF16), HostTable(kI32, kBf16),
    HostTable(kU64, kF32), HostTable(kU64, kF16), HostTable(kU64, kBf16)};
INSTANTIATE_TABLE_SUITES(Host, OnlyIf(kSanitized, {0, 4, 8}, kHostTables));

TableOptions GoodOptions() {
  TableOptions options;
  options.name = "options";
  options.dim = 16;
  return options;
}

void ExpectRefused(const TableOptions& options, const std::string& name, const std::string& value) {
  std::unique_ptr<Table> table;
  const Status status = Table::Create(options, &table);
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << name << "=" << value;
  EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(value), std::string::npos) << status.message();
  EXPECT_EQ(table, nullptr);
}

TEST(TableOptions, InvalidOptionsAreNamed) {
  const auto change = [](auto field, auto value) {
    TableOptions options = GoodOptions();
    options.*field = value;
    return options;
  };
  for (const int64_t dim : {int64_t{0}, int64_t{-3}, int64_t{1} << 40}) {
    ExpectRefused(change(&TableOptions::dim, dim), "dim", std::to_string(dim));
  }
  for (const int64_t n : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    ExpectRefused(change(&TableOptions::init_capacity, n), "init_capacity", std::to_string(n));
  }
  for (const int64_t n : {int64_t{-1}, INT64_MAX, int64_t{0xFFFFFFFF}}) {
    ExpectRefused(change(&TableOptions::max_capacity, n), "max_capacity", std::to_string(n));
  }
  ExpectRefused(change(&TableOptions::max_capacity, int64_t{1000}), "init_capacity", "1024");
  for (const double load : {0.0, -0.5, 0.049, 0.96, 1.0, 1e300, std::nan(""), -HUGE_VAL}) {
    ExpectRefused(change(&TableOptions::max_load_factor, load), "max_load_factor",
                  "=" + NumberText(load) + ":");
  }
  using Columns = std::vector<ColumnInit>;
  ExpectRefused(change(&TableOptions::initializer, Columns{}), "initializer", "0");
  ExpectRefused(change(&TableOptions::initializer, Columns(3)), "initializer", "3");
  ExpectRefused(change(&TableOptions::initializer, Columns{{InitKind::kNormal, 0.0f, -2.0f}}),
                "stddev", "-2");
}

TEST(TableOptions, ValidOptionsAreKept) {
  TableOptions options = GoodOptions();
  options.max_load_factor = 0.95;
  options.max_capacity = options.init_capacity = 1;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  EXPECT_EQ(table->options().name, "options");
  EXPECT_EQ(table->options().max_capacity, 1);
  EXPECT_EQ(table->size(), 0u);
  SerialExec exec;
  EXPECT_EQ(table->AttachState(exec, {"x", {1, 2}, {0.0f}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(table->AttachState(exec, {"x", {0}, {0.0f}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(table->layout().state_width, 0);
}

// The bound of design.md: at most 32 bytes of metadata per row, at sizes up to a million rows.
TEST(TableMemory, MetadataOfAMillionRows) {
  SKIP_UNDER_TSAN("a test of memory, in one thread");
  TableOptions options = GoodOptions();
  options.init_capacity = 1;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  SerialExec exec;
  Subject t(std::move(table), &exec);
  for (uint64_t next = 0; next < 1000000; next += 20000) {
    t.FindOrInsert(Progression(next, 20000));
    const TableStats s = t.stats();
    ASSERT_LE(s.metadata_bytes, 32 * s.size) << s.size;
    ASSERT_EQ(s.metadata_bytes, s.index_bytes + s.row_bytes - s.size * 16 * 4);
  }
  EXPECT_EQ(t.size(), 1000000u);
  t.Check();
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
