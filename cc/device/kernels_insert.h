// The kernels that make, write and remove rows (kernels.h says what a kernel is here).
//
// Making rows for the keys of a batch that have none, in all its tables at once:
//
//   ElectPositions, FlagFirst, a sum   number them j = 0, 1, ... in the order of the batch
//   Deal                               how many get a row that is free, how many one by eviction
//   ListNew                            position and row of each j
//   ClaimSlots                         slots for those with a free row
//   EvictSlots                         slots and rows for the others: after all claims, so that no
//                                      victim is a slot that is just being claimed
//   (rows that go are saved here, for who wants them)
//   FillRows                           key, time, vector, state
//   SpreadRows                         tells every position its row
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

// What a batch inserts into one table. New keys are numbered across the tables of the batch.
struct Dealt {
  uint32_t first;      // number of the table's first new key
  uint32_t keys;       // distinct keys without a row
  uint32_t fresh;      // of these, that get a free row: the first ones
  uint32_t from_free;  // of these, one of the free list: the first ones
  uint32_t free_before, high_before;
};

// Item t takes rows for the new keys of table t.
struct Deal {
  TableViews tables;
  const uint32_t* sums;
  Dealt* dealt;

  DYNEMB_HD void operator()(size_t t) const {
    const auto index = static_cast<uint32_t>(t);
    const TableView& table = tables[index];
    Counters* const counters = table.counters;
    Dealt d;
    d.first = sums[tables.begin(index)];
    d.keys = sums[tables.end(index)] - d.first;
    d.free_before = counters->free_count;
    d.high_before = counters->high_water;
    const uint64_t room = table.capacity - counters->size();
    d.fresh = d.keys < room ? d.keys : static_cast<uint32_t>(room);
    d.from_free = d.fresh < d.free_before ? d.fresh : d.free_before;
    counters->free_count -= d.from_free;
    counters->high_water += d.fresh - d.from_free;
    dealt[t] = d;
  }
};

struct ListNew {
  TableViews tables;
  const uint32_t* sums;
  const Dealt* dealt;
  uint32_t* positions;
  RowId* new_rows;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t j = sums[i];
    if (j == sums[i + 1]) return;
    positions[j] = static_cast<uint32_t>(i);
    const uint32_t t = tables.IndexOf(i);
    const Dealt& d = dealt[t];
    const uint32_t k = j - d.first;
    RowId row = kNoRow;
    if (k < d.from_free) {
      row = *tables[t].FreeRow(d.free_before - 1 - k);
    } else if (k < d.fresh) {
      row = d.high_before + (k - d.from_free);
    }
    new_rows[j] = row;
  }
};

// The new keys of a batch, for kernels over j.
struct NewKeys {
  TableViews tables;
  KeyArray keys;
  const uint32_t* sums;
  const Dealt* dealt;
  const uint32_t* positions;
  RowId* new_rows;

  DYNEMB_HD bool Has(size_t j) const { return j < sums[tables.items]; }
  DYNEMB_HD uint32_t TableOf(size_t j) const { return tables.IndexOf(positions[j]); }
  DYNEMB_HD uint64_t key(size_t j) const { return keys[positions[j]]; }
  // Whether j's row is, or is to be, one that was another key's.
  DYNEMB_HD bool Evicts(size_t j, uint32_t table) const {
    return j - dealt[table].first >= dealt[table].fresh;
  }
};

struct ClaimSlots {
  NewKeys added;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (!added.Has(j)) return;
    const uint32_t t = added.TableOf(j);
    if (added.Evicts(j, t)) return;
    const TableView& table = added.tables[t];
    const uint64_t hash = table.HashOf(added.key(j));
    Claim(lanes, table.ring, ProbeIn(table.ring, hash), added.new_rows[j], table.now);
  }
};

struct EvictSlots {
  NewKeys added;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (!added.Has(j)) return;
    const uint32_t t = added.TableOf(j);
    if (!added.Evicts(j, t)) return;
    const TableView& table = added.tables[t];
    const uint64_t hash = table.HashOf(added.key(j));
    const SlotRef at = Evict(lanes, table, table.ring, ProbeIn(table.ring, hash), table.now);
    if (lanes.rank() == 0) added.new_rows[j] = at.row;
  }
};

// gone[i] = the row that the key of position i takes from another key; kNoRow, which is there
// before, for those that do not.
struct ListEvicted {
  NewKeys added;
  RowId* gone;

  DYNEMB_HD void operator()(size_t j) const {
    if (added.Has(j) && added.Evicts(j, added.TableOf(j))) {
      gone[added.positions[j]] = added.new_rows[j];
    }
  }
};

// Sets vectors of new rows: fill(lanes, table, position, key, row).

// The initial vector.
struct FillInitial {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, const TableView& table, size_t, uint64_t key,
                            char* row) const {
    FillInitialVector(lanes, table.initial, key, table.layout.dtype, table.layout.vector(row));
  }
};

// Nothing: the caller writes the vectors.
struct FillNothing {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes&, const TableView&, size_t, uint64_t, char*) const {}
};

template <class Fill>
struct FillRows {
  NewKeys added;
  Fill fill;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (!added.Has(j) || added.new_rows[j] == kNoRow) return;
    const TableView& table = added.tables[added.TableOf(j)];
    const RowLayout& l = table.layout;
    const uint64_t key = added.key(j);
    char* row = table.RowAt(added.new_rows[j]);
    if (lanes.rank() == 0) {
      StoreKey(row, l.key_size, 0, key);
      *l.update(row) = table.now;
    }
    CopyBytes(lanes, l.state(row), table.initial_state, l.state_bytes());
    fill(lanes, table, added.positions[j], key, row);
  }
};

// Gives each position without a row that of its key.
struct SpreadRows {
  RowId* rows;
  const uint32_t* sums;
  const uint32_t* places;  // null: keys are distinct
  const uint32_t* of;
  const RowId* new_rows;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] != kNoRow) return;
    const size_t first = places == nullptr ? i : places[of[i]];
    rows[i] = new_rows[sums[first]];
  }
};

// ForTally's items, over as many new keys as there may be.
struct CountInserted {
  NewKeys added;

  struct Tally {
    uint64_t inserted, evicted, refused;
  };
  DYNEMB_HD void operator()(size_t t) const {
    ForTally<Tally>(
        t, added.sums[added.tables.items], [&](size_t j) { return added.TableOf(j); },
        [&](size_t j, Tally* tally) {
          if (added.new_rows[j] == kNoRow) {
            ++tally->refused;
          } else {
            ++tally->inserted;
            tally->evicted += added.Evicts(j, added.TableOf(j));
          }
        },
        [&](const Tally& tally, uint32_t table) {
          Counters* counters = added.tables[table].counters;
          if (tally.inserted != 0) AtomicAdd(&counters->inserts, tally.inserted);
          if (tally.evicted != 0) AtomicAdd(&counters->evictions, tally.evicted);
          if (tally.refused != 0) AtomicAdd(&counters->refused, tally.refused);
        });
  }
};

// Item t posts the counters of table t.
struct PostCounters {
  TableViews tables;

  DYNEMB_HD void operator()(size_t t) const {
    const TableView& table = tables[static_cast<uint32_t>(t)];
    const uint64_t high = static_cast<uint64_t>(table.batch) << 32;
    AtomicStore(&table.mailbox->high_water, high | table.counters->high_water);
    AtomicStore(&table.mailbox->free_count, high | table.counters->free_count);
  }
};

// How many slots hold a row last accessed before `now`: item t looks at buckets t, t + stride, ...
struct CountOlder {
  FlatRing ring;
  StampOrder order;
  Stamp now;
  size_t stride;
  uint64_t* older;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t count = 0;
    for (size_t b = t; b < ring.count; b += stride) {
      const Bucket& bucket = ring.buckets[b];
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        count += bucket.row[s] != kNoRow && order.Rank(bucket.access[s]) < order.Rank(now);
      }
    }
    if (count != 0) AtomicAdd(older, count);
  }
};

// --- Writing rows that are there ---------------------------------------------------------------

// The vector of rows[i] becomes vectors[i], where position i stands for its key: every one if
// `places` is null.
struct WriteVectors {
  DeviceView view;
  const RowId* rows;
  const uint32_t* places;
  const uint32_t* of;
  const char* vectors;
  Stamp now;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow || (places != nullptr && places[of[i]] != i)) return;
    const RowLayout& l = view.layout;
    char* row = view.RowAt(rows[i]);
    CopyBytes(lanes, l.vector(row), vectors + i * l.vector_bytes(), l.vector_bytes());
    if (lanes.rank() == 0) *l.update(row) = now;
  }
};

// Float32 vectors are added to those of rows[i] or take their place; state, unless it is null,
// takes the place of theirs.
struct WriteFloats {
  DeviceView view;
  KeyArray keys;
  const RowId* rows;
  const float* vectors;
  const float* state;
  bool add;
  Rounding rounding;  // its key apart
  Stamp now;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow) return;
    const RowLayout& l = view.layout;
    char* row = view.RowAt(rows[i]);
    Rounding of_key = rounding;
    of_key.key = keys[i];
    const float* from = vectors + i * static_cast<size_t>(l.dim);
    UpdateVector(lanes, l.dtype, l.dim, l.vector(row), of_key,
                 [&](int64_t first, int n, Quad<float>* v) {
                   const Quad<float> given = LoadQuad(from + first, n);
                   for (int c = 0; c < kQuad; ++c) {
                     v->at[c] = add ? v->at[c] + given.at[c] : given.at[c];
                   }
                 });
    if (state != nullptr) {
      CopyBytes(lanes, l.state(row), state + i * static_cast<size_t>(l.state_width),
                l.state_bytes());
    }
    if (lanes.rank() == 0) *l.update(row) = now;
  }
};

// One step of an optimizer on rows[i] of a batch that brings gradients.
template <class Formula>
struct ApplyGradients {
  TableViews tables;
  OptimizerCoefficients coefficients;
  KeyArray keys;
  const RowId* rows;
  uint32_t* nonfinite;  // [items], zeros before: whether gradient i has a NaN or Inf

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow) return;
    const uint32_t t = tables.IndexOf(i);
    const TableView& table = tables[t];
    const RowLayout& l = table.layout;
    char* row = table.RowAt(rows[i]);
    const float* gradient = table.gradients + (i - tables.begin(t)) * static_cast<size_t>(l.dim);
    Rounding of_key = table.rounding;
    of_key.key = keys[i];
    if (!ColumnsFinite(lanes, gradient, l.dim)) AtomicStore(&nonfinite[i], 1u);
    ApplyToRow<Formula>(lanes, coefficients, l.dtype, l.dim, l.vector(row), l.state(row), gradient,
                        of_key);
    if (lanes.rank() == 0) *l.update(row) = table.now;
  }
};

// ForTally's items.
struct CountApplied {
  TableViews tables;
  const RowId* rows;
  const uint32_t* nonfinite;

  struct Tally {
    uint64_t dropped, bad;
  };
  DYNEMB_HD void operator()(size_t t) const {
    ForTally<Tally>(
        t, tables.items, [&](size_t i) { return tables.IndexOf(i); },
        [&](size_t i, Tally* tally) {
          tally->dropped += rows[i] == kNoRow;
          tally->bad += nonfinite[i];
        },
        [&](const Tally& tally, uint32_t table) {
          Counters* counters = tables[table].counters;
          if (tally.dropped != 0) AtomicAdd(&counters->dropped_gradients, tally.dropped);
          if (tally.bad != 0) AtomicAdd(&counters->nonfinite_gradients, tally.bad);
        });
  }
};

// The state of rows[i] becomes state[i], or if `state` is null what new rows have.
struct WriteStates {
  DeviceView view;
  const RowId* rows;
  const float* state;
  const float* initial_state;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const RowLayout& l = view.layout;
    CopyBytes(lanes, l.state(view.RowAt(rows[i])),
              state != nullptr ? state + i * static_cast<size_t>(l.state_width) : initial_state,
              l.state_bytes());
  }
};

// The times of loaded rows, ticks less `base`.
struct WriteTimes {
  DeviceView view;
  const RowId* rows;
  const uint32_t* updates;
  const uint32_t* accesses;
  Tick base;
  Stamps stamps;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint64_t key = view.KeyAt(rows[i]);
    const SlotRef at = view.Find(lanes, key);
    if (lanes.rank() != 0) return;
    *view.layout.update(view.RowAt(rows[i])) = stamps.Encode(base + updates[i]);
    AtomicStore(&at.bucket->access[at.slot], stamps.Encode(base + accesses[i]));
  }
};

// --- Removing ----------------------------------------------------------------------------------

// gone[i] = the row that keys[i] had, for one position of each key; kNoRow for the others.
struct EraseKeys {
  DeviceView view;
  KeyArray keys;
  RowId* gone;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const FlatProbe probe = ProbeIn(view.ring, view.HashOf(keys[i]));
    const SlotRef at = dynemb::Find(lanes, view, view.ring, probe, keys[i]);
    const bool erased = at.bucket != nullptr && Erase(lanes, view.ring, probe, at);
    if (lanes.rank() == 0) gone[i] = erased ? at.row : kNoRow;
  }
};

// flags[i] = whether there is a row in rows[i]; flags[n] = 0.
struct FlagRows {
  const RowId* rows;
  size_t n;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const { flags[i] = i < n && rows[i] != kNoRow ? 1 : 0; }
};

// Frees the rows of `gone`, the k-th of which is sums[i] = k; `wipe` overwrites them with zeros.
struct FreeRows {
  DeviceView view;
  const RowId* gone;
  const uint32_t* sums;
  const Counters* counters;
  bool wipe;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (gone[i] == kNoRow) return;
    char* row = view.RowAt(gone[i]);
    if (wipe) {
      // But the four bytes that are nobody's.
      for (size_t w = lanes.rank(); w < view.layout.stride / 4; w += lanes.width()) {
        if (w != DeviceView::kFreeOffset / 4) reinterpret_cast<uint32_t*>(row)[w] = 0;
      }
    }
    if (lanes.rank() != 0) return;
    *view.layout.update(row) = 0;
    *view.FreeRow(counters->free_count + sums[i]) = gone[i];
  }
};

struct ListFree {
  DeviceView view;
  RowId* rows;

  DYNEMB_HD void operator()(size_t i) const { rows[i] = *view.FreeRow(i); }
};

struct CountFreed {
  const uint32_t* sums;
  size_t n;
  Counters* counters;

  DYNEMB_HD void operator()(size_t) const {
    counters->free_count += sums[n];
    counters->erased += sums[n];
  }
};

// --- Growing -----------------------------------------------------------------------------------

struct ClearBuckets {
  Bucket* buckets;
  DYNEMB_HD void operator()(size_t b) const { ClearBucket(&buckets[b]); }
};

// Moves the slots of bucket b of another ring into the view's.
struct MoveSlots {
  DeviceView view;
  FlatRing from;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t b) const {
    const Bucket& bucket = from.buckets[b];
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      const RowId row = bucket.row[s];
      if (row == kNoRow) continue;
      const uint64_t hash = view.HashOf(view.KeyAt(row));
      Claim(lanes, view.ring, ProbeIn(view.ring, hash), row, bucket.access[s]);
    }
  }
};

// Row r of one table's rows to where another keeps it; states start anew unless layouts agree.
struct MoveRows {
  TieredRows from;
  RowLayout from_layout;
  TieredRows to;
  RowLayout to_layout;
  const float* initial_state;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t r) const {
    const auto row = static_cast<RowId>(r);
    const char* source = from.At(row);
    char* target = to.At(row);
    CopyBytes(lanes, target, source, from_layout.vector_offset);
    CopyBytes(lanes, to_layout.vector(target), from_layout.vector(source),
              from_layout.vector_bytes());
    CopyBytes(lanes, to_layout.state(target), initial_state, to_layout.state_bytes());
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_INSERT_H_
