// The kernels of promotion, which keep hot rows in the device tier (kernels.h defines kernels).
//
// The device tier is a cache. An inserting lookup, as in training, promotes all rows of the host
// tier that it has read (Promotes::kRead), if scores are last accesses. Otherwise the lookup would
// read them over PCIe, and the step would read and write them. To move a row is to read it once,
// and to write the row whose place it takes. These places are those that were not read for the
// longest time, of a window. A row that this lookup has read keeps its place.
//
// Between batches, the rows that are read most often are promoted (Promotes::kHotter). This uses
// only the scores that the table has anyway (score.h). If they are last accesses:
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
// cache. A row that is only slightly hotter is not worth the copies. benchmarks/log.md
// compares other rules.
//
// Candidates are noted in slots, which a hash of the row's id selects. If several rows share a
// slot, the best is noted. The number of rows that are read between two promotions, and their
// order, do not matter. A row is noted at most once.
//
// One promotion is for several tables. The slots, the places of the windows, and the pairs are
// numbered across the tables (TierTables):
//
//   FindKeys                     notes candidates, or lists the rows that a batch reads
//   ListCandidates, SortPairs    sorts the candidates of each table, and empties the slots; or
//   ListRead, SortPairs          sorts the rows that the batch has read
//   LookAtPlaces, SortPairs      sorts the places of each table's window
//   PairUp                       determines the pairs that change places, and their slots
//   SwapRows                     swaps contents and slots
//
// Before and after, exactly one slot of the index names a row: the slot of its key. Two rows of
// different tiers swap contents, and their slots swap ids, so every row is in exactly one tier at
// any time.
#ifndef DYNEMB_DEVICE_KERNELS_TIERS_H_
#define DYNEMB_DEVICE_KERNELS_TIERS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/ranges.h"
#include "cc/table/bucket_ops.h"

namespace dynemb::device {

// A candidate must be read this many times as often as the row whose place it takes.
constexpr uint32_t kHysteresis = 2;
// The number of places that are examined per candidate.
constexpr uint32_t kPlacesEach = 4;

// Which candidates are promoted.
enum class Promotes : uint8_t {
  kHotter,  // those that are read more often than the row whose place they take
  kRead     // all for which there is a place whose row was not read at this time; for last accesses
};

// The state that is kept between two promotions. The slots of the candidates follow it.
struct TierState {
  uint64_t hand;  // the place that is examined next
};

// A table in a promotion.
struct TierTable {
  DeviceView view;
  TierState* state;
  uint64_t* slots;    // of candidates
  uint32_t first_id;  // for Promotes::kRead: in the batch
  Counters* counters;
  EvictStrategy strategy;
  Promotes which;
  bool by_time;  // whether scores are stamps
  StampOrder stamps;
  Stamp now;
};

struct TierTables {
  const TierTable* tables;
  const uint32_t* slot_begins;  // [count + 1]: table t has the slots [slot_begins[t], ...)
  const uint32_t* place_begins;
  const uint32_t* pair_begins;
  uint32_t count;

  DYNEMB_HD uint32_t places(uint32_t t) const { return place_begins[t + 1] - place_begins[t]; }
};

// Rows in the order in which they are paired. From the low bits on, a key has 32 bits of the order
// among the rows of a table (reuse or ~score of a candidate, ~age or score of a place), a bit of
// the entries without a row, which come last, and the number of the table.
struct OrderedRows {
  uint64_t* keys;
  RowId* rows;

  static constexpr int kOrderBits = 33;
  DYNEMB_HD void Set(size_t i, uint32_t table, uint32_t order, RowId row) const {
    keys[i] = static_cast<uint64_t>(table) << kOrderBits |
              (row == kNoRow ? uint64_t{1} << (kOrderBits - 1) : uint64_t{order});
    rows[i] = row;
  }
  DYNEMB_HD uint32_t OrderOf(size_t i) const { return static_cast<uint32_t>(keys[i]); }
};

// Lists the candidate of slot i, and empties it.
struct ListCandidates {
  TierTables tables;
  OrderedRows candidates;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t t = RangeOf(tables.slot_begins, tables.count, i);
    uint64_t* const slot = tables.tables[t].slots + (i - tables.slot_begins[t]);
    const uint64_t noted = *slot;
    if (noted == 0) return candidates.Set(i, t, 0, kNoRow);
    candidates.Set(i, t, Candidates::OrderOf(noted), Candidates::RowOf(noted));
    *slot = 0;
  }
};

// Lists the row of candidate i, an id of the batch. The order of the candidates must not depend on
// which of the ids with the same row has it.
struct ListRead {
  TierTables tables;
  const RowId* read;  // FindKeys::read
  OrderedRows candidates;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t t = RangeOf(tables.slot_begins, tables.count, i);
    const RowId row = read[tables.tables[t].first_id + (i - tables.slot_begins[t])];
    candidates.Set(i, t, row, row);
  }
};

// Examines place i: of the window of a table, the w-th place from the hand on, cyclic among the
// places of the device tier.
struct LookAtPlaces {
  TierTables tables;
  OrderedRows candidates;  // sorted
  OrderedRows places;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t t = RangeOf(tables.place_begins, tables.count, i);
    const TierTable& table = tables.tables[t];
    const DeviceView& view = table.view;
    const size_t w = i - tables.place_begins[t];
    auto row = static_cast<RowId>((table.state->hand + w) % view.rows.split);
    uint32_t order = 0;
    const bool is_due = candidates.rows[tables.slot_begins[t] + w / kPlacesEach] != kNoRow;
    if (is_due && row < table.counters->high_water && *view.UpdateAt(row) != 0) {
      const SlotRef at = view.Find(lanes, view.KeyAt(row));
      order = AtomicLoad(&at.bucket->score[at.slot]);
      if (table.by_time) {
        const Stamp age = table.stamps.Rank(table.now) - table.stamps.Rank(order);
        if (table.stamps.Rank(order) >= table.stamps.Rank(table.now)) row = kNoRow;
        order = ~age;
      }
    } else {
      row = kNoRow;
    }
    if (lanes.rank() == 0) places.Set(i, t, order, row);
  }
};

struct Swap {
  RowId* host_slot;    // the slot of the key that moves to the device tier; null: no move
  RowId* device_slot;  // the slot of the key that moves to the host tier
  RowId host_row, device_row;
};

// Pair i: the p-th candidate and the p-th place of a table, both in their orders. Since the
// candidate was noted, its row may have been freed or given to another key. After ResetState or
// SwapRows it may even be in the device tier.
struct PairUp {
  TierTables tables;
  OrderedRows candidates, places;
  Swap* swaps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t t = RangeOf(tables.pair_begins, tables.count, i);
    const TierTable& table = tables.tables[t];
    const DeviceView& view = table.view;
    const size_t p = i - tables.pair_begins[t];
    const size_t candidate = tables.slot_begins[t] + p, place = tables.place_begins[t] + p;
    Swap swap{};
    swap.host_row = candidates.rows[candidate];
    swap.device_row = places.rows[place];
    if (swap.host_row != kNoRow && swap.device_row != kNoRow &&
        (table.which == Promotes::kRead ||
         IsHotter(table.strategy, candidates.OrderOf(candidate), places.OrderOf(place))) &&
        !view.InDevice(swap.host_row) && swap.host_row < table.counters->high_water &&
        *view.UpdateAt(swap.host_row) != 0) {
      const SlotRef host = view.Find(lanes, view.KeyAt(swap.host_row));
      const SlotRef device = view.Find(lanes, view.KeyAt(swap.device_row));
      swap.host_slot = &host.bucket->row[host.slot];
      swap.device_slot = &device.bucket->row[device.slot];
    }
    if (lanes.rank() == 0) swaps[i] = swap;
  }

 private:
  // Whether a candidate with this order should take a place with this order.
  DYNEMB_HD static bool IsHotter(EvictStrategy strategy, uint32_t candidate, uint32_t place) {
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
  TierTables tables;
  const Swap* swaps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const Swap swap = swaps[i];
    if (swap.host_slot == nullptr) return;
    const DeviceView& view = tables.tables[RangeOf(tables.pair_begins, tables.count, i)].view;
    auto* host = reinterpret_cast<Quad<float>*>(view.VectorAt(swap.host_row));
    auto* device = reinterpret_cast<Quad<float>*>(view.VectorAt(swap.device_row));
    const size_t count = view.layout.content_bytes() / sizeof(*host);
    for (size_t w = lanes.rank(); w < count; w += lanes.width()) {
      const Quad<float> from_host = host[w];
      host[w] = device[w];
      device[w] = from_host;
    }
    if (lanes.rank() != 0) return;
    RowHead& host_head = view.heads[swap.host_row];
    RowHead& device_head = view.heads[swap.device_row];
    const RowHead from_host = host_head;
    host_head.key = device_head.key;  // the free list does not move
    host_head.update = device_head.update;
    device_head.key = from_host.key;
    device_head.update = from_host.update;
    *swap.host_slot = swap.device_row;
    *swap.device_slot = swap.host_row;
  }
};

// Item t moves the hand of table t.
struct EndPromotion {
  TierTables tables;
  OrderedRows candidates;  // sorted

  DYNEMB_HD void operator()(size_t item) const {
    const auto t = static_cast<uint32_t>(item);
    const TierTable& table = tables.tables[t];
    const uint32_t begin = tables.slot_begins[t], end = tables.slot_begins[t + 1];
    // The number of candidates, which come before the entries without a row.
    uint32_t low = begin, high = end;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (candidates.rows[middle] != kNoRow) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const uint64_t due = uint64_t{kPlacesEach} * (low - begin);
    const uint32_t window = tables.places(t);
    table.state->hand = (table.state->hand + (due < window ? due : window)) % table.view.rows.split;
  }
};

// Items as in ForTally, over the pairs.
struct CountSwaps {
  TierTables tables;
  const Swap* swaps;

  DYNEMB_HD void operator()(size_t t) const {
    ForTally<uint32_t>(
        t, tables.pair_begins[tables.count],
        [&](size_t i) { return RangeOf(tables.pair_begins, tables.count, i); },
        [&](size_t i) { return swaps[i].host_slot != nullptr; },
        [](size_t, bool moved, uint32_t, uint32_t* promotions) { *promotions += moved; },
        [&](uint32_t promotions, uint32_t table) {
          AtomicAddTogether(&tables.tables[table].counters->promotions, promotions);
        });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_TIERS_H_
