// The kernels of a device table: bodies for Session's ForEach, ForKeys and ForRows (device.h). A
// kernel is a struct of values and device addresses; its operator() handles item i.
//
// A count that only the device knows is passed as an address. Such kernels are launched for the
// maximal number of items, and return at once for items beyond the count.
#ifndef DYNEMB_DEVICE_KERNELS_H_
#define DYNEMB_DEVICE_KERNELS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/row_columns.h"
#include "cc/table/row_predicate.h"
#include "cc/table/stamps.h"
#include "cc/table/types.h"

namespace dynemb::device {

// Copies `bytes` from or to a row, with the widest access that both addresses and `bytes` allow.
// All teams that access these bytes divide them among their lanes in the same way.
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

// The number of accesses that CopyBytes makes if they are the widest.
constexpr size_t QuadsOfBytes(size_t bytes) {
  return (bytes + sizeof(Quad<float>) - 1) / sizeof(Quad<float>);
}

// --- Finding ---------------------------------------------------------------------------------

// rows[i] = the row of keys[i], or kNoRow. found[i] = whether keys[i] has a row. Either array may
// be null. Touches the rows that are found, and notes rows of the host tier as candidates for
// Promote (kernels_tiers.h), once for each batch if scores are stamps.
struct FindKeys {
  TableViews tables;
  KeyArray keys;
  RowId* rows;
  bool* found;
  // If not null: read[i] is the row of keys[i] if promotion is to consider it (Promotes::kRead),
  // once for each row, otherwise kNoRow.
  RowId* read = nullptr;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const TableView& table = tables.Of(i);
    const SlotRef at = table.FindUnexpired(lanes, keys[i]);
    if (lanes.rank() != 0) return;
    if (rows != nullptr) rows[i] = at.row;
    if (read != nullptr) read[i] = kNoRow;
    if (found != nullptr) found[i] = at.bucket != nullptr;
    if (table.now == 0 || at.bucket == nullptr) return;
    const bool is_candidate = table.candidates.count != 0 && !table.InDevice(at.row);
    Score* const score = &at.bucket->score[at.slot];
    const Score was = AtomicLoad(score);
    if (table.touch.kind == Touch::Kind::kSet) {
      const Stamp now = table.touch.value;
      if (was == now) return;
      if (!is_candidate) {
        AtomicStore(score, now);
      } else if (AtomicExchange(score, now) != now) {  // the batch's first access to this slot
        if (table.promotes_read) {
          read[i] = at.row;
        } else {
          table.candidates.Note(at.row, table.stamps.Rank(now) - table.stamps.Rank(was));
        }
      }
      return;
    }
    const Score is =
        table.touch.kind == Touch::Kind::kCount ? Count(table.touch, 1, score, was) : was;
    if (is_candidate) table.candidates.Note(at.row, ~is);
  }

  // Counts n finds of a slot whose score was `was` a moment ago; returns the new score.
  DYNEMB_HD static Score Count(const Touch& touch, uint32_t n, Score* score, Score was) {
    // An addition cannot fail, unlike a compare-and-swap, which thousands of threads would repeat
    // for a frequent key. It must change nothing but the count, and not saturate, whatever the
    // threads that are running now add. A GPU runs fewer than kMostThreads at a time.
    constexpr Score kMostThreads = 1u << 19;
    if (n == 1 && (was & ~touch.count_mask) == touch.value &&
        (was & touch.count_mask) < touch.count_mask - kMostThreads) {
      return AtomicAdd(score, 1u) + 1;
    }
    for (;;) {
      const Score next = touch.Counted(was, n);
      const Score now = AtomicCompareExchange(score, was, next);
      if (now == was) return next;
      was = now;
    }
  }
};

// Adds a lookup's hits and misses to the counters. Items as in ForTally.
struct CountFound {
  TableViews tables;
  const RowId* rows;

  struct Tally {
    uint32_t device, host, missed;
  };
  DYNEMB_HD void operator()(size_t t) const {
    ForTally<Tally>(
        t, tables.items, [&](size_t i) { return tables.IndexOf(i); },
        [&](size_t i) { return rows[i]; },
        [&](size_t, RowId row, uint32_t table, Tally* tally) {
          if (row == kNoRow) {
            ++tally->missed;
          } else if (tables[table].InDevice(row)) {
            ++tally->device;
          } else {
            ++tally->host;
          }
        },
        [&](const Tally& tally, uint32_t table) {
          Counters* counters = tables[table].counters;
          AtomicAddTogether(&counters->device_hits, tally.device);
          AtomicAddTogether(&counters->host_hits, tally.host);
          AtomicAddTogether(&counters->misses, tally.missed);
        });
  }
};

// `row` if that is still the row of the key (the generation check). Otherwise, the key's current
// row if rows may move between tiers and `row` is not kNoRow, or kNoRow.
template <class Lanes>
DYNEMB_HD RowId ResolvedRow(Lanes& lanes, const TableView& table, uint64_t key, RowId row) {
  if (row < table.counters->high_water && *table.UpdateAt(row) != 0 && table.KeyAt(row) == key) {
    return row;
  }
  return table.rows_move && row != kNoRow ? table.Find(lanes, key).row : kNoRow;
}

// resolved[i] = ResolvedRow of rows[i], or rows[i] if the key was refused. `resolved` may be
// `rows`.
struct ResolveRows {
  TableViews tables;
  KeyArray keys;
  const RowId* rows;
  RowId* resolved;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const TableView& table = tables.Of(i);
    // The leader alone reads rows[i], because it writes resolved[i].
    const RowId row = lanes.FromLeader(lanes.rank() == 0 ? rows[i] : kNoRow);
    RowId now = row;
    if (table.admission.rule == Admit::kAll || !IsRefused(row)) {
      now = ResolvedRow(lanes, table, keys[i], row);
    }
    if (lanes.rank() == 0) resolved[i] = now;
  }
};

// --- Reading ---------------------------------------------------------------------------------

// vectors[i] = the vector of rows[i]. If that is not a row, it is `otherwise`; if that is null,
// zeros if the key was refused and `refused_is_zero`; otherwise the initial vector of keys[i].
// Nothing is written in the last case if initial.dim is 0.
struct ReadVectors {
  DeviceView view;
  InitializerView initial;
  bool refused_is_zero;
  KeyArray keys;
  const RowId* rows;
  const void* otherwise;
  char* vectors;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const size_t bytes = view.layout.vector_bytes();
    char* to = vectors + i * bytes;
    if (IsRow(rows[i])) {
      CopyBytes(lanes, to, view.VectorAt(rows[i]), bytes);
    } else if (otherwise != nullptr) {
      CopyBytes(lanes, to, otherwise, bytes);
    } else if (refused_is_zero && IsRefused(rows[i])) {
      // Vectors have elements of 16 or 32 bits.
      for (size_t w = lanes.rank(); w < bytes / 2; w += lanes.width()) {
        reinterpret_cast<uint16_t*>(to)[w] = 0;
      }
    } else {
      FillInitialVector(lanes, initial, keys[i], view.layout.dtype, to);
    }
  }
};

// Copies rows to columns, and their vectors, converted to float32, to `float_vectors`, unless it is
// null. Where rows[i] is kNoRow, float_vectors and state are zeros, and the other columns are not
// written.
struct ReadColumns {
  DeviceView view;
  const RowId* rows;
  RowColumns<Stamp> to;
  float* float_vectors = nullptr;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const RowLayout& l = view.layout;
    const RowId row = rows[i];
    const bool has_row = row != kNoRow;
    if (lanes.rank() == 0 && has_row) {
      if (to.keys != nullptr) StoreKey(to.keys, l.key_size, i, view.KeyAt(row));
      if (to.updates != nullptr) to.updates[i] = *view.UpdateAt(row);
    }
    if (to.scores != nullptr && has_row) {
      const SlotRef slot = view.Find(lanes, view.KeyAt(row));
      if (lanes.rank() == 0) to.scores[i] = AtomicLoad(&slot.bucket->score[slot.slot]);
    }
    if (to.vectors != nullptr && has_row) {
      CopyBytes(lanes, static_cast<char*>(to.vectors) + i * l.vector_bytes(), view.VectorAt(row),
                l.vector_bytes());
    }
    if (float_vectors != nullptr) {
      float* vector = float_vectors + i * static_cast<size_t>(l.dim);
      ForEachQuad(lanes, l.dim, [&](int64_t first, int n) {
        StoreQuad(has_row ? LoadColumns(l.dtype, view.VectorAt(row), first, n) : Quad<float>{}, n,
                  vector + first);
      });
    }
    if (to.state != nullptr && l.state_width != 0) {
      float* state = to.state + i * static_cast<size_t>(l.state_width);
      ForEachQuad(lanes, l.state_width, [&](int64_t first, int n) {
        StoreQuad(has_row ? LoadQuad(view.StateAt(row) + first, n) : Quad<float>{}, n,
                  state + first);
      });
    }
  }
};

// copies[i] = rows[i] in one piece (RowLayout). If that is kNoRow, the copy's last update is 0.
struct CopyRows {
  DeviceView view;
  const RowId* rows;
  char* copies;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const RowLayout& l = view.layout;
    const RowId row = rows[i];
    char* const to = copies + i * l.stride;
    if (lanes.rank() == 0) {
      if (row != kNoRow) StoreKey(to, l.key_size, 0, view.KeyAt(row));
      *l.update(to) = row != kNoRow ? *view.UpdateAt(row) : 0;
    }
    if (row != kNoRow) CopyBytes(lanes, l.vector(to), view.VectorAt(row), l.content_bytes());
  }
};

// Table::Changed.
struct CompareUpdates {
  DeviceView view;
  const RowId* rows;
  const RowId* rows_before;
  Stamps stamps;
  Tick since, now;
  Tick last_step;  // rows that are behind will change
  bool* changed;

  DYNEMB_HD void operator()(size_t i) const {
    if (!IsRow(rows[i])) {
      changed[i] = rows[i] == kNoRow || rows[i] != rows_before[i];
      return;
    }
    const Tick updated = stamps.Decode(*view.UpdateAt(rows[i]));
    const bool is_new = rows_before[i] == kNoRow && updated == now;
    changed[i] = (updated > since && !is_new) || last_step > since;
  }
};

// --- Repeated keys ---------------------------------------------------------------------------

// An election chooses one position for each key that a batch may repeat: its first or its last. It
// is a hash set of positions with 2^log_places places, more than there are keys. The caller fills
// the places with kNoPosition.
constexpr uint32_t kNoPosition = 0xFFFFFFFFu;

// log_places for n < 2^32 keys: at least 1.5 n places, if 32 bits can number them.
inline uint32_t LogPlaces(size_t n) {
  uint32_t log_places = 1;
  while (log_places < 32 && (size_t{1} << log_places) < n + n / 2) ++log_places;
  return log_places;
}

// of[i] = the place that holds the elected position of keys[i]. If `rows` is not null, only keys
// without a row take part.
template <bool kLast, class Keys>
struct ElectPositions {
  Keys keys;  // Hash(i), Same(i, j)
  const RowId* rows;
  uint32_t* places;
  uint32_t log_places;
  uint32_t* of;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows != nullptr && rows[i] != kNoRow) return;
    const auto position = static_cast<uint32_t>(i);
    const auto last = static_cast<uint32_t>((uint64_t{1} << log_places) - 1);
    uint32_t p = static_cast<uint32_t>(keys.Hash(i)) >> (32 - log_places);
    for (;; p = (p + 1) & last) {
      uint32_t there = AtomicLoad(&places[p]);
      if (there == kNoPosition) {
        there = AtomicCompareExchange(&places[p], kNoPosition, position);
        if (there == kNoPosition) break;
      }
      if (!keys.Same(there, i)) continue;
      // From now on, the place only changes from one position of this key to another. Many
      // positions may have the same key; only those that improve the result make an atomic update.
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

// Runs ElectPositions on n keys. If memory runs out, it does nothing, and the session's status
// reports this.
template <bool kLast, class Session, class Keys>
void Elect(Session& session, const Keys& keys, const RowId* rows, size_t n, const uint32_t** places,
           uint32_t** of) {
  const uint32_t log_places = LogPlaces(n);
  auto* made = session.template Take<uint32_t>(size_t{1} << log_places);
  *of = session.template Take<uint32_t>(n);
  if (made == nullptr || *of == nullptr) return;
  session.Fill(made, 0xFF, sizeof(uint32_t) << log_places);
  session.ForEach(n, ElectPositions<kLast, Keys>{keys, rows, made, log_places, *of});
  *places = made;
}

// flags[i] = 1 if i is the elected position of a key without a row, otherwise 0. flags[n] = 0, for
// the sum.
struct FlagFirst {
  const RowId* rows;       // null: no key has a row
  const uint32_t* places;  // null: keys are distinct
  const uint32_t* of;
  size_t n;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const {
    const bool first = i < n && (rows == nullptr || rows[i] == kNoRow) &&
                       (places == nullptr || places[of[i]] == i);
    flags[i] = first ? 1 : 0;
  }
};

// --- Exporting -------------------------------------------------------------------------------

// flags[i] = whether row `begin` + i is live and satisfies a predicate; flags[n] = 0.
struct FlagSelected {
  DeviceView view;
  KeyType key_type;
  Stamps stamps;
  UpdatedAfter after;
  RowPredicate where;
  bool by_time;          // whether scores are stamps
  const float* vectors;  // [n, dim] up-to-date vectors of the rows; null: the rows are
  uint64_t begin;
  size_t n;
  uint32_t* flags;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const bool selected = i < n && IsSelected(lanes, i);
    if (lanes.rank() == 0) flags[i] = selected ? 1 : 0;
  }

 private:
  template <class Lanes>
  DYNEMB_HD bool IsSelected(Lanes& lanes, size_t i) const {
    const auto row = static_cast<RowId>(begin + i);
    const Stamp updated = *view.UpdateAt(row);
    if (!after(updated) || stamps.Decode(updated) > where.updated_until) return false;
    const uint64_t key = view.KeyAt(row);
    if (!where.AllowsKey(key_type, key)) return false;
    if (where.has_scores()) {
      const SlotRef slot = view.Find(lanes, key);
      const Score score = AtomicLoad(&slot.bucket->score[slot.slot]);
      const int64_t shown = by_time ? static_cast<int64_t>(stamps.Decode(score)) : int64_t{score};
      if (!where.AllowsScore(shown)) return false;
    }
    if (!where.has_norms) return true;
    double square = 0;
    const int64_t dim = view.layout.dim;
    for (int64_t first = 0; first < dim; first += kQuad) {
      const int count = static_cast<int>(dim - first < kQuad ? dim - first : kQuad);
      const Quad<float> quad =
          vectors != nullptr ? LoadQuad(vectors + i * static_cast<size_t>(dim) + first, count)
                             : LoadColumns(view.layout.dtype, view.VectorAt(row), first, count);
      for (int c = 0; c < count; ++c) square += static_cast<double>(quad.at[c]) * quad.at[c];
    }
    return where.AllowsSquare(square);
  }
};

// Lists `begin` + i for the items i with sums[i] < sums[i + 1] (those whose flag was set), in
// order, at most `most` of them.
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

// Sweeps: Stamps::Clamp on all scores that are stamps, and on all last updates.
struct ClampScores {
  Bucket* buckets;
  Stamps stamps;
  DYNEMB_HD void operator()(size_t b) const {
    for (Score& score : buckets[b].score) score = stamps.Clamp(score);
  }
};

// Scoring::Rebased on all scores.
struct RebaseScores {
  Bucket* buckets;
  DYNEMB_HD void operator()(size_t b) const {
    for (Score& score : buckets[b].score) score = Scoring::Rebased(score);
  }
};

struct ClampUpdates {
  DeviceView view;
  Stamps stamps;
  DYNEMB_HD void operator()(size_t r) const {
    Stamp* update = view.UpdateAt(static_cast<RowId>(r));
    *update = stamps.Clamp(*update);
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_H_
