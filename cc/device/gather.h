// GatherPool and GatherWeightGradient (cc/lookup/gather.h) on a device: bags of vectors that lie in
// arrays, by index.
//
// Contract. What tasks point to is in the device's memory, but for their bags; `rows` holds
// addresses of the device. Vectors, and what is written, need no more alignment than their elements
// have. Nothing waits: the results are there when the stream gets there. So an index is not refused
// that is n or more: its id counts with a vector of zeros, as with TensorFlow's gather on a GPU.
// All else has the host's bits, but for which NaN a NaN is. InvalidArgument, before any work is
// given out: all tasks have more than 2^32 - 2 bags, or ids, together.
#ifndef DYNEMB_DEVICE_GATHER_H_
#define DYNEMB_DEVICE_GATHER_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cc/device/pool_bags.h"
#include "cc/device/vector_sources.h"
#include "cc/lookup/gather.h"
#include "cc/table/phase.h"
#include "cc/table/status.h"

namespace dynemb::device {

namespace internal_gather {

template <class Task>
std::vector<IndexedVectors::Part> VectorsOf(const std::vector<Task>& tasks) {
  std::vector<IndexedVectors::Part> parts;
  for (const Task& task : tasks) {
    parts.push_back({task.index, task.n, task.vectors, task.rows, task.dtype, task.dim});
  }
  return parts;
}

}  // namespace internal_gather

// One launch.
template <class Session>
Status GatherPool(Session& session, const std::vector<GatherTask>& tasks) {
  Phase phase("pool received rows");
  std::vector<const BagTask*> bags;
  size_t quads = 0;  // of the widest vectors
  for (const GatherTask& task : tasks) {
    bags.push_back(&task);
    quads = std::max(quads, QuadsOf(task.dim));
  }
  return CombineBags(session, IndexedVectors{}, internal_gather::VectorsOf(tasks), bags, quads);
}

// Two launches.
template <class Session>
Status GatherWeightGradient(Session& session, const std::vector<GatherWeightTask>& tasks) {
  Phase phase("weight gradients");
  std::vector<const BagWeightTask*> bags;
  for (const GatherWeightTask& task : tasks) bags.push_back(&task);
  return DifferentiateWeights(session, IndexedVectors{}, internal_gather::VectorsOf(tasks), bags);
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_GATHER_H_
