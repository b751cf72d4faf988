// The kernels that keep hot rows in the device tier (kernels.h says what a kernel is here).
//
// The device tier is a cache of the rows that are read most, with what the table knows anyway: when
// each row was read last. A row of the host tier that is read is a candidate; its `reuse` is how
// long ago it was read before. The places of the device tier are looked at in turns, a window at a
// time; a place's `age` is how long ago its row was read. The candidates with the shortest reuse
// meet the places with the greatest age, and change places with them if kHysteresis
// reuse < age: what is
// read more often than the other is likely to be read again first. So a scan over rows that are
// read once moves nothing, where plain LRU would empty the cache; and a row that is only slightly
// hotter is not worth the copies. docs/performance_log.md has what other rules came to.
//
//   FindKeys                notes candidates
//   SortPairs               candidates by reuse
//   LookAtPlaces, SortPairs the window's places by age
//   ElectPositions          a row that was noted twice counts once
//   PairUp                  which change places, and where their slots are
//   SwapRows                contents and slots
//
// A row is named by exactly one slot, before and after: that of its key. Two rows of different
// tiers exchange contents, and their slots exchange ids; nothing is ever in both tiers, or in
// neither.
#ifndef DYNEMB_DEVICE_KERNELS_TIERS_H_
#define DYNEMB_DEVICE_KERNELS_TIERS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/table/bucket_ops.h"

namespace dynemb::device {

// A candidate must be this much more frequent than the row whose place it takes.
constexpr uint32_t kHysteresis = 2;
// Places that are looked at for each candidate.
constexpr uint32_t kPlacesEach = 4;

// What is kept between two rounds.
struct TierState {
  uint32_t candidates;  // noted; those beyond the room for them are forgotten
  uint32_t unused;
  uint64_t hand;  // the place that is looked at next
};

// Rows with what they are sorted by, row << 32 | order. kNoPlace is none, and last.
constexpr uint64_t kNoPlace = ~uint64_t{0};
constexpr int kOrderBits = 32;
DYNEMB_HD inline RowId OrderedRow(uint64_t ordered) { return static_cast<RowId>(ordered >> 32); }

// order[c] = candidate c, or kNoPlace behind the last.

struct CopyCandidates {
  const TierState* state;
  const uint64_t* candidates;
  uint64_t* order;

  DYNEMB_HD void operator()(size_t c) const {
    order[c] = c < state->candidates ? candidates[c] : kNoPlace;
  }
};

// Rows of the candidates, as keys for ElectPositions.
struct ListCandidates {
  const uint64_t* order;
  uint32_t* rows;

  DYNEMB_HD void operator()(size_t p) const { rows[p] = OrderedRow(order[p]); }
};

// The w-th place from the hand on, cyclic among `places`: order[w] sorts it by falling age, and is
// kNoPlace if nothing is there to be moved.

struct LookAtPlaces {
  DeviceView view;
  uint64_t places;
  const TierState* state;
  const Counters* counters;
  Stamp now;
  uint64_t* order;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t w) const {
    const auto row = static_cast<RowId>((state->hand + w) % places);
    uint64_t sorted = kNoPlace;
    if (w / kPlacesEach < state->candidates && row < counters->high_water &&
        *view.layout.update(view.RowAt(row)) != 0) {
      const SlotRef at = view.Find(lanes, view.KeyAt(row));
      const Stamp rank = view.order.Rank(AtomicLoad(&at.bucket->access[at.slot]));
      const Stamp rank_now = view.order.Rank(now);
      if (rank < rank_now) sorted = static_cast<uint64_t>(row) << 32 | ~(rank_now - rank);
    }
    if (lanes.rank() == 0) order[w] = sorted;
  }
};

struct Swap {
  RowId* host_slot;    // of the key that comes to the device tier; null: nothing moves
  RowId* device_slot;  // of the key that goes to the host tier
  RowId host_row, device_row;
};

// Pair p: the candidate with the p-th shortest reuse and the place with the p-th greatest age. The
// candidate's row may have been freed since, or be another key's, or (where a table's rows have got
// a state, or another table's place) in the device tier by now.
struct PairUp {
  DeviceView view;
  const uint64_t* candidates;
  const uint64_t* victims;
  const uint32_t* elected;  // places and of, of ElectPositions over the candidates' rows
  const uint32_t* elected_of;
  const Counters* counters;
  Swap* swaps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t p) const {
    Swap swap{};
    const uint64_t candidate = candidates[p], victim = victims[p];
    const auto reuse = static_cast<uint32_t>(candidate);
    const uint32_t age = ~static_cast<uint32_t>(victim);
    swap.host_row = OrderedRow(candidate);
    swap.device_row = OrderedRow(victim);
    if (candidate != kNoPlace && victim != kNoPlace && uint64_t{kHysteresis} * reuse < age &&
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
      if (w == DeviceView::kFreeOffset / sizeof(*host)) {  // the free list stays
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

// Begins the next round.
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
