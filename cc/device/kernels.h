// The kernels of a device table: bodies for Session's ForEach, ForKeys and ForRows (device.h). Each
// is a struct of values and device addresses; what it does for item i is its operator().
//
// A count that only the device knows is an address: bodies are launched for as many items as there
// may be, and end at once for those beyond it.
#ifndef DYNEMB_DEVICE_KERNELS_H_
#define DYNEMB_DEVICE_KERNELS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/row_math.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/stamps.h"
#include "cc/table/types.h"

namespace dynemb::device {

// What a table counts, in device memory.
struct Counters {
  uint32_t high_water;  // row ids handed out at least once are below it
  uint32_t free_count;  // of these, that hold no row
  uint64_t device_hits, host_hits, misses;
  uint64_t inserts, evictions, erased, refused;
  uint64_t dropped_gradients, nonfinite_gradients;
  uint64_t promotions;

  DYNEMB_HD uint64_t size() const { return high_water - free_count; }
};

// Copies `bytes` of a row, or to one, with the widest access that both addresses allow. Every team
// that touches these bytes deals them alike.
template <class Lanes>
DYNEMB_HD void CopyBytes(Lanes& lanes, void* to, const void* from, size_t bytes) {
  const uintptr_t low = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  const auto copy = [&](auto word) {
    using Word = decltype(word);
    for (size_t w = lanes.rank(); w < bytes / sizeof(Word); w += lanes.width()) {
      static_cast<Word*>(to)[w] = static_cast<const Word*>(from)[w];
    }
  };
  if (low % 16 == 0) {
    copy(Quad<float>{});
  } else if (low % 8 == 0) {
    copy(uint64_t{});
  } else if (low % 4 == 0) {
    copy(uint32_t{});
  } else {
    copy(uint16_t{});
  }
}

// --- Finding ---------------------------------------------------------------------------------

// Rows of the host tier that a batch has read: what may be moved to the device tier after it.
struct Candidates {
  uint32_t* count = nullptr;  // may pass `most`
  uint64_t* order = nullptr;  // [most] ticks since the access before << 32 | row
  uint32_t most = 0;          // 0: none are noted
};

// rows[i] = the row of keys[i], or kNoRow; null: not wanted. found[i] likewise. Stamps rows that
// are there with `now`, unless it is 0.
struct FindKeys {
  DeviceView view;
  KeyArray keys;
  Stamp now;
  RowId* rows;
  bool* found;
  Candidates candidates;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const SlotRef at = view.Find(lanes, keys[i]);
    if (lanes.rank() != 0) return;
    if (rows != nullptr) rows[i] = at.row;
    if (found != nullptr) found[i] = at.bucket != nullptr;
    if (now == 0 || at.bucket == nullptr) return;
    Stamp* access = &at.bucket->access[at.slot];
    const Stamp was = AtomicLoad(access);
    if (was == now) return;
    if (candidates.most == 0 || view.InDevice(at.row)) {
      AtomicStore(access, now);
    } else if (AtomicExchange(access, now) != now) {  // the first of this batch to come here
      if (AtomicLoad(candidates.count) >= candidates.most) return;  // one address for all
      const uint32_t c = AtomicAdd(candidates.count, 1u);
      if (c < candidates.most) {
        candidates.order[c] = static_cast<uint64_t>(now - was) << 32 | at.row;
      }
    }
  }
};

// Adds to the counters what a lookup found: item t looks at rows t, t + stride, ...
struct CountFound {
  const RowId* rows;
  size_t n;
  size_t stride;
  uint64_t split;
  Counters* counters;

  DYNEMB_HD void operator()(size_t t) const {
    uint64_t device = 0, host = 0, missed = 0;
    for (size_t i = t; i < n; i += stride) {
      if (rows[i] == kNoRow) {
        ++missed;
      } else if (rows[i] < split) {
        ++device;
      } else {
        ++host;
      }
    }
    if (device != 0) AtomicAdd(&counters->device_hits, device);
    if (host != 0) AtomicAdd(&counters->host_hits, host);
    if (missed != 0) AtomicAdd(&counters->misses, missed);
  }
};

// rows[i] stays where it still is keys[i]'s row (the generation check); else it becomes the row
// that the key has now, if rows may move between tiers, or kNoRow.
struct ResolveRows {
  DeviceView view;
  KeyArray keys;
  const RowId* rows;
  RowId* resolved;
  const Counters* counters;
  bool rows_move;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    RowId row = rows[i];
    if (row >= counters->high_water || *view.layout.update(view.RowAt(row)) == 0 ||
        view.KeyAt(row) != keys[i]) {
      row = rows_move && row != kNoRow ? view.Find(lanes, keys[i]).row : kNoRow;
    }
    if (lanes.rank() == 0) resolved[i] = row;
  }
};

// --- Reading ---------------------------------------------------------------------------------

// vectors[i] = the vector of rows[i]; where there is none, `otherwise`, or if that is null the
// vector that keys[i] starts with, or if `initial` has no dim nothing.
struct ReadVectors {
  DeviceView view;
  InitializerView initial;
  KeyArray keys;
  const RowId* rows;
  const void* otherwise;
  char* vectors;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const size_t bytes = view.layout.vector_bytes();
    char* to = vectors + i * bytes;
    if (rows[i] != kNoRow) {
      CopyBytes(lanes, to, view.layout.vector(view.RowAt(rows[i])), bytes);
    } else if (otherwise != nullptr) {
      CopyBytes(lanes, to, otherwise, bytes);
    } else {
      FillInitialVector(lanes, initial, keys[i], view.layout.dtype, to);
    }
  }
};

// A row's columns, as arrays; null skips one. float_vectors are converted, vectors copied. Rows
// that are kNoRow are zeros.
struct ReadColumns {
  DeviceView view;
  const RowId* rows;
  void* keys;
  char* vectors;
  float* float_vectors;
  float* state;
  Stamp* updates;
  Stamp* accesses;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const RowLayout& l = view.layout;
    const RowId row = rows[i];
    const char* at = row == kNoRow ? nullptr : view.RowAt(row);
    if (lanes.rank() == 0 && at != nullptr) {
      if (keys != nullptr) StoreKey(keys, l.key_size, i, view.KeyAt(row));
      if (updates != nullptr) updates[i] = *l.update(at);
    }
    if (accesses != nullptr && at != nullptr) {
      const SlotRef slot = view.Find(lanes, view.KeyAt(row));
      if (lanes.rank() == 0) accesses[i] = AtomicLoad(&slot.bucket->access[slot.slot]);
    }
    if (vectors != nullptr && at != nullptr) {
      CopyBytes(lanes, vectors + i * l.vector_bytes(), l.vector(at), l.vector_bytes());
    }
    if (float_vectors != nullptr) {
      float* to = float_vectors + i * static_cast<size_t>(l.dim);
      for (int64_t c = lanes.rank(); c < l.dim; c += lanes.width()) {
        to[c] = at == nullptr ? 0.0f : LoadElement(l.dtype, l.vector(at), c);
      }
    }
    if (state != nullptr && l.state_width != 0) {
      float* to = state + i * static_cast<size_t>(l.state_width);
      for (int64_t c = lanes.rank(); c < l.state_width; c += lanes.width()) {
        to[c] = at == nullptr ? 0.0f : l.state(at)[c];
      }
    }
  }
};

// copies[i] = rows[i], whole.
struct CopyRows {
  DeviceView view;
  const RowId* rows;
  char* copies;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    CopyBytes(lanes, copies + i * view.layout.stride, view.RowAt(rows[i]), view.layout.stride);
  }
};

// Table::Changed.
struct CompareUpdates {
  DeviceView view;
  const RowId* rows;
  const RowId* rows_before;
  Tick base, since, now;
  bool* changed;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] == kNoRow) {
      changed[i] = true;
      return;
    }
    const Tick updated = base + *view.layout.update(view.RowAt(rows[i]));
    const bool is_new = rows_before[i] == kNoRow && updated == now;
    changed[i] = updated > since && !is_new;
  }
};

// --- Repeated keys ---------------------------------------------------------------------------

// Which position stands for a key that a batch may repeat: a hash set of positions, 2^log_places of
// them, more than there are keys, filled with kNoPosition before. of[i] is the place of keys[i]'s;
// only keys without a row in `rows` take part, if it is given.
constexpr uint32_t kNoPosition = 0xFFFFFFFFu;

template <bool kLast>
struct ElectPositions {
  KeyArray keys;
  const RowId* rows;
  uint32_t* places;
  uint32_t log_places;
  uint32_t* of;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows != nullptr && rows[i] != kNoRow) return;
    const auto position = static_cast<uint32_t>(i);
    const uint64_t key = keys[i];
    uint32_t p = log_places == 0 ? 0 : static_cast<uint32_t>(MixKey(key)) >> (32 - log_places);
    for (;; p = (p + 1) & ((1u << log_places) - 1)) {
      uint32_t there = AtomicLoad(&places[p]);
      if (there == kNoPosition) {
        there = AtomicCompareExchange(&places[p], kNoPosition, position);
        if (there == kNoPosition) break;
      }
      if (keys[there] != key) continue;
      // Once a place is a key's, it only goes from one of its positions to another.
      // Many positions may have one key: only those that change something swap.
      if (kLast ? there > position : there < position) break;
      if (kLast) {
        AtomicMax(&places[p], position);
      } else {
        AtomicMin(&places[p], position);
      }
      break;
    }
    of[i] = p;
  }
};

// flags[i] = 1 where a key without a row stands first; flags has one more, 0, for the sum.
struct FlagFirst {
  const RowId* rows;
  const uint32_t* places;  // null: keys are distinct
  const uint32_t* of;
  size_t n;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const {
    const bool first = i < n && rows[i] == kNoRow && (places == nullptr || places[of[i]] == i);
    flags[i] = first ? 1 : 0;
  }
};

// --- Exporting -------------------------------------------------------------------------------

// flags[i] = whether row `begin` + i is live and was updated after `after`; flags[n] = 0.
struct FlagUpdated {
  DeviceView view;
  uint64_t begin;
  size_t n;
  Stamp after;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const {
    flags[i] = i<n&& * view.layout.update(view.RowAt(static_cast<RowId>(begin + i)))> after;
  }
};

// The items whose flag was set, in order: sums[i] < sums[i + 1].
struct Compact {
  const uint32_t* sums;
  uint32_t begin;
  uint32_t most;
  uint32_t* items;

  DYNEMB_HD void operator()(size_t i) const {
    if (sums[i] == sums[i + 1] || sums[i] >= most) return;
    items[sums[i]] = begin + static_cast<uint32_t>(i);
  }
};

// --- Times -----------------------------------------------------------------------------------

struct RebaseAccesses {
  Bucket* buckets;
  Tick move;
  DYNEMB_HD void operator()(size_t b) const {
    for (Stamp& access : buckets[b].access) access = Earlier(access, move);
  }
};

struct RebaseUpdates {
  DeviceView view;
  Tick move;
  DYNEMB_HD void operator()(size_t r) const {
    Stamp* update = view.layout.update(view.RowAt(static_cast<RowId>(r)));
    *update = Earlier(*update, move);
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_H_
