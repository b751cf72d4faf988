// A table of which most rows are in files trains to the same bits as one in memory: more rows than
// the models of the other tests can follow, with threads, and with compaction in the background.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/table/exec.h"
#include "cc/table/key.h"
#include "cc/table/optimizer.h"
#include "cc/table/table.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"
#include "tests/cc/zipf.h"

namespace dynemb {
namespace {

constexpr int64_t kDim = 16;

class Trainer {
 public:
  // `files`: null for a table in memory.
  Trainer(const FileOptions* files, uint64_t hot_rows) {
    TableOptions options;
    options.name = "large";
    options.dim = kDim;
    options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    const RowLayout row(8, DType::kFloat32, kDim, kDim);
    const Status made = files == nullptr
                            ? Table::Create(options, &table_)
                            : CreateFileTable(options, *files, hot_rows * row.stride, &table_);
    EXPECT_TRUE(made.ok()) << made.message();
    const Status attached = table_->AttachState(exec_, StateSpec{"adagrad", {kDim}, {0.1f}});
    EXPECT_TRUE(attached.ok()) << attached.message();
  }

  // A lookup, and a step of Adagrad on the distinct keys.
  void Step(const std::vector<uint64_t>& keys, uint64_t step) {
    vectors_.resize(keys.size() * kDim);
    rows_.resize(keys.size());
    Check([&](Tick tick) {
      return table_->LookupOrInsert(exec_, {keys.data(), keys.size()}, tick, vectors_.data(),
                                    rows_.data());
    });
    std::vector<uint64_t> distinct = keys;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    std::vector<float> gradients(distinct.size() * kDim);
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = static_cast<float>((distinct[i / kDim] + i + step) % 64) / 64 - 0.5f;
    }
    const KeySpan span(distinct.data(), distinct.size());
    std::vector<RowId> found(distinct.size());
    Check([&](Tick tick) {
      table_->BeginBatch(exec_, tick, distinct.size());
      table_->Find(exec_, span, tick, found.data());
      exec_.ParallelFor(distinct.size(), 1024, [&](size_t begin, size_t end) {
        table_->ApplyRange(exec_, adagrad_, span, found.data(), gradients.data(), begin, end, tick,
                           tick);
      });
      return table_->Error();
    });
  }
  // The keys that the last step has looked up.
  const std::vector<float>& vectors() const { return vectors_; }
  Table& table() { return *table_; }
  Exec& exec() { return exec_; }

 private:
  template <class Call>
  void Check(const Call& call) {
    TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
    const Status status = call(++tick_);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  static Hyper Rate() {
    Hyper hyper;
    hyper.learning_rate = 0.01f;
    return hyper;
  }

  std::unique_ptr<Table> table_;
  ThreadsExec exec_{2};
  Tick tick_ = 0;
  const RowOptimizer adagrad_{OptimizerKind::kAdagrad, {}, Rate(), kDim};
  std::vector<float> vectors_;
  std::vector<RowId> rows_;
};

// The vectors and the state of the rows of `keys`.
std::vector<float> Rows(Trainer& trainer, const std::vector<uint64_t>& keys) {
  const size_t n = keys.size();
  std::vector<float> rows(2 * n * kDim);
  std::unique_ptr<bool[]> found(new bool[n]);
  TableLock lock({&trainer.table()}, TableLock::Mode::kShared);
  trainer.table().ReadRows(trainer.exec(), {keys.data(), n}, rows.data(), rows.data() + n * kDim,
                           found.get());
  const Status status = trainer.table().Error();
  EXPECT_TRUE(status.ok()) << status.message();
  for (size_t i = 0; i < n; ++i) EXPECT_TRUE(found[i]) << keys[i];
  return rows;
}

// Five million rows: TABLE_TEST_LONGER=250, or 1000 under sanitizers (`make soak`).
TEST(FileTableScale, TrainsToTheBitsOfATableInMemory) {
  const size_t rows = Longer(kSanitized ? 5000 : 20000), batch = std::min<size_t>(rows / 10, 65536);
  const testing_files::Folder folder;
  FileOptions files;
  files.folder = folder / "files";
  Trainer in_memory(nullptr, 0), in_files(&files, rows / 7);

  std::vector<uint64_t> all(rows);
  for (size_t i = 0; i < rows; ++i) all[i] = MixKey(i);
  testing_table::Random random(11);
  const testing_table::Zipf zipf(rows, 1.05);
  for (uint64_t step = 0; step < rows / batch + 200; ++step) {
    std::vector<uint64_t> keys;
    if (step < rows / batch) {
      keys.assign(all.begin() + static_cast<int64_t>(step * batch),
                  all.begin() + static_cast<int64_t>((step + 1) * batch));
    } else {
      for (size_t i = 0; i < batch; ++i) keys.push_back(all[zipf.Draw(random)]);
    }
    ASSERT_NO_FATAL_FAILURE(in_memory.Step(keys, step));
    ASSERT_NO_FATAL_FAILURE(in_files.Step(keys, step));
    ASSERT_TRUE(in_files.vectors() == in_memory.vectors()) << "step " << step;
  }
  {
    TableLock lock({&in_files.table()}, TableLock::Mode::kShared);  // the compaction still runs
    const TableStats stats = in_files.table().stats();
    EXPECT_GT(stats.cold.rows, rows / 2);
    EXPECT_GT(stats.cold.hits, 0u);
    EXPECT_EQ(in_files.table().size(), in_memory.table().size());
  }
  for (size_t begin = 0; begin < rows / batch * batch; begin += batch) {
    const std::vector<uint64_t> keys(all.begin() + static_cast<int64_t>(begin),
                                     all.begin() + static_cast<int64_t>(begin + batch));
    ASSERT_TRUE(Rows(in_files, keys) == Rows(in_memory, keys)) << "from row " << begin;
  }
  TableLock lock({&in_files.table()}, TableLock::Mode::kExclusive);
  in_files.table().CheckInvariants();
}

}  // namespace
}  // namespace dynemb
