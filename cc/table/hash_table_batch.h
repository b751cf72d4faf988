// HashTable, the batch operations: a visitor for pass 1, and pass 2 where a call may insert.
// Included by hash_table.h only.
#ifndef DYNEMB_TABLE_HASH_TABLE_BATCH_H_
#define DYNEMB_TABLE_HASH_TABLE_BATCH_H_

#include <cstring>
#include <memory>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/hash_table.h"
#include "cc/table/owners.h"

namespace dynemb {

// Copies a vector; the common sizes inline, as a call costs more than they do.
inline void CopyVector(void* to, const void* from, size_t bytes) {
  switch (bytes) {
    case 16:
      memcpy(to, from, 16);
      break;
    case 32:
      memcpy(to, from, 32);
      break;
    case 64:
      memcpy(to, from, 64);
      break;
    case 128:
      memcpy(to, from, 128);
      break;
    case 256:
      memcpy(to, from, 256);
      break;
    default:
      memcpy(to, from, bytes);
  }
}

// A float32 buffer for one vector; on the stack up to dim 256.
class VectorBuffer {
 public:
  explicit VectorBuffer(int64_t dim) {
    if (static_cast<size_t>(dim) > kInline) heap_.reset(new float[static_cast<size_t>(dim)]);
  }
  float* get() { return heap_ ? heap_.get() : inline_; }

 private:
  static constexpr size_t kInline = 256;
  alignas(64) float inline_[kInline];
  std::unique_ptr<float[]> heap_;
};

namespace internal {

// Remembers the row of every position.
struct RowVisitor {
  RowId* rows;
  bool leader;
  uint64_t hits = 0, misses = 0;
  void Hit(size_t i, RowId row, const char*) {
    if (leader && rows != nullptr) rows[i] = row;
    ++hits;
  }
  template <class K>
  void Miss(size_t i, K) {
    if (leader && rows != nullptr) rows[i] = kNoRow;
    ++misses;
  }
};

}  // namespace internal

template <class K, class Lanes>
Status HashTable<K, Lanes>::Make(const TableOptions& options, std::unique_ptr<Table>* table) {
  std::unique_ptr<HashTable> made(new HashTable);
  DYNEMB_RETURN_IF_ERROR(made->Init(options));
  *table = std::move(made);
  return Status();
}

template <class K, class Lanes>
template <class MakeVisitor>
void HashTable<K, Lanes>::FindBatch(Exec& exec, const K* keys, size_t n, Stamp now,
                                    size_t row_bytes, const MakeVisitor& make) const {
  const TableView<K> view = View();
  Lanes::Launch(exec, n, kKeyGrain, [&](Lanes& lanes, size_t begin, size_t end) {
    auto visit = make(lanes);
    FindPass(
        lanes, view, row_bytes, [keys](size_t i) { return keys[i]; }, begin, end, now, visit);
    if (lanes.rank() == 0) CountFinds(visit.hits, visit.misses);
  });
}

inline std::vector<size_t> Missing(const RowId* rows, size_t n) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) count += rows[i] == kNoRow;
  std::vector<size_t> missing;
  missing.reserve(count);
  for (size_t i = 0; i < n && missing.size() < count; ++i) {
    if (rows[i] == kNoRow) missing.push_back(i);
  }
  return missing;
}

template <class K, class Lanes>
void HashTable<K, Lanes>::InitialVector(K key, void* vector) const {
  VectorBuffer buffer(options_.dim);
  initializer_.Fill(key, buffer.get());
  StoreVector(options_.dtype, buffer.get(), options_.dim, vector);
}

template <class K, class Lanes>
void HashTable<K, Lanes>::StoreUpdated(const float* vector, K key, Tick tick, char* row) const {
  void* to = layout().vector(row);
  if (options_.stochastic_rounding) {
    StoreVectorStochastic(options_.dtype, vector, options_.dim, to, options_.seed, key, tick);
  } else {
    StoreVector(options_.dtype, vector, options_.dim, to);
  }
}

template <class K, class Lanes>
void HashTable<K, Lanes>::Find(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) {
  FindBatch(exec, static_cast<const K*>(keys), n, ToStamp(tick), layout().key_size,
            [&](Lanes& lanes) {
              return internal::RowVisitor{rows, lanes.rank() == 0};
            });
}

template <class K, class Lanes>
void HashTable<K, Lanes>::Contains(Exec& exec, const void* keys, size_t n, bool* found) const {
  struct Visitor {
    bool* found;
    bool leader;
    uint64_t hits = 0, misses = 0;  // not a lookup: stay 0
    void Hit(size_t i, RowId, const char*) {
      if (leader) found[i] = true;
    }
    void Miss(size_t i, K) {
      if (leader) found[i] = false;
    }
  };
  FindBatch(exec, static_cast<const K*>(keys), n, 0, layout().key_size, [&](Lanes& lanes) {
    return Visitor{found, lanes.rank() == 0};
  });
}

namespace internal {

// Copies vectors out; a key without a row is left to on_miss(i, key).
template <class OnMiss>
struct CopyVisitor {
  const RowLayout& layout;
  char* vectors;
  RowId* rows;
  bool leader;
  const OnMiss& on_miss;
  uint64_t hits = 0, misses = 0;
  void Hit(size_t i, RowId row, const char* at) {
    ++hits;
    if (!leader) return;
    rows[i] = row;
    CopyVector(vectors + i * layout.vector_bytes(), layout.vector(at), layout.vector_bytes());
  }
  template <class K>
  void Miss(size_t i, K key) {
    ++misses;
    if (!leader) return;
    rows[i] = kNoRow;
    on_miss(i, key);
  }
};
template <class OnMiss>
CopyVisitor(const RowLayout&, char*, RowId*, bool, const OnMiss&) -> CopyVisitor<OnMiss>;

}  // namespace internal

template <class K, class Lanes>
void HashTable<K, Lanes>::Lookup(Exec& exec, const void* keys, size_t n, Tick tick,
                                 const void* default_vector, void* vectors, RowId* rows) {
  const size_t bytes = layout().vector_bytes();
  auto* out = static_cast<char*>(vectors);
  const auto miss = [&](size_t i, K key) {
    if (default_vector != nullptr) {
      memcpy(out + i * bytes, default_vector, bytes);
    } else {
      InitialVector(key, out + i * bytes);
    }
  };
  FindBatch(exec, static_cast<const K*>(keys), n, ToStamp(tick), layout().vector_offset + bytes,
            [&](Lanes& lanes) {
              return internal::CopyVisitor{layout(), out, rows, lanes.rank() == 0, miss};
            });
}

template <class K, class Lanes>
void HashTable<K, Lanes>::ReadRows(Exec& exec, const void* keys, size_t n, float* vectors,
                                   float* state, bool* found) const {
  struct Visitor {
    const RowLayout& layout;
    float* vectors;
    float* state;
    bool* found;
    bool leader;
    uint64_t hits = 0, misses = 0;  // not a lookup: stay 0
    void Hit(size_t i, RowId, const char* row) {
      if (!leader) return;
      found[i] = true;
      LoadVector(layout.dtype, layout.vector(row), layout.dim,
                 vectors + i * static_cast<size_t>(layout.dim));
      if (layout.state_width != 0) {
        memcpy(state + i * static_cast<size_t>(layout.state_width), layout.state(row),
               layout.state_bytes());
      }
    }
    void Miss(size_t i, K) {
      if (!leader) return;
      found[i] = false;
      memset(vectors + i * static_cast<size_t>(layout.dim), 0,
             static_cast<size_t>(layout.dim) * sizeof(float));
      if (layout.state_width != 0) {
        memset(state + i * static_cast<size_t>(layout.state_width), 0, layout.state_bytes());
      }
    }
  };
  FindBatch(exec, static_cast<const K*>(keys), n, 0, layout().stride, [&](Lanes& lanes) {
    return Visitor{layout(), vectors, state, found, lanes.rank() == 0};
  });
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::InsertInitial(Exec& exec, const K* keys,
                                          const std::vector<size_t>& positions, Tick tick,
                                          RowId* rows) {
  const Stamp now = BeginBatch(tick, positions.size());
  return Insert(exec, keys, positions, now, rows, [this](Lanes& lanes, size_t, K key, char* row) {
    if (lanes.rank() == 0) InitialVector(key, layout().vector(row));
  });
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick,
                                         RowId* rows) {
  BeginBatch(tick, n);
  Find(exec, keys, n, tick, rows);
  return InsertInitial(exec, static_cast<const K*>(keys), Missing(rows, n), tick, rows);
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick,
                                           void* vectors, RowId* rows) {
  const K* k = static_cast<const K*>(keys);
  const size_t bytes = layout().vector_bytes();
  auto* out = static_cast<char*>(vectors);
  const Stamp now = BeginBatch(tick, n);
  const auto later = [](size_t, K) {};
  FindBatch(exec, k, n, now, layout().vector_offset + bytes, [&](Lanes& lanes) {
    return internal::CopyVisitor{layout(), out, rows, lanes.rank() == 0, later};
  });
  const std::vector<size_t> missing = Missing(rows, n);
  DYNEMB_RETURN_IF_ERROR(InsertInitial(exec, k, missing, tick, rows));
  exec.ParallelFor(missing.size(), kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      const size_t i = missing[j];
      CopyVector(out + i * bytes, layout().vector(rows_.At(rows[i])), bytes);
    }
  });
  return Status();
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::MakeRoomFirst(Exec& exec, const K* keys, size_t n, Stamp now) {
  if (capacity() - size() >= n) return Status();
  std::vector<RowId> rows(n);
  FindBatch(exec, keys, n, now, layout().key_size, [&](Lanes& lanes) {
    return internal::RowVisitor{rows.data(), lanes.rank() == 0};
  });
  return Insert(exec, keys, Missing(rows.data(), n), now, rows.data(),
                [this](Lanes& lanes, size_t, K key, char* row) {
                  if (lanes.rank() == 0) InitialVector(key, layout().vector(row));
                });
}

namespace internal {

// A set of rows that threads add to, and that holds some others too: about one in eight at most.
class RowFilter {
 public:
  // For up to n rows.
  explicit RowFilter(size_t n) {
    while ((kBitsPerWord << log_words_) < 8 * n) ++log_words_;
    words_.resize(size_t{1} << log_words_);
  }
  void Add(RowId row) {
    __atomic_fetch_or(&words_[Word(row)], Bit(row), __ATOMIC_RELAXED);
    if (empty_.load(std::memory_order_relaxed)) empty_.store(false, std::memory_order_relaxed);
  }
  bool MayHold(RowId row) const { return (words_[Word(row)] & Bit(row)) != 0; }
  bool empty() const { return empty_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kBitsPerWord = 64;
  // The top bits of a product choose the word, the next six the bit.
  static uint64_t Scatter(RowId row) { return row * 0x9E3779B97F4A7C15ull; }
  size_t Word(RowId row) const { return Scatter(row) >> 1 >> (63 - log_words_); }
  uint64_t Bit(RowId row) const { return uint64_t{1} << (Scatter(row) << log_words_ >> 58); }

  uint32_t log_words_ = 0;
  std::vector<uint64_t> words_;
  std::atomic<bool> empty_{true};
};

}  // namespace internal

template <class K, class Lanes>
Status HashTable<K, Lanes>::Upsert(Exec& exec, const void* keys, size_t n, const void* vectors,
                                   Tick tick) {
  const K* k = static_cast<const K*>(keys);
  const size_t bytes = layout().vector_bytes();
  const auto* from = static_cast<const char*>(vectors);
  const Stamp now = BeginBatch(tick, n);
  DYNEMB_RETURN_IF_ERROR(MakeRoomFirst(exec, k, n, now));

  // The first to mark a row as updated by this batch writes it, so no two threads write one row. If
  // a second comes, the key repeats, and its row is written again below, in order.
  struct Visitor {
    const RowLayout& layout;
    const char* vectors;
    RowId* rows;
    Stamp now;
    bool leader;
    internal::RowFilter* again;
    std::atomic<bool>* missing;
    uint64_t hits = 0, misses = 0;  // not a lookup: stay 0
    void Hit(size_t i, RowId row, char* at) {
      if (!leader) return;
      rows[i] = row;
      if (__atomic_exchange_n(layout.update(at), now, __ATOMIC_RELAXED) == now) {
        again->Add(row);
        return;
      }
      CopyVector(layout.vector(at), vectors + i * layout.vector_bytes(), layout.vector_bytes());
    }
    void Miss(size_t i, K) {
      if (!leader) return;
      rows[i] = kNoRow;
      missing->store(true, std::memory_order_relaxed);
    }
  };
  std::vector<RowId> rows(n);
  internal::RowFilter again(n);
  std::atomic<bool> missing{false};
  FindBatch(exec, k, n, now, layout().vector_offset + bytes, [&](Lanes& lanes) {
    return Visitor{layout(), from, rows.data(), now, lanes.rank() == 0, &again, &missing};
  });
  if (missing.load()) {
    std::vector<size_t> repeats;
    DYNEMB_RETURN_IF_ERROR(Insert(
        exec, k, Missing(rows.data(), n), now, rows.data(),
        [&](Lanes& lanes, size_t i, K, char* row) {
          if (lanes.rank() == 0) CopyVector(layout().vector(row), from + i * bytes, bytes);
        },
        &repeats));
    for (size_t i : repeats) again.Add(rows[i]);
  }
  if (!again.empty()) {
    ForWorkers(exec, n, [&](size_t worker, size_t workers) {
      for (uint32_t i : OwnedBy(worker, workers, 0, n, [&](size_t i) { return rows[i]; })) {
        if (!again.MayHold(rows[i])) continue;
        CopyVector(layout().vector(rows_.At(rows[i])), from + i * bytes, bytes);
      }
    });
  }
  return Status();
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                                       Tick tick) {
  const K* k = static_cast<const K*>(keys);
  const auto dim = static_cast<size_t>(options_.dim);
  const Stamp now = BeginBatch(tick, n);
  const auto add = [&](size_t i, K key, char* row) {
    VectorBuffer sum(options_.dim);
    LoadVector(options_.dtype, layout().vector(row), options_.dim, sum.get());
    for (size_t c = 0; c < dim; ++c) sum.get()[c] += deltas[i * dim + c];
    StoreUpdated(sum.get(), key, tick, row);
    *layout().update(row) = now;
  };
  std::vector<RowId> rows(n);
  FindBatch(exec, k, n, now, layout().key_size, [&](Lanes& lanes) {
    return internal::RowVisitor{rows.data(), lanes.rank() == 0};
  });
  DYNEMB_RETURN_IF_ERROR(InsertInitial(exec, k, Missing(rows.data(), n), tick, rows.data()));
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + 8 < end) PrefetchBytes(rows_.At(rows[i + 8]), layout().vector_offset + dim * 4);
      add(i, k[i], rows_.At(rows[i]));
    }
  });
  return Status();
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors,
                                      const float* state, bool insert, Tick tick) {
  const K* k = static_cast<const K*>(keys);
  const Stamp now = BeginBatch(tick, n);
  std::vector<RowId> rows(n);
  FindBatch(exec, k, n, now, layout().key_size, [&](Lanes& lanes) {
    return internal::RowVisitor{rows.data(), lanes.rank() == 0};
  });
  if (insert) {
    DYNEMB_RETURN_IF_ERROR(InsertInitial(exec, k, Missing(rows.data(), n), tick, rows.data()));
  }
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (rows[i] == kNoRow) continue;
      char* row = rows_.At(rows[i]);
      StoreUpdated(vectors + i * static_cast<size_t>(options_.dim), k[i], tick, row);
      if (layout().state_width != 0) {
        memcpy(layout().state(row), state + i * static_cast<size_t>(layout().state_width),
               layout().state_bytes());
      }
      *layout().update(row) = now;
    }
  });
  return Status();
}

template <class K, class Lanes>
void HashTable<K, Lanes>::ApplyRange(const RowOptimizer& optimizer, const void* keys,
                                     const RowId* rows, const float* gradients, size_t begin,
                                     size_t end, Tick tick) {
  constexpr size_t kAhead = 8;
  const K* k = static_cast<const K*>(keys);
  const auto dim = static_cast<size_t>(options_.dim);
  const Stamp now = ToStamp(tick);
  const size_t row_bytes = std::min(layout().stride, kPrefetchMost);
  VectorBuffer vector(options_.dim);
  uint64_t dropped = 0;
  uint64_t nonfinite = 0;
  for (size_t i = begin; i < end; ++i) {
    if (i + kAhead < end && rows[i + kAhead] < rows_.high_water()) {
      PrefetchBytes(rows_.At(rows[i + kAhead]), row_bytes);
    }
    if (!Holds(rows[i], k[i])) {
      ++dropped;
      continue;
    }
    char* row = rows_.At(rows[i]);
    const float* gradient = gradients + i * dim;
    nonfinite += !AllFinite(gradient, options_.dim);
    if (options_.dtype == DType::kFloat32) {
      optimizer.Apply(reinterpret_cast<float*>(layout().vector(row)), layout().state(row),
                      gradient);
    } else {
      LoadVector(options_.dtype, layout().vector(row), options_.dim, vector.get());
      optimizer.Apply(vector.get(), layout().state(row), gradient);
      StoreUpdated(vector.get(), k[i], tick, row);
    }
    *layout().update(row) = now;
  }
  if (dropped != 0) counters_.dropped_gradients.fetch_add(dropped, std::memory_order_relaxed);
  if (nonfinite != 0) counters_.nonfinite_gradients.fetch_add(nonfinite, std::memory_order_relaxed);
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_TABLE_BATCH_H_
