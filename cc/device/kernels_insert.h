// The kernels that make, write and remove rows (kernels.h says what a kernel is here).
//
// Making rows for the keys of a batch that have none:
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
#include "cc/table/bucket_ops.h"
#include "cc/table/stamps.h"

namespace dynemb::device {

// What a batch inserts.
struct Dealt {
  uint32_t keys;       // distinct keys without a row
  uint32_t fresh;      // of these, that get a free row: the first ones
  uint32_t from_free;  // of these, one of the free list: the first ones
  uint32_t free_before, high_before;
};

// Thread 0 takes rows for sums[n] keys.
struct Deal {
  const uint32_t* sums;
  size_t n;
  uint64_t capacity;
  Counters* counters;
  Dealt* dealt;

  DYNEMB_HD void operator()(size_t) const {
    Dealt d;
    d.keys = sums[n];
    d.free_before = counters->free_count;
    d.high_before = counters->high_water;
    const uint64_t room = capacity - counters->size();
    d.fresh = d.keys < room ? d.keys : static_cast<uint32_t>(room);
    d.from_free = d.fresh < d.free_before ? d.fresh : d.free_before;
    counters->free_count -= d.from_free;
    counters->high_water += d.fresh - d.from_free;
    *dealt = d;
  }
};

struct ListNew {
  DeviceView view;
  const uint32_t* sums;
  const Dealt* dealt;
  uint32_t* positions;
  RowId* new_rows;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t j = sums[i];
    if (j == sums[i + 1]) return;
    positions[j] = static_cast<uint32_t>(i);
    RowId row = kNoRow;
    if (j < dealt->from_free) {
      row = *view.FreeRow(dealt->free_before - 1 - j);
    } else if (j < dealt->fresh) {
      row = dealt->high_before + (j - dealt->from_free);
    }
    new_rows[j] = row;
  }
};

struct ClaimSlots {
  DeviceView view;
  KeyArray keys;
  const Dealt* dealt;
  const uint32_t* positions;
  const RowId* new_rows;
  Stamp now;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (j >= dealt->fresh) return;
    const uint64_t hash = MixKey(keys[positions[j]]);
    Claim(lanes, view.ring, ProbeIn(view.ring, hash), new_rows[j], now);
  }
};

struct EvictSlots {
  DeviceView view;
  KeyArray keys;
  const Dealt* dealt;
  const uint32_t* positions;
  RowId* new_rows;
  Stamp now;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (j < dealt->fresh || j >= dealt->keys) return;
    const uint64_t hash = MixKey(keys[positions[j]]);
    const SlotRef at = Evict(lanes, view, view.ring, ProbeIn(view.ring, hash), now);
    if (lanes.rank() == 0) new_rows[j] = at.row;
  }
};

// gone[j] = the row that new key j takes from another key; kNoRow for those that do not.
struct ListEvicted {
  const Dealt* dealt;
  const RowId* new_rows;
  RowId* gone;

  DYNEMB_HD void operator()(size_t j) const {
    gone[j] = j >= dealt->fresh && j < dealt->keys ? new_rows[j] : kNoRow;
  }
};

// Sets vectors of new rows: fill(lanes, position, key, row).

// The initial vector.
struct FillInitial {
  InitializerView initial;
  RowLayout layout;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t, uint64_t key, char* row) const {
    FillInitialVector(lanes, initial, key, layout.dtype, layout.vector(row));
  }
};

// Nothing: the caller writes the vectors.
struct FillNothing {
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes&, size_t, uint64_t, char*) const {}
};

template <class Fill>
struct FillRows {
  DeviceView view;
  KeyArray keys;
  const Dealt* dealt;
  const uint32_t* positions;
  const RowId* new_rows;
  const float* initial_state;  // [state_width]
  Stamp now;
  Fill fill;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t j) const {
    if (j >= dealt->keys || new_rows[j] == kNoRow) return;
    const RowLayout& l = view.layout;
    const size_t position = positions[j];
    char* row = view.RowAt(new_rows[j]);
    if (lanes.rank() == 0) {
      StoreKey(row, l.key_size, 0, keys[position]);
      *l.update(row) = now;
    }
    CopyBytes(lanes, l.state(row), initial_state, l.state_bytes());
    fill(lanes, position, keys[position], row);
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

// Item t counts the new keys t, t + stride, ...
struct CountInserted {
  const RowId* new_rows;
  const Dealt* dealt;
  size_t stride;
  Counters* counters;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t inserted = 0, evicted = 0, refused = 0;
    for (size_t j = t; j < dealt->keys; j += stride) {
      if (new_rows[j] == kNoRow) {
        ++refused;
      } else {
        ++inserted;
        evicted += j >= dealt->fresh;
      }
    }
    if (inserted != 0) AtomicAdd(&counters->inserts, inserted);
    if (evicted != 0) AtomicAdd(&counters->evictions, evicted);
    if (refused != 0) AtomicAdd(&counters->refused, refused);
  }
};

// What the host gets to know of a table without waiting: the counters after its inserting batch of
// this number, in host memory that kernels reach. Each word is written at once.
struct Mailbox {
  uint64_t high_water;  // batch << 32 | the counter
  uint64_t free_count;
};

struct PostCounters {
  const Counters* counters;
  uint32_t batch;
  Mailbox* mailbox;

  DYNEMB_HD void operator()(size_t) const {
    const uint64_t high = static_cast<uint64_t>(batch) << 32;
    AtomicStore(&mailbox->high_water, high | counters->high_water);
    AtomicStore(&mailbox->free_count, high | counters->free_count);
  }
};

// How many slots hold a row last accessed before `now`: item t looks at buckets t, t + stride, ...
struct CountOlder {
  FlatRing ring;
  Stamp now;
  size_t stride;
  uint64_t* older;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t count = 0;
    for (size_t b = t; b < ring.count; b += stride) {
      const Bucket& bucket = ring.buckets[b];
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        count += bucket.row[s] != kNoRow && bucket.access[s] < now;
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

// One step of an optimizer on rows[i].
template <class Formula>
struct ApplyGradients {
  DeviceView view;
  OptimizerCoefficients coefficients;
  KeyArray keys;
  const RowId* rows;
  const float* gradients;
  Rounding rounding;
  Stamp now;
  uint32_t* nonfinite;  // [n], zeros before: whether gradient i has a NaN or Inf

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow) return;
    const RowLayout& l = view.layout;
    char* row = view.RowAt(rows[i]);
    const float* gradient = gradients + i * static_cast<size_t>(l.dim);
    Rounding of_key = rounding;
    of_key.key = keys[i];
    if (!ColumnsFinite(lanes, gradient, l.dim)) AtomicStore(&nonfinite[i], 1u);
    ApplyToRow<Formula>(lanes, coefficients, l.dtype, l.dim, l.vector(row), l.state(row), gradient,
                        of_key);
    if (lanes.rank() == 0) *l.update(row) = now;
  }
};

// Item t counts gradients t, t + stride, ...
struct CountApplied {
  const RowId* rows;
  const uint32_t* nonfinite;
  size_t n;
  size_t stride;
  Counters* counters;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t dropped = 0, bad = 0;
    for (size_t i = t; i < n; i += stride) {
      dropped += rows[i] == kNoRow;
      bad += nonfinite[i];
    }
    if (dropped != 0) AtomicAdd(&counters->dropped_gradients, dropped);
    if (bad != 0) AtomicAdd(&counters->nonfinite_gradients, bad);
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
    *view.layout.update(view.RowAt(rows[i])) = stamps.Of(base + updates[i]);
    AtomicStore(&at.bucket->access[at.slot], stamps.Of(base + accesses[i]));
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
    const FlatProbe probe = ProbeIn(view.ring, MixKey(keys[i]));
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
      const uint64_t hash = MixKey(view.KeyAt(row));
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
