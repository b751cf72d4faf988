// SumGradients: Backward (cc/lookup/backward.h) on a device. Gradients of pooled vectors, summed
// per unique key, for many tables in one call.
//
// A key's sum has the bits of the host's (but for which NaN) if the key has at most 256 ids. A key
// of more would keep one team busy while all others are done: its ids, in their order, are summed
// in pieces of 256, and then the pieces' sums are added from the first to the last. So the sums do
// not depend on how the work is dealt out, nor on the device.
//
// How many launches there are does not depend on how many tasks there are. The call waits once, for
// the numbers of unique keys; the sums themselves are done when the stream gets there.
#ifndef DYNEMB_DEVICE_SUM_GRADIENTS_H_
#define DYNEMB_DEVICE_SUM_GRADIENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
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

// Ids, or bags, of all tasks are numbered in 32 bits.
inline Status CheckTotal(size_t total, const char* what) {
  constexpr size_t kMost = Bags::kMaxSize;
  if (total <= kMost) return Status();
  return InvalidArgument("all tables together may have at most 2^32 - 2 " + std::string(what) +
                         " in a batch, got " + std::to_string(total));
}

// How many pieces a task may need at most. A key that is summed in pieces has 256 ids besides its
// first, or more: for each 256 of them that is two pieces at most.
inline uint32_t MostPieces(size_t ids, size_t unique) {
  const size_t others = ids - unique;
  return others < kPieceIds ? 0 : static_cast<uint32_t>(others / (kPieceIds / 2));
}

// How many low bits of numbers below n are not 0 in all of them.
inline int BitsBelow(size_t n) {
  int bits = 0;
  while ((size_t{1} << bits) < n) ++bits;
  return bits;
}

// Every id of all tasks, at its position.
struct Ids {
  size_t n = 0;
  Parts<GradientPart> tasks;
  uint64_t* uniques = nullptr;       // the number of its key
  uint32_t* positions = nullptr;     // its position
  uint32_t* bag_of = nullptr;        // its bag
  std::vector<uint32_t> key_begins;  // of the host, [tasks + 1]: how many keys there are before
};

// `begins` are the tasks' first positions. Waits.
template <class Session>
Status NumberKeys(Session& session, const std::vector<BackwardTask>& tasks,
                  const std::vector<uint32_t>& begins, Ids* ids) {
  // Which bags have scales of their own, as in Upstream::Prepare.
  const auto has_scales = [](const BackwardTask& task) {
    return task.bags->nnz() != 0 && HasScale(task.combiner) &&
           (task.bags->splits() != nullptr || task.weights != nullptr);
  };
  std::vector<uint32_t> bag_begins{0};
  size_t bags = 0;
  for (const BackwardTask& task : tasks) {
    if (has_scales(task)) bags += task.bags->num_bags();
    DYNEMB_RETURN_IF_ERROR(CheckTotal(bags, "bags"));
    bag_begins.push_back(static_cast<uint32_t>(bags));
  }
  const size_t n = begins.back(), num_begins = begins.size();
  ids->n = n;
  ids->uniques = session.template Take<uint64_t>(n);
  ids->positions = session.template Take<uint32_t>(n);
  ids->bag_of = session.template Take<uint32_t>(n);
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
  ids->tasks = ToDevice(session, parts, begins);

  const typename Session::Scratch scratch(session);
  Parts<GradientPart> scaled = ids->tasks;
  scaled.begins = ToDevice(session, bag_begins.data(), bag_begins.size());
  session.ForEach(bags, ScaleBags{scaled});
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  Elect</*kLast=*/false>(session, TaskKeys{ids->tasks}, /*rows=*/nullptr, n, &places, &of);
  auto* const sums = session.template Take<uint32_t>(n + 1);
  auto* const key_begins = session.template Take<uint32_t>(num_begins);
  auto* const read_back = session.template Pinned<uint32_t>(num_begins);
  DYNEMB_RETURN_IF_ERROR(session.status());
  session.ForEach(n + 1, FlagFirst{/*rows=*/nullptr, places, of, n, sums});
  session.ExclusiveSum(sums, n + 1);
  session.ForEach(n,
                  ListIds{ids->tasks, places, of, sums, ids->uniques, ids->positions, ids->bag_of});
  session.ForEach(num_begins, ReadBegins{ids->tasks.begins, sums, key_begins});
  session.Copy(read_back, key_begins, num_begins * sizeof(uint32_t));
  DYNEMB_RETURN_IF_ERROR(session.Synchronize());
  ids->key_begins.assign(read_back, read_back + num_begins);
  return Status();
}

// Leaves other contents in the arrays of `ids`.
template <class Session>
Status SumTerms(Session& session, const std::vector<BackwardTask>& tasks,
                const std::vector<uint32_t>& begins, const Ids& ids,
                std::vector<GradientOutput> outputs) {
  const std::vector<uint32_t>& key_begins = ids.key_begins;
  const size_t num_unique = key_begins.back();
  std::vector<uint32_t> piece_begins{0};
  std::vector<size_t> floats{0};  // where those of each task's pieces begin
  size_t quads = 0;               // of the widest sums
  for (size_t t = 0; t < tasks.size(); ++t) {
    const uint32_t most = MostPieces(begins[t + 1] - begins[t], key_begins[t + 1] - key_begins[t]);
    piece_begins.push_back(piece_begins.back() + most);
    const size_t end = floats.back() + most * static_cast<size_t>(tasks[t].dim);
    floats.push_back((end + kQuad - 1) / kQuad * kQuad);
    quads = std::max(quads, QuadsOf(tasks[t].dim));
  }
  session.SortPairs(ids.uniques, ids.positions, ids.n, BitsBelow(num_unique));
  auto* const key_ids = session.template Take<uint32_t>(num_unique + 1);
  auto* const terms = session.template Take<Term>(ids.n);
  auto* const pieces = session.template Take<Piece>(piece_begins.back());
  auto* const piece_counts = session.template Take<uint32_t>(tasks.size());
  auto* const piece_sums = session.template Take<float>(floats.back());
  DYNEMB_RETURN_IF_ERROR(session.status());
  for (size_t t = 0; t < tasks.size(); ++t) outputs[t].pieces = piece_sums + floats[t];
  const Parts<GradientOutput> by_key = ToDevice(session, outputs, key_begins);
  Parts<GradientOutput> by_piece = by_key;
  by_piece.begins = ToDevice(session, piece_begins.data(), piece_begins.size());

  session.ForEach(
      ids.n, ListTerms{ids.tasks, ids.uniques, ids.positions, ids.bag_of, ids.n, key_ids, terms});
  session.Fill(piece_counts, 0, tasks.size() * sizeof(uint32_t));
  const SortedTerms sorted{ids.tasks, ids.positions, key_ids, terms};
  const PieceList list{by_piece, pieces, piece_counts};
  session.ForRows(num_unique, quads, SumKeys{sorted, by_key, list});
  session.ForRows(piece_begins.back(), quads, SumPieces{{sorted, list}});
  session.ForRows(piece_begins.back(), quads, AddPieces{{sorted, list}, by_key.begins});
  return session.status();
}

}  // namespace internal_sum_gradients

// All that tasks and outputs point to is in the device's memory, but for bags. Keys come out in the
// order of their first ids. allocate(task, num_unique, BackwardOutput*) is called once for every
// task, in order, and may take its arrays from the session; what it fails with is returned. Fails
// as Backward::Check does, and where all tasks have more than 2^32 - 2 ids together, before any
// work is given out.
template <class Session, class Allocate>
Status SumGradients(Session& session, const std::vector<BackwardTask>& tasks,
                    const Allocate& allocate) {
  namespace internal = internal_sum_gradients;
  DYNEMB_RETURN_IF_ERROR(Backward::Check(tasks.data(), tasks.size()));
  size_t n = 0;
  std::vector<uint32_t> begins{0};
  for (const BackwardTask& task : tasks) {
    n += task.bags->nnz();
    DYNEMB_RETURN_IF_ERROR(internal::CheckTotal(n, "ids"));
    begins.push_back(static_cast<uint32_t>(n));
  }
  internal::Ids ids;
  ids.key_begins.resize(begins.size());
  if (n != 0) {
    Phase phase("find unique ids");
    DYNEMB_RETURN_IF_ERROR(internal::NumberKeys(session, tasks, begins, &ids));
  }
  std::vector<GradientOutput> outputs(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    const size_t num_unique = ids.key_begins[t + 1] - ids.key_begins[t];
    DYNEMB_RETURN_IF_ERROR(allocate(t, num_unique, &outputs[t]));
  }
  if (n == 0) return session.status();
  Phase phase("sum gradients");
  return internal::SumTerms(session, tasks, begins, ids, std::move(outputs));
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_SUM_GRADIENTS_H_
