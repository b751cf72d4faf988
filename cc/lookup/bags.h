// Bags: the bag of each of nnz ids. One view of all forms that a *bags* tensor may have:
//
//   uniform   rank 0   ids per bag          bag b holds positions [b × hotness, (b + 1) × hotness)
//   splits    rank 1   num_bags + 1 offsets bag b holds positions [splits[b], splits[b + 1])
//   indices   rank 2   the bag of each id   any order; Init builds splits, and an `order` if the
//                                           bags do not ascend
//
// The forward pass walks bags (`begin`, `end`, `position`: ascending inside a bag); the backward
// pass needs the bag of a position (`BagOf`):
//
//   for (size_t i = bags.begin(b); i < bags.end(b); ++i) Use(ids[bags.position(i)]);
//
// Contract. Each Init validates everything, so no later access is out of bounds, and returns
// InvalidArgument naming the first invalid value. After a failure, the object must be initialized
// again before use. Uniform bags own no arrays. `splits` and `indices` are borrowed, and must
// outlive the use of the object. Scratch is reused by the next Init.
#ifndef DYNEMB_LOOKUP_BAGS_H_
#define DYNEMB_LOOKUP_BAGS_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/exec.h"
#include "cc/table/scratch.h"
#include "cc/table/status.h"

namespace dynemb {

class Bags {
 public:
  // The largest nnz and num_bags: positions and bags are stored in 32 bits.
  static constexpr int64_t kMaxSize = 0xFFFFFFFE;

  Bags() = default;
  // Move-only: pointers into the object's own arrays stay valid if a vector is moved, but not if it
  // is copied.
  Bags(Bags&&) = default;
  Bags& operator=(Bags&&) = default;

  Status InitUniform(int64_t hotness, int64_t nnz, int64_t num_bags);
  Status InitSplits(Exec& exec, const int64_t* splits, int64_t num_splits, int64_t nnz,
                    int64_t num_bags);
  // indices[i * stride] is the bag of id i: the first column of a row-major [nnz, stride] tensor.
  Status InitIndices(Exec& exec, const int64_t* indices, int64_t stride, int64_t nnz,
                     int64_t num_bags);

  size_t nnz() const { return nnz_; }
  size_t num_bags() const { return num_bags_; }

  // The ids of a bag are [begin, end) in bag order; position() maps an index in bag order to the
  // id's position.
  size_t begin(size_t bag) const {
    return splits_ != nullptr ? static_cast<size_t>(splits_[bag]) : bag * hotness_;
  }
  size_t end(size_t bag) const { return begin(bag + 1); }
  size_t position(size_t i) const { return order_ != nullptr ? order_[i] : i; }

  // For loops that hoist the choice of form. splits() is null if the bags are uniform (hotness()
  // ids each). order() is null if bag order is the order of positions.
  const int64_t* splits() const { return splits_; }
  const uint32_t* order() const { return order_; }
  size_t hotness() const { return hotness_; }

  // Makes bag_of constant-time for the splits form, with an array of nnz elements. Does nothing for
  // the other forms. Idempotent.
  void BuildBagOf(Exec& exec);
  // Sets bags[i] to the bag of positions[i]. Requires BuildBagOf.
  void BagOf(const uint32_t* positions, size_t n, uint32_t* bags) const;
  size_t bag_of(size_t position) const {
    uint32_t p = static_cast<uint32_t>(position), bag;
    BagOf(&p, 1, &bag);
    return bag;
  }

 private:
  Status Reset(int64_t nnz, int64_t num_bags);
  void SortIndices();
  // Makes bags in order uniform if all have the same number of ids: the id of a one-hot feature is
  // often given as a sparse tensor. Uniform bags need no arrays, on a device none that have to be
  // copied there.
  void FindHotness(Exec& exec);

  size_t nnz_ = 0;
  size_t num_bags_ = 0;
  size_t hotness_ = 0;
  const int64_t* splits_ = nullptr;
  const uint32_t* order_ = nullptr;
  const int64_t* indices_ = nullptr;
  size_t stride_ = 0;
  bool has_bag_of_ = false;
  // Scratch, sized for the largest use so far.
  Buffer<int64_t> own_splits_;
  Buffer<uint32_t> own_order_;
  Buffer<uint32_t> own_bag_of_;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_BAGS_H_
