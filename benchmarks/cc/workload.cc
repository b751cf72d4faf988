#include "benchmarks/cc/workload.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace dynemb {

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::abort();
}

std::vector<uint64_t> DrawRows(Keys kind, size_t n, uint64_t rows, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> drawn(n, 7 % rows);
  if (kind == Keys::kUniform) {
    for (uint64_t& row : drawn) row = random() % rows;
  } else if (kind == Keys::kZipf) {
    // The inverse of the distribution's continuous form.
    const double s = 1.05, top = std::pow(static_cast<double>(rows), 1 - s);
    std::uniform_real_distribution<double> u(0, 1);
    for (uint64_t& row : drawn) {
      const double rank = std::pow(1 + u(random) * (top - 1), 1 / (1 - s));
      row = std::min(static_cast<uint64_t>(rank), rows - 1);
    }
  }
  return drawn;
}

std::vector<uint64_t> KeysOf(std::vector<uint64_t> rows) {
  for (uint64_t& row : rows) row = KeyOfRow(row);
  return rows;
}

std::vector<uint64_t> ShuffledKeys(size_t rows) {
  std::vector<uint64_t> keys(rows);
  for (size_t row = 0; row < rows; ++row) keys[row] = KeyOfRow(row);
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(1));
  return keys;
}

std::unique_ptr<Table> MakeTable(int64_t dim, int64_t init_capacity, ColumnInit init) {
  TableOptions options;
  options.name = "benchmark";
  options.dim = dim;
  options.init_capacity = init_capacity;
  options.initializer = {init};
  std::unique_ptr<Table> table;
  Require(Table::Create(options, &table));
  return table;
}

Model::Model(const Shape& shape, OptimizerKind optimizer)
    : shape_(shape), optimizer_(optimizer), next_row_(shape.rows) {
  constexpr size_t kFill = 65536;
  ThreadsExec exec(2);
  StateSpec state{"benchmark", StateWidths(optimizer, OptimizerFlags(), shape.dim), {}};
  state.inits.assign(state.widths.size(), 0.1f);
  // The order of rows is independent of their frequency.
  std::vector<uint64_t> all(shape.rows);
  for (uint64_t row = 0; row < shape.rows; ++row) all[row] = KeyOfRow(row);
  std::shuffle(all.begin(), all.end(), std::mt19937_64(1));
  std::vector<RowId> rows(kFill);
  for (size_t t = 0; t < shape.tables; ++t) {
    tables_.push_back(
        MakeTable(shape.dim, static_cast<int64_t>(shape.rows), {InitKind::kNormal, 0.0f, 0.01f}));
    Require(tables_[t]->AttachState(exec, state));
    for (size_t first = 0; first < all.size(); first += kFill) {
      const size_t n = std::min(kFill, all.size() - first);
      Require(tables_[t]->FindOrInsert(exec, {&all[first], n}, NextTick(), rows.data()));
    }
  }
  for (size_t step = 0; step < kSteps; ++step) {
    keys_.emplace_back();
    for (size_t t = 0; t < shape.tables; ++t) {
      const uint64_t seed = 1 + step * shape.tables + t;
      keys_[step].push_back(KeysOf(DrawRows(shape.keys, nnz(), shape.rows, seed)));
    }
  }
}

void Model::DrawAgain(size_t step, uint64_t new_ids) {
  for (size_t t = 0; t < shape_.tables; ++t) {
    const uint64_t seed = 1'000'000 + draws_++;
    std::vector<uint64_t> rows = DrawRows(shape_.keys, nnz(), shape_.rows, seed);
    std::mt19937_64 random(seed);
    for (uint64_t& row : rows) {
      if (random() % 1'000'000 < new_ids) row = next_row_++;
    }
    keys_[step % kSteps][t] = KeysOf(std::move(rows));
  }
}

int64_t PhaseTimes::Begin(const char* name) {
  open_.push_back({name, Clock::now()});
  return 0;
}

void PhaseTimes::End(int64_t) {
  const Open ended = open_.back();
  open_.pop_back();
  const Clock::duration took = Clock::now() - ended.since;
  if (!open_.empty()) open_.back().inside += took;
  seconds_[ended.name] += std::chrono::duration<double>(took - ended.inside).count();
}

void PhaseTimes::Report(benchmark::State* state) const {
  for (const auto& [name, seconds] : seconds_) {
    state->counters[name] = benchmark::Counter(seconds, benchmark::Counter::kAvgIterations);
  }
}

Model& Model::Of(const Shape& shape, OptimizerKind optimizer) {
  static std::unique_ptr<Model> model;
  if (model == nullptr || !(model->shape_ == shape) || model->optimizer_ != optimizer) {
    model.reset();
    model = std::make_unique<Model>(shape, optimizer);
  }
  return *model;
}

}  // namespace dynemb
