// The kernels that create rows (kernels.h defines kernels).
//
// Rows for the keys of a batch that have none are created in all tables of the batch at once:
//
//   PinRows                            pins the rows that the batch has found (Evictable), where
//                                      rows may be evicted and scores are not stamps
//   ElectPositions, FlagFirst, a sum   number the keys j = 0, 1, ... in the order of the batch
//   (keys are admitted or refused here, and the admitted keys numbered: kernels_admission.h)
//   ListNew                            lists position and row of each j: a free row, or none for a
//                                      key that evicts (RowGrant)
//   ClaimSlots                         claims slots for the keys with a free row
//   EvictSlots                         takes rows and slots for the other keys (Evict). It runs
//                                      after all claims, so that no victim is a slot that is being
//                                      claimed.
//   (evicted rows are saved here, for cuts and InsertAndEvict)
//   FillRows                           sets key, last update, vector and state
//   CountRepeats                       counts the other positions of each key, in tables that count
//   SpreadRows                         gives every position its row; updates and posts the
//                                      counters, whose values from before the batch all earlier
//                                      kernels read
//
// If no key is new, every kernel from ListNew on returns at once, except the counters.
//
// ReadRooms, ListLost, ListEvictedKeys, ListEvictedRows and ReadEnds collect what the host needs to
// know.
#ifndef DYNEMB_DEVICE_KERNELS_INSERT_H_
#define DYNEMB_DEVICE_KERNELS_INSERT_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/stamps.h"

namespace dynemb::device {

// The row ids that a batch allocates in one table. New keys are numbered across the tables of the
// batch.
struct RowGrant {
  uint32_t first;      // the number of the table's first new key
  uint32_t keys;       // distinct keys without a row
  uint32_t fresh;      // the first `fresh` of them get a free row; the others evict
  uint32_t from_free;  // the first `from_free` of these get a row from the free list
  uint32_t free_before, high_before;
};

// The numbers that the host needs to make room for a batch in a table.
struct Room {
  uint32_t keys;  // distinct keys without a row
  uint32_t high_water, free_count;
};

// Item t reads the room of table t.
struct ReadRooms {
  TableViews tables;
  const uint32_t* sums;
  Room* rooms;

  DYNEMB_HD void operator()(size_t t) const {
    const auto index = static_cast<uint32_t>(t);
    const Counters& counters = *tables[index].counters;
    rooms[t] = {sums[tables.end(index)] - sums[tables.begin(index)], counters.high_water,
                counters.free_count};
  }
};

// The new keys of a batch, for kernels over j, and the rows that they get. Valid until SpreadRows,
// which updates the counters.
struct NewKeys {
  TableViews tables;
  KeyArray keys;
  const uint32_t* sums;
  uint32_t* positions;
  RowId* new_rows;
  const Score* scores;  // by position; null: the scores of new rows

  DYNEMB_HD size_t count() const { return sums[tables.items]; }
  DYNEMB_HD uint32_t TableOf(size_t j) const { return tables.IndexOf(positions[j]); }
  DYNEMB_HD uint64_t key(size_t j) const { return keys[positions[j]]; }
  DYNEMB_HD Score ScoreOf(size_t j, const TableView& table) const {
    return scores != nullptr ? scores[positions[j]] : table.new_score;
  }
  DYNEMB_HD RowGrant Grant(uint32_t t) const {
    const TableView& table = tables[t];
    const Counters* const counters = table.counters;
    RowGrant g;
    g.first = sums[tables.begin(t)];
    g.keys = sums[tables.end(t)] - g.first;
    g.free_before = counters->free_count;
    g.high_before = counters->high_water;
    const uint64_t room = table.capacity - counters->size();
    g.fresh = g.keys < room ? g.keys : static_cast<uint32_t>(room);
    g.from_free = g.fresh < g.free_before ? g.fresh : g.free_before;
    return g;
  }
  // Whether key j takes the row of an evicted key.
  DYNEMB_HD bool Evicts(size_t j, uint32_t table) const {
    const RowGrant g = Grant(table);
    return j - g.first >= g.fresh;
  }
};

// Item i is a position of the batch.
struct ListNew {
  NewKeys added;

  DYNEMB_HD size_t Items() const { return added.count() != 0 ? added.tables.items : 0; }
  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t j = added.sums[i];
    if (j == added.sums[i + 1]) return;
    added.positions[j] = static_cast<uint32_t>(i);
    const uint32_t t = added.tables.IndexOf(i);
    const RowGrant g = added.Grant(t);
    const uint32_t k = j - g.first;
    RowId row = kNoRow;
    if (k < g.from_free) {
      row = *added.tables[t].FreeRow(g.free_before - 1 - k);
    } else if (k < g.fresh) {
      row = g.high_before + (k - g.from_free);
    }
    added.new_rows[j] = row;
  }
};

struct ClaimSlots {
  NewKeys added;

  DYNEMB_HD size_t Items() const { return added.count(); }
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    const uint32_t t = added.TableOf(j);
    if (added.Evicts(j, t)) return;
    const TableView& table = added.tables[t];
    const uint64_t hash = table.HashOf(added.key(j));
    Claim(lanes, table.ring, ProbeIn(table.ring, hash), added.new_rows[j], added.ScoreOf(j, table));
    uint32_t* const pins = table.evictable.pins;
    if (lanes.rank() == 0 && pins != nullptr) Evictable::Pin(lanes, pins, added.new_rows[j]);
  }
};

// Pins the rows that the batch has found.
struct PinRows {
  TableViews tables;
  const RowId* rows;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const TableView& table = tables.Of(i);
    if (lanes.rank() != 0 || table.evictable.pins == nullptr || !IsRow(rows[i])) return;
    if (Evictable::Pin(lanes, table.evictable.pins, rows[i])) {
      AtomicAddTogether(table.num_pinned, 1);
    }
  }
};

struct EvictSlots {
  NewKeys added;
  Score* scores;  // [j] the score of the evicted key; null: not wanted

  DYNEMB_HD size_t Items() const { return added.count(); }
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    const uint32_t t = added.TableOf(j);
    if (!added.Evicts(j, t)) return;
    const TableView& table = added.tables[t];
    const uint64_t hash = table.HashOf(added.key(j));
    const EvictedSlot at = Evict(lanes, table, table.ring, ProbeIn(table.ring, hash),
                                 table.evictable, added.ScoreOf(j, table));
    if (lanes.rank() != 0) return;
    added.new_rows[j] = at.row;
    if (scores != nullptr) scores[j] = at.score;
    if (at.row == kNoRow) AtomicAdd(&table.counters->refused_now, 1u);
  }
};

// gone[i] = the row that the key of position i takes from an evicted key, and gone_scores[i] the
// score of the evicted key. The caller has set the other entries of `gone` to kNoRow.
struct ListEvicted {
  NewKeys added;
  const Score* scores;  // of EvictSlots
  RowId* gone;
  Score* gone_scores;

  DYNEMB_HD size_t Items() const { return added.count(); }
  DYNEMB_HD void operator()(size_t j) const {
    if (added.Evicts(j, added.TableOf(j))) {
      gone[added.positions[j]] = added.new_rows[j];
      gone_scores[added.positions[j]] = scores[j];
    }
  }
};

// FillRows calls fill(lanes, table, position, key, row) to set the vector of a new row.

// Fills in the initial vector.
struct FillInitial {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, const TableView& table, size_t, uint64_t key,
                            RowId row) const {
    FillInitialVector(lanes, table.initial, key, table.layout.dtype, table.VectorAt(row));
  }
};

// Does nothing: the caller writes the vectors.
struct FillNothing {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes&, const TableView&, size_t, uint64_t, RowId) const {}
};

template <class Fill>
struct FillRows {
  NewKeys added;
  Fill fill;

  DYNEMB_HD size_t Items() const { return added.count(); }
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    const RowId row = added.new_rows[j];
    if (row == kNoRow) return;
    const TableView& table = added.tables[added.TableOf(j)];
    const uint64_t key = added.key(j);
    if (lanes.rank() == 0) {
      table.heads[row].key = key;
      table.heads[row].update = table.now;
    }
    CopyBytes(lanes, table.StateAt(row), table.initial_state, table.layout.state_bytes());
    fill(lanes, table, added.positions[j], key, row);
  }
};

// Counts the positions of new keys that are not the first ones of their keys.
struct CountRepeats {
  TableViews tables;
  KeyArray keys;
  const RowId* rows;
  const uint32_t* places;
  const uint32_t* of;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] != kNoRow || places[of[i]] == i) return;
    const TableView& table = tables.Of(i);
    if (table.touch.kind != Touch::Kind::kCount) return;
    const SlotRef at = table.Find(lanes, keys[i]);
    if (lanes.rank() != 0 || at.bucket == nullptr) return;
    Score* const score = &at.bucket->score[at.slot];
    FindKeys::Count(table.touch, 1, score, AtomicLoad(score));
  }
};

// Sets the row of each position without one to the new row of its key. A key without a number was
// refused. Item t also updates and posts the counters of table t, so there are at least as many
// items as tables.
struct SpreadRows {
  NewKeys added;
  RowId* rows;
  const uint32_t* places;  // null: keys are distinct
  const uint32_t* of;
  bool all_admitted;  // every key without a row has a number
  bool counts;        // whether inserted, evicted and refused keys are counted

  DYNEMB_HD size_t Items() const {
    const TableViews& tables = added.tables;
    const bool any = !all_admitted || added.count() != 0;
    return any && tables.items > tables.count ? tables.items : tables.count;
  }
  DYNEMB_HD void operator()(size_t i) const {
    if (i < added.tables.count) Settle(static_cast<uint32_t>(i));
    if (i >= added.tables.items || rows[i] != kNoRow) return;
    const size_t first = places == nullptr ? i : places[of[i]];
    const uint32_t j = added.sums[first];
    rows[i] =
        j != added.sums[first + 1] ? added.new_rows[j] : added.tables.Of(i).admission.absent_row;
  }

 private:
  DYNEMB_HD void Settle(uint32_t t) const {
    const TableView& table = added.tables[t];
    Counters* const counters = table.counters;
    const RowGrant g = added.Grant(t);
    const uint32_t refused = counters->refused_now;
    counters->refused_now = 0;
    counters->free_count -= g.from_free;
    counters->high_water += g.fresh - g.from_free;
    if (counts) {
      counters->inserts += g.keys - refused;
      if (!table.has_cold_rows) counters->evictions += g.keys - g.fresh - refused;
      counters->refused += refused;
    }
    const uint64_t high = static_cast<uint64_t>(table.batch) << 32;
    AtomicStore(&table.mailbox->high_water, high | counters->high_water);
    AtomicStore(&table.mailbox->free_count, high | counters->free_count);
  }
};

// Counts the rows that may be evicted if scores are stamps. Item t examines the buckets t, t +
// stride, ...
struct CountOlder {
  FlatRing ring;
  Evictable evictable;
  size_t stride;
  uint64_t* older;

  DYNEMB_HD void operator()(size_t t) const {
    uint32_t count = 0;
    for (size_t b = t; b < ring.count; b += stride) {
      const Bucket& bucket = ring.buckets[b];
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        count +=
            bucket.row[s] != kNoRow && evictable.order.Rank(bucket.score[s]) < evictable.rank_now;
      }
    }
    AtomicAddTogether(older, count);
  }
};

// Lists the keys of the rows in `rows`, where sums[i] is the number of rows before rows[i].
struct ListLost {
  TableViews tables;
  const RowId* rows;
  const uint32_t* sums;
  uint64_t* keys;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] != kNoRow) keys[sums[i]] = tables.Of(i).KeyAt(rows[i]);
  }
};

// Lists the keys of the rows in `rows` and their positions, where sums[i] is the number of rows
// before rows[i].
struct ListEvictedKeys {
  DeviceView view;
  const RowId* rows;
  const uint32_t* sums;
  uint64_t* keys;
  uint32_t* positions;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] == kNoRow) return;
    keys[sums[i]] = view.KeyAt(rows[i]);
    positions[sums[i]] = static_cast<uint32_t>(i);
  }
};

// Lists the rows at positions of `rows`, and their scores as Table::Scores returns them.
struct ListEvictedRows {
  const RowId* rows;
  const Score* scores;
  const uint32_t* positions;
  Stamps stamps;
  bool by_time;  // whether scores are stamps
  RowId* listed;
  int64_t* listed_scores;

  DYNEMB_HD void operator()(size_t j) const {
    const uint32_t i = positions[j];
    listed[j] = rows[i];
    listed_scores[j] =
        by_time ? static_cast<int64_t>(stamps.Decode(scores[i])) : int64_t{scores[i]};
  }
};

// ends[t] = the sum at the end of table t's share of the batch.
struct ReadEnds {
  TableViews tables;
  const uint32_t* sums;
  uint32_t* ends;

  DYNEMB_HD void operator()(size_t t) const {
    ends[t] = sums[tables.end(static_cast<uint32_t>(t))];
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_INSERT_H_
