// InsertPlan: the work of pass 2 for a batch. It lists the distinct keys that need a row (or that
// are erased), the segment of each, and the worker that changes its slot. A plan is working memory,
// reused for the next batch. Building one takes time linear in the batch, for any keys.
//
//   plan.Build(exec, keys, rows, n, index);             // distinct keys and their workers
//   plan.rows, index.Grow(...)                          // rows and slots, by the caller
//   plan.ForWorkers(exec, ...)                          // claims the slots
//
// Keys are numbered j = 0, 1, ... in the order of the batch. A key's worker depends on the segment
// that the key belongs to before the index grows. Segments only split, so all keys of a segment
// still have one worker afterwards, and its slots are claimed in the order of the batch, by any
// number of workers.
#ifndef DYNEMB_TABLE_INSERT_PLAN_H_
#define DYNEMB_TABLE_INSERT_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/hash.h"
#include "cc/table/index.h"
#include "cc/table/owned_items.h"
#include "cc/table/scratch.h"
#include "cc/table/staged.h"
#include "cc/table/types.h"

namespace dynemb {

class InsertPlan {
 public:
  // The maximal number of keys in a batch; positions have 32 bits.
  static constexpr size_t kMaxKeys = 0xFFFFFFFE;
  // A position whose key also has an earlier position, and the first of its positions.
  struct Repeat {
    uint32_t position, first;
  };

  // Plans for the keys[i] with rows[i] == kNoRow, i < n <= kMaxKeys. `missing`: null, or a list in
  // ascending order that has these i, and maybe others: spares a scan of `rows`.
  template <class K>
  void Build(Exec& exec, const K* keys, const RowId* rows, size_t n, const Index& index,
             const std::vector<uint32_t>* missing = nullptr) {
    const auto has_none = [](RowId row) { return row == kNoRow; };
    if (missing == nullptr) {
      Select(
          exec, rows, n, [](size_t i) { return i; }, has_none);
    } else {
      Select(
          exec, rows, missing->size(), [missing](size_t i) { return (*missing)[i]; }, has_none);
    }
    Arrange(exec, keys, index);
  }
  // Plans for the other keys[i], which have rows; copies their row ids to `rows`.
  template <class K>
  void BuildHeld(Exec& exec, const K* keys, const RowId* rows_found, size_t n, const Index& index) {
    Select(
        exec, rows_found, n, [](size_t i) { return i; }, [](RowId row) { return row != kNoRow; });
    Arrange(exec, keys, index);
    for (size_t j = 0; j < size_; ++j) rows[j] = rows_found[positions[j]];
  }

  // Removes the keys j with !kept[j], and their repeats, from the plan. Frees nothing, and cannot
  // fail.
  void Keep(const bool* kept);

  // Allocates the memory of plans of up to n keys, so that building them cannot fail.
  void Reserve(const Exec& exec, size_t n);

  // The number of distinct keys.
  size_t size() const { return size_; }
  // The j of each worker.
  const OwnedItems& owned() const { return owned_; }
  const std::vector<Repeat>& repeats() const { return repeats_; }
  // The number of the key whose first position is `position`.
  size_t NumberAt(uint32_t position) const {
    return std::lower_bound(positions.get(), positions.get() + size_, position) - positions.get();
  }
  // Calls fn(j) for every j in [begin, end), on the worker of j; a worker's calls are in ascending
  // order. prefetch(j) is called a block of keys earlier (staged.h).
  template <class Prefetch, class Fn>
  void ForWorkers(Exec& exec, size_t begin, size_t end, const Prefetch& prefetch,
                  const Fn& fn) const;
  // Frees the arrays that only a huge batch needs.
  void Shrink();

  // Data of key j < size():
  Buffer<uint32_t> positions;   // its first position in the batch
  Buffer<uint64_t> hashes;      // its hash
  Buffer<uint32_t> segment_of;  // its segment; Index::Grow and MakeSlots update it
  Buffer<RowId> rows;           // the row ids that the caller allocates, or BuildHeld copies

 private:
  static constexpr size_t kSelectPart = 16384;
  using Seen = Buffer<uint32_t>;  // a hash set of j, with open addressing

  // Sets `positions` to the at(i), i < n, for which chosen(rows[at(i)]).
  template <class At, class Chosen>
  void Select(Exec& exec, const RowId* rows, size_t n, const At& at, const Chosen& chosen);
  template <class K>
  void Arrange(Exec& exec, const K* keys, const Index& index);
  // Builds the lists of the workers, and separates repeated keys.
  void Assign(Exec& exec, const Index& index);
  bool FindRepeats(size_t worker);
  // Uses a hash set with this mix of the hashes. Returns false, without a result, if too many
  // hashes collide in it.
  bool TryFindRepeats(size_t worker, size_t slots, uint64_t mix, bool* repeated);
  void RemoveRepeats();
  // Moves the data of the keys j with keeps(j) up, in their order, and renumbers them.
  template <class Keeps>
  void Compact(const Keeps& keeps);

  size_t size_ = 0;
  OwnedItems owned_;
  std::vector<Seen> seen_;   // by worker; only grows
  Buffer<uint32_t> chosen_;  // by part of Select: the number of its keys
  std::vector<Repeat> repeats_;
  Buffer<uint32_t> first_;  // first_[j]: the first j with the same hash, while keys may repeat
};

// Each part of the batch moves its positions to the front of its range; then the ranges move
// together.
template <class At, class Chosen>
void InsertPlan::Select(Exec& exec, const RowId* rows_found, size_t n, const At& at,
                        const Chosen& chosen) {
  positions.Resize(n);
  const size_t parts = (n + kSelectPart - 1) / kSelectPart;
  chosen_.Resize(parts);
  exec.ParallelFor(parts, 1, [&](size_t p, size_t last) {
    for (; p < last; ++p) {
      const size_t begin = p * kSelectPart, end = std::min(n, begin + kSelectPart);
      size_t to = begin;
      for (size_t i = begin; i < end; ++i) {  // without a branch, which would be unpredictable
        positions[to] = static_cast<uint32_t>(at(i));
        to += chosen(rows_found[at(i)]);
      }
      chosen_[p] = static_cast<uint32_t>(to - begin);
    }
  });
  size_ = 0;
  for (size_t p = 0; p < parts; ++p) {
    const uint32_t* const from = positions.get() + p * kSelectPart;
    std::copy(from, from + chosen_[p], positions.get() + size_);
    size_ += chosen_[p];
  }
}

template <class K>
void InsertPlan::Arrange(Exec& exec, const K* keys, const Index& index) {
  constexpr size_t kGrain = 2048;
  hashes.Resize(size_);
  segment_of.Resize(size_);
  exec.ParallelFor(size_, kGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      hashes[j] = index.HashOf(keys[positions[j]]);
      segment_of[j] = index.SegmentOf(hashes[j]);
    }
  });
  Assign(exec, index);
  rows.Resize(size_);
}

template <class Prefetch, class Fn>
void InsertPlan::ForWorkers(Exec& exec, size_t begin, size_t end, const Prefetch& prefetch,
                            const Fn& fn) const {
  owned_.ForWorkers(exec, end, [&](size_t, const uint32_t* j, const uint32_t* last) {
    j = std::lower_bound(j, last, begin);
    RunStaged(
        static_cast<size_t>(last - j), kMostStaged, [&](size_t i) { prefetch(j[i]); },
        [&](size_t i) { fn(j[i]); });
  });
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INSERT_PLAN_H_
