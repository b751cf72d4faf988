// The data that snapshot tests compare: the rows of a table as bytes, and the rows that a snapshot
// delivers.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_MODEL_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

// Creates a table of the program's kind.
Status MakeTable(const TableOptions& options, std::unique_ptr<Table>* table);
// The reason why there can be no such tables here; empty if there can.
std::string MissingTable();
namespace {

constexpr int64_t kDim = 3;

// The factor by which random tests are shortened, because sanitizers are slow.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kFewer = 3;
#else
constexpr size_t kFewer = 1;
#endif

// Rows as bytes, by key.
struct Held {
  std::string vector, state;
  Tick update = 0;
  bool operator==(const Held& o) const {
    return vector == o.vector && state == o.state && update == o.update;
  }
};
using Image = std::unordered_map<uint64_t, Held>;

Image Rows(const Subject& t) {
  const ExportPlan plan = t->PlanExport(t.exec(), 0, ~uint64_t{0}, 0);
  const size_t n = plan.rows.size();
  const size_t state_bytes = t->layout().state_bytes();
  std::vector<char> keys(n * t.key_size()), vectors(n * t.vector_bytes());
  std::vector<char> state(n * state_bytes + 1);
  std::vector<int64_t> updates(n);
  t->Export(t.exec(), plan,
            {keys.data(), vectors.data(), reinterpret_cast<float*>(state.data()), updates.data(),
             nullptr});
  Image image;
  for (size_t i = 0; i < n; ++i) {
    Held& row = image[t.KeyAt(keys, i)];
    row.vector.assign(vectors.data() + i * t.vector_bytes(), t.vector_bytes());
    row.state.assign(state.data() + i * state_bytes, state_bytes);
    row.update = static_cast<Tick>(updates[i]);
  }
  EXPECT_EQ(image.size(), n);
  return image;
}

struct Delivered {
  Held held;
  Tick access = 0;
};
using Delivery = std::unordered_map<uint64_t, Delivered>;

Snapshot::Block Next(Snapshot* snapshot, size_t limit) {
  Snapshot::Block block;
  const Status status = snapshot->Next(limit, &block);
  EXPECT_TRUE(status.ok()) << status.message();
  return block;
}

// Reads one block, and adds it to the rows delivered so far, per table. Times are converted back to
// ticks. Returns false at the end.
bool ReadBlock(Snapshot* snapshot, Exec& exec, size_t limit, std::vector<Delivery>* to) {
  Snapshot::Block block = Next(snapshot, limit);
  if (block.n == 0) return false;
  const size_t n = block.n, t = block.table;
  const RowLayout& l = snapshot->layout(t);
  std::vector<char> keys(n * l.key_size), vectors(n * l.vector_bytes());
  std::vector<char> state(n * l.state_bytes() + 1);
  std::vector<CutTime> updates(n), accesses(n);
  const Status read =
      snapshot->Read(exec, &block,
                     {keys.data(), vectors.data(), reinterpret_cast<float*>(state.data()),
                      updates.data(), accesses.data()});
  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_FALSE(block.lock.owns_lock());
  for (size_t i = 0; i < n; ++i) {
    uint64_t key = 0;
    std::memcpy(&key, keys.data() + i * l.key_size, l.key_size);
    Delivered row;
    row.held.vector.assign(vectors.data() + i * l.vector_bytes(), l.vector_bytes());
    row.held.state.assign(state.data() + i * l.state_bytes(), l.state_bytes());
    row.held.update = snapshot->base(t) + updates[i];
    row.access = snapshot->base(t) + accesses[i];
    EXPECT_TRUE((*to)[t].emplace(key, row).second) << "delivered twice: " << key;
  }
  return true;
}

std::vector<Delivery> ReadAll(Snapshot* snapshot, Exec& exec, size_t num_tables,
                              size_t limit = 1000) {
  std::vector<Delivery> all(num_tables);
  while (ReadBlock(snapshot, exec, limit, &all)) {
  }
  return all;
}

// An exec with a small grain, so that threads share even a small table.
class SmallRanges final : public Exec {
 public:
  explicit SmallRanges(size_t threads) : threads_(threads) {}
  size_t parallelism() const override { return threads_.parallelism(); }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override {
    threads_.ParallelFor(n, std::min<size_t>(grain, 16), fn);
  }

 private:
  ThreadsExec threads_;
};

struct Kind {
  const char* name;
  KeyType key_type;
  DType dtype;
  size_t state;  // 0: none, 1: Adagrad's, 2: Adam's
  int64_t max_capacity;
  EvictStrategy evict;
  uint64_t key_space;
  size_t batch;
  size_t threads;
};

const Kind kPlain{"plain", KeyType::kInt64, DType::kFloat32, 1, 0, EvictStrategy::kLru, 0, 0, 1};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::string NameOf(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }

TableOptions OptionsOf(const Kind& kind) {
  TableOptions options;
  options.name = kind.name;
  options.key_type = kind.key_type;
  options.dtype = kind.dtype;
  options.dim = kDim;
  options.init_capacity = 1;
  options.max_capacity = kind.max_capacity;
  options.evict_strategy = kind.evict;
  options.seed = 7;
  options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
  return options;
}

StateSpec SpecOf(size_t state) {
  if (state == 0) return StateSpec();
  if (state == 1) return {"adagrad", {kDim}, {0.5f}};
  return {"adam", {kDim, kDim}, {0.0f, 0.25f}};
}

RowOptimizer OptimizerOf(const Table& table) {
  Hyper hyper;
  hyper.learning_rate = 0.25f;
  const int64_t width = table.layout().state_width;
  const OptimizerKind kind = width == 0      ? OptimizerKind::kSgd
                             : width == kDim ? OptimizerKind::kAdagrad
                                             : OptimizerKind::kAdam;
  return RowOptimizer(kind, {}, hyper, kDim);
}

Subject MakeSubject(const Kind& kind, Exec* exec) {
  std::unique_ptr<Table> table;
  const Status status = MakeTable(OptionsOf(kind), &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return Subject(std::move(table), exec);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_MODEL_H_
