// The workload of the benchmarks: keys, tables filled with them, and the tables of a model.
#ifndef DYNEMB_BENCHMARKS_CC_WORKLOAD_H_
#define DYNEMB_BENCHMARKS_CC_WORKLOAD_H_

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cc/lookup/bags.h"
#include "cc/table/exec.h"
#include "cc/table/phase.h"
#include "cc/table/table.h"

namespace dynemb {

// Aborts the process if the call failed: there is nothing to measure then.
void Require(const Status& status);

enum class Keys { kUniform, kZipf, kEqual };

// n row numbers below `rows`: uniform, by Zipf's law with exponent 1.05, or all equal.
std::vector<uint64_t> DrawRows(Keys kind, size_t n, uint64_t rows, uint64_t seed);

// The key of a row number. Keys are distinct, and in no order.
inline uint64_t KeyOfRow(uint64_t row) { return row * 0x9E3779B97F4A7C15ull; }
std::vector<uint64_t> KeysOf(std::vector<uint64_t> rows);
// The keys of rows 0 to rows - 1, in a random order.
std::vector<uint64_t> ShuffledKeys(size_t rows);

std::unique_ptr<Table> MakeTable(int64_t dim, int64_t init_capacity, ColumnInit init = {});

// Tables of `rows` rows each, with the state of `optimizer`, and ids to look up in them. Vectors
// are drawn from a normal distribution.
class Model {
 public:
  struct Shape {
    size_t tables = 26;
    uint64_t rows = 1'000'000;
    int64_t dim = 16;
    size_t batch = 8192;
    size_t hotness = 1;
    Keys keys = Keys::kUniform;
    bool operator==(const Shape& o) const {
      return tables == o.tables && rows == o.rows && dim == o.dim && batch == o.batch &&
             hotness == o.hotness && keys == o.keys;
    }
  };
  static constexpr size_t kSteps = 4;  // distinct batches, which a benchmark cycles through

  Model(const Shape& shape, OptimizerKind optimizer);
  // The model of this shape. Keeps only the last model, because memory permits one at a time.
  static Model& Of(const Shape& shape, OptimizerKind optimizer);

  const Shape& shape() const { return shape_; }
  size_t ids() const { return shape_.tables * nnz(); }
  size_t nnz() const { return shape_.batch * shape_.hotness; }
  Table* table(size_t t) { return tables_[t].get(); }
  const uint64_t* keys(size_t t, size_t step) const { return keys_[step % kSteps][t].data(); }
  // Draws the ids of a step again. Of a million ids, `new_ids` have no row, and were never drawn.
  void DrawAgain(size_t step, uint64_t new_ids);
  // Increases with every call.
  Tick NextTick() { return ++tick_; }

 private:
  Shape shape_;
  OptimizerKind optimizer_;
  Tick tick_ = 0;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::vector<std::vector<uint64_t>>> keys_;  // [step][table][nnz]
  uint64_t draws_ = 0;
  uint64_t next_row_;  // the row number of the next new id
};

// Adds up the time of the library's phases during its lifetime, in seconds: the time of each phase
// without the time of the phases inside it. For batches that run one at a time.
class PhaseTimes final : public PhaseListener {
 public:
  PhaseTimes() { Phase::Listen(this); }
  ~PhaseTimes() override { Phase::Listen(nullptr); }
  int64_t Begin(const char* name) override;
  void End(int64_t id) override;
  // Sets the time of each phase per iteration as a counter of the benchmark.
  void Report(benchmark::State* state) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Open {
    const char* name;
    Clock::time_point since;
    Clock::duration inside{0};
  };
  std::vector<Open> open_;
  std::map<std::string, double> seconds_;
};

}  // namespace dynemb

#endif  // DYNEMB_BENCHMARKS_CC_WORKLOAD_H_
