#include "cc/lookup/upstream.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

constexpr size_t kChunk = Upstream::kChunk;
// Upstream rows are prefetched this many entries before they are added: early enough to hide a miss
// of the last-level cache, late enough that the rows are still in L1 when they are added.
constexpr size_t kPrefetch = 16;
// Rows of 16-bit values are converted this many elements at a time, on the stack.
constexpr int64_t kBuffer = 256;
constexpr size_t kBagGrain = 4096;
constexpr size_t kRowGrain = 65536;
constexpr int64_t kBlock = 16;

// Ids, with the addresses of their upstream rows.
struct Chunk {
  size_t n;
  const uint32_t* positions;
  const uint32_t* local;
  const bool* is_first;
  const char* upstream[kChunk];
  const int32_t* argmax[kChunk];  // for max
  float scale[kChunk];
};

inline void PrefetchRow(const char* row, size_t bytes) {
  for (size_t i = 0; i < std::min<size_t>(bytes, 512); i += 64) PrefetchLine(row + i);
}

// sum = [sum +] scale * x. The first term is stored, because the memory is not initialized.
template <int kDim>
DYNEMB_INLINE void AddRow(const float* __restrict x, float scale, bool first, int64_t dim,
                          float* __restrict sum) {
  if (kDim == 0) {
    // Whole blocks first: only loops of constant length are vectorized at -O2.
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

// For max: scales the columns of the upstream row that this position won, and zeroes the others.
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

// Adds the chunk's terms to `sums`. kDim is dim, or 0 for any.
template <int kDim>
DYNEMB_CLONES void AddChunk(const Chunk& chunk, const UpstreamTask& task, float* sums) {
  const int64_t dim = kDim > 0 ? kDim : task.dim;
  const size_t element = SizeOf(task.dtype), row_bytes = dim * element;
  const bool max = task.combiner == Combiner::kMax;
  float buffer[kBuffer];
  for (size_t i = 0; i < chunk.n; ++i) {
    if (i + kPrefetch < chunk.n) PrefetchRow(chunk.upstream[i + kPrefetch], row_bytes);
    const bool first = chunk.is_first[i];
    float* const sum = sums + chunk.local[i] * dim;
    if (task.dtype == DType::kFloat32 && !max) {
      AddRow<kDim>(reinterpret_cast<const float*>(chunk.upstream[i]), chunk.scale[i], first, dim,
                   sum);
      continue;
    }
    for (int64_t c = 0; c < dim; c += kBuffer) {
      const int64_t n = std::min(dim - c, kBuffer);
      LoadVector(task.dtype, chunk.upstream[i] + c * element, n, buffer);
      float scale = chunk.scale[i];
      if (max) {
        const int32_t position = static_cast<int32_t>(chunk.positions[i]);
        KeepWon<kDim>(chunk.argmax[i] + c, position, std::exchange(scale, 1.0f), n, buffer);
      }
      AddRow<kDim>(buffer, scale, first, n, sum + c);
    }
  }
}

using AddChunkFn = void (*)(const Chunk&, const UpstreamTask&, float*);

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

}  // namespace

Status Upstream::Check(const UpstreamTask& t) {
  if (t.bags == nullptr) return InvalidArgument("bags must be given");
  if (t.dim <= 0) return InvalidArgument("dim must be positive, got " + std::to_string(t.dim));
  const size_t nnz = t.bags->nnz();
  if (nnz == 0) return {};
  if (t.upstream == nullptr && t.upstream_rows == nullptr)
    return InvalidArgument("upstream gradients must be given");
  if (t.combiner == Combiner::kMax) {
    if (t.argmax == nullptr) return InvalidArgument("combiner max needs argmax");
    if (nnz > 0x7FFFFFFF) {
      return InvalidArgument("combiner max takes at most 2^31 - 1 ids, got " + std::to_string(nnz));
    }
  }
  return {};
}

void Upstream::FindRefused(Exec& exec, bool* any_skipped) {
  std::atomic<bool> refused{false}, skipped{false};
  const RowId* const rows = task_.rows;
  exec.ParallelFor(rows == nullptr ? 0 : task_.bags->nnz(), kRowGrain,
                   [&](size_t begin, size_t end) {
                     bool some = false;
                     for (size_t i = begin; i < end; ++i) some |= IsRefused(rows[i]);
                     if (!some) return;
                     refused.store(true, std::memory_order_relaxed);
                     if (std::find(rows + begin, rows + end, kSkippedRow) == rows + end) return;
                     skipped.store(true, std::memory_order_relaxed);
                   });
  any_refused_ = refused.load();
  *any_skipped = skipped.load();
}

void Upstream::Prepare(Exec& exec, const UpstreamTask& task) {
  task_ = task;
  bool any_skipped = false;
  FindRefused(exec, &any_skipped);
  Bags& bags = *task.bags;
  bags.BuildBagOf(exec);
  if (zeros_.size() < static_cast<size_t>(task.dim)) zeros_.resize(task.dim);
  scale_by_bag_ = HasScale(task.combiner) &&
                  (bags.splits() != nullptr || task.weights != nullptr || any_skipped);
  if (!scale_by_bag_) {
    scale_ = BagScale(task.combiner, bags.hotness());
    return;
  }
  const CountedRows counted{any_skipped ? task.rows : nullptr};
  if (scales_.size() < bags.num_bags()) scales_.resize(bags.num_bags());
  exec.ParallelFor(bags.num_bags(), kBagGrain, [&](size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
      scales_[b] = BagScale(task.combiner, bags, task.weights, b, counted);
    }
  });
}

void Upstream::Add(const uint32_t* positions, const uint32_t* local, const bool* is_first, size_t n,
                   float* sums) const {
  const size_t row_bytes = task_.dim * SizeOf(task_.dtype);
  const char* const upstream = static_cast<const char*>(task_.upstream);
  const char* const zeros = reinterpret_cast<const char*>(zeros_.data());
  uint32_t bags[kChunk];
  Chunk chunk;
  chunk.n = n;
  chunk.positions = positions;
  chunk.local = local;
  chunk.is_first = is_first;
  task_.bags->BagOf(positions, n, bags);
  for (size_t j = 0; j < n; ++j) {
    chunk.upstream[j] = task_.upstream_rows != nullptr
                            ? static_cast<const char*>(task_.upstream_rows[bags[j]])
                            : upstream + bags[j] * row_bytes;
    if (j < kPrefetch) PrefetchRow(chunk.upstream[j], row_bytes);
    chunk.scale[j] = scale_;
  }
  if (scale_by_bag_) {
    for (size_t j = 0; j < n; ++j) {
      chunk.scale[j] = scales_[bags[j]];
      if (chunk.scale[j] == 0.0f) chunk.upstream[j] = zeros;
    }
  }
  if (task_.weights != nullptr) {
    for (size_t j = 0; j < n; ++j) chunk.scale[j] *= task_.weights[positions[j]];
  }
  if (any_refused_) {
    for (size_t j = 0; j < n; ++j) {
      if (!IsRefused(task_.rows[positions[j]])) continue;
      chunk.upstream[j] = zeros;
      chunk.scale[j] = 0.0f;
    }
  }
  if (task_.combiner == Combiner::kMax) {
    for (size_t j = 0; j < n; ++j) {
      chunk.argmax[j] = task_.argmax + bags[j] * static_cast<size_t>(task_.dim);
    }
  }
  AddChunkFor(task_.dim)(chunk, task_, sums);
}

}  // namespace dynemb
