// SumGradients: Backward (cc/lookup/backward.h) on a device. It sums the gradients of pooled
// vectors per unique key, for many tables in one call.
//
// The sum of a key with at most 256 ids has the same bits as on the host, except for the bits of a
// NaN. A key of more ids would keep one team busy after all others have finished. Its ids, in their
// order, are therefore summed in chunks of 256, and then the sums of the chunks are added from the
// first to the last. The sums depend neither on the division of the work nor on the device.
//
// The number of launches does not depend on the number of tasks; there is one more if a key may
// have more than 256 ids. The call waits once, for the numbers of unique keys. The sums are queued
// on the stream.
#ifndef DYNEMB_DEVICE_SUM_GRADIENTS_H_
#define DYNEMB_DEVICE_SUM_GRADIENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/kernels.h"
#include "cc/device/kernels_gradient.h"
#include "cc/device/kernels_segments.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/combiner.h"
#include "cc/table/key.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"
#include "cc/table/status.h"

namespace dynemb::device {

// The `Sums` of SumGradients (kernels_segments.h): all terms of a key are of its task.
struct KeySums {
  static constexpr bool kSteps = false;
  static constexpr uint32_t kInFlight = 8;
  // 80 registers of a thread, so that 24 warps share a multiprocessor.
  static constexpr unsigned int kLeastBlocks = 12;

  struct Target {
    float* sums;
    uint32_t begin;
    size_t dim;

    DYNEMB_HD float* SumOf(uint32_t key) const { return sums + (key - begin) * dim; }
  };
  SortedTerms terms;
  Parts<BackwardOutput> outputs;  // the items of a part are its unique keys
  uint32_t num_keys;

  DYNEMB_HD uint32_t TaskOf(uint32_t key) const { return outputs.IndexOf(key); }
  DYNEMB_HD uint32_t KeysEnd(uint32_t t) const { return outputs.end(t); }
  DYNEMB_HD int64_t dim(uint32_t t) const { return terms.parts[t].task.dim; }
  DYNEMB_HD Target TargetOf(uint32_t t) const {
    return {outputs[t].sums, outputs.begin(t), static_cast<size_t>(dim(t))};
  }
  DYNEMB_HD TermForm FormOf(uint32_t t, uint32_t, uint32_t*) const {
    return device::FormOf(terms.parts[t].task);
  }
};

// For ListTerms: writes a key and its row.
struct DeliverKey {
  Parts<GradientPart> parts;
  Parts<BackwardOutput> outputs;

  DYNEMB_HD void operator()(uint32_t t, uint32_t key, uint32_t position) const {
    const GradientPart& part = parts[t];
    const BackwardOutput& out = outputs[t];
    const size_t at = key - outputs.begin(t);
    const KeyArray keys = part.keys();
    StoreKey(out.keys, keys.key_size, at, keys[position]);
    if (part.task.rows != nullptr) out.rows[at] = part.task.rows[position];
  }
};

namespace internal_sum_gradients {

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

// Fills the arrays of `ids`. key_begins[t] = the number of keys before the keys of task t. Waits.
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
// written for each key that has ids. `first` is ListTerms's. Overwrites the arrays of `ids`.
template <class First, class Session>
Status SortTerms(Session& session, const Ids& ids, size_t numbers, const First& first,
                 TermRange* ranges, SortedTerms* sorted) {
  session.SortPairs(ids.uniques, ids.positions, ids.n, BitsBelow(numbers));
  auto* const terms = session.template Take<Term>(ids.n);
  const auto n = static_cast<uint32_t>(ids.n);
  session.ForEach(ids.n, ListTerms<First>{ids.parts, ids.uniques, ids.positions, ids.bag_of, n,
                                          first, ranges, terms});
  *sorted = {ids.parts, ids.positions, ids.bag_of, ranges, terms, n};
  return session.status();
}

// The sizes that SumTerms needs of all tasks together.
struct SumOptions {
  size_t quads = 0;       // of the widest sums
  size_t long_quads = 0;  // of the widest sums of tasks that may have long keys; 0: none may
  bool whole = true;      // all tasks and their sums are whole

  // A task with this number of ids and of unique keys.
  void Add(size_t ids, size_t unique, int64_t dim) {
    quads = std::max(quads, QuadsOf(dim));
    if (ids >= unique + kChunkIds) long_quads = std::max(long_quads, QuadsOf(dim));
  }
  // The items of AddChunks for n terms.
  size_t Places(size_t n) const { return long_quads != 0 ? ChunkSums::CountOf(n) : 0; }
};

// Memory for the chunks of n terms.
template <class Session>
ChunkSums TakeChunks(Session& session, size_t n, const SumOptions& options) {
  const size_t places = options.Places(n);
  ChunkSums chunks{};
  chunks.stride = options.long_quads * kQuad;
  chunks.sums = session.template Take<float>(2 * places * chunks.stride);
  chunks.keys = session.template Take<uint32_t>(places);
  session.Fill(chunks.keys, 0xFF, places * sizeof(uint32_t));
  return chunks;
}

// Sums the terms of all keys. Takes no memory. kWhole: all tasks and their sums are whole.
template <bool kWhole, class Session, class Sums>
Status SumTermsAs(Session& session, const Sums& sums, const ChunkSums& chunks,
                  const SumOptions& options) {
  const size_t n = sums.terms.n;
  constexpr uint32_t kMostTerms = 32;
  const uint32_t length = RunLength(session, n, options.quads, kMostTerms);
  session.ForRows(NumRuns(n, length), options.quads,
                  SumSegments<Sums, kWhole>{sums, chunks, length});
  session.ForRows(options.Places(n), options.long_quads, AddChunks<Sums>{sums, chunks});
  return session.status();
}
template <class Session, class Sums>
Status SumTerms(Session& session, const Sums& sums, const ChunkSums& chunks,
                const SumOptions& options) {
  return options.whole ? SumTermsAs<true>(session, sums, chunks, options)
                       : SumTermsAs<false>(session, sums, chunks, options);
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
  internal::SumOptions options;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const size_t num_unique = key_begins[t + 1] - key_begins[t];
    DYNEMB_RETURN_IF_ERROR(allocate(t, num_unique, &outputs[t]));
    options.Add(tasks[t].bags->nnz(), num_unique, tasks[t].dim);
    options.whole &= IsWhole(tasks[t]) && IsAligned(outputs[t].sums);
  }
  if (n == 0) return session.status();
  Phase phase("sum gradients");
  KeySums sums{};
  sums.num_keys = key_begins.back();
  sums.outputs = ToDevice(session, outputs, key_begins);
  auto* const ranges = session.template Take<TermRange>(sums.num_keys);
  // Before the first output is written.
  const ChunkSums chunks = internal::TakeChunks(session, n, options);
  DYNEMB_RETURN_IF_ERROR(internal::SortTerms(
      session, ids, sums.num_keys, DeliverKey{ids.parts, sums.outputs}, ranges, &sums.terms));
  return internal::SumTerms(session, sums, chunks, options);
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_SUM_GRADIENTS_H_
