// The launches of kernels_pool.h, for tasks whose vectors come from a source (vector_sources.h).
// For all tasks together, one launch combines their bags, and two launches compute the gradients of
// weights.
//
// Contract. The arrays of tasks are in the device's memory, except their bags. parts[t] has the
// vectors of task t. No call waits. InvalidArgument, before any work is given, if all tasks
// together have more than 2^32 - 2 bags or ids.
#ifndef DYNEMB_DEVICE_POOL_BAGS_H_
#define DYNEMB_DEVICE_POOL_BAGS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/kernels_pool.h"
#include "cc/device/parts.h"
#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/combiner.h"
#include "cc/lookup/weight_gradient.h"
#include "cc/table/status.h"

namespace dynemb::device {

namespace internal_pool_bags {

// The positions at which the items of each task begin, and the end of the last. A task has
// (bags.*count)() items.
template <class Task>
Status NumberItems(const std::vector<const Task*>& tasks, size_t (Bags::*count)() const,
                   const char* what, std::vector<uint32_t>* begins) {
  size_t total = 0;
  for (const Task* task : tasks) {
    DYNEMB_RETURN_IF_ERROR(CheckTotal(total += (task->bags->*count)(), what));
    begins->push_back(static_cast<uint32_t>(total));
  }
  return Status();
}

template <class Source, class Session, class Task>
BagsPart<Source> BringBags(Session& session, const typename Source::Part& part, const Task& task) {
  return {part, ToDevice(session, *task.bags), task.weights, task.combiner};
}

}  // namespace internal_pool_bags

// BagCombiner for all tasks. `quads` is the number of quads of the widest vectors.
template <class Session, class Source>
Status CombineBags(Session& session, const Source& source,
                   const std::vector<typename Source::Part>& parts,
                   const std::vector<const BagTask*>& tasks, size_t quads) {
  namespace internal = internal_pool_bags;
  std::vector<uint32_t> begins{0};
  DYNEMB_RETURN_IF_ERROR(internal::NumberItems(tasks, &Bags::num_bags, "bags", &begins));
  if (begins.back() == 0) return session.status();
  std::vector<PoolPart<Source>> pool;
  std::vector<uint32_t> scaled{0};
  size_t ids = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Bags& bags = *tasks[t]->bags;
    PoolPart<Source> part{internal::BringBags<Source>(session, parts[t], *tasks[t]),
                          tasks[t]->pooled, tasks[t]->argmax};
    const bool differ = bags.splits() != nullptr || part.weights != nullptr || part.some_absent;
    if (HasScale(part.combiner) && differ) {
      part.scales = session.template Take<float>(bags.num_bags());
    } else {
      part.scale = BagScale(part.combiner, bags.hotness());
    }
    scaled.push_back(scaled.back() +
                     (part.scales != nullptr ? static_cast<uint32_t>(bags.num_bags()) : 0));
    pool.push_back(part);
    ids += bags.nnz();
  }
  DYNEMB_RETURN_IF_ERROR(session.status());
  const auto of_bags = ToDevice(session, pool, begins);
  if (scaled.back() != 0) {
    Parts<PoolPart<Source>> of_scaled = of_bags;
    of_scaled.begins = ToDevice(session, scaled.data(), scaled.size());
    session.ForEach(scaled.back(), ScalePooled<Source>{source, of_scaled});
  }
  // Runs of many ids would be few, and of different lengths.
  const uint32_t most_bags = ids < 2 * size_t{begins.back()} ? 16 : 8;
  const uint32_t length = RunLength(session, begins.back(), quads, most_bags);
  session.ForRows(NumRuns(begins.back(), length), quads,
                  PoolBags<Source>{source, of_bags, begins.back(), length});
  return session.status();
}

// WeightGradientOfBags for all tasks.
template <class Session, class Source>
Status DifferentiateWeights(Session& session, const Source& source,
                            const std::vector<typename Source::Part>& parts,
                            const std::vector<const BagWeightTask*>& tasks) {
  namespace internal = internal_pool_bags;
  std::vector<uint32_t> bag_begins{0}, id_begins{0};
  DYNEMB_RETURN_IF_ERROR(internal::NumberItems(tasks, &Bags::num_bags, "bags", &bag_begins));
  DYNEMB_RETURN_IF_ERROR(internal::NumberItems(tasks, &Bags::nnz, "ids", &id_begins));
  if (id_begins.back() == 0) return session.status();
  std::vector<WeightGradientPart<Source>> gradients;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const BagWeightTask& task = *tasks[t];
    auto* const terms =
        HasScale(task.combiner) ? session.template Take<BagTerms>(task.bags->num_bags()) : nullptr;
    gradients.push_back({internal::BringBags<Source>(session, parts[t], task), task.argmax,
                         task.pooled, task.upstream, terms, task.gradient});
  }
  const auto of_bags = ToDevice(session, gradients, bag_begins);
  auto of_ids = of_bags;
  of_ids.begins = ToDevice(session, id_begins.data(), id_begins.size());
  session.ForEach(bag_begins.back(), PrepareWeightGradients<Source>{source, of_bags});
  session.ForEach(id_begins.back(), BagWeightGradients<Source>{source, of_ids});
  return session.status();
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_POOL_BAGS_H_
