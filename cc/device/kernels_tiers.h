// The kernels of promotion, which keep hot rows in the device tier (kernels.h defines kernels).
//
// The device tier is a cache of the rows that are read most often. Promotion uses only the scores
// that the table has anyway (score.h). If they are last accesses:
//
// - A row of the host tier that is read is a candidate. Its `reuse` is the time since its previous
//   read.
// - The places (row ids) of the device tier are examined in turns, a window at a time. The `age` of
//   a place is the time since its row was read.
// - The candidates with the shortest reuse are paired with the places with the greatest age. The
//   rows of a pair change places if kHysteresis * reuse < age: the row that is read more often is
//   likely to be read again first.
//
// If scores are counts or the caller's, the candidates with the greatest scores are paired with the
// places with the lowest scores. The rows of a pair change places if the candidate's score is
// greater; a count must be greater than kHysteresis times the other.
//
// A scan over rows that are read once therefore moves nothing, where plain LRU would empty the
// cache. A row that is only slightly hotter is not worth the copies. docs/performance_log.md
// compares other rules.
//
//   FindKeys                   notes candidates
//   SortPairs                  sorts the candidates by reuse
//   LookAtPlaces, SortPairs    sorts the places of the window by age
//   ElectPositions             chooses one of the entries of a candidate that was noted twice
//   PairUp                     determines the pairs that change places, and their slots
//   SwapRows                   swaps contents and slots
//
// Before and after, exactly one slot names a row: the slot of its key. Two rows of different tiers
// swap contents, and their slots swap ids, so every row is in exactly one tier at any time.
#ifndef DYNEMB_DEVICE_KERNELS_TIERS_H_
#define DYNEMB_DEVICE_KERNELS_TIERS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/table/bucket_ops.h"

namespace dynemb::device {

// A candidate must be read this many times as often as the row whose place it takes.
constexpr uint32_t kHysteresis = 2;
// The number of places that are examined per candidate.
constexpr uint32_t kPlacesEach = 4;

// The state that is kept between two promotions.
struct TierState {
  uint32_t candidates;  // the number noted; may exceed the room, and the excess is dropped
  uint32_t unused;
  uint64_t hand;  // the place that is examined next
};

// A row with its sort key: row << 32 | order. The order of a candidate is its reuse or ~score, that
// of a place ~age or its score. kNoPlace means no row, and is sorted last.
constexpr uint64_t kNoPlace = ~uint64_t{0};
constexpr int kOrderBits = 32;
DYNEMB_HD inline RowId OrderedRow(uint64_t ordered) { return static_cast<RowId>(ordered >> 32); }

// order[c] = candidate c, or kNoPlace after the last candidate.
struct CopyCandidates {
  const TierState* state;
  const uint64_t* candidates;
  uint64_t* order;

  DYNEMB_HD void operator()(size_t c) const {
    order[c] = c < state->candidates ? candidates[c] : kNoPlace;
  }
};

// Lists the rows of the candidates, as keys for ElectPositions.
struct ListCandidates {
  const uint64_t* order;
  uint32_t* rows;

  DYNEMB_HD void operator()(size_t p) const { rows[p] = OrderedRow(order[p]); }
};

// Examines the w-th place from the hand on, cyclic among `places`. order[w] is kNoPlace if the
// place has no row that may move.
struct LookAtPlaces {
  DeviceView view;
  uint64_t places;
  const TierState* state;
  const Counters* counters;
  bool by_time;  // whether scores are stamps
  StampOrder stamps;
  Stamp now;
  uint64_t* order;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t w) const {
    const auto row = static_cast<RowId>((state->hand + w) % places);
    uint64_t sorted = kNoPlace;
    if (w / kPlacesEach < state->candidates && row < counters->high_water &&
        *view.layout.update(view.RowAt(row)) != 0) {
      const SlotRef at = view.Find(lanes, view.KeyAt(row));
      const Score score = AtomicLoad(&at.bucket->score[at.slot]);
      const Stamp rank_now = stamps.Rank(now);
      if (!by_time) {
        sorted = static_cast<uint64_t>(row) << 32 | score;
      } else if (stamps.Rank(score) < rank_now) {
        sorted = static_cast<uint64_t>(row) << 32 | ~(rank_now - stamps.Rank(score));
      }
    }
    if (lanes.rank() == 0) order[w] = sorted;
  }
};

struct Swap {
  RowId* host_slot;    // the slot of the key that moves to the device tier; null: no move
  RowId* device_slot;  // the slot of the key that moves to the host tier
  RowId host_row, device_row;
};

// Pair p: the p-th candidate and the p-th place, both in their orders. Since the candidate was
// noted, its row may have been freed or given to another key. After ResetState or SwapRows it may
// even be in the device tier.
struct PairUp {
  DeviceView view;
  EvictStrategy strategy;
  const uint64_t* candidates;
  const uint64_t* victims;
  const uint32_t* elected;  // `places` and `of` of ElectPositions over the candidates' rows
  const uint32_t* elected_of;
  const Counters* counters;
  Swap* swaps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t p) const {
    Swap swap{};
    const uint64_t candidate = candidates[p], victim = victims[p];
    swap.host_row = OrderedRow(candidate);
    swap.device_row = OrderedRow(victim);
    if (candidate != kNoPlace && victim != kNoPlace &&
        IsHotter(static_cast<uint32_t>(candidate), static_cast<uint32_t>(victim)) &&
        elected[elected_of[p]] == p && !view.InDevice(swap.host_row) &&
        swap.host_row < counters->high_water &&
        *view.layout.update(view.RowAt(swap.host_row)) != 0) {
      const SlotRef host = view.Find(lanes, view.KeyAt(swap.host_row));
      const SlotRef device = view.Find(lanes, view.KeyAt(swap.device_row));
      swap.host_slot = &host.bucket->row[host.slot];
      swap.device_slot = &device.bucket->row[device.slot];
    }
    if (lanes.rank() == 0) swaps[p] = swap;
  }

 private:
  // Whether a candidate with this order should take a place with this order.
  DYNEMB_HD bool IsHotter(uint32_t candidate, uint32_t place) const {
    switch (strategy) {
      case EvictStrategy::kLfu:
        return ~candidate > uint64_t{kHysteresis} * place;
      case EvictStrategy::kEpochLfu: {
        const uint32_t mask = (1u << Scoring::kCountBits) - 1;
        const uint32_t epoch = ~candidate >> Scoring::kCountBits;
        const uint32_t epoch_there = place >> Scoring::kCountBits;
        if (epoch != epoch_there) return epoch > epoch_there;
        return (~candidate & mask) > kHysteresis * (place & mask);
      }
      case EvictStrategy::kScore:
        return ~candidate > place;
      default:
        return uint64_t{kHysteresis} * candidate < ~place;  // reuse and age
    }
  }
};

struct SwapRows {
  DeviceView view;
  const Swap* swaps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t p) const {
    const Swap swap = swaps[p];
    if (swap.host_slot == nullptr) return;
    auto* host = reinterpret_cast<Quad<float>*>(view.RowAt(swap.host_row));
    auto* device = reinterpret_cast<Quad<float>*>(view.RowAt(swap.device_row));
    for (size_t w = lanes.rank(); w < view.layout.stride / sizeof(*host); w += lanes.width()) {
      Quad<float> from_host = host[w], from_device = device[w];
      if (w == DeviceView::kFreeOffset / sizeof(*host)) {  // the free list does not move
        const float in_host = from_host.at[3];
        from_host.at[3] = from_device.at[3];
        from_device.at[3] = in_host;
      }
      host[w] = from_device;
      device[w] = from_host;
    }
    if (lanes.rank() != 0) return;
    *swap.host_slot = swap.device_row;
    *swap.device_slot = swap.host_row;
  }
};

// Resets the state for the next promotion.
struct EndRound {
  uint64_t places, window;
  TierState* state;

  DYNEMB_HD void operator()(size_t) const {
    const uint64_t looked = uint64_t{kPlacesEach} * state->candidates;
    state->hand = (state->hand + (looked < window ? looked : window)) % places;
    state->candidates = 0;
  }
};

// Item t counts swaps t, t + stride, ...
struct CountSwaps {
  const Swap* swaps;
  size_t n;
  size_t stride;
  Counters* counters;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t moved = 0;
    for (size_t p = t; p < n; p += stride) moved += swaps[p].host_slot != nullptr;
    if (moved != 0) AtomicAdd(&counters->promotions, moved);
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_TIERS_H_
