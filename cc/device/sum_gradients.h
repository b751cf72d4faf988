// SumGradients: Backward (cc/lookup/backward.h) on a device. It sums the gradients of pooled
// vectors per unique key, for many tables in one call.
//
// The sum of a key with at most 256 ids has the same bits as on the host, except for the bits of a
// NaN. A key of more ids would keep one team busy after all others have finished. Its ids, in their
// order, are therefore summed in chunks of 256, and then the sums of the chunks are added from the
// first to the last. The sums depend neither on the division of the work nor on the device.
//
// The number of launches does not depend on the number of tasks. The call waits once, for the
// numbers of unique keys. The sums are queued on the stream.
#ifndef DYNEMB_DEVICE_SUM_GRADIENTS_H_
#define DYNEMB_DEVICE_SUM_GRADIENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/kernels.h"
#include "cc/device/kernels_gradient.h"
#include "cc/device/parts.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/combiner.h"
#include "cc/table/phase.h"
#include "cc/table/status.h"

namespace dynemb::device {

namespace internal_sum_gradients {

// An upper bound of the number of chunks of a task. A key that is summed in chunks has at least 256
// ids besides its first, and at most two chunks per 256 of these.
inline uint32_t MostChunks(size_t ids, size_t unique) {
  const size_t others = ids - unique;
  return others < kChunkIds ? 0 : static_cast<uint32_t>(others / (kChunkIds / 2));
}

// The ids of all tasks, in arrays by position.
struct Ids {
  size_t n = 0;
  Parts<GradientPart> parts;
  uint32_t* uniques = nullptr;    // the number of the id's key
  uint32_t* positions = nullptr;  // the id's position
  uint32_t* bag_of = nullptr;     // the id's bag
};

// Takes the arrays of `ids`, and copies the data for terms to the device. `begins` are the first
// positions of the tasks.
template <class Session>
Status BringIds(Session& session, const std::vector<BackwardTask>& tasks,
                const std::vector<uint32_t>& begins, Ids* ids) {
  // Whether each bag of a task has its own scale, as in Upstream::Prepare. The host does not know
  // whether there are rows that say that an id is absent from its bag.
  const auto has_scales = [](const BackwardTask& task) {
    return task.bags->nnz() != 0 && HasScale(task.combiner) &&
           (task.bags->splits() != nullptr || task.weights != nullptr || task.rows != nullptr);
  };
  std::vector<uint32_t> bag_begins{0};
  size_t bags = 0;
  for (const BackwardTask& task : tasks) {
    if (has_scales(task)) bags += task.bags->num_bags();
    DYNEMB_RETURN_IF_ERROR(CheckTotal(bags, "bags"));
    bag_begins.push_back(static_cast<uint32_t>(bags));
  }
  ids->n = begins.back();
  ids->uniques = session.template Take<uint32_t>(ids->n);
  ids->positions = session.template Take<uint32_t>(ids->n);
  ids->bag_of = session.template Take<uint32_t>(ids->n);
  auto* const scales = session.template Take<float>(bags);
  DYNEMB_RETURN_IF_ERROR(session.status());
  std::vector<GradientPart> parts(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    if (tasks[t].bags->nnz() == 0) continue;
    parts[t].task = tasks[t];
    parts[t].bags = ToDevice(session, *tasks[t].bags);
    if (has_scales(tasks[t])) {
      parts[t].scales = scales + bag_begins[t];
    } else {
      parts[t].scale = BagScale(tasks[t].combiner, tasks[t].bags->hotness());
    }
  }
  ids->parts = ToDevice(session, parts, begins);

  const typename Session::Scratch scratch(session);
  Parts<GradientPart> scaled = ids->parts;
  scaled.begins = ToDevice(session, bag_begins.data(), bag_begins.size());
  session.ForEach(bags, ScaleBags{scaled});
  return session.status();
}

// Fills the arrays of `ids`. key_begins[t] = the number of keys before those of task t. Waits.
template <class Session>
Status NumberKeys(Session& session, const Ids& ids, std::vector<uint32_t>* key_begins) {
  const size_t n = ids.n, num_begins = key_begins->size();
  const typename Session::Scratch scratch(session);
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  Elect</*kLast=*/false>(session, TaskKeys{ids.parts}, /*rows=*/nullptr, n, &places, &of);
  auto* const sums = session.template Take<uint32_t>(n + 1);
  auto* const begins = session.template Take<uint32_t>(num_begins);
  auto* const read_back = session.template Pinned<uint32_t>(num_begins);
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(n + 1, FlagFirst{/*rows=*/nullptr, places, of, n, sums});
  session.ExclusiveSum(sums, n + 1);
  session.ForEach(n, ListIds<ElectedNumbers>{
                         ids.parts, {places, of, sums}, ids.uniques, ids.positions, ids.bag_of});
  session.ForEach(num_begins, ReadBegins{ids.parts.begins, sums, begins});
  session.Copy(read_back, begins, num_begins * sizeof(uint32_t));
  DYNEMB_RETURN_IF_ERROR(session.Synchronize());
  key_begins->assign(read_back, read_back + num_begins);
  return Status();
}

// Sorts the ids by key, and lists their terms. Key numbers are below `numbers`; ranges[key] is
// written for each key that has ids. Overwrites the arrays of `ids`.
template <class Session>
Status SortTerms(Session& session, const Ids& ids, size_t numbers, TermRange* ranges,
                 SortedTerms* sorted) {
  session.SortPairs(ids.uniques, ids.positions, ids.n, BitsBelow(numbers));
  auto* const terms = session.template Take<Term>(ids.n);
  session.ForEach(
      ids.n, ListTerms{ids.parts, ids.uniques, ids.positions, ids.bag_of, ids.n, ranges, terms});
  *sorted = {ids.parts, ids.positions, ranges, terms};
  return session.status();
}

// Room for the maximal number of chunks of all tasks.
struct ChunkRoom {
  std::vector<uint32_t> begins{0};
  std::vector<size_t> floats{0};  // where the sums of each task's chunks begin
  size_t quads = 0;               // the quads of the widest sums

  void Add(size_t ids, size_t unique, int64_t dim) {
    const uint32_t most = MostChunks(ids, unique);
    begins.push_back(begins.back() + most);
    const size_t end = floats.back() + most * static_cast<size_t>(dim);
    floats.push_back((end + kQuad - 1) / kQuad * kQuad);
    quads = std::max(quads, QuadsOf(dim));
  }
};

// Sums the terms of the keys 0, ..., num_keys - 1.
template <class Session, class Sums>
Status AddTerms(Session& session, const Sums& sums, size_t num_keys, const ChunkRoom& room) {
  const size_t tasks = room.begins.size() - 1, most = room.begins.back();
  auto* const chunks = session.template Take<Chunk>(most);
  auto* const counts = session.template Take<uint32_t>(tasks);
  auto* const chunk_sums = session.template Take<float>(room.floats.back());
  DYNEMB_RETURN_IF_ERROR(session.status());
  std::vector<float*> of_task;
  for (size_t t = 0; t < tasks; ++t) of_task.push_back(chunk_sums + room.floats[t]);
  const ChunkList list{ToDevice(session, of_task, room.begins), chunks, counts};
  session.Fill(counts, 0, tasks * sizeof(uint32_t));
  session.ForRows(num_keys, room.quads, SumKeys<Sums>{sums, list});
  session.ForRows(most, room.quads, SumChunks<Sums>{{sums, list}});
  session.ForRows(most, room.quads, AddChunks<Sums>{{sums, list}});
  return session.status();
}

}  // namespace internal_sum_gradients

// All arrays of tasks and outputs are in the device's memory, except bags. The output keys are in
// the order of their first ids. allocate(task, num_unique, BackwardOutput*) is called once per
// task, in order, and may take its arrays from the session; if it fails, its error is returned.
//
// Fails like Backward::Check, or if all tasks together have more than 2^32 - 2 ids, before any work
// is given.
template <class Session, class Allocate>
Status SumGradients(Session& session, const std::vector<BackwardTask>& tasks,
                    const Allocate& allocate) {
  namespace internal = internal_sum_gradients;
  DYNEMB_RETURN_IF_ERROR(Backward::Check(tasks.data(), tasks.size()));
  size_t n = 0;
  std::vector<uint32_t> begins{0};
  for (const BackwardTask& task : tasks) {
    n += task.bags->nnz();
    DYNEMB_RETURN_IF_ERROR(CheckTotal(n, "ids"));
    begins.push_back(static_cast<uint32_t>(n));
  }
  internal::Ids ids;
  std::vector<uint32_t> key_begins(begins.size());
  if (n != 0) {
    Phase phase("find unique ids");
    DYNEMB_RETURN_IF_ERROR(internal::BringIds(session, tasks, begins, &ids));
    DYNEMB_RETURN_IF_ERROR(internal::NumberKeys(session, ids, &key_begins));
  }
  std::vector<BackwardOutput> outputs(tasks.size());
  internal::ChunkRoom room;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const size_t num_unique = key_begins[t + 1] - key_begins[t];
    DYNEMB_RETURN_IF_ERROR(allocate(t, num_unique, &outputs[t]));
    room.Add(tasks[t].bags->nnz(), num_unique, tasks[t].dim);
  }
  if (n == 0) return session.status();
  Phase phase("sum gradients");
  const size_t num_keys = key_begins.back();
  auto* const ranges = session.template Take<TermRange>(num_keys);
  KeySums sums;
  DYNEMB_RETURN_IF_ERROR(internal::SortTerms(session, ids, num_keys, ranges, &sums.terms));
  sums.outputs = ToDevice(session, outputs, key_begins);
  return internal::AddTerms(session, sums, num_keys, room);
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_SUM_GRADIENTS_H_
