#include "cc/lookup/backward.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

// Entries whose upstream rows are looked up together.
constexpr size_t kChunk = 256;
// Upstream rows are asked for this many entries before they are added: enough to hide a miss of the
// last-level cache, few enough to be still in L1 when their turn comes.
constexpr size_t kPrefetch = 16;
// Floats that a unit of Write adds up, at least: 10 to 20 us.
constexpr size_t kUnitFloats = 65536;
// Rows of 16-bit values are converted in pieces of this many, on the stack.
constexpr int64_t kPiece = 256;
constexpr size_t kBagGrain = 4096;
constexpr int64_t kBlock = 16;

// What some entries of one partition add to the sums.
struct Chunk {
  size_t n;
  const uint32_t* positions;
  const uint32_t* local;
  const char* upstream[kChunk];
  const int32_t* argmax[kChunk];  // for max
  float scale[kChunk];
};

inline void PrefetchRow(const char* row, size_t bytes) {
  for (size_t i = 0; i < std::min<size_t>(bytes, 512); i += 64) __builtin_prefetch(row + i);
}

// sum = [sum +] scale * x. The first term of a sum is stored: the memory is not initialised.
template <int kDim>
DYNEMB_INLINE void AddRow(const float* __restrict x, float scale, bool first, int64_t dim,
                          float* __restrict sum) {
  if (kDim == 0) {
    // Whole blocks first: only a loop of constant length becomes vector instructions at -O2.
    for (; dim >= kBlock; dim -= kBlock, x += kBlock, sum += kBlock) {
      AddRow<kBlock>(x, scale, first, kBlock, sum);
    }
  }
  const int64_t n = kDim > 0 ? kDim : dim;
  if (first) {
    for (int64_t c = 0; c < n; ++c) sum[c] = scale * x[c];
  } else {
    for (int64_t c = 0; c < n; ++c) sum[c] += scale * x[c];
  }
}

// For max: keeps, and scales, the columns of the upstream row that this position won.
template <int kDim>
DYNEMB_INLINE void KeepWon(const int32_t* __restrict argmax, int32_t position, float scale,
                           int64_t dim, float* __restrict x) {
  if (kDim == 0) {
    for (; dim >= kBlock; dim -= kBlock, x += kBlock, argmax += kBlock) {
      KeepWon<kBlock>(argmax, position, scale, kBlock, x);
    }
  }
  const int64_t n = kDim > 0 ? kDim : dim;
  for (int64_t c = 0; c < n; ++c) {
    const float scaled = scale * x[c];
    x[c] = argmax[c] == position ? scaled : 0.0f;
  }
}

// Adds the chunk's entries to the partition's `sums`, of which the first `num_sums` have been
// started; returns how many have been then. kDim is dim, or 0 for any.
template <int kDim>
DYNEMB_CLONES uint32_t AddChunk(const Chunk& chunk, const BackwardTask& task, uint32_t num_sums,
                                float* sums) {
  const int64_t dim = kDim > 0 ? kDim : task.dim;
  const size_t element = SizeOf(task.dtype), row_bytes = dim * element;
  const bool max = task.combiner == Combiner::kMax;
  float piece[kPiece];
  for (size_t i = 0; i < chunk.n; ++i) {
    if (i + kPrefetch < chunk.n) PrefetchRow(chunk.upstream[i + kPrefetch], row_bytes);
    const uint32_t u = chunk.local[i];
    const bool first = u == num_sums;
    num_sums += first;
    float* const sum = sums + u * dim;
    if (task.dtype == DType::kFloat32 && !max) {
      AddRow<kDim>(reinterpret_cast<const float*>(chunk.upstream[i]), chunk.scale[i], first, dim,
                   sum);
      continue;
    }
    for (int64_t c = 0; c < dim; c += kPiece) {
      const int64_t n = std::min(dim - c, kPiece);
      LoadVector(task.dtype, chunk.upstream[i] + c * element, n, piece);
      float scale = chunk.scale[i];
      if (max) {
        const int32_t position = static_cast<int32_t>(chunk.positions[i]);
        KeepWon<kDim>(chunk.argmax[i] + c, position, std::exchange(scale, 1.0f), n, piece);
      }
      AddRow<kDim>(piece, scale, first, n, sum + c);
    }
  }
  return num_sums;
}

using AddChunkFn = uint32_t (*)(const Chunk&, const BackwardTask&, uint32_t, float*);

AddChunkFn AddChunkFor(int64_t dim) {
  switch (dim) {
    case 4:
      return AddChunk<4>;
    case 8:
      return AddChunk<8>;
    case 16:
      return AddChunk<16>;
    case 32:
      return AddChunk<32>;
    case 64:
      return AddChunk<64>;
    case 128:
      return AddChunk<128>;
    default:
      return AddChunk<0>;
  }
}

Status Check(const BackwardTask& t) {
  if (t.bags == nullptr) return InvalidArgument("bags must be given");
  if (t.dim <= 0) return InvalidArgument("dim must be positive, got " + std::to_string(t.dim));
  const size_t nnz = t.bags->nnz();
  if (nnz == 0) return {};
  if (t.keys == nullptr) return InvalidArgument("keys must be given");
  if (t.upstream == nullptr) return InvalidArgument("upstream gradients must be given");
  if (t.combiner == Combiner::kMax) {
    if (t.argmax == nullptr) return InvalidArgument("combiner max needs argmax");
    if (nnz > 0x7FFFFFFF) {
      return InvalidArgument("combiner max takes at most 2^31 - 1 ids, got " + std::to_string(nnz));
    }
  }
  return {};
}

}  // namespace

Status Backward::Prepare(Exec& exec, const BackwardTask* tasks, size_t num_tasks) {
  Phase phase("find unique ids");
  num_tasks_ = 0;
  units_.clear();
  size_t total = 0;
  int64_t max_dim = 0;
  for (size_t t = 0; t < num_tasks; ++t) {
    const Status status = Check(tasks[t]);
    if (!status.ok()) {
      return Status(status.code(), "table " + std::to_string(t) + ": " + status.message());
    }
    total += tasks[t].bags->nnz();
    max_dim = std::max(max_dim, tasks[t].dim);
  }
  if (zeros_.size() < static_cast<size_t>(max_dim)) zeros_.resize(max_dim);
  if (prepared_.size() < num_tasks) prepared_.resize(num_tasks);

  // A task that is a small part of the whole is done by one thread, while it is in that thread's
  // cache; others by all threads, one after the other. The outcome is the same.
  std::vector<Prepared*> small;
  const size_t small_keys = total / (2 * exec.parallelism());
  for (size_t t = 0; t < num_tasks; ++t) {
    Prepared* const p = &prepared_[t];
    p->task = tasks[t];
    if (p->task.bags->nnz() <= small_keys) {
      small.push_back(p);
    } else {
      PrepareTask(exec, p);
    }
  }
  exec.ParallelFor(small.size(), 1, [&](size_t begin, size_t end) {
    SerialExec serial;
    for (size_t i = begin; i < end; ++i) PrepareTask(serial, small[i]);
  });
  num_tasks_ = num_tasks;
  MakeUnits();
  return {};
}

void Backward::PrepareTask(Exec& exec, Prepared* prepared) {
  const BackwardTask& task = prepared->task;
  Bags& bags = *task.bags;
  // Bags has checked that nnz is not too large for Dedup.
  static_assert(Bags::kMaxSize <= Dedup<uint64_t>::kMaxKeys, "");
  const Status status =
      SizeOf(task.key_type) == 8
          ? prepared->dedup64.Run(exec, static_cast<const uint64_t*>(task.keys), bags.nnz())
          : prepared->dedup32.Run(exec, static_cast<const uint32_t*>(task.keys), bags.nnz());
  (void)status;
  bags.BuildBagOf(exec);

  prepared->scale_by_bag =
      HasScale(task.combiner) && (bags.splits() != nullptr || task.weights != nullptr);
  if (!prepared->scale_by_bag) {
    prepared->scale = BagScale(task.combiner, bags.hotness());
    return;
  }
  if (prepared->scales.size() < bags.num_bags()) prepared->scales.resize(bags.num_bags());
  exec.ParallelFor(bags.num_bags(), kBagGrain, [&](size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
      prepared->scales[b] = BagScale(task.combiner, bags, task.weights, b);
    }
  });
}

size_t Backward::num_unique(size_t t) const {
  const Prepared& p = prepared_[t];
  return SizeOf(p.task.key_type) == 8 ? p.dedup64.num_unique() : p.dedup32.num_unique();
}

void Backward::MakeUnits() {
  units_.clear();
  for (uint32_t t = 0; t < num_tasks_; ++t) {
    const Prepared& p = prepared_[t];
    const bool wide = SizeOf(p.task.key_type) == 8;
    const size_t partitions = wide ? p.dedup64.num_partitions() : p.dedup32.num_partitions();
    size_t begin = 0, floats = 0;
    for (size_t i = 0; i < partitions; ++i) {
      const size_t entries =
          wide ? p.dedup64.partition(i).num_entries : p.dedup32.partition(i).num_entries;
      floats += entries * p.task.dim;
      if (floats < kUnitFloats && i + 1 < partitions) continue;
      units_.push_back({t, static_cast<uint32_t>(begin), static_cast<uint32_t>(i + 1)});
      begin = i + 1;
      floats = 0;
    }
  }
}

void Backward::Write(Exec& exec, const BackwardOutput* outputs) const {
  Phase phase("sum gradients");
  exec.ParallelFor(units_.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Unit& unit = units_[i];
      const Prepared& p = prepared_[unit.task];
      if (SizeOf(p.task.key_type) == 8) {
        WriteUnit(p, p.dedup64, unit, outputs[unit.task]);
      } else {
        WriteUnit(p, p.dedup32, unit, outputs[unit.task]);
      }
    }
  });
}

template <typename K>
void Backward::WriteUnit(const Prepared& prepared, const Dedup<K>& dedup, const Unit& unit,
                         const BackwardOutput& out) const {
  const BackwardTask& task = prepared.task;
  const size_t row_bytes = task.dim * SizeOf(task.dtype);
  const char* const upstream = static_cast<const char*>(task.upstream);
  const char* const zeros = reinterpret_cast<const char*>(zeros_.data());
  const AddChunkFn add_chunk = AddChunkFor(task.dim);
  uint32_t bags[kChunk];
  Chunk chunk;
  for (size_t i = unit.partition_begin; i < unit.partition_end; ++i) {
    const auto p = dedup.partition(i);
    std::copy(p.unique, p.unique + p.num_unique, static_cast<K*>(out.keys) + p.unique_begin);
    if (task.rows != nullptr) {
      // Rewrites the next key's row until its first occurrence is there: no branch to mispredict.
      RowId* const rows = out.rows + p.unique_begin;
      for (size_t e = 0, u = 0; u < p.num_unique; ++e) {
        rows[u] = task.rows[p.positions[e]];
        u += p.local[e] == u;
      }
    }
    float* const sums = out.sums + p.unique_begin * task.dim;
    uint32_t num_sums = 0;
    for (size_t e = 0; e < p.num_entries; e += kChunk) {
      chunk.n = std::min(p.num_entries - e, kChunk);
      chunk.positions = p.positions + e;
      chunk.local = p.local + e;
      task.bags->BagOf(chunk.positions, chunk.n, bags);
      for (size_t j = 0; j < chunk.n; ++j) {
        chunk.upstream[j] = upstream + bags[j] * row_bytes;
        if (j < kPrefetch) PrefetchRow(chunk.upstream[j], row_bytes);
        chunk.scale[j] = prepared.scale;
      }
      if (prepared.scale_by_bag) {
        for (size_t j = 0; j < chunk.n; ++j) {
          chunk.scale[j] = prepared.scales[bags[j]];
          if (chunk.scale[j] == 0.0f) chunk.upstream[j] = zeros;
        }
      }
      if (task.weights != nullptr) {
        for (size_t j = 0; j < chunk.n; ++j) chunk.scale[j] *= task.weights[chunk.positions[j]];
      }
      if (task.combiner == Combiner::kMax) {
        for (size_t j = 0; j < chunk.n; ++j) {
          chunk.argmax[j] = task.argmax + bags[j] * static_cast<size_t>(task.dim);
        }
      }
      num_sums = add_chunk(chunk, task, num_sums, sums);
    }
  }
}

}  // namespace dynemb
