// GatherPool and GatherWeightGradient (cc/lookup/gather.h) on a device: bags of vectors in arrays,
// selected by index.
//
// Contract:
//
// - The arrays of tasks are in the device's memory, except their bags. `rows` has device addresses.
// - Vectors and outputs need only the alignment of their elements.
// - No call waits; the work is queued on the stream. An index of n or more is therefore not an
//   error. Its id counts as a vector of zeros, as in TensorFlow's gather on a GPU.
// - All other results have the same bits as on the host, except for the bits of a NaN.
// - InvalidArgument, before any work is given, if all tasks together have more than 2^32 - 2 bags
//   or ids.
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
