// Code shared by the operators that send and receive words.
#ifndef DYNEMB_TF_WIRE_SIDE_H_
#define DYNEMB_TF_WIRE_SIDE_H_

#include <cstdint>
#include <vector>

#include "cc/lookup/wire.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/table_resource.h"

namespace dynemb {

// The types of the tables' rows, their wire types, and the number of this rank.
class WireSide {
 public:
  // Reads the attributes wire and rank.
  absl::Status Init(tf::OpKernelConstruction* ctx, const std::vector<tf::DataType>& dtypes);
  // The same, with the types of the rows from the attribute of this name.
  absl::Status Init(tf::OpKernelConstruction* ctx, const char* dtypes);

  size_t num_tables() const { return dtypes_.size(); }
  // The type of the rows of table t.
  tf::DataType dtype(size_t t) const { return dtypes_[t]; }
  uint32_t rank() const { return rank_; }

  // Sets *layout for rows of these widths; counts is [tables, ranks].
  absl::Status MakeLayout(const tf::Tensor& counts, const std::vector<int64_t>& dims,
                          WireLayout* layout) const;
  // Finds the rows of table t that this rank sends to itself. `rows` has all rows of the table that
  // this rank sends, in the order of the ranks; `sent` has their numbers.
  absl::Status FindOwn(const tf::Tensor& rows, const char* name, const tf::Tensor& sent,
                       const WireLayout& layout, size_t t, const void** own) const;

 private:
  std::vector<tf::DataType> dtypes_;
  std::vector<WireType> wires_;
  uint32_t rank_ = 0;
};

// Gets attribute `rank`.
absl::Status GetRank(tf::OpKernelConstruction* ctx, uint32_t* rank);
// Fails unless attribute `name` is the integer `size`, or a list of `size` types.
absl::Status HasLength(tf::OpKernelConstruction* ctx, const char* name, size_t size);
// Gets a list attribute, whose values must be in [least, most].
absl::Status GetInts(tf::OpKernelConstruction* ctx, const char* name, int64_t least, int64_t most,
                     std::vector<int64_t>* values);
// Gets the counters of the tables that attribute `names` lists.
absl::Status GetCounters(tf::OpKernelConstruction* ctx, std::vector<ExchangeCounters*>* counters);

// Writes output `index`: the number of words for each rank.
absl::Status OutputSplits(tf::OpKernelContext* ctx, int index, const std::vector<size_t>& words);
// Allocates output 0, the words of the messages, and writes output 1, their splits.
absl::Status OutputWords(tf::OpKernelContext* ctx, const WireLayout& layout, int32_t** words);
// Adds the bytes that are sent to other ranks to the counters of each table.
void CountBytes(const WireLayout& layout, std::atomic<int64_t> ExchangeCounters::*counter,
                const std::vector<ExchangeCounters*>& counters);
// Gets the width of `rows`, which must be a matrix.
absl::Status WidthOf(const tf::Tensor& rows, const char* name, int64_t* dim);

}  // namespace dynemb

#endif  // DYNEMB_TF_WIRE_SIDE_H_
