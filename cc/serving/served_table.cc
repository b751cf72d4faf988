#include "cc/serving/served_table.h"

#include <algorithm>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/copy_vector.h"
#include "cc/table/portability.h"
#include "cc/table/vector_buffer.h"
#include "cc/table/vector_format.h"

namespace dynemb {
namespace {

// Keys per range of work.
constexpr size_t kGrain = 4096;

// Calls fn(const K* keys) with K of the keys' width.
template <class Fn>
void WithKeys(KeySpan keys, const Fn& fn) {
  if (keys.type() == KeyType::kInt32) {
    fn(keys.As<uint32_t>());
  } else {
    fn(keys.As<uint64_t>());
  }
}

DYNEMB_CLONES void Load(Place place, int64_t dim, float* vector) {
  LoadStored(place.format(), place.row(), dim, vector);
}

// Whether a delta that changed nothing is the only difference.
bool HaveSameArrays(const TableRows& a, const TableRows& b) {
  return std::equal(a.sources().begin(), a.sources().end(), b.sources().begin(), b.sources().end(),
                    [](const RowSource& x, const RowSource& y) {
                      return x.slots == y.slots && x.keys == y.keys && x.vectors == y.vectors;
                    });
}

const char* Name(KeyType type) {
  return type == KeyType::kInt32 ? "int32" : type == KeyType::kUint64 ? "uint64" : "int64";
}
const char* Name(DType type) {
  return type == DType::kFloat32 ? "float32" : type == DType::kFloat16 ? "float16" : "bfloat16";
}

}  // namespace

Status ServedTable::Create(const ServedOptions& options, std::shared_ptr<ServedTable>* table) {
  std::shared_ptr<ServedTable> made(new ServedTable);
  made->options_.name = options.name;
  made->options_.key_type = options.key_type;
  made->options_.dtype = options.dtype;
  made->options_.dim = options.dim;
  made->options_.seed = options.seed;
  made->options_.initializer = options.initializer;
  DYNEMB_RETURN_IF_ERROR(CheckOptions(made->options_));
  DYNEMB_RETURN_IF_ERROR(
      Initializer::Create(options.initializer, options.dim, options.seed, &made->initializer_));
  made->layout_ = RowLayout(SizeOf(options.key_type), options.dtype, options.dim, 0);
  if (!options.default_vector.empty()) {
    if (options.default_vector.size() != static_cast<size_t>(options.dim)) {
      return InvalidArgument("default_vector has " + std::to_string(options.default_vector.size()) +
                             " numbers, expected none or " + std::to_string(options.dim));
    }
    made->default_.resize(made->layout_.vector_bytes());
    StoreVector(options.dtype, options.default_vector.data(), options.dim, made->default_.data());
  } else if (options.absent == Unadmitted::kSkip) {
    made->absent_row_ = kSkippedRow;
  }
  made->served_ = options;
  made->rows_ = std::make_shared<TableRows>();
  made->counters_ = std::make_shared<Counters>();
  *table = std::move(made);
  return Status();
}

Status ServedTable::WithRows(std::shared_ptr<const TableRows> rows, const ServedTable* before,
                             std::shared_ptr<ServedTable>* table) const {
  const TableEntry& entry = rows->entry();
  if (entry.dim != options_.dim || entry.key_type != options_.key_type ||
      entry.dtype != options_.dtype) {
    return DataLoss("table '" + entry.name + "' on disk has vectors " + Name(entry.dtype) + " [" +
                    std::to_string(entry.dim) + "] by " + Name(entry.key_type) +
                    ", but the model was exported with " + Name(options_.dtype) + " [" +
                    std::to_string(options_.dim) + "] by " + Name(options_.key_type));
  }
  std::shared_ptr<ServedTable> made(new ServedTable);
  made->options_ = options_;
  made->served_ = served_;
  made->layout_ = layout_;
  made->initializer_ = initializer_;
  made->default_ = default_;
  made->absent_row_ = absent_row_;
  made->rows_ = std::move(rows);
  made->counters_ = counters_;
  if (before != nullptr && HaveSameArrays(*before->rows_, *made->rows_)) {
    made->placed_ = before->placed_;
  } else if (served_.place != nullptr) {
    const Table* const earlier = before != nullptr ? before->placed_.get() : nullptr;
    DYNEMB_RETURN_IF_ERROR(served_.place->Place(*made, earlier, &made->placed_));
  }
  *table = std::move(made);
  return Status();
}

TableStats ServedTable::stats() const {
  TableStats s;
  s.size = rows_->size();
  s.slots = rows_->slots();
  s.index_bytes = s.slots * sizeof(uint32_t);
  s.row_bytes = rows_->mapped_bytes() + rows_->level_bytes() - s.index_bytes;
  s.metadata_bytes = s.index_bytes + s.size * SizeOf(options_.key_type);
  s.hits = counters_->hits.load(std::memory_order_relaxed);
  s.misses = counters_->misses.load(std::memory_order_relaxed);
  return s;
}

void ServedTable::AbsentVector(uint64_t key, void* vector) const {
  if (!default_.empty()) {
    memcpy(vector, default_.data(), default_.size());
  } else if (served_.absent != Unadmitted::kInitial) {
    memset(vector, 0, layout_.vector_bytes());
  } else {
    initializer_.FillAs(options_.dtype, key, vector);
  }
}

void ServedTable::ReadVector(Place place, void* vector) const {
  if (place.format() == FormatOf(options_.dtype)) {
    CopyVector(vector, place.row(), layout_.vector_bytes());
  } else if (options_.dtype == DType::kFloat32) {
    Load(place, options_.dim, static_cast<float*>(vector));
  } else {
    VectorBuffer loaded(options_.dim);
    Load(place, options_.dim, loaded.get());
    StoreVector(options_.dtype, loaded.get(), options_.dim, vector);
  }
}

void ServedTable::Count(uint64_t hits, uint64_t misses,
                        std::chrono::steady_clock::time_point began) const {
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
  counters_->lookup_ns.fetch_add(static_cast<uint64_t>(took.count()), std::memory_order_relaxed);
  counters_->hits.fetch_add(hits, std::memory_order_relaxed);
  counters_->misses.fetch_add(misses, std::memory_order_relaxed);
}

void ServedTable::Find(Exec& exec, KeySpan keys, Tick, RowId* rows) {
  WithKeys(keys, [&](const auto* k) {
    using K = std::decay_t<decltype(*k)>;
    exec.ParallelFor(keys.size(), kGrain, [&](size_t begin, size_t end) {
      ForEach<K>([k](size_t i) { return k[i]; }, begin, end, false,
                 [&](size_t i, K, Place place) { rows[i] = place.has_row() ? 0 : kNoRow; });
    });
  });
}

void ServedTable::Contains(Exec& exec, KeySpan keys, bool* found) const {
  WithKeys(keys, [&](const auto* k) {
    using K = std::decay_t<decltype(*k)>;
    exec.ParallelFor(keys.size(), kGrain, [&](size_t begin, size_t end) {
      ForEach<K>([k](size_t i) { return k[i]; }, begin, end, false,
                 [&](size_t i, K, Place place) { found[i] = place.has_row(); });
    });
  });
}

void ServedTable::Lookup(Exec& exec, KeySpan keys, Tick, const void* default_vector, void* vectors,
                         RowId* rows) {
  const size_t bytes = layout_.vector_bytes();
  auto* const out = static_cast<char*>(vectors);
  WithKeys(keys, [&](const auto* k) {
    using K = std::decay_t<decltype(*k)>;
    exec.ParallelFor(keys.size(), kGrain, [&](size_t begin, size_t end) {
      const auto began = std::chrono::steady_clock::now();
      uint64_t misses = 0;
      ForEach<K>([k](size_t i) { return k[i]; }, begin, end, true,
                 [&](size_t i, K key, Place place) {
                   char* const to = out + i * bytes;
                   if (place.has_row()) {
                     ReadVector(place, to);
                     rows[i] = 0;
                     return;
                   }
                   ++misses;
                   if (default_vector != nullptr) {
                     CopyVector(to, default_vector, bytes);
                     rows[i] = kNoRow;
                   } else {
                     AbsentVector(key, to);
                     rows[i] = absent_row_;
                   }
                 });
      Count(end - begin - misses, misses, began);
    });
  });
}

void ServedTable::ReadRows(Exec& exec, KeySpan keys, float* vectors, float*, bool* found) const {
  WithKeys(keys, [&](const auto* k) {
    using K = std::decay_t<decltype(*k)>;
    exec.ParallelFor(keys.size(), kGrain, [&](size_t begin, size_t end) {
      ForEach<K>([k](size_t i) { return k[i]; }, begin, end, true,
                 [&](size_t i, K, Place place) {
                   float* const to = vectors + i * static_cast<size_t>(options_.dim);
                   found[i] = place.has_row();
                   if (found[i]) {
                     Load(place, options_.dim, to);
                   } else {
                     std::fill_n(to, options_.dim, 0.0f);
                   }
                 });
    });
  });
}

Status ServedTable::FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) {
  Find(exec, keys, tick, rows);
  return Error();
}

Status ServedTable::LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors,
                                   RowId* rows) {
  Lookup(exec, keys, tick, nullptr, vectors, rows);
  return Error();
}

}  // namespace dynemb
