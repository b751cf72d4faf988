#include "cc/lookup/bags.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace dynemb {
namespace {

// Items per range of the loops here: enough to make the cost of handing out a range negligible.
constexpr size_t kGrain = 16384;
constexpr size_t kNone = ~size_t{0};

// Keeps the smallest of the reported positions, so that the message does not depend on the order in
// which threads report. Relaxed: the position is read after the loop has joined.
class FirstBad {
 public:
  void Report(size_t position) {
    size_t seen = position_.load(std::memory_order_relaxed);
    while (position < seen &&
           !position_.compare_exchange_weak(seen, position, std::memory_order_relaxed)) {
    }
  }
  size_t position() const { return position_.load(std::memory_order_relaxed); }

 private:
  std::atomic<size_t> position_{kNone};
};

std::string Str(int64_t x) { return std::to_string(x); }

}  // namespace

Status Bags::Reset(int64_t nnz, int64_t num_bags) {
  nnz_ = num_bags_ = hotness_ = stride_ = 0;
  splits_ = indices_ = nullptr;
  order_ = nullptr;
  has_bag_of_ = false;
  if (num_bags < 0 || num_bags > kMaxSize) {
    return InvalidArgument("num_bags must be in [0, 2^32 - 2], got " + Str(num_bags));
  }
  if (nnz < 0 || nnz > kMaxSize) {
    return InvalidArgument("the number of ids must be in [0, 2^32 - 2], got " + Str(nnz));
  }
  nnz_ = nnz;
  num_bags_ = num_bags;
  return {};
}

Status Bags::InitUniform(int64_t hotness, int64_t nnz, int64_t num_bags) {
  DYNEMB_RETURN_IF_ERROR(Reset(nnz, num_bags));
  if (hotness < 0) return InvalidArgument("ids per bag must not be negative, got " + Str(hotness));
  // Divides first, so that the product cannot overflow.
  const bool fits = num_bags == 0 || hotness <= nnz / num_bags;
  if (!fits || hotness * num_bags != nnz) {
    return InvalidArgument("the number of ids must be num_bags times ids per bag, got " + Str(nnz) +
                           " ids, " + Str(num_bags) + " bags and " + Str(hotness) + " per bag");
  }
  hotness_ = hotness;
  return {};
}

Status Bags::InitSplits(Exec& exec, const int64_t* splits, int64_t num_splits, int64_t nnz,
                        int64_t num_bags) {
  DYNEMB_RETURN_IF_ERROR(Reset(nnz, num_bags));
  if (num_splits != num_bags + 1) {
    return InvalidArgument("row splits must have num_bags + 1 = " + Str(num_bags + 1) +
                           " elements, got " + Str(num_splits));
  }
  if (splits[0] != 0) return InvalidArgument("row splits must start at 0, got " + Str(splits[0]));
  FirstBad bad;
  exec.ParallelFor(num_bags_, kGrain, [&](size_t begin, size_t end) {
    bool descends = false;
    for (size_t b = begin; b < end; ++b) descends |= splits[b + 1] < splits[b];
    if (!descends) return;
    size_t b = begin;
    while (splits[b + 1] >= splits[b]) ++b;
    bad.Report(b + 1);
  });
  if (bad.position() != kNone) {
    const size_t i = bad.position();
    return InvalidArgument("row splits must not descend, got " + Str(splits[i]) + " after " +
                           Str(splits[i - 1]) + " at position " + Str(i));
  }
  if (splits[num_bags] != nnz) {
    return InvalidArgument("row splits must end at the number of ids, " + Str(nnz) + ", got " +
                           Str(splits[num_bags]));
  }
  splits_ = splits;
  FindHotness(exec);
  return {};
}

Status Bags::InitIndices(Exec& exec, const int64_t* indices, int64_t stride, int64_t nnz,
                         int64_t num_bags) {
  DYNEMB_RETURN_IF_ERROR(Reset(nnz, num_bags));
  if (stride < 1)
    return InvalidArgument("indices must have at least one column, got " + Str(stride));
  stride_ = stride;
  own_splits_.Resize(num_bags_ + 1);
  int64_t* const splits = own_splits_.get();

  // One pass validates the bags, finds out whether they ascend, and writes splits: where the bag
  // changes from `last` to `bag`, at position i, each bag in (last, bag] begins at i.
  //
  // If the bags ascend, each element of splits is written by one range. If they do not, several
  // ranges may write the same element, and the result is discarded. The stores are atomic (relaxed:
  // plain stores in machine code) only because a data race would be undefined behavior.
  //
  // A range stops writing at its first descent, and ranges that begin later write nothing. Bags
  // that jump up and down therefore cost at most num_bags stores per range in flight.
  FirstBad bad;
  std::atomic<bool> ascends{true};
  exec.ParallelFor(nnz_, kGrain, [&](size_t begin, size_t end) {
    bool write = ascends.load(std::memory_order_relaxed);
    int64_t last = begin == 0 ? -1 : indices[(begin - 1) * stride];
    // An invalid bag at the end of the previous range is reported by that range.
    if (last < -1 || last >= num_bags) write = false;
    for (size_t i = begin; i < end; ++i) {
      const int64_t bag = indices[i * stride];
      if (bag == last && bag >= 0) continue;
      if (bag < 0 || bag >= num_bags) return bad.Report(i);
      if (bag < last && write) {
        ascends.store(false, std::memory_order_relaxed);
        write = false;
      }
      if (write) {
        for (int64_t b = last + 1; b <= bag; ++b) {
          __atomic_store_n(&splits[b], static_cast<int64_t>(i), __ATOMIC_RELAXED);
        }
      }
      last = bag;
    }
  });
  if (bad.position() != kNone) {
    const size_t i = bad.position();
    return InvalidArgument("bag index must be in [0, num_bags = " + Str(num_bags) + "), got " +
                           Str(indices[i * stride]) + " at position " + Str(i));
  }
  indices_ = indices;
  splits_ = splits;
  if (ascends.load(std::memory_order_relaxed)) {
    const int64_t last = nnz == 0 ? -1 : indices[(nnz - 1) * stride];
    std::fill(splits + last + 1, splits + num_bags + 1, nnz);
    FindHotness(exec);
  } else {
    SortIndices();
  }
  return {};
}

void Bags::FindHotness(Exec& exec) {
  if (num_bags_ == 0 || nnz_ % num_bags_ != 0) return;
  const size_t hotness = nnz_ / num_bags_;
  if (static_cast<size_t>(splits_[1]) != hotness) return;  // most other bags end here
  std::atomic<bool> uniform{true};
  exec.ParallelFor(num_bags_, kGrain, [&](size_t begin, size_t end) {
    bool differs = false;
    for (size_t b = begin; b < end; ++b) differs |= static_cast<size_t>(splits_[b]) != b * hotness;
    if (differs) uniform.store(false, std::memory_order_relaxed);
  });
  if (!uniform.load(std::memory_order_relaxed)) return;
  hotness_ = hotness;
  splits_ = indices_ = nullptr;
}

// A stable counting sort. It is serial, because sparse tensors are almost always in order.
void Bags::SortIndices() {
  own_order_.Resize(nnz_);
  int64_t* const splits = own_splits_.get();
  std::fill(splits, splits + num_bags_ + 1, 0);
  for (size_t i = 0; i < nnz_; ++i) ++splits[indices_[i * stride_]];
  int64_t at = 0;
  for (size_t b = 0; b < num_bags_; ++b) at += std::exchange(splits[b], at);
  // splits[b] is now the cursor of bag b. After the loop, it is where bag b + 1 begins.
  for (size_t i = 0; i < nnz_; ++i) {
    own_order_[splits[indices_[i * stride_]]++] = static_cast<uint32_t>(i);
  }
  std::copy_backward(splits, splits + num_bags_, splits + num_bags_ + 1);
  splits[0] = 0;
  order_ = own_order_.get();
}

void Bags::BuildBagOf(Exec& exec) {
  if (splits_ == nullptr || indices_ != nullptr || has_bag_of_) return;
  own_bag_of_.Resize(nnz_);
  exec.ParallelFor(num_bags_, kGrain / 8, [&](size_t begin, size_t end) {
    uint32_t* const bag_of = own_bag_of_.get();
    for (size_t b = begin; b < end; ++b) {
      std::fill(bag_of + splits_[b], bag_of + splits_[b + 1], static_cast<uint32_t>(b));
    }
  });
  has_bag_of_ = true;
}

void Bags::BagOf(const uint32_t* positions, size_t n, uint32_t* bags) const {
  if (indices_ != nullptr) {
    for (size_t i = 0; i < n; ++i) {
      bags[i] = static_cast<uint32_t>(indices_[positions[i] * stride_]);
    }
  } else if (splits_ != nullptr) {
    for (size_t i = 0; i < n; ++i) bags[i] = own_bag_of_[positions[i]];
  } else if (hotness_ == 1) {
    std::copy(positions, positions + n, bags);
  } else if (n > 0) {
    // x / d as the high half of x * ceil(2^64 / d): exact for 32-bit x and d > 1 (Lemire, Kaser,
    // Kurz 2019), and several times faster than a division.
    const uint64_t reciprocal = ~uint64_t{0} / hotness_ + 1;
    for (size_t i = 0; i < n; ++i) {
      bags[i] =
          static_cast<uint32_t>((static_cast<unsigned __int128>(reciprocal) * positions[i]) >> 64);
    }
  }
}

}  // namespace dynemb
