// What operators that send and receive words have in common.
#ifndef DYNEMB_TF_WIRE_SIDE_H_
#define DYNEMB_TF_WIRE_SIDE_H_

#include <cstdint>
#include <vector>

#include "cc/lookup/wire.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/table_resource.h"

namespace dynemb {

// The types of the tables' rows, how they travel, and which of the ranks is this one.
class WireSide {
 public:
  // From the attributes wire and rank.
  absl::Status Init(tf::OpKernelConstruction* ctx, const std::vector<tf::DataType>& dtypes);
  // The types too, from an attribute of this name.
  absl::Status Init(tf::OpKernelConstruction* ctx, const char* dtypes);

  size_t num_tables() const { return dtypes_.size(); }
  // Of the rows of table t.
  tf::DataType dtype(size_t t) const { return dtypes_[t]; }
  uint32_t rank() const { return rank_; }

  // Of rows of these widths, of which counts [tables, ranks] travel.
  absl::Status MakeLayout(const tf::Tensor& counts, const std::vector<int64_t>& dims,
                          WireLayout* layout) const;
  // Finds the rows of this rank for itself among `rows`: all that it sends of table t, in the order
  // of the ranks, with the counts `sent`.
  absl::Status FindOwn(const tf::Tensor& rows, const char* name, const tf::Tensor& sent,
                       const WireLayout& layout, size_t t, const void** own) const;

 private:
  std::vector<tf::DataType> dtypes_;
  std::vector<WireType> wires_;
  uint32_t rank_ = 0;
};

// Attribute `rank`.
absl::Status GetRank(tf::OpKernelConstruction* ctx, uint32_t* rank);
// Fails unless integer attribute `name` is `size`, or a list attribute has so many entries.
absl::Status HasLength(tf::OpKernelConstruction* ctx, const char* name, size_t size);
// A list attribute, whose values must be in [least, most].
absl::Status GetInts(tf::OpKernelConstruction* ctx, const char* name, int64_t least, int64_t most,
                     std::vector<int64_t>* values);
// Of the tables that attribute `names` lists.
absl::Status GetCounters(tf::OpKernelConstruction* ctx, std::vector<ExchangeCounters*>* counters);

// Output `index`: the words for each rank.
absl::Status OutputSplits(tf::OpKernelContext* ctx, int index, const std::vector<size_t>& words);
// Outputs 0 and 1: the words of the messages, and their splits.
absl::Status OutputWords(tf::OpKernelContext* ctx, const WireLayout& layout, int32_t** words);
// Adds to the counters of each table the bytes that leave this rank.
void CountBytes(const WireLayout& layout, std::atomic<int64_t> ExchangeCounters::*counter,
                const std::vector<ExchangeCounters*>& counters);
// The width of rows, a matrix.
absl::Status WidthOf(const tf::Tensor& rows, const char* name, int64_t* dim);

}  // namespace dynemb

#endif  // DYNEMB_TF_WIRE_SIDE_H_
