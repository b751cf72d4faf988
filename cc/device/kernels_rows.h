// The kernels that write, remove and move existing rows (kernels.h defines kernels).
#ifndef DYNEMB_DEVICE_KERNELS_ROWS_H_
#define DYNEMB_DEVICE_KERNELS_ROWS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/stamps.h"

namespace dynemb::device {

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
    const size_t bytes = view.layout.vector_bytes();
    CopyBytes(lanes, view.VectorAt(rows[i]), vectors + i * bytes, bytes);
    if (lanes.rank() == 0) *view.UpdateAt(rows[i]) = now;
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
    Rounding of_key = rounding;
    of_key.key = keys[i];
    const float* from = vectors + i * static_cast<size_t>(l.dim);
    UpdateVector(lanes, l.dtype, l.dim, view.VectorAt(rows[i]), of_key,
                 [&](int64_t first, int n, Quad<float>* v) {
                   const Quad<float> given = LoadQuad(from + first, n);
                   for (int c = 0; c < kQuad; ++c) {
                     v->at[c] = add ? v->at[c] + given.at[c] : given.at[c];
                   }
                 });
    if (state != nullptr) {
      CopyBytes(lanes, view.StateAt(rows[i]), state + i * static_cast<size_t>(l.state_width),
                l.state_bytes());
    }
    if (lanes.rank() == 0) *view.UpdateAt(rows[i]) = now;
  }
};

// One step of an optimizer on the rows of a batch with gradients. Item r is a run of neighboring
// items of the batch: `length` of them from r * length on, but none after n. The time of a run is
// the latency of reading rows, so all of its rows are on their way before the first one changes.
template <class Formula>
struct ApplyGradients {
  TableViews tables;
  OptimizerCoefficients coefficients;
  KeyArray keys;
  const RowId* rows;
  uint32_t* nonfinite;  // [n], zeros at first; 1: gradient i has a NaN or Inf
  size_t n;
  uint32_t length;  // at most kMostLength

  static constexpr uint32_t kMostLength = 4;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t r) const {
    const size_t begin = r * length;
    const size_t end = begin + length < n ? begin + length : n;
    for (size_t i = begin; i < end;) {
      const uint32_t t = tables.IndexOf(i);
      const TableView& table = tables[t];
      const size_t last = tables.end(t) < end ? tables.end(t) : end;
      // For the items [i, last). The compiler cannot know that stores do not change the table's
      // view.
      const TieredRows rows_of = table.rows;
      const RowLayout l = table.layout;
      const float* const gradients =
          table.gradients + (i - tables.begin(t)) * static_cast<size_t>(l.dim);
      if (last - i > 1) PrefetchRows(lanes, rows_of, l, gradients, i, last);
      IsWhole(l) && IsAligned(gradients)
          ? Apply<true>(lanes, table, rows_of, l, gradients, i, last)
          : Apply<false>(lanes, table, rows_of, l, gradients, i, last);
      i = last;
    }
  }

 private:
  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE void PrefetchRows(Lanes& lanes, const TieredRows& rows_of,
                                            const RowLayout& l, const float* gradients,
                                            size_t begin, size_t end) const {
    const size_t first = sizeof(Quad<float>) * lanes.rank();
    const size_t by = sizeof(Quad<float>) * lanes.width();
    for (size_t i = begin; i < end; ++i) {
      if (!IsRow(rows[i])) continue;
      const char* const row = rows_of.At(rows[i]);
      for (size_t at = first; at < l.content_bytes(); at += by) Prefetch(row + at);
      const auto* const gradient =
          reinterpret_cast<const char*>(gradients + (i - begin) * static_cast<size_t>(l.dim));
      const size_t bytes = static_cast<size_t>(l.dim) * sizeof(float);
      for (size_t at = first; at < bytes; at += by) Prefetch(gradient + at);
    }
  }

  // A step on the rows of the items [begin, end), whose gradients begin at `gradients`. kWhole:
  // rows and gradients are whole (row_math.h).
  template <bool kWhole, class Lanes>
  DYNEMB_HD DYNEMB_INLINE void Apply(Lanes& lanes, const TableView& table,
                                     const TieredRows& rows_of, const RowLayout& l,
                                     const float* gradients, size_t begin, size_t end) const {
    const float step_mark = table.step_mark;
    const Stamp now = table.now;
    RowHead* const heads = table.heads;
    const size_t state_at = l.state_offset - l.vector_offset;
    Rounding rounding{};
    if (!kWhole) rounding = table.rounding;  // float32 is not rounded
    for (size_t i = begin; i < end; ++i) {
      if (!IsRow(rows[i])) continue;
      const RowId id = rows[i];
      char* const row = rows_of.At(id);
      auto* const state = reinterpret_cast<float*>(row + state_at);
      const float* const gradient = gradients + (i - begin) * static_cast<size_t>(l.dim);
      if (!kWhole) rounding.key = keys[i];
      const bool finite = ApplyToRow<Formula, kWhole>(lanes, coefficients, l.dtype, l.dim, row,
                                                      state, gradient, rounding);
      if (!finite) AtomicStore(&nonfinite[i], 1u);
      if (lanes.rank() != 0) continue;
      if (step_mark >= 0) state[l.state_width - 1] = step_mark;
      heads[id].update = now;
    }
  }
};

// Counts dropped and nonfinite gradients. A table with admission drops gradients by design, and
// does not count them. Items as in ForTally.
struct CountApplied {
  TableViews tables;
  const RowId* rows;
  const uint32_t* nonfinite;

  struct Tally {
    uint32_t dropped, bad;
  };
  DYNEMB_HD void operator()(size_t t) const {
    ForTally<Tally>(
        t, tables.items, [&](size_t i) { return tables.IndexOf(i); },
        [&](size_t i) {
          return Words{rows[i], nonfinite[i]};
        },
        [&](size_t, const Words& of, uint32_t table, Tally* tally) {
          tally->dropped += of.first == kNoRow && tables[table].admission.rule == Admit::kAll;
          tally->bad += of.second;
        },
        [&](const Tally& tally, uint32_t table) {
          Counters* counters = tables[table].counters;
          AtomicAddTogether(&counters->dropped_gradients, tally.dropped);
          AtomicAddTogether(&counters->nonfinite_gradients, tally.bad);
        });
  }
};

// Sets the state of rows[i] to state[i]; if `state` is null, to the initial state. Then sets the
// mark, unless it is negative.
struct WriteStates {
  DeviceView view;
  const RowId* rows;
  const float* state;
  const float* initial_state;
  float mark;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const RowLayout& l = view.layout;
    float* const to = view.StateAt(rows[i]);
    const float* const from =
        state != nullptr ? state + i * static_cast<size_t>(l.state_width) : initial_state;
    const bool has_mark = mark >= 0;
    CopyBytes(lanes, to, from, l.state_bytes() - (has_mark ? sizeof(float) : 0));
    if (has_mark && lanes.rank() == 0) to[l.state_width - 1] = mark;
  }
};

// Sets the times of loaded rows, which are given as ticks minus `base`, and their scores.
struct WriteTimes {
  DeviceView view;
  const RowId* rows;
  const uint32_t* updates;
  const uint32_t* scores;  // null: they are the last updates, or new_score
  Tick base;
  Stamps stamps;
  bool by_time;  // whether scores are stamps
  Score new_score;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint64_t key = view.KeyAt(rows[i]);
    const SlotRef at = view.Find(lanes, key);
    if (lanes.rank() != 0) return;
    *view.UpdateAt(rows[i]) = stamps.Encode(base + updates[i]);
    Score score = scores != nullptr ? scores[i] : new_score;
    if (by_time) score = stamps.Encode(base + (scores != nullptr ? scores : updates)[i]);
    AtomicStore(&at.bucket->score[at.slot], score);
  }
};

// Adds counts to the scores of rows, as FindKeys does.
struct AddCounts {
  DeviceView view;
  Touch touch;
  const RowId* rows;
  const uint32_t* counts;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow) return;
    const SlotRef at = view.Find(lanes, view.KeyAt(rows[i]));
    if (lanes.rank() != 0) return;
    Score* const score = &at.bucket->score[at.slot];
    FindKeys::Count(touch, counts[i], score, AtomicLoad(score));
  }
};

// Sets the scores of rows. The elected position of a key sets its score.
struct WriteScores {
  DeviceView view;
  const RowId* rows;
  const Score* scores;
  const uint32_t* places;  // of ElectPositions
  const uint32_t* of;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow || places[of[i]] != i) return;
    const SlotRef at = view.Find(lanes, view.KeyAt(rows[i]));
    if (lanes.rank() == 0) AtomicStore(&at.bucket->score[at.slot], scores[i]);
  }
};

// --- Removing ----------------------------------------------------------------------------------

// Erases keys; those whose row has expired, or all if `expired` is nothing. gone[i] = the row that
// keys[i] had, and scores[i] its score, for one position of each key; gone[i] = kNoRow for its
// other positions.
struct EraseKeys {
  DeviceView view;
  KeyArray keys;
  Expired expired;
  RowId* gone;
  Score* scores;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const FlatProbe probe = ProbeIn(view.ring, view.HashOf(keys[i]));
    SlotRef at = dynemb::Find(lanes, view, view.ring, probe, keys[i]);
    if (at.bucket != nullptr && expired.any() && !HasExpired(expired, view, at)) at = SlotRef{};
    if (lanes.rank() == 0 && at.bucket != nullptr) {
      scores[i] = AtomicLoad(&at.bucket->score[at.slot]);
    }
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
    if (wipe) {
      auto* const words = reinterpret_cast<uint32_t*>(view.VectorAt(gone[i]));
      const size_t count = view.layout.content_bytes() / sizeof(*words);
      for (size_t w = lanes.rank(); w < count; w += lanes.width()) words[w] = 0;
    }
    if (lanes.rank() != 0) return;
    if (wipe) view.heads[gone[i]].key = 0;
    *view.UpdateAt(gone[i]) = 0;
    *view.FreeRow(counters->free_count + sums[i]) = gone[i];
  }
};

// All row ids are unused again.
struct ForgetFree {
  Counters* counters;

  DYNEMB_HD void operator()(size_t) const { counters->high_water = counters->free_count = 0; }
};

struct ListFree {
  DeviceView view;
  RowId* rows;

  DYNEMB_HD void operator()(size_t i) const { rows[i] = *view.FreeRow(i); }
};

// Counts freed rows, also in `lost`, one of the counters, unless it is null.
struct CountFreed {
  const uint32_t* sums;
  size_t n;
  Counters* counters;
  uint64_t* lost;

  DYNEMB_HD void operator()(size_t) const {
    counters->free_count += sums[n];
    if (lost != nullptr) *lost += sums[n];
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
      Claim(lanes, view.ring, ProbeIn(view.ring, hash), row, bucket.score[s]);
    }
  }
};

// Copies row r to memory of another layout. Its state becomes the initial state.
struct MoveRows {
  DeviceView from;
  DeviceView to;
  const float* initial_state;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t r) const {
    const auto row = static_cast<RowId>(r);
    if (lanes.rank() == 0) to.heads[row] = from.heads[row];
    CopyBytes(lanes, to.VectorAt(row), from.VectorAt(row), from.layout.vector_bytes());
    CopyBytes(lanes, to.StateAt(row), initial_state, to.layout.state_bytes());
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_ROWS_H_
