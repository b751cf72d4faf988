// BagCombiner: combines the vectors of consecutive bags.
//
//   BagCombiner<kDim> combine(task, dtype, dim, first_bag);
//   for (size_t i = ...) combine.Add(i, vector);   // ids in bag order, from first_bag's on
//   combine.Finish(last_bag);                      // every bag before last_bag is written
//
// kDim is the dim if it is one of the common ones, so that the loops over columns unroll; otherwise
// 0. float32 vectors are summed directly in the output.
#ifndef DYNEMB_LOOKUP_BAG_COMBINER_H_
#define DYNEMB_LOOKUP_BAG_COMBINER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cc/lookup/bags.h"
#include "cc/lookup/combiner.h"
#include "cc/table/codec.h"
#include "cc/table/types.h"
#include "cc/table/vector_buffer.h"
#include "cc/table/vector_format.h"

namespace dynemb {

// The bags to combine, and the outputs.
struct BagTask {
  const Bags* bags = nullptr;
  const float* weights = nullptr;  // [nnz], or null for none
  Combiner combiner = Combiner::kSum;
  void* pooled = nullptr;  // out [num_bags, dim] of the vectors' dtype; zeros for an empty bag
  // out [num_bags, dim], for kMax only: the position in nnz of the largest element, the first one
  // if several are equal; -1 for an empty bag
  int32_t* argmax = nullptr;
};

template <int64_t kDim>
class BagCombiner {
 public:
  // `rows`: null, or the row id of each position. It is kSkippedRow exactly for the ids that are
  // passed to Skip.
  BagCombiner(const BagTask& task, DType dtype, int64_t dim, size_t bag,
              const RowId* rows = nullptr)
      : task_(task),
        rows_(rows),
        dtype_(dtype),
        runtime_dim_(dim),
        vector_bytes_(static_cast<size_t>(dim) * SizeOf(dtype)),
        bag_(bag),
        loaded_(dim),
        sum_(dim) {
    StartBag();
  }

  // Adds the vector of the i-th id in bag order.
  void Add(size_t i, const char* vector) { Add(i, vector, FormatOf(dtype_)); }
  void Add(size_t i, const char* row, VectorFormat format) {
    while (i >= bag_end_) NextBag();
    if (incomplete_) return;
    const float* v;
    if (format == VectorFormat::kFloat32) {
      v = reinterpret_cast<const float*>(row);
    } else {
      LoadStored(format, row, dim(), loaded_.get());
      v = loaded_.get();
    }
    const size_t position = task_.bags->position(i);
    const float w = task_.weights != nullptr ? task_.weights[position] : 1.0f;
    if (task_.combiner == Combiner::kMax) {
      AddMax(position, w, v);
    } else if (count_ == 0) {
      for (int64_t c = 0; c < dim(); ++c) into_[c] = w * v[c];
    } else if (task_.weights == nullptr) {
      for (int64_t c = 0; c < dim(); ++c) into_[c] += v[c];
    } else {
      for (int64_t c = 0; c < dim(); ++c) into_[c] += w * v[c];
    }
    ++count_;
  }
  // The i-th id in bag order has no vector yet: puts its bag aside, with an undefined output.
  void PutAside(size_t i) {
    while (i >= bag_end_) NextBag();
    incomplete_ = true;
  }
  // The i-th id in bag order is absent from its bag.
  void Skip(size_t i) {
    while (i >= bag_end_) NextBag();
  }
  // Continues with a bag, after Finish.
  void GoTo(size_t bag) {
    bag_ = bag;
    StartBag();
  }
  // Completes every bag before last_bag.
  void Finish(size_t last_bag) {
    while (bag_ < last_bag) NextBag();
  }
  // In increasing order.
  const std::vector<size_t>& put_aside() const { return put_aside_; }

 private:
  int64_t dim() const { return kDim != 0 ? kDim : runtime_dim_; }
  char* PooledAt(size_t bag) const {
    return static_cast<char*>(task_.pooled) + bag * vector_bytes_;
  }
  int32_t* ArgmaxAt(size_t bag) const { return task_.argmax + bag * static_cast<size_t>(dim()); }

  void StartBag() {
    if (bag_ >= task_.bags->num_bags()) return;
    bag_end_ = task_.bags->end(bag_);
    count_ = 0;
    incomplete_ = false;
    into_ = dtype_ == DType::kFloat32 ? reinterpret_cast<float*>(PooledAt(bag_)) : sum_.get();
  }

  void NextBag() {
    if (incomplete_) {
      put_aside_.push_back(bag_);
    } else if (count_ == 0) {
      memset(PooledAt(bag_), 0, vector_bytes_);
      if (task_.combiner == Combiner::kMax) std::fill_n(ArgmaxAt(bag_), dim(), -1);
    } else {
      EndBag();
    }
    ++bag_;
    StartBag();
  }

  void EndBag() {
    if (HasScale(task_.combiner)) {
      const float scale =
          task_.weights == nullptr
              ? BagScale(task_.combiner, count_)
              : BagScale(task_.combiner, *task_.bags, task_.weights, bag_, CountedRows{rows_});
      if (scale == 0.0f) {
        for (int64_t c = 0; c < dim(); ++c) into_[c] = 0.0f;  // even if the sum is NaN
      } else {
        for (int64_t c = 0; c < dim(); ++c) into_[c] *= scale;
      }
    }
    if (dtype_ != DType::kFloat32) StoreVector(dtype_, into_, dim(), PooledAt(bag_));
  }

  void AddMax(size_t position, float w, const float* v) {
    int32_t* argmax = ArgmaxAt(bag_);
    for (int64_t c = 0; c < dim(); ++c) {
      const float value = w * v[c];
      if (count_ != 0 && !(value > into_[c])) continue;
      into_[c] = value;
      argmax[c] = static_cast<int32_t>(position);
    }
  }

  const BagTask& task_;
  const RowId* const rows_;
  const DType dtype_;
  const int64_t runtime_dim_;
  const size_t vector_bytes_;
  size_t bag_;
  size_t bag_end_ = 0;
  size_t count_ = 0;
  bool incomplete_ = false;
  float* into_ = nullptr;
  VectorBuffer loaded_;  // a row of another format as float32
  VectorBuffer sum_;     // of a bag of 16-bit vectors
  std::vector<size_t> put_aside_;
};

// Calls fn with an integral_constant: dim if it is a common one, otherwise 0.
template <class Fn>
auto DispatchDim(int64_t dim, const Fn& fn) {
  switch (dim) {
    case 4:
      return fn(std::integral_constant<int64_t, 4>());
    case 8:
      return fn(std::integral_constant<int64_t, 8>());
    case 16:
      return fn(std::integral_constant<int64_t, 16>());
    case 32:
      return fn(std::integral_constant<int64_t, 32>());
    case 64:
      return fn(std::integral_constant<int64_t, 64>());
    case 128:
      return fn(std::integral_constant<int64_t, 128>());
    default:
      return fn(std::integral_constant<int64_t, 0>());
  }
}

// The number of bags in a range of work: about 4096 ids.
inline size_t BagGrain(const Bags& bags) {
  constexpr size_t kIds = 4096;
  if (bags.num_bags() == 0) return 1;
  const size_t ids_per_bag = std::max<size_t>(1, bags.nnz() / bags.num_bags());
  return std::max<size_t>(1, kIds / ids_per_bag);
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_BAG_COMBINER_H_
