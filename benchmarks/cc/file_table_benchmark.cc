// Tables of which most rows are in files (cc/file/file_rows.h). Rows of dim 16 with the state of
// Adagrad; batches of 65,536 ids; two threads. The files are below the folder that the environment
// variable DYNEMB_BENCHMARK_FOLDER names, or the current one. A million rows unless
// DYNEMB_BENCHMARK_ROWS says how many.
//
//   InMemory   a table whose memory holds all rows, with ids that all have rows: a step (lookup,
//              then an update of the distinct rows) as a multiple of the step of a table without
//              files; medians of rounds in which both take turns.
//   Zipf       memory for the share of the rows that the argument gives, in percent; ids follow
//              Zipf's law with exponent 1.05. Counters: ids a second, the share of the ids that
//              were hits in memory, bytes written per byte of rows that left memory, bytes of files
//              per byte of live rows, bytes of index per row in files.
//   ColdRows   distinct rows none of which is in memory, in random order, in batches of the size
//              that the argument gives: rows read a second, beside reads of single blocks of the
//              same files with the same reader (blocks a second).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/file/file_rows.h"
#include "cc/table/optimizer.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;
constexpr int64_t kDim = 16;

size_t Rows() {
  const char* rows = std::getenv("DYNEMB_BENCHMARK_ROWS");
  return rows == nullptr ? 1'000'000 : std::stoul(rows);
}

std::string Folder() {
  const char* folder = std::getenv("DYNEMB_BENCHMARK_FOLDER");
  return (folder == nullptr ? std::string(".") : std::string(folder)) + "/file_table_benchmark";
}

// One trainer's view of a table: lookups, and updates of distinct rows.
class Trained {
 public:
  // hot_rows < 0: without files.
  Trained(int64_t hot_rows, Exec* exec) : exec_(exec) {
    TableOptions options;
    options.name = "rows";
    options.dim = kDim;
    const RowLayout row(8, DType::kFloat32, kDim, kDim);
    if (hot_rows < 0) {
      Require(Table::Create(options, &table_));
    } else {
      FileOptions files;
      files.folder = Folder();
      Require(
          CreateFileTable(options, files, static_cast<uint64_t>(hot_rows) * row.stride, &table_));
    }
    Require(table_->AttachState(*exec, {"adagrad", {kDim}, {0.1f}}));
    Hyper hyper;
    hyper.learning_rate = 0.01f;
    optimizer_ =
        std::make_unique<RowOptimizer>(OptimizerKind::kAdagrad, OptimizerFlags{}, hyper, kDim);
  }

  void Step(const std::vector<uint64_t>& keys) {
    const size_t n = keys.size();
    vectors_.resize(n * kDim);
    rows_.resize(n);
    {
      TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
      Require(
          table_->LookupOrInsert(*exec_, {keys.data(), n}, ++tick_, vectors_.data(), rows_.data()));
    }
    std::vector<uint64_t> distinct = keys;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    gradients_.assign(distinct.size() * kDim, 0.5f);
    std::vector<RowId> found(distinct.size());
    const KeySpan span(distinct.data(), distinct.size());
    TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
    table_->BeginBatch(*exec_, ++tick_, distinct.size());
    table_->Find(*exec_, span, tick_, found.data());
    exec_->ParallelFor(distinct.size(), 1024, [&](size_t begin, size_t end) {
      table_->ApplyRange(*exec_, *optimizer_, span, found.data(), gradients_.data(), begin, end,
                         tick_, tick_);
    });
  }

  void Insert(size_t rows) {
    std::vector<uint64_t> keys;
    for (size_t first = 0; first < rows; first += kBatch / 4) {
      keys.clear();
      for (size_t i = first; i < std::min(rows, first + kBatch / 4); ++i) {
        keys.push_back(KeyOfRow(i));
      }
      vectors_.resize(keys.size() * kDim);
      rows_.resize(keys.size());
      TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
      Require(table_->LookupOrInsert(*exec_, {keys.data(), keys.size()}, ++tick_, vectors_.data(),
                                     rows_.data()));
    }
  }

  Table& table() { return *table_; }
  Tick NextTick() { return ++tick_; }

 private:
  Exec* exec_;
  std::unique_ptr<Table> table_;
  std::unique_ptr<RowOptimizer> optimizer_;
  Tick tick_ = 0;
  std::vector<float> vectors_, gradients_;
  std::vector<RowId> rows_;
};

template <class Fn>
double SecondsOf(const Fn& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size()) / 2,
                   values.end());
  return values[values.size() / 2];
}

void InMemory(benchmark::State& state) {
  const size_t rows = Rows();
  ThreadsExec exec(2);
  Trained without(-1, &exec), with(static_cast<int64_t>(2 * rows), &exec);
  without.Insert(rows);
  with.Insert(rows);
  const auto kind = state.range(0) == 0 ? Keys::kUniform : Keys::kZipf;
  std::vector<double> ratios;
  for (auto _ : state) {
    for (size_t round = 0; round < 21; ++round) {
      const std::vector<uint64_t> keys = KeysOf(DrawRows(kind, kBatch, rows, round + 1));
      const bool swapped = round % 2 != 0;
      const double first = SecondsOf([&] { (swapped ? with : without).Step(keys); });
      const double second = SecondsOf([&] { (swapped ? without : with).Step(keys); });
      ratios.push_back(swapped ? first / second : second / first);
    }
  }
  state.counters["with/without"] = Median(ratios);
}
BENCHMARK(InMemory)->ArgName("zipf")->Arg(0)->Arg(1)->Iterations(1)->Unit(benchmark::kSecond);

void Zipf(benchmark::State& state) {
  const size_t rows = Rows();
  ThreadsExec exec(2);
  Trained table(static_cast<int64_t>(rows) * state.range(0) / 100, &exec);
  table.Insert(rows);
  constexpr size_t kWarm = 60, kSteps = 100;
  for (size_t step = 0; step < kWarm; ++step) {
    table.Step(KeysOf(DrawRows(Keys::kZipf, kBatch, rows, step)));
  }
  const TableStats before = table.table().stats();
  double seconds = 0;
  for (auto _ : state) {
    for (size_t step = 0; step < kSteps; ++step) {
      const std::vector<uint64_t> keys = KeysOf(DrawRows(Keys::kZipf, kBatch, rows, kWarm + step));
      seconds += SecondsOf([&] { table.Step(keys); });
    }
  }
  const TableStats after = table.table().stats();
  const auto ids = static_cast<double>(kSteps * kBatch);
  const auto added = static_cast<double>(after.cold.rows_added - before.cold.rows_added);
  const RowFormat format(2 * kDim * sizeof(float));
  state.counters["ids/s"] = ids / seconds;
  state.counters["memory_hits"] = 1 - static_cast<double>(after.cold.hits - before.cold.hits) / ids;
  state.counters["write_amplification"] =
      static_cast<double>(after.cold.bytes_written - before.cold.bytes_written) /
      (added * static_cast<double>(format.row_bytes));
  state.counters["space"] =
      static_cast<double>(after.cold.file_bytes) / static_cast<double>(after.cold.row_bytes);
  state.counters["index_bytes/row"] =
      static_cast<double>(after.cold.index_bytes) / static_cast<double>(after.cold.rows);
}
BENCHMARK(Zipf)->ArgName("percent")->Arg(10)->Arg(50)->Iterations(1)->Unit(benchmark::kSecond);

void ColdRows(benchmark::State& state) {
  const size_t rows = Rows();
  const auto at_once = static_cast<size_t>(state.range(0));
  const size_t batches = 102400 / at_once;
  ThreadsExec exec(2);
  Trained table(static_cast<int64_t>(rows) / 20, &exec);
  table.Insert(rows);
  // Rows from the beginning left memory first.
  std::vector<uint64_t> order(std::min(rows / 2, at_once * batches));
  std::mt19937_64 random(1);
  for (uint64_t& row : order) row = random() % (rows / 2);
  std::sort(order.begin(), order.end());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  std::shuffle(order.begin(), order.end(), random);
  std::vector<float> vectors(at_once * kDim), row_state(at_once * kDim);
  const std::unique_ptr<bool[]> found(new bool[at_once]);
  double seconds = 0;
  size_t read = 0;
  const TableStats before = table.table().stats();
  for (auto _ : state) {
    for (size_t first = 0; first + at_once <= order.size(); first += at_once) {
      std::vector<uint64_t> keys;
      for (size_t i = 0; i < at_once; ++i) keys.push_back(KeyOfRow(order[first + i]));
      seconds += SecondsOf([&] {
        TableLock lock({&table.table()}, TableLock::Mode::kShared);
        table.table().ReadRows(exec, {keys.data(), at_once}, vectors.data(), row_state.data(),
                               found.get());
      });
      read += static_cast<size_t>(std::count(found.get(), found.get() + at_once, true));
    }
  }
  Require(table.table().Error());
  const TableStats after = table.table().stats();

  // Single blocks of the same files.
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(Folder())) {
    if (entry.path().extension() == ".rows" && entry.file_size() >= size_t{1} << 20) {
      paths.push_back(entry.path());
    }
  }
  std::unique_ptr<BlockReader> reader;
  Require(BlockReader::Create({}, &reader));
  std::vector<int> fds(paths.size());
  std::vector<uint64_t> blocks(paths.size());
  bool direct = false;
  for (size_t f = 0; f < paths.size(); ++f) {
    Require(OpenForReading(FileSystem::Posix(), paths[f], &direct, &fds[f]));
    blocks[f] = static_cast<uint64_t>(FileSystem::Posix().Size(fds[f])) / kBlockBytes;
  }
  AlignedBuffer buffer(at_once * kBlockBytes);
  std::vector<BlockRead> reads(at_once);
  double block_seconds = 0;
  for (size_t batch = 0; batch < batches; ++batch) {
    for (size_t i = 0; i < at_once; ++i) {
      const size_t f = random() % fds.size();
      reads[i] = {fds[f], random() % blocks[f] * kBlockBytes, kBlockBytes,
                  buffer.data() + i * kBlockBytes, 0};
    }
    block_seconds +=
        SecondsOf([&] { reader->Read(reads.data(), at_once, [](const BlockRead&) {}); });
  }
  for (const int fd : fds) FileSystem::Posix().Close(fd);
  state.counters["rows/s"] = static_cast<double>(read) / seconds;
  state.counters["blocks/s"] = at_once * batches / block_seconds;
  state.counters["rows/blocks"] =
      static_cast<double>(read) / seconds / (at_once * batches / block_seconds);
  state.counters["reads/row"] = static_cast<double>(after.cold.reads - before.cold.reads) /
                                static_cast<double>(std::max<size_t>(1, read));
  state.counters["direct"] = direct;
}
BENCHMARK(ColdRows)->Arg(1024)->Arg(8192)->Iterations(1)->Unit(benchmark::kSecond);

}  // namespace
}  // namespace dynemb
