// The cost of a model's embeddings in a step, without TensorFlow: pooled lookup, backward,
// optimizer.
//
//   Pool, Apply, Step / keys, hotness, dim, tables, threads     ns per id looked up
//   NewIds / ids of a million that are new, hotness             ns per id looked up
//
// 26 tables of 1 million rows, batch 8,192, unless noted otherwise. Apply is an optimizer step on
// the distinct keys of a batch. Step is a pooled lookup and ApplyPooled, with Adagrad; counters
// give the seconds per phase.
#include <benchmark/benchmark.h>

#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/lookup/apply.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/pool.h"

namespace dynemb {
namespace {

// A step of a model in three parts, with the arrays that TensorFlow would pass to the operators.
class Trainer {
 public:
  Trainer(Model* model, OptimizerKind optimizer, Combiner combiner)
      : model_(*model), optimizer_(optimizer), combiner_(combiner) {
    const auto& shape = model_.shape();
    const size_t tables = shape.tables, nnz = model_.nnz();
    const size_t floats = static_cast<size_t>(shape.dim);
    bags_.resize(tables);
    for (size_t t = 0; t < tables; ++t) {
      pooled_.emplace_back(shape.batch * floats);
      upstream_.emplace_back(shape.batch * floats, 1e-3f);
      rows_.emplace_back(nnz);
      unique_.emplace_back(nnz);
      unique_rows_.emplace_back(nnz);
      sums_.emplace_back(nnz * floats);
      const auto hotness = static_cast<int64_t>(shape.hotness);
      Require(bags_[t].InitUniform(hotness, static_cast<int64_t>(nnz),
                                   static_cast<int64_t>(shape.batch)));
    }
  }

  void Forward(Exec& exec, size_t step) {
    std::vector<PoolTask> tasks(bags_.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      tasks[t].table = model_.table(t);
      tasks[t].keys = model_.keys(t, step);
      tasks[t].bags = &bags_[t];
      tasks[t].combiner = combiner_;
      tasks[t].pooled = pooled_[t].data();
      tasks[t].rows = rows_[t].data();
    }
    Require(Pool(exec, tasks, model_.NextTick(), true));
  }
  void Backpropagate(Exec& exec, size_t step) {
    std::vector<BackwardTask> tasks(bags_.size());
    std::vector<BackwardOutput> outputs(bags_.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      tasks[t] = Gradient(t, step);
      outputs[t] = {unique_[t].data(), unique_rows_[t].data(), sums_[t].data()};
    }
    Require(backward_.Prepare(exec, tasks.data(), tasks.size()));
    backward_.Write(exec, outputs.data());
  }
  void Update(Exec& exec) {
    std::vector<ApplyTask> tasks(bags_.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      tasks[t] = {model_.table(t), unique_[t].data(), unique_rows_[t].data(), sums_[t].data(),
                  backward_.num_unique(t)};
    }
    const StateSpec& state = tasks[0].table->state_spec();
    Require(Apply(exec, tasks, {optimizer_, {}, {}, 1, state.optimizer, state.inits},
                  model_.NextTick()));
  }
  // Backpropagate and Update in one call, as a model does it.
  void BackpropagateAndUpdate(Exec& exec, size_t step) {
    std::vector<ApplyPooledTask> tasks(bags_.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      static_cast<BackwardTask&>(tasks[t]) = Gradient(t, step);
      tasks[t].table = model_.table(t);
    }
    const StateSpec& state = tasks[0].table->state_spec();
    Require(ApplyPooled(exec, tasks, {optimizer_, {}, {}, 1, state.optimizer, state.inits},
                        model_.NextTick()));
  }
  size_t num_unique() const {
    size_t sum = 0;
    for (size_t t = 0; t < bags_.size(); ++t) sum += backward_.num_unique(t);
    return sum;
  }

 private:
  BackwardTask Gradient(size_t t, size_t step) {
    BackwardTask task;
    task.keys = model_.keys(t, step);
    task.rows = rows_[t].data();
    task.bags = &bags_[t];
    task.combiner = combiner_;
    task.upstream = upstream_[t].data();
    task.dim = model_.shape().dim;
    return task;
  }

  Model& model_;
  const OptimizerKind optimizer_;
  const Combiner combiner_;
  Backward backward_;
  std::vector<Bags> bags_;
  std::vector<std::vector<float>> pooled_, upstream_, sums_;
  std::vector<std::vector<uint64_t>> unique_;
  std::vector<std::vector<RowId>> rows_, unique_rows_;
};

struct Case {
  explicit Case(benchmark::State& state) {
    shape.keys = static_cast<Keys>(state.range(0));
    shape.hotness = static_cast<size_t>(state.range(1));
    shape.dim = state.range(2);
    shape.tables = static_cast<size_t>(state.range(3));
    shape.rows = 16 * 26'000'000 / static_cast<uint64_t>(shape.dim) / shape.tables;
    shape.batch = 8192 * 26 / shape.tables;
    threads = static_cast<size_t>(state.range(4));
  }
  Model::Shape shape;
  size_t threads;
};

void Report(benchmark::State& state, const Model& model) {
  state.counters["ns_per_id"] = benchmark::Counter(
      static_cast<double>(model.ids()) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void RunPool(benchmark::State& state, Combiner combiner) {
  const Case c(state);
  Model& model = Model::Of(c.shape, OptimizerKind::kAdagrad);
  Trainer trainer(&model, OptimizerKind::kAdagrad, combiner);
  ThreadsExec exec(c.threads);
  size_t step = 0;
  for (auto _ : state) trainer.Forward(exec, step++);
  Report(state, model);
}

void RunApply(benchmark::State& state, OptimizerKind optimizer) {
  const Case c(state);
  Model& model = Model::Of(c.shape, optimizer);
  Trainer trainer(&model, optimizer, Combiner::kSum);
  ThreadsExec exec(c.threads);
  size_t step = 0;
  for (auto _ : state) {
    state.PauseTiming();
    trainer.Forward(exec, step);
    trainer.Backpropagate(exec, step++);
    state.ResumeTiming();
    trainer.Update(exec);
  }
  Report(state, model);
  state.counters["unique"] = static_cast<double>(trainer.num_unique());
}

void Step(benchmark::State& state) {
  const Case c(state);
  Model& model = Model::Of(c.shape, OptimizerKind::kAdagrad);
  Trainer trainer(&model, OptimizerKind::kAdagrad, Combiner::kSum);
  ThreadsExec exec(c.threads);
  size_t step = 0;
  PhaseTimes phases;
  for (auto _ : state) {
    trainer.Forward(exec, step);
    trainer.BackpropagateAndUpdate(exec, step++);
  }
  Report(state, model);
  phases.Report(&state);
}

// Pool of batches that have new ids.
void NewIds(benchmark::State& state) {
  Model::Shape shape;
  shape.hotness = static_cast<size_t>(state.range(1));
  Model& model = Model::Of(shape, OptimizerKind::kAdagrad);
  Trainer trainer(&model, OptimizerKind::kAdagrad, Combiner::kSum);
  ThreadsExec exec(2);
  PhaseTimes phases;
  size_t step = 0;
  for (auto _ : state) {
    state.PauseTiming();
    model.DrawAgain(step, static_cast<uint64_t>(state.range(0)));
    state.ResumeTiming();
    trainer.Forward(exec, step++);
  }
  Report(state, model);
  phases.Report(&state);
}

constexpr auto kUniform = static_cast<int64_t>(Keys::kUniform);
constexpr auto kZipf = static_cast<int64_t>(Keys::kZipf);
constexpr auto kEqual = static_cast<int64_t>(Keys::kEqual);

// All cases of a model are consecutive, because filling a model takes longer than its cases.
void Args(benchmark::internal::Benchmark* b) {
  b->ArgNames({"keys", "hotness", "dim", "tables", "threads"})
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
  for (int64_t keys : {kUniform, kZipf}) {
    for (int hotness : {1, 10}) {
      for (int threads : {1, 2}) b->Args({keys, hotness, 16, 26, threads});
    }
  }
}
BENCHMARK_CAPTURE(RunPool, sum, Combiner::kSum)->Apply(Args);
// Everything is in the cache: the cost of the processor alone.
BENCHMARK_CAPTURE(RunPool, cached, Combiner::kSum)
    ->ArgNames({"keys", "hotness", "dim", "tables", "threads"})
    ->ArgsProduct({{kEqual}, {10}, {16, 64, 128}, {26}, {1}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(RunPool, mean, Combiner::kMean)->Args({kUniform, 10, 16, 26, 2})->UseRealTime();
BENCHMARK(Step)
    ->Apply(Args)
    ->Args({kUniform, 1, 16, 1, 2})
    ->Args({kUniform, 10, 16, 1, 2})
    ->Args({kUniform, 1, 16, 200, 2});
BENCHMARK(NewIds)
    ->ArgNames({"new", "hotness"})
    ->ArgsProduct({{0, 100, 10'000, 100'000}, {1, 10}})
    ->Iterations(24)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(RunApply, adagrad, OptimizerKind::kAdagrad)->Apply(Args);
BENCHMARK_CAPTURE(RunApply, adam, OptimizerKind::kAdam)->Apply(Args);

}  // namespace
}  // namespace dynemb
