// OwnedItems: the items of a batch that each worker owns (workers.h), in ascending order.
//
//   items [0, n)     each has a unit: a segment, a row
//   lists            worker by worker, the items whose units it owns
//
// Building the lists takes time linear in n, for any number of workers: each thread counts, and
// then writes, the items of a part of [0, n). The lists of a given number of workers do not depend
// on timing.
//
// Contract. One call of Build at a time; then several threads may read. An OwnedItems is reusable
// scratch: repeating a Build of a size seen before allocates nothing.
#ifndef DYNEMB_TABLE_OWNED_ITEMS_H_
#define DYNEMB_TABLE_OWNED_ITEMS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cc/table/exec.h"
#include "cc/table/scratch.h"
#include "cc/table/workers.h"

namespace dynemb {

class OwnedItems {
 public:
  // As a unit: the item belongs to no worker. As a number: the item is removed.
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  // unit(j), for j < n <= kNone, is called twice, from any thread.
  template <class Unit>
  void Build(Exec& exec, size_t n, const Unit& unit);
  // Allocates the memory for up to n items, so that Build cannot fail.
  void Reserve(const Exec& exec, size_t n) {
    items_.Resize(n);
    counts_.Resize(NumWorkers(exec, n) * NumWorkers(exec, n));
    lists_.Resize(NumWorkers(exec, n));
  }

  size_t num_workers() const { return num_workers_; }
  // The items of worker w: [begin(w), end(w)).
  const uint32_t* begin(size_t w) const { return items_.get() + lists_[w].begin; }
  const uint32_t* end(size_t w) const { return items_.get() + lists_[w].end; }
  // Calls fn(w, begin, end) for the items of each worker that are below `n`, once for each worker,
  // on any thread.
  template <class Fn>
  void ForWorkers(Exec& exec, size_t n, const Fn& fn) const {
    exec.ParallelFor(num_workers_, 1, [&](size_t first, size_t last) {
      for (size_t w = first; w < last; ++w) {
        fn(w, begin(w), std::lower_bound(begin(w), end(w), n));
      }
    });
  }

  // Item j becomes number[j], which increases with j, or is removed.
  void Renumber(const uint32_t* number) {
    for (size_t w = 0; w < num_workers_; ++w) {
      List& list = lists_[w];
      uint32_t* to = items_.get() + list.begin;
      for (uint32_t i = list.begin; i < list.end; ++i) {
        *to = number[items_[i]];
        to += *to != kNone;
      }
      list.end = static_cast<uint32_t>(to - items_.get());
    }
  }

  // Frees the arrays that only a huge batch needs.
  void Shrink() { items_.Shrink(); }

 private:
  struct List {
    uint32_t begin, end;  // in items_
  };

  size_t num_workers_ = 0;
  Buffer<uint32_t> items_;
  Buffer<uint32_t> counts_;  // [parts][workers]: items; then the position of the part's next one
  Buffer<List> lists_;
};

template <class Unit>
void OwnedItems::Build(Exec& exec, size_t n, const Unit& unit) {
  const size_t workers = NumWorkers(exec, n);
  const size_t part_items = std::max<size_t>(1, (n + workers - 1) / workers);
  const size_t parts = (n + part_items - 1) / part_items;
  num_workers_ = workers;
  Reserve(exec, n);
  // Calls fn(unit of j, j) for the items of part p that have a unit.
  const auto for_part = [&](size_t p, const auto& fn) {
    const size_t end = std::min(n, (p + 1) * part_items);
    for (size_t j = p * part_items; j < end; ++j) {
      const uint32_t u = unit(j);
      if (u != kNone) fn(u, j);
    }
  };
  exec.ParallelFor(parts, 1, [&](size_t p, size_t last) {
    for (; p < last; ++p) {
      // On the stack, because the counters of neighboring parts share cache lines.
      uint32_t counts[kMostWorkers];
      std::fill_n(counts, workers, 0);
      for_part(p, [&](uint32_t u, size_t) { ++counts[OwnerOf(workers, u)]; });
      std::copy_n(counts, workers, counts_.get() + p * workers);
    }
  });
  uint32_t at = 0;
  for (size_t w = 0; w < workers; ++w) {
    lists_[w].begin = at;
    for (size_t p = 0; p < parts; ++p) at += std::exchange(counts_[p * workers + w], at);
    lists_[w].end = at;
  }
  exec.ParallelFor(parts, 1, [&](size_t p, size_t last) {
    for (; p < last; ++p) {
      uint32_t next[kMostWorkers];
      std::copy_n(counts_.get() + p * workers, workers, next);
      for_part(p, [&](uint32_t u, size_t j) {
        items_[next[OwnerOf(workers, u)]++] = static_cast<uint32_t>(j);
      });
    }
  });
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_OWNED_ITEMS_H_
