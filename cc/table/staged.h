// RunStaged: a loop whose items need memory that is not in the cache, in stages.
//
// Each stage fetches what the next one reads. A block of items passes through one stage before the
// next stage begins, and the stages of a block are a turn apart:
//
//   turn   stage 0    stage 1    stage 2
//   0      block 0
//   1      block 1    block 0
//   2      block 2    block 1    block 0
//
// The memory that a stage fetches has a turn's time to arrive.
//
// Why blocks, and not one item of each stage in turn: a prefetch does not wait for its data, but on
// some CPUs it waits until its address is translated, which takes as long as a cache miss where the
// translation is not cached. A CPU works some hundred instructions ahead. If these are one stage of
// many items, it translates many addresses at the same time (benchmarks/log.md, 2026-12-01).
#ifndef DYNEMB_TABLE_STAGED_H_
#define DYNEMB_TABLE_STAGED_H_

#include <algorithm>
#include <cstddef>

#include "cc/table/portability.h"

namespace dynemb {

// The number of items in a block, if a stage fetches `lines` cache lines for each item. The lines
// of a block stay in a first-level cache of 32 KiB until the next turn.
constexpr size_t kMostStaged = 32;
constexpr size_t StagedBlock(size_t lines) {
  constexpr size_t kLines = 64, kLeast = 8;
  return lines == 0 ? kMostStaged : std::clamp(kLines / lines, kLeast, kMostStaged);
}

// What the stages of an item know about it, at [i] for item i: an array that the blocks on their
// way through kStages stages share.
template <class T, size_t kStages>
class StagedRing {
 public:
  T& operator[](size_t i) { return items_[i % kSize]; }

 private:
  static constexpr size_t Size(size_t least) {
    size_t size = 1;
    while (size < least) size *= 2;
    return size;
  }
  static constexpr size_t kSize = Size(kStages * kMostStaged);

  T items_[kSize];
};

// Calls each stage(i) for all i in [0, n), in order. No block has more than kMostStaged items.
template <class... Stages>
DYNEMB_INLINE void RunStaged(size_t n, size_t block, const Stages&... stages) {
  constexpr size_t kTurns = sizeof...(Stages) - 1;  // from a block's first stage to its last
  for (size_t turn = 0; turn < n + kTurns * block; turn += block) {
    size_t first = turn;  // of this stage's block; wraps around before there is one
    const auto run = [&](const auto& stage) __attribute__((always_inline)) {
      if (first < n) {
        const size_t end = std::min(first + block, n);
        for (size_t i = first; i < end; ++i) stage(i);
      }
      first -= block;
    };
    (run(stages), ...);
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_STAGED_H_
