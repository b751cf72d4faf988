#include "cc/tf/wire_side.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/owners.h"

namespace dynemb {

absl::Status WireSide::Init(tf::OpKernelConstruction* ctx,
                            const std::vector<tf::DataType>& dtypes) {
  std::vector<std::string> wires;
  TF_RETURN_IF_ERROR(ctx->GetAttr("wire", &wires));
  TF_RETURN_IF_ERROR(GetRank(ctx, &rank_));
  dtypes_ = dtypes;
  if (wires.size() != dtypes.size()) {
    return absl::InvalidArgumentError("wire and the types of rows: lengths differ");
  }
  for (size_t t = 0; t < dtypes.size(); ++t) {
    WireType wire;
    TF_RETURN_IF_ERROR(ToAbsl(ParseWireType(wires[t], &wire)));
    // The bits of int32 are sent as float32, so they must not be converted.
    if (dtypes[t] == tf::DT_INT32 && wire != WireType::kSame) {
      return absl::InvalidArgumentError(absl::StrCat("int32 cannot be sent as ", wires[t]));
    }
    wires_.push_back(wire);
  }
  return absl::OkStatus();
}

absl::Status WireSide::Init(tf::OpKernelConstruction* ctx, const char* dtypes_attr) {
  std::vector<tf::DataType> dtypes;
  TF_RETURN_IF_ERROR(ctx->GetAttr(dtypes_attr, &dtypes));
  return Init(ctx, dtypes);
}

absl::Status WireSide::MakeLayout(const tf::Tensor& counts, const std::vector<int64_t>& dims,
                                  WireLayout* layout) const {
  const auto tables = static_cast<int64_t>(num_tables());
  const int64_t ranks = counts.dims() == 2 ? counts.dim_size(1) : 0;
  TF_RETURN_IF_ERROR(CheckShape(counts, {tables, ranks}, "counts"));
  if (rank_ >= ranks || ranks > int64_t{Owners::kMaxRanks}) {
    return absl::InvalidArgumentError(
        absl::StrCat("counts are for ", ranks, " ranks, but this is rank ", rank_));
  }
  std::vector<WireTable> of_tables(num_tables());
  for (size_t t = 0; t < num_tables(); ++t) {
    of_tables[t].dtype = ToDType(dtypes_[t]);
    of_tables[t].dim = dims[t];
    of_tables[t].wire = wires_[t];
  }
  return ToAbsl(
      layout->Init(of_tables, Data<int64_t>(counts), static_cast<uint32_t>(ranks), rank_));
}

absl::Status WireSide::FindOwn(const tf::Tensor& rows, const char* name, const tf::Tensor& sent,
                               const WireLayout& layout, size_t t, const void** own) const {
  const int64_t* const counts = Data<int64_t>(sent) + t * layout.ranks();
  const WireTable& table = layout.tables()[t];
  int64_t n = 0, before = 0;
  for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
    if (counts[rank] < 0 || counts[rank] > Bags::kMaxSize) {
      return absl::InvalidArgumentError(absl::StrCat("sent holds ", counts[rank]));
    }
    if (rank == rank_) before = n;
    n += counts[rank];
  }
  TF_RETURN_IF_ERROR(CheckShape(rows, {n, table.dim}, absl::StrCat(name, "[", t, "]").c_str()));
  if (static_cast<size_t>(counts[rank_]) != layout.section(t, rank_).rows) {
    return absl::InvalidArgumentError(absl::StrCat("this rank sends itself ", counts[rank_],
                                                   " rows of table ", t, ", but receives ",
                                                   layout.section(t, rank_).rows));
  }
  const size_t row_bytes = static_cast<size_t>(table.dim) * SizeOf(table.dtype);
  *own = static_cast<const char*>(rows.data()) + static_cast<size_t>(before) * row_bytes;
  return absl::OkStatus();
}

absl::Status GetRank(tf::OpKernelConstruction* ctx, uint32_t* rank) {
  int64_t value;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &value));
  if (value < 0 || value >= int64_t{Owners::kMaxRanks}) {
    return absl::InvalidArgumentError(absl::StrCat("rank is ", value));
  }
  *rank = static_cast<uint32_t>(value);
  return absl::OkStatus();
}

absl::Status HasLength(tf::OpKernelConstruction* ctx, const char* name, size_t size) {
  int64_t length;
  std::vector<tf::DataType> types;
  if (!ctx->GetAttr(name, &length).ok()) {
    TF_RETURN_IF_ERROR(ctx->GetAttr(name, &types));
    length = static_cast<int64_t>(types.size());
  }
  if (length == static_cast<int64_t>(size)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected ", size, " entries, got ", length));
}

absl::Status GetInts(tf::OpKernelConstruction* ctx, const char* name, int64_t least, int64_t most,
                     std::vector<int64_t>* values) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
  for (int64_t value : *values) {
    if (value < least || value > most) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " must be in [", least, ", ", most, "], got ", value));
    }
  }
  return absl::OkStatus();
}

absl::Status GetCounters(tf::OpKernelConstruction* ctx, std::vector<ExchangeCounters*>* counters) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names));
  for (const std::string& name : names) counters->push_back(ExchangeCounters::Of(name));
  return absl::OkStatus();
}

absl::Status OutputSplits(tf::OpKernelContext* ctx, int index, const std::vector<size_t>& words) {
  int32_t* splits;
  TF_RETURN_IF_ERROR(Output(ctx, index, {static_cast<int64_t>(words.size())}, &splits));
  for (size_t rank = 0; rank < words.size(); ++rank) {
    splits[rank] = static_cast<int32_t>(words[rank]);
  }
  return absl::OkStatus();
}

absl::Status OutputWords(tf::OpKernelContext* ctx, const WireLayout& layout, int32_t** words) {
  TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(layout.num_words())}, words));
  std::vector<size_t> splits;
  for (uint32_t rank = 0; rank < layout.ranks(); ++rank) splits.push_back(layout.num_words(rank));
  return OutputSplits(ctx, 1, splits);
}

void CountBytes(const WireLayout& layout, std::atomic<int64_t> ExchangeCounters::*counter,
                const std::vector<ExchangeCounters*>& counters) {
  for (size_t t = 0; t < counters.size(); ++t) {
    size_t words = 0;
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      if (rank == layout.self()) continue;
      words += WireLayout::Words(layout.tables()[t], layout.section(t, rank).rows);
    }
    (counters[t]->*counter)
        .fetch_add(static_cast<int64_t>(words * sizeof(int32_t)), std::memory_order_relaxed);
  }
}

absl::Status WidthOf(const tf::Tensor& rows, const char* name, int64_t* dim) {
  *dim = rows.dims() == 2 ? rows.dim_size(1) : 0;
  return CheckWidth(*dim, name);
}

}  // namespace dynemb
