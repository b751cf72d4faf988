// The calls of a host table that write rows: Upsert, Accumulate, WriteRows and LoadRows, and
// ApplyRange, which steps the rows of a range of keys.
//
// A call that creates rows does first what may fail: the keys without rows get rows (Insert). Then
// the rows that existed before are written.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cc/table/codec.h"
#include "cc/table/copy_vector.h"
#include "cc/table/hash_table.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/staged.h"
#include "cc/table/vector_buffer.h"

namespace dynemb {

template <class K>
const uint32_t* HashTable<K>::ListHeld(const RowId* rows, size_t n, uint64_t missing,
                                       BatchScratch* scratch) {
  if (missing == 0) return nullptr;
  uint32_t* const held = scratch->positions.Resize(n - missing);
  for (size_t i = 0, h = 0; h < n - missing; ++i) {
    if (rows[i] != kNoRow) held[h++] = static_cast<uint32_t>(i);
  }
  return held;
}

template <class K>
template <class Fn>
void HashTable<K>::ForHeld(Exec& exec, const RowId* rows, const uint32_t* held, size_t num_held,
                           size_t row_bytes, const Fn& fn) {
  Phase phase("write rows");
  const RowPrefetch prefetch(rows_.base(), layout().stride, row_bytes);
  exec.ParallelFor(num_held, kKeyGrain, [&](size_t begin, size_t end) {
    const auto position = [=](size_t h) { return held != nullptr ? held[begin + h] : begin + h; };
    const auto fetch = [&](size_t h) { prefetch(rows_.At(rows[position(h)])); };
    const auto visit = [&](size_t h) {
      const size_t i = position(h);
      fn(i, rows_.At(rows[i]));
    };
    RunStaged(end - begin, StagedBlock(prefetch.lines()), fetch, visit);
  });
}

template <class K>
Status HashTable<K>::Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) {
  const K* const k = keys.As<K>();
  const size_t n = keys.size();
  const size_t bytes = layout().vector_bytes();
  const auto* from = static_cast<const char*>(vectors);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = BeginInsert(exec, tick, n);
  BringKeys(exec, keys);

  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  RowFilter& again = scratch->again;
  again.Reset(n);
  scratch->owned.Reserve(exec, n);
  // First everything that may fail: keys without rows get rows. Then existing rows are written.
  const Touch touch = scoring_.Write(now);
  const uint64_t missing = FindRows(exec, k, n, touch, ExpiredAt(tick), Counts::kNothing, rows);
  const uint32_t* const held = ListHeld(rows, n, missing, scratch.get());
  std::vector<uint32_t> moved;
  if (missing != 0) {
    const auto fill = [&](size_t i, K, char* row) {
      CopyVector(layout().vector(row), from + i * bytes, bytes);
    };
    Batch batch{k, n, rows, now, tick, touch};
    batch.moved = &moved;
    DYNEMB_RETURN_IF_ERROR(Insert(exec, batch, fill, scratch.get()));
    for (const InsertPlan::Repeat& r : scratch->plan.repeats()) again.Add(rows[r.position]);
  }
  // The first thread that marks a row as updated by this batch writes it, so no two threads write
  // one row. If a row is marked twice, its key repeats; the row is then written again below, in the
  // order of the batch.
  const auto write = [&](size_t i, char* row) {
    const Stamp updated = __atomic_exchange_n(layout().update(row), now, __ATOMIC_RELAXED);
    if (updated == now) {
      again.Add(rows[i]);
      return;
    }
    BeforeWrite(rows[i], updated);
    CopyVector(layout().vector(row), from + i * bytes, bytes);
  };
  const size_t written_bytes = layout().vector_offset + bytes;
  ForHeld(exec, rows, held, n - missing, written_bytes, write);
  ForHeld(exec, rows, moved.data(), moved.size(), written_bytes, write);
  if (!again.empty()) {
    Phase phase("write repeated keys");
    OwnedItems& owned = scratch->owned;
    owned.Build(exec, n, [&](size_t i) { return again.MayHold(rows[i]) ? rows[i] : kNoRow; });
    owned.ForWorkers(exec, n, [&](size_t, const uint32_t* i, const uint32_t* end) {
      for (; i != end; ++i) {
        CopyVector(layout().vector(rows_.At(rows[*i])), from + *i * bytes, bytes);
      }
    });
  }
  return Status();
}

template <class K>
Status HashTable<K>::Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) {
  const K* const k = keys.As<K>();
  const size_t n = keys.size();
  const auto dim = static_cast<size_t>(options_.dim);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = BeginInsert(exec, tick, n);
  BringKeys(exec, keys);
  const uint64_t step = RoundingStep(Update::kAddition, additions_ + 1);
  const auto add = [&](size_t i, K key, RowId row_id, float* loaded) {
    char* row = rows_.At(row_id);
    BeforeWrite(row_id, *layout().update(row));
    const bool in_place = options_.dtype == DType::kFloat32;
    auto* const sum = in_place ? reinterpret_cast<float*>(layout().vector(row)) : loaded;
    if (!in_place) LoadVector(options_.dtype, layout().vector(row), options_.dim, sum);
    for (size_t c = 0; c < dim; ++c) sum[c] += deltas[i * dim + c];
    if (!in_place) StoreUpdated(sum, key, step, layout().vector(row));
    *layout().update(row) = now;
  };
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  const Touch touch = scoring_.Write(now);
  if (FindRows(exec, k, n, touch, ExpiredAt(tick), Counts::kLookup, rows) != 0) {
    DYNEMB_RETURN_IF_ERROR(InsertInitialAt(exec, {k, n, rows, now, tick, touch}, scratch.get()));
  }
  ++additions_;  // only now: a call that fails has changed nothing
  const RowPrefetch prefetch(rows_.base(), layout().stride,
                             layout().vector_offset + layout().vector_bytes());
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    VectorBuffers::Lease loaded(&buffers_);
    RunStaged(
        end - begin, StagedBlock(prefetch.lines()),
        [&](size_t j) { prefetch(rows_.At(rows[begin + j])); },
        [&](size_t j) { add(begin + j, k[begin + j], rows[begin + j], loaded.get()); });
  });
  return Status();
}

template <class K>
Status HashTable<K>::WriteRows(Exec& exec, KeySpan keys, const float* vectors, const float* state,
                               bool insert, uint64_t rounding, Tick tick) {
  const K* const k = keys.As<K>();
  const size_t n = keys.size();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = insert ? BeginInsert(exec, tick, n) : BeginBatch(exec, tick, n);
  if (!insert) DYNEMB_RETURN_IF_ERROR(WarmRows(exec, keys));
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  const Touch touch = scoring_.Write(now);
  if (FindRows(exec, k, n, touch, ExpiredAt(tick), Counts::kLookup, rows) != 0 && insert) {
    DYNEMB_RETURN_IF_ERROR(InsertInitialAt(exec, {k, n, rows, now, tick, touch}, scratch.get()));
  }
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (rows[i] == kNoRow) continue;
      char* row = rows_.At(rows[i]);
      BeforeWrite(rows[i], *layout().update(row));
      StoreUpdated(vectors + i * static_cast<size_t>(options_.dim), k[i], rounding,
                   layout().vector(row));
      if (layout().state_width != 0) {
        memcpy(layout().state(row), state + i * static_cast<size_t>(layout().state_width),
               layout().state_bytes());
      }
      *layout().update(row) = now;
    }
  });
  return Status();
}

template <class K>
void HashTable<K>::ApplyRange(Exec&, const RowOptimizer& optimizer, KeySpan keys, const RowId* rows,
                              const float* gradients, size_t begin, size_t end, uint64_t rounding,
                              Tick tick) {
  const K* const k = keys.As<K>();
  const auto dim = static_cast<size_t>(options_.dim);
  const Stamp now = stamps_.Encode(tick);
  const RowPrefetch prefetch(rows_.base(), layout().stride, layout().bytes());
  VectorBuffers::Lease vector(&buffers_);
  const float mark = step_mark();
  uint64_t dropped = 0;
  uint64_t nonfinite = 0;
  const auto fetch = [&](size_t j) {
    if (rows[begin + j] < rows_.high_water()) prefetch(rows_.At(rows[begin + j]));
  };
  const auto step = [&](size_t j) {
    const size_t i = begin + j;
    if (!Holds(rows[i], k[i])) {
      dropped += !admission_.enabled();  // admission drops gradients by design
      return;
    }
    char* row = rows_.At(rows[i]);
    const float* gradient = gradients + i * dim;
    nonfinite += !AllFinite(gradient, options_.dim);
    if (catch_up_.active()) BringRow(rows[i], vector.get());
    BeforeWrite(rows[i], *layout().update(row));
    if (options_.dtype == DType::kFloat32) {
      optimizer.Apply(reinterpret_cast<float*>(layout().vector(row)), layout().state(row),
                      gradient);
    } else {
      LoadVector(options_.dtype, layout().vector(row), options_.dim, vector.get());
      optimizer.Apply(vector.get(), layout().state(row), gradient);
      StoreUpdated(vector.get(), k[i], rounding, layout().vector(row));
    }
    if (catch_up_.enabled()) layout().state(row)[layout().state_width - 1] = mark;
    *layout().update(row) = now;
  };
  RunStaged(end - begin, StagedBlock(prefetch.lines()), fetch, step);
  if (dropped != 0) counters_.dropped_gradients.fetch_add(dropped, std::memory_order_relaxed);
  if (nonfinite != 0) counters_.nonfinite_gradients.fetch_add(nonfinite, std::memory_order_relaxed);
}

template <class K>
Status HashTable<K>::LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) {
  // Memory need not hold all of the rows.
  const size_t most = cold_ == nullptr ? loaded.keys.size() : std::max<size_t>(1, capacity() / 2);
  for (size_t first = 0; first < loaded.keys.size(); first += most) {
    const size_t n = std::min(most, loaded.keys.size() - first);
    DYNEMB_RETURN_IF_ERROR(LoadPart(exec, loaded.Part(first, n, layout()), tick));
  }
  return Status();
}

template <class K>
Status HashTable<K>::LoadPart(Exec& exec, const LoadedRows& loaded, Tick tick) {
  const K* const k = loaded.keys.As<K>();
  const size_t n = loaded.keys.size();
  const auto* vectors = static_cast<const char*>(loaded.vectors);
  const size_t bytes = layout().vector_bytes();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = BeginBatch(exec, tick, n);
  const auto write = [&](size_t i, char* row) {
    CopyVector(layout().vector(row), vectors + i * bytes, bytes);
    if (layout().state_width != 0) {
      memcpy(layout().state(row),
             loaded.state != nullptr ? loaded.state + i * static_cast<size_t>(layout().state_width)
                                     : initial_state_.data(),
             layout().state_bytes());
    }
    if (catch_up_.enabled()) layout().state(row)[layout().state_width - 1] = catch_up_.mark();
    *layout().update(row) = stamps_.Encode(loaded.base + loaded.updates[i]);
  };
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  // The new keys do not evict existing rows of the batch. These are written last, when nothing can
  // fail anymore.
  const Touch touch = scoring_.Write(now);
  const uint64_t missing = FindRows(exec, k, n, touch, ExpiredAt(tick), Counts::kNothing, rows);
  const uint32_t* const held = ListHeld(rows, n, missing, scratch.get());
  std::vector<uint32_t> moved;
  if (missing != 0) {
    const auto fill = [&](size_t i, K, char* row) { write(i, row); };
    Batch batch{k, n, rows, now, tick, touch};
    batch.moved = &moved;
    DYNEMB_RETURN_IF_ERROR(Insert(exec, batch, fill, scratch.get()));
  }
  const auto overwrite = [&](size_t i, char* row) {
    BeforeWrite(rows[i], *layout().update(row));
    write(i, row);
  };
  ForHeld(exec, rows, held, n - missing, layout().bytes(), overwrite);
  ForHeld(exec, rows, moved.data(), moved.size(), layout().bytes(), overwrite);
  if (scoring_.has_epochs() && loaded.scores != nullptr) {
    for (size_t i = 0; i < n; ++i) scoring_.Adopt(loaded.scores[i]);
  }
  WriteScores(exec, rows, n, [&](size_t i) {
    if (scoring_.by_time()) {
      // Without scores, the last update counts as the last access. The batch's own stamp would keep
      // the rows from eviction, and the next batch may have the same tick (SwapRows).
      const CutTime* const times = loaded.scores != nullptr ? loaded.scores : loaded.updates;
      return stamps_.Encode(loaded.base + times[i]);
    }
    return loaded.scores != nullptr ? loaded.scores[i] : scoring_.New(now);
  });
  return Status();
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                                               \
  template Status HashTable<K>::Upsert(Exec&, KeySpan, const void*, Tick);                  \
  template Status HashTable<K>::Accumulate(Exec&, KeySpan, const float*, Tick);             \
  template Status HashTable<K>::WriteRows(Exec&, KeySpan, const float*, const float*, bool, \
                                          uint64_t, Tick);                                  \
  template void HashTable<K>::ApplyRange(Exec&, const RowOptimizer&, KeySpan, const RowId*, \
                                         const float*, size_t, size_t, uint64_t, Tick);     \
  template Status HashTable<K>::LoadRows(Exec&, const LoadedRows&, Tick);                   \
  template Status HashTable<K>::LoadPart(Exec&, const LoadedRows&, Tick)
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
