// The gradient of the loss with respect to the weights of ids, from the derivatives of the formulas
// in combiner.h. It is 0 if the divisor of the bag is 0.
#ifndef DYNEMB_LOOKUP_WEIGHT_GRADIENT_H_
#define DYNEMB_LOOKUP_WEIGHT_GRADIENT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/tasks.h"
#include "cc/table/exec.h"

namespace dynemb {

struct BagWeightTask {
  const Bags* bags = nullptr;
  const float* weights = nullptr;  // [nnz]
  Combiner combiner = Combiner::kSum;
  const int32_t* argmax = nullptr;
  const void* pooled = nullptr;    // [num_bags, dim] of the vectors' dtype, as in BagTask
  const void* upstream = nullptr;  // likewise: the gradient of the loss by `pooled`
  float* gradient = nullptr;       // out [nnz]
};

namespace internal_weight_gradient {
inline float Dot(const float* a, const float* b, int64_t dim) {
  float sum = 0.0f;
  for (int64_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}
}  // namespace internal_weight_gradient

// vector_at(position) is the address of an id's vector. `rows`: null, or the row ids; the weights
// of ids with kSkippedRow have no effect.
template <class VectorAt>
void WeightGradientOfBags(const BagWeightTask& task, DType dtype, int64_t dim, size_t begin,
                          size_t end, const VectorAt& vector_at, const RowId* rows = nullptr) {
  const CountedRows counted{rows};
  using internal_weight_gradient::Dot;
  const Bags& bags = *task.bags;
  const size_t vector_bytes = static_cast<size_t>(dim) * SizeOf(dtype);
  VectorBuffer upstream_buffer(dim), vector_buffer(dim);
  float* const upstream = upstream_buffer.get();
  float* const vector = vector_buffer.get();
  for (size_t bag = begin; bag < end; ++bag) {
    LoadVector(dtype, static_cast<const char*>(task.upstream) + bag * vector_bytes, dim, upstream);
    const float scale = BagScale(task.combiner, bags, task.weights, bag, counted);
    float pooled_dot = 0.0f;
    if (HasScale(task.combiner)) {
      LoadVector(dtype, static_cast<const char*>(task.pooled) + bag * vector_bytes, dim, vector);
      pooled_dot = Dot(upstream, vector, dim);
    }
    for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      const size_t position = bags.position(i);
      if (!counted(position)) {
        task.gradient[position] = 0.0f;
        continue;
      }
      LoadVector(dtype, vector_at(position), dim, vector);
      float dot = 0.0f;
      if (task.combiner == Combiner::kMax) {
        const int32_t* argmax = task.argmax + bag * static_cast<size_t>(dim);
        for (int64_t c = 0; c < dim; ++c) {
          if (argmax[c] == static_cast<int32_t>(position)) dot += upstream[c] * vector[c];
        }
      } else {
        dot = Dot(upstream, vector, dim);
      }
      task.gradient[position] =
          WeightDerivative(task.combiner, dot, pooled_dot, task.weights[position], scale);
    }
  }
}

// Calls fn(task, begin, end) on ranges that cover all bags of all tasks.
template <class Task, class Fn>
void WeightGradients(Exec& exec, const std::vector<Task>& tasks, const Fn& fn) {
  std::vector<size_t> sizes;
  std::vector<size_t> grains;
  for (const Task& task : tasks) {
    sizes.push_back(task.bags->num_bags());
    grains.push_back(BagGrain(*task.bags));
  }
  ParallelForTasks(exec, sizes, grains,
                   [&](size_t t, size_t begin, size_t end) { fn(tasks[t], begin, end); });
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_WEIGHT_GRADIENT_H_
