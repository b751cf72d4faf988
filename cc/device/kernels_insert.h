// The kernels that create, write and remove rows (kernels.h defines kernels).
//
// Rows for the keys of a batch that have none are created in all tables of the batch at once:
//
//   ElectPositions, FlagFirst, a sum   number the keys j = 0, 1, ... in the order of the batch
//   Deal                               counts the keys that get a free row, and those that evict
//   ListNew                            lists position and row of each j
//   ClaimSlots                         claims slots for the keys with a free row
//   EvictSlots                         takes slots and rows for the other keys. It runs after all
//                                      claims, so that no victim is a slot that is being claimed.
//   (evicted rows are saved here, for cuts and InsertAndEvict)
//   FillRows                           sets key, last update, vector and state
//   SpreadRows                         gives every position its row
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
struct Dealt {
  uint32_t first;      // the number of the table's first new key
  uint32_t keys;       // distinct keys without a row
  uint32_t fresh;      // the first `fresh` of them get a free row; the others evict
  uint32_t from_free;  // the first `from_free` of these get a row from the free list
  uint32_t free_before, high_before;
};

// Item t allocates rows for the new keys of table t.
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
  // Whether key j takes the row of an evicted key.
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

// gone[i] = the row that the key of position i takes from an evicted key. The caller has set the
// other entries to kNoRow.
struct ListEvicted {
  NewKeys added;
  RowId* gone;

  DYNEMB_HD void operator()(size_t j) const {
    if (added.Has(j) && added.Evicts(j, added.TableOf(j))) {
      gone[added.positions[j]] = added.new_rows[j];
    }
  }
};

// FillRows calls fill(lanes, table, position, key, row) to set the vector of a new row.

// Fills in the initial vector.
struct FillInitial {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, const TableView& table, size_t, uint64_t key,
                            char* row) const {
    FillInitialVector(lanes, table.initial, key, table.layout.dtype, table.layout.vector(row));
  }
};

// Does nothing: the caller writes the vectors.
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

// Sets the row of each position without one to the new row of its key.
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

// Counts inserted, evicted and refused keys. Items as in ForTally, over the new keys.
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

// Counts the slots whose row was last accessed before `now`. Item t examines the buckets t, t +
// stride, ...
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

// --- Writing existing rows ---------------------------------------------------------------------

// Sets the vector of rows[i] to vectors[i] if i is the elected position of its key. If `places` is
// null, every position is.
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

// Adds float32 vectors to the vectors of rows[i], or replaces them. Replaces the state, unless
// `state` is null.
struct WriteFloats {
  DeviceView view;
  KeyArray keys;
  const RowId* rows;
  const float* vectors;
  const float* state;
  bool add;
  Rounding rounding;  // the key is set per row
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

// One step of an optimizer on rows[i] of a batch with gradients.
template <class Formula>
struct ApplyGradients {
  TableViews tables;
  OptimizerCoefficients coefficients;
  KeyArray keys;
  const RowId* rows;
  uint32_t* nonfinite;  // [items], zeros at first; 1: gradient i has a NaN or Inf

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

// Counts dropped and nonfinite gradients. Items as in ForTally.
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

// Sets the state of rows[i] to state[i]; if `state` is null, to the initial state.
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

// Sets the times of loaded rows, which are given as ticks minus `base`.
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

// Erases keys. gone[i] = the row that keys[i] had, for one position of each key; kNoRow for its
// other positions.
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

// flags[i] = whether rows[i] is a row; flags[n] = 0.
struct FlagRows {
  const RowId* rows;
  size_t n;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const { flags[i] = i < n && rows[i] != kNoRow ? 1 : 0; }
};

// Frees the rows in `gone`. gone[i] is the sums[i]-th of them. `wipe`: overwrites them with
// zeros.
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
      // All bytes except the four that hold the free list.
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

// Copies the slots of bucket b of another ring into the view's ring.
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

// Copies row r to its address in another layout. Its state becomes the initial state.
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
