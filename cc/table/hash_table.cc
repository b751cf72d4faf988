#include "cc/table/hash_table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "cc/table/codec.h"
#include "cc/table/copy_vector.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

// Remembers the row of every position.
struct RowVisitor {
  RowId* rows;
  uint64_t hits = 0, misses = 0;
  void Hit(size_t i, RowId row, const char*) {
    rows[i] = row;
    ++hits;
  }
  template <class K>
  void Miss(size_t i, K) {
    rows[i] = kNoRow;
    ++misses;
  }
};

}  // namespace

template <class K>
Status HashTable<K>::Make(const TableOptions& options, std::unique_ptr<Table>* table, Exec* exec,
                          HotLimit limit) {
  std::unique_ptr<HashTable> made(new HashTable);
  DYNEMB_RETURN_IF_ERROR(made->Init(options, exec, std::move(limit)));
  *table = std::move(made);
  return Status();
}

template <class K>
template <class Visitor>
uint64_t HashTable<K>::FindBatch(Exec& exec, const K* keys, size_t n, const Touch& touch,
                                 const Expired& expired, size_t row_bytes, Counts counts,
                                 const Visitor& visitor) const {
  Phase phase("find");
  const TableView<K> view = View();
  std::atomic<uint64_t> missing{0};
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    Visitor visit = visitor;
    const size_t num_expired = FindPass(
        view, row_bytes, [keys](size_t i) { return keys[i]; }, begin, end, touch, expired, visit);
    if (num_expired != 0) found_expired_.store(true, std::memory_order_relaxed);
    if (visit.misses != 0) missing.fetch_add(visit.misses, std::memory_order_relaxed);
    if (counts == Counts::kLookup) CountFinds(visit.hits, visit.misses);
  });
  return missing.load();
}

template <class K>
uint64_t HashTable<K>::FindRows(Exec& exec, const K* keys, size_t n, const Touch& touch,
                                const Expired& expired, Counts counts, RowId* rows) const {
  return FindBatch(exec, keys, n, touch, expired, layout().key_size, counts, RowVisitor{rows});
}

template <class K>
void HashTable<K>::Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) {
  Warm(exec, keys);
  FindRows(exec, keys.As<K>(), keys.size(), scoring_.Lookup(stamps_.Encode(tick), false),
           ExpiredAt(tick), Counts::kLookup, rows);
}

template <class K>
void HashTable<K>::Contains(Exec& exec, KeySpan keys, bool* found) const {
  struct Visitor {
    bool* found;
    uint64_t hits = 0, misses = 0;
    void Hit(size_t i, RowId, const char*) { found[i] = true; }
    void Miss(size_t i, K) { found[i] = false; }
  };
  FindBatch(exec, keys.As<K>(), keys.size(), Touch{}, ExpiredAt(0), layout().key_size,
            Counts::kNothing, Visitor{found});
  ForCold(keys, [found](size_t i, const ColdRow&) { found[i] = true; });
}

namespace {

// Copies vectors out; a key without a row is left to on_miss(i, key).
template <class OnMiss>
struct CopyVisitor {
  const RowLayout& layout;
  char* vectors;
  RowId* rows;
  const OnMiss& on_miss;
  uint64_t hits = 0, misses = 0;
  void Hit(size_t i, RowId row, const char* at) {
    ++hits;
    rows[i] = row;
    CopyVector(vectors + i * layout.vector_bytes(), layout.vector(at), layout.vector_bytes());
  }
  template <class K>
  void Miss(size_t i, K key) {
    ++misses;
    rows[i] = kNoRow;
    on_miss(i, key);
  }
};
template <class OnMiss>
CopyVisitor(const RowLayout&, char*, RowId*, const OnMiss&) -> CopyVisitor<OnMiss>;

}  // namespace

template <class K>
void HashTable<K>::Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector,
                          void* vectors, RowId* rows) {
  const size_t bytes = layout().vector_bytes();
  auto* out = static_cast<char*>(vectors);
  Warm(exec, keys);
  BringKeys(exec, keys);
  const auto miss = [&](size_t i, K key) {
    if (default_vector != nullptr) {
      memcpy(out + i * bytes, default_vector, bytes);
    } else {
      AbsentVector(key, out + i * bytes);
      rows[i] = AbsentRow();
    }
  };
  FindBatch(exec, keys.As<K>(), keys.size(), scoring_.Lookup(stamps_.Encode(tick), false),
            ExpiredAt(tick), layout().vector_offset + bytes, Counts::kLookup,
            CopyVisitor{layout(), out, rows, miss});
}

template <class K>
void HashTable<K>::ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state,
                            bool* found) const {
  struct Visitor {
    const RowLayout& layout;
    const CatchUp& catch_up;
    float* vectors;
    float* state;
    bool* found;
    uint64_t hits = 0, misses = 0;
    void Hit(size_t i, RowId, const char* row) {
      found[i] = true;
      LoadVector(layout.dtype, layout.vector(row), layout.dim,
                 vectors + i * static_cast<size_t>(layout.dim));
      if (layout.state_width != 0) {
        memcpy(state + i * static_cast<size_t>(layout.state_width), layout.state(row),
               layout.state_bytes());
      }
      if (catch_up.active()) {
        catch_up.Bring(vectors + i * static_cast<size_t>(layout.dim),
                       state + i * static_cast<size_t>(layout.state_width));
      }
    }
    void Miss(size_t i, K) {
      found[i] = false;
      memset(vectors + i * static_cast<size_t>(layout.dim), 0,
             static_cast<size_t>(layout.dim) * sizeof(float));
      if (layout.state_width != 0) {
        memset(state + i * static_cast<size_t>(layout.state_width), 0, layout.state_bytes());
      }
    }
  };
  FindBatch(exec, keys.As<K>(), keys.size(), Touch{}, ExpiredAt(0), layout().bytes(),
            Counts::kNothing, Visitor{layout(), catch_up_, vectors, state, found});
  ForCold(keys, [&](size_t i, const ColdRow& row) {
    found[i] = true;
    LoadVector(layout().dtype, row.content, layout().dim,
               vectors + i * static_cast<size_t>(layout().dim));
    if (layout().state_width == 0) return;
    memcpy(state + i * static_cast<size_t>(layout().state_width),
           row.content + layout().state_offset - layout().vector_offset, layout().state_bytes());
    if (catch_up_.active()) {
      catch_up_.Bring(vectors + i * static_cast<size_t>(layout().dim),
                      state + i * static_cast<size_t>(layout().state_width));
    }
  });
}

template <class K>
Status HashTable<K>::CheckBatch(size_t n) {
  if (n <= InsertPlan::kMaxKeys) return Status();
  return InvalidArgument("at most " + std::to_string(InsertPlan::kMaxKeys) +
                         " keys in one call, got " + std::to_string(n));
}

template <class K>
Status HashTable<K>::FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) {
  const K* const k = keys.As<K>();
  const size_t n = keys.size();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Touch touch = scoring_.Lookup(BeginLookup(exec, tick, n), true);
  BringKeys(exec, keys);
  if (FindRows(exec, k, n, touch, ExpiredAt(tick), Counts::kLookup, rows) == 0) return Status();
  return InsertInitial(exec, k, n, tick, rows);
}

template <class K>
Status HashTable<K>::LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times, Tick tick,
                                   void* vectors, RowId* rows) {
  const K* const k = keys.As<K>();
  const size_t n = keys.size();
  const size_t bytes = layout().vector_bytes();
  auto* out = static_cast<char*>(vectors);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = BeginLookup(exec, tick, n);
  BringKeys(exec, keys);
  const Touch touch = scoring_.Lookup(now, true);
  const auto later = [](size_t, K) {};
  const CopyVisitor visitor{layout(), out, rows, later};
  if (FindBatch(exec, k, n, touch, ExpiredAt(tick), layout().vector_offset + bytes, Counts::kLookup,
                visitor) == 0) {
    return Status();
  }
  const ScratchLease scratch;
  std::vector<uint32_t> moved;
  Batch batch{k, n, rows, now, tick, touch, {}, admission_.enabled(), times};
  batch.moved = &moved;
  DYNEMB_RETURN_IF_ERROR(InsertInitialAt(exec, batch, scratch.get()));
  const InsertPlan& plan = scratch->plan;
  Phase phase("copy new rows");
  const auto copy = [&](size_t i) {
    CopyVector(out + i * bytes, layout().vector(rows_.At(rows[i])), bytes);
  };
  exec.ParallelFor(plan.size(), kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) copy(plan.positions[j]);
  });
  for (const InsertPlan::Repeat& r : plan.repeats()) copy(r.position);
  for (const uint32_t i : moved) copy(i);
  if (!admission_.enabled()) return Status();
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (rows[i] != kNoRow) continue;
      AbsentVector(k[i], out + i * bytes);
      rows[i] = AbsentRow();
    }
  });
  return Status();
}

template class HashTable<uint64_t>;
template class HashTable<uint32_t>;

}  // namespace dynemb
