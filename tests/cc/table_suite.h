// The contract suite of Table. Its tests are compiled once, and run for kinds of table: a key type,
// a vector type and, for tables on a device, the device. The Exec is serial, unless the environment
// variable TABLE_TEST_THREADS gives a number of threads.
//
// A test body uses TableFixture, which hides the types behind uint64 keys and float vectors.
// table_suites.h has the topics.
#ifndef DYNEMB_TESTS_CC_TABLE_SUITE_H_
#define DYNEMB_TESTS_CC_TABLE_SUITE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cc/table/codec.h"
#include "cc/table/exec.h"
#include "cc/table/hash_table.h"
#include "cc/table/table.h"
#include "tests/cc/chosen_keys.h"

namespace dynemb {
namespace testing_table {

// Small deterministic random numbers (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint64_t Below(uint64_t n) { return Next() % n; }
  // An integer in [-8, 8], which is exact in every vector type.
  float Value() { return static_cast<float>(static_cast<int>(Below(17)) - 8); }
  std::vector<float> Values(size_t n) {
    std::vector<float> values(n);
    for (float& value : values) value = Value();
    return values;
  }

 private:
  uint64_t state_;
};

using Keys = std::vector<uint64_t>;
using Floats = std::vector<float>;
using RowIds = std::vector<RowId>;

// The n keys first, first + step, and so on.
inline Keys Progression(uint64_t first, size_t n, uint64_t step = 1) {
  Keys keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = first + i * step;
  return keys;
}

// Distinct keys that look random. Their low 32 bits are distinct too, so they suit every key type.
inline Keys Scattered(uint64_t first, size_t n) {
  Keys keys(n);
  for (size_t i = 0; i < n; ++i) {
    const auto low = static_cast<uint32_t>((first + i) * 2654435761u);
    keys[i] = (MixKey(first + i) << 32) | low;
  }
  return keys;
}

using testing_keys::SamePrefix;
using testing_keys::UnmixKey;

// One exported row.
struct Exported {
  uint64_t key;
  RowId row;
  Floats vector;
  Floats state;
  int64_t update;
  bool operator==(const Exported& o) const {
    return key == o.key && row == o.row && vector == o.vector && state == o.state &&
           update == o.update;
  }
};

// Keys as an array of a table's key type.
struct PackedKeys {
  std::vector<char> bytes;
  KeyType type;
  size_t size() const { return bytes.size() / SizeOf(type); }
  char* data() { return bytes.data(); }
  operator KeySpan() const { return {type, bytes.data(), size()}; }
};

// A Table with its Exec and its tick. Keys are uint64, of which a table of 32-bit keys gets the low
// bits. Vectors are float32, and are rounded to nearest on their way into the table.
class Subject {
 public:
  Subject(std::unique_ptr<Table> table, Exec* exec) : table_(std::move(table)), exec_(exec) {}

  Table* operator->() const { return table_.get(); }
  Table& table() const { return *table_; }
  Exec& exec() const { return *exec_; }
  int64_t dim() const { return table_->options().dim; }
  int64_t state_width() const { return table_->layout().state_width; }
  size_t key_size() const { return SizeOf(table_->options().key_type); }
  size_t vector_bytes() const { return table_->layout().vector_bytes(); }
  uint64_t size() const { return table_->size(); }
  TableStats stats() const { return table_->stats(); }

  Tick tick() const { return tick_; }
  void set_tick(Tick tick) { tick_ = tick; }  // the next batch gets tick + 1

  uint64_t Narrow(uint64_t key) const { return key_size() == 4 ? static_cast<uint32_t>(key) : key; }
  PackedKeys Pack(const Keys& keys) const {
    PackedKeys packed{std::vector<char>(keys.size() * key_size()), table_->options().key_type};
    for (size_t i = 0; i < keys.size(); ++i) {
      std::memcpy(packed.data() + i * key_size(), &keys[i], key_size());  // little-endian
    }
    return packed;
  }
  uint64_t KeyAt(const std::vector<char>& packed, size_t i) const {
    uint64_t key = 0;
    std::memcpy(&key, packed.data() + i * key_size(), key_size());
    return key;
  }
  std::vector<char> Encode(const Floats& vectors) const {
    std::vector<char> encoded(vectors.size() * SizeOf(table_->options().dtype));
    StoreVector(table_->options().dtype, vectors.data(), static_cast<int64_t>(vectors.size()),
                encoded.data());
    return encoded;
  }
  Floats Decode(const std::vector<char>& encoded) const {
    Floats vectors(encoded.size() / SizeOf(table_->options().dtype));
    LoadVector(table_->options().dtype, encoded.data(), static_cast<int64_t>(vectors.size()),
               vectors.data());
    return vectors;
  }
  // `vectors`, rounded to nearest as in a row.
  Floats Rounded(const Floats& vectors) const { return Decode(Encode(vectors)); }

  RowIds Find(const Keys& keys) {
    RowIds rows(keys.size(), 12345);
    table_->Find(*exec_, Pack(keys), ++tick_, rows.data());
    return rows;
  }
  std::vector<char> Contains(const Keys& keys) const {
    const std::unique_ptr<bool[]> found(new bool[keys.size() + 1]);
    table_->Contains(*exec_, Pack(keys), found.get());
    return std::vector<char>(found.get(), found.get() + keys.size());
  }
  size_t CountContained(const Keys& keys) const {
    size_t n = 0;
    for (char found : Contains(keys)) n += found;
    return n;
  }
  // If `default_vector` is empty, unknown keys get their initial vectors.
  Floats Lookup(const Keys& keys, const Floats& default_vector = {}, RowIds* rows_out = nullptr) {
    std::vector<char> encoded(keys.size() * vector_bytes());
    const std::vector<char> otherwise = Encode(default_vector);
    RowIds rows(keys.size(), 12345);
    table_->Lookup(*exec_, Pack(keys), ++tick_, default_vector.empty() ? nullptr : otherwise.data(),
                   encoded.data(), rows.data());
    if (rows_out != nullptr) *rows_out = rows;
    return Decode(encoded);
  }
  Status TryFindOrInsert(const Keys& keys, RowIds* rows) {
    rows->assign(keys.size(), 12345);
    return table_->FindOrInsert(*exec_, Pack(keys), ++tick_, rows->data());
  }
  RowIds FindOrInsert(const Keys& keys) {
    RowIds rows;
    const Status status = TryFindOrInsert(keys, &rows);
    EXPECT_TRUE(status.ok()) << status.message();
    return rows;
  }
  Floats LookupOrInsert(const Keys& keys, RowIds* rows_out = nullptr) {
    std::vector<char> encoded(keys.size() * vector_bytes());
    RowIds rows(keys.size(), 12345);
    const Status status =
        table_->LookupOrInsert(*exec_, Pack(keys), ++tick_, encoded.data(), rows.data());
    EXPECT_TRUE(status.ok()) << status.message();
    if (rows_out != nullptr) *rows_out = rows;
    return Decode(encoded);
  }
  Status TryUpsert(const Keys& keys, const Floats& vectors) {
    return table_->Upsert(*exec_, Pack(keys), Encode(vectors).data(), ++tick_);
  }
  void Upsert(const Keys& keys, const Floats& vectors) {
    const Status status = TryUpsert(keys, vectors);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  Status TryAccumulate(const Keys& keys, const Floats& deltas) {
    return table_->Accumulate(*exec_, Pack(keys), deltas.data(), ++tick_);
  }
  // If `step` is 0, every call is a new step (here and in Apply).
  Status TryWriteRows(const Keys& keys, const Floats& vectors, const Floats& state, bool insert,
                      uint64_t step = 0) {
    const Tick tick = ++tick_;
    return table_->WriteRows(*exec_, Pack(keys), vectors.data(), state.data(), insert,
                             step != 0 ? step : tick, tick);
  }
  uint64_t salt() const { return Table::SaltOf(table_->options()); }
  Status Clear() { return table_->Clear(*exec_, ++tick_); }
  size_t Erase(const Keys& keys) { return table_->Erase(*exec_, Pack(keys), ++tick_); }
  void Apply(const RowOptimizer& optimizer, const Keys& keys, const RowIds& rows,
             const Floats& gradients, uint64_t step = 0) {
    const PackedKeys packed = Pack(keys);
    const Tick tick = ++tick_;
    table_->BeginBatch(*exec_, tick, keys.size());
    RowIds held = rows;
    const Table::HeldRows to_hold{packed, held.data()};
    const Status status = table_->HoldRows(*exec_, &to_hold, 1);
    EXPECT_TRUE(status.ok()) << status.message();
    exec_->ParallelFor(keys.size(), 64, [&](size_t begin, size_t end) {
      table_->ApplyRange(*exec_, optimizer, packed, held.data(), gradients.data(), begin, end,
                         step != 0 ? step : tick, tick);
    });
  }
  // The vectors of keys; zeros for keys without a row. Not an access.
  Floats Read(const Keys& keys, Floats* state_out = nullptr) const {
    Floats vectors(keys.size() * static_cast<size_t>(dim()), -77.0f);
    Floats state(keys.size() * static_cast<size_t>(state_width()) + 1, -77.0f);
    const std::unique_ptr<bool[]> found(new bool[keys.size() + 1]);
    table_->ReadRows(*exec_, Pack(keys), vectors.data(), state.data(), found.get());
    state.pop_back();
    if (state_out != nullptr) *state_out = state;
    return vectors;
  }
  std::vector<Exported> Export(Tick since = 0, uint64_t limit = ~0ull) const {
    std::vector<Exported> all;
    int64_t cursor = 0;
    do {
      const ExportPlan plan =
          table_->PlanExport(*exec_, static_cast<uint64_t>(cursor), limit, since);
      const size_t n = plan.rows.size();
      EXPECT_LE(n, limit);
      if (plan.next_cursor >= 0) {
        EXPECT_GT(plan.next_cursor, cursor);
        if (plan.next_cursor <= cursor) return all;
      }
      std::vector<char> keys(n * key_size());
      std::vector<char> encoded(n * vector_bytes());
      Floats state(n * static_cast<size_t>(state_width()));
      std::vector<int64_t> updates(n);
      table_->Export(*exec_, plan,
                     {keys.data(), encoded.data(), state.data(), updates.data(), nullptr});
      const Floats vectors = Decode(encoded);
      for (size_t i = 0; i < n; ++i) {
        const auto v = vectors.begin() + static_cast<int64_t>(i) * dim();
        const auto s = state.begin() + static_cast<int64_t>(i) * state_width();
        all.push_back({KeyAt(keys, i), plan.rows[i], Floats(v, v + dim()),
                       Floats(s, s + state_width()), updates[i]});
      }
      cursor = plan.next_cursor;
    } while (cursor >= 0);
    return all;
  }
  Keys ExportedKeys(Tick since) const {
    Keys keys;
    for (const Exported& row : Export(since)) keys.push_back(row.key);
    std::sort(keys.begin(), keys.end());
    return keys;
  }
  std::vector<int64_t> Scores(const Keys& keys) const {
    std::vector<int64_t> scores(keys.size(), -77);
    table_->Scores(*exec_, Pack(keys), scores.data());
    return scores;
  }
  Status SetScores(const Keys& keys, const std::vector<Score>& scores) {
    return table_->SetScores(*exec_, Pack(keys), scores.data());
  }
  Status AddCounts(const Keys& keys, const std::vector<uint32_t>& counts) {
    return table_->AddCounts(*exec_, Pack(keys), counts.data());
  }
  void Check() const { table_->CheckInvariants(); }

 private:
  std::unique_ptr<Table> table_;
  Exec* exec_;
  Tick tick_ = 0;
};

inline RowOptimizer Sgd(float learning_rate, int64_t dim) {
  Hyper hyper;
  hyper.learning_rate = learning_rate;
  return RowOptimizer(OptimizerKind::kSgd, {}, hyper, dim);
}

// A kind of table that the tests run for.
struct TableKind {
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  // The time per key, as a multiple of the time on the host. Tests use Scaled(n, least) keys, where
  // n is enough on the host.
  size_t slowness = 1;
  // Whether the index is one ring (cc/device/flat_index.h), not segments that split.
  bool flat = false;
  bool rows_move =
      false;  // whether a live row may get another id; ApplyRange then looks up keys again
  std::function<Status(const TableOptions&, std::unique_ptr<Table>*)> make;
  bool cold = false;  // whether rows may be cold (cold_rows.h): then they have no row ids
  // The reason why this machine cannot have such tables; empty if it can.
  std::string (*missing)() = [] { return std::string(); };
};

inline std::ostream& operator<<(std::ostream& out, const TableKind& kind) {
  return out << "key type " << static_cast<int>(kind.key_type) << ", dtype "
             << static_cast<int>(kind.dtype);
}

inline TableKind HostTable(KeyType key_type, DType dtype) {
  TableKind kind;
  kind.key_type = key_type;
  kind.dtype = dtype;
  kind.slowness = 1;
  kind.make = [](const TableOptions& options, std::unique_ptr<Table>* table) {
    return Table::Create(options, table);
  };
  return kind;
}

// The options of a table on a device whose first tier has room for `hbm_rows` rows without state;
// -1: for all rows.
inline TableOptions OnDevice(TableOptions options, int hbm_rows) {
  options.tier = hbm_rows < 0 ? Tier::kHbm : Tier::kHybrid;
  if (hbm_rows >= 0) {
    const RowLayout row(SizeOf(options.key_type), options.dtype, options.dim, 0, 16);
    options.max_hbm_bytes = static_cast<uint64_t>(hbm_rows) * row.stride;
  }
  return options;
}

inline std::unique_ptr<Exec> MakeExec() {
  const char* threads = std::getenv("TABLE_TEST_THREADS");
  if (threads == nullptr) return std::make_unique<SerialExec>();
  return std::make_unique<ThreadsExec>(std::stoul(threads));
}

class TableFixture : public ::testing::TestWithParam<TableKind> {
 public:
  void SetUp() override {
    if (!GetParam().missing().empty()) GTEST_SKIP() << GetParam().missing();
  }
  KeyType key_type() const { return GetParam().key_type; }
  DType dtype() const { return GetParam().dtype; }
  size_t slowness() const { return GetParam().slowness; }
  bool flat() const { return GetParam().flat; }
  bool rows_move() const { return GetParam().rows_move; }
  bool cold() const { return GetParam().cold; }
  Status Make(const TableOptions& options, std::unique_ptr<Table>* table) const {
    return GetParam().make(options, table);
  }
  Exec& exec() { return *exec_; }

  size_t Scaled(size_t n, size_t least = 1) const { return std::max(least, n / slowness()); }
  TableOptions Options(int64_t dim = 4) const {
    TableOptions options;
    options.name = "subject";
    options.key_type = key_type();
    options.dtype = dtype();
    options.dim = dim;
    options.init_capacity = 1;
    options.seed = 42;
    options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    return options;
  }
  Subject Create(const TableOptions& options, Exec* exec_or_null = nullptr) {
    std::unique_ptr<Table> table;
    const Status status = Make(options, &table);
    EXPECT_TRUE(status.ok()) << status.message();
    if (table == nullptr) std::abort();
    return Subject(std::move(table), exec_or_null == nullptr ? &exec() : exec_or_null);
  }
  Subject Create() { return Create(Options()); }

  // The initial vectors of keys, by the contract of Initializer, rounded to the table's type.
  static Floats InitialVectors(const Subject& t, const Keys& keys) {
    const TableOptions& options = t->options();
    Initializer initializer;
    const Status status =
        Initializer::Create(options.initializer, options.dim, options.seed, &initializer);
    EXPECT_TRUE(status.ok()) << status.message();
    Floats vectors(keys.size() * static_cast<size_t>(options.dim));
    for (size_t i = 0; i < keys.size(); ++i) {
      initializer.Fill(t.Narrow(keys[i]), &vectors[i * static_cast<size_t>(options.dim)]);
    }
    return t.Rounded(vectors);
  }

 private:
  std::unique_ptr<Exec> exec_ = MakeExec();
};

}  // namespace testing_table
}  // namespace dynemb

// A test of the topic `suite`, whose fixture is `f`:
//   TABLE_TEST(TableBasic, EmptyTable) { Subject t = f.Create(); ... }
#define TABLE_TEST(suite, name)               \
  void suite##name(TableFixture& f);          \
  TEST_P(suite, name) { suite##name(*this); } \
  void suite##name([[maybe_unused]] TableFixture& f)

#endif  // DYNEMB_TESTS_CC_TABLE_SUITE_H_
