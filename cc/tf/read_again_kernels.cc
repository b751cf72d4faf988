// The kernel of read_again_ops.cc: unpack, call the library, pack.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

// Keys whose vectors are to be sent again.
struct ChangedKeys {
  std::vector<char> keys;       // of either width
  std::vector<int32_t> places;  // the index of each among the keys that its rank requested
};

// Selects the changed keys among the keys that `ranks` ranks requested, served[r] of them by rank
// r. Sets counts[r] to the number of changed keys of rank r.
ChangedKeys Select(const bool* changed, const char* keys, size_t key_size, const int64_t* served,
                   int64_t ranks, int64_t* counts) {
  ChangedKeys selected;
  size_t i = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    counts[rank] = 0;
    for (int64_t place = 0; place < served[rank]; ++place, ++i) {
      if (!changed[i]) continue;
      const char* key = keys + i * key_size;
      selected.keys.insert(selected.keys.end(), key, key + key_size);
      selected.places.push_back(static_cast<int32_t>(place));
      ++counts[rank];
    }
  }
  return selected;
}

class ReadAgainOp : public DynembOp {
 public:
  explicit ReadAgainOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    if (ctx->num_inputs() != 3 * n_ + 2 || static_cast<int>(dtypes_.size()) != n_) {
      return absl::InvalidArgumentError(absl::StrCat("every list must have ", n_, " entries"));
    }
    const tf::Tensor& served = ctx->input(3 * n_);
    const tf::Tensor& since = ctx->input(3 * n_ + 1);
    const int64_t ranks = served.dims() == 2 ? served.dim_size(1) : 0;
    TF_RETURN_IF_ERROR(CheckShape(served, {n_, ranks}, "served"));
    TF_RETURN_IF_ERROR(CheckScalar(since, "since"));
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, 3 * n_, {n_, ranks}, &counts));
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    TF_RETURN_IF_ERROR(GetTables(ctx, 0, n_, &refs, &tables));
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(Check(ctx, i, *tables[i], Data<int64_t>(served) + i * ranks, ranks));
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock(tables, insert_ ? TableLock::Mode::kExclusive : TableLock::Mode::kRead);
    const Tick tick = ProcessClock().Next();
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(ReadTable(ctx, *exec, i, tables[i], tick, since.scalar<int64_t>()(),
                                   Data<int64_t>(served) + i * ranks, ranks, counts + i * ranks));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Check(tf::OpKernelContext* ctx, int i, const Table& table, const int64_t* served,
                     int64_t ranks) const {
    const tf::Tensor& keys = ctx->input(n_ + i);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(keys, {keys.NumElements()}, "keys"));
    TF_RETURN_IF_ERROR(CheckDType(table, dtypes_[i], "vectors"));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(2 * n_ + i), keys.shape(), "rows_before"));
    int64_t total = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (served[rank] < 0) return absl::InvalidArgumentError("served holds a negative number");
      total += served[rank];
    }
    if (total == keys.NumElements()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("served counts ", total, " keys, but there are ", keys.NumElements()));
  }

  absl::Status ReadTable(tf::OpKernelContext* ctx, Exec& exec, int i, Table* table, Tick tick,
                         Tick since, const int64_t* served, int64_t ranks, int64_t* counts) const {
    const tf::Tensor& keys = ctx->input(n_ + i);
    const auto n = static_cast<size_t>(keys.NumElements());
    RowId* rows;
    TF_RETURN_IF_ERROR(Output(ctx, i, keys.shape(), &rows));
    if (insert_) {
      DYNEMB_RETURN_IF_LIBRARY_ERROR(table->FindOrInsert(exec, KeysOf(keys), tick, rows));
    } else {
      table->Find(exec, KeysOf(keys), tick, rows);
    }
    tf::Tensor changed_tensor;
    bool* changed;
    TF_RETURN_IF_ERROR(Temporary(ctx, keys.NumElements(), &changed_tensor, &changed));
    table->Changed(exec, rows, Data<RowId>(ctx->input(2 * n_ + i)), n, since, tick, changed);
    // The host selects the changed keys.
    const std::unique_ptr<bool[]> host_changed(new bool[n]);
    std::vector<char> host_keys(n * SizeOf(table->options().key_type));
    TF_RETURN_IF_ERROR(CopyToHost(ctx, changed, n, host_changed.get()));
    TF_RETURN_IF_ERROR(CopyToHost(ctx, keys.data(), host_keys.size(), host_keys.data()));
    const ChangedKeys selected = Select(host_changed.get(), host_keys.data(),
                                        SizeOf(table->options().key_type), served, ranks, counts);

    const auto size = static_cast<int64_t>(selected.places.size());
    int32_t* places;
    void* vectors;
    TF_RETURN_IF_ERROR(Output(ctx, n_ + i, {size, 1}, &places));
    TF_RETURN_IF_ERROR(Output(ctx, 2 * n_ + i, {size, table->options().dim}, &vectors));
    std::copy(selected.places.begin(), selected.places.end(), places);
    tf::Tensor found_tensor, keys_tensor;
    RowId* found;
    int8_t* selected_keys;
    const auto key_bytes = static_cast<int64_t>(selected.keys.size());
    TF_RETURN_IF_ERROR(Temporary(ctx, size, &found_tensor, &found));
    TF_RETURN_IF_ERROR(Temporary(ctx, key_bytes, &keys_tensor, &selected_keys));
    TF_RETURN_IF_ERROR(
        CopyFromHost(ctx, selected.keys.data(), selected.keys.size(), selected_keys));
    table->Lookup(exec, {table->options().key_type, selected_keys, static_cast<size_t>(size)}, tick,
                  nullptr, vectors, found);
    return ToAbsl(table->Error());
  }

  int n_;
  std::vector<tf::DataType> dtypes_;
  bool insert_;
};

REGISTER_KERNEL_BUILDER(Name("DynembReadAgain").Device(tensorflow::DEVICE_CPU), ReadAgainOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembReadAgain")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handles")
                               .HostMemory("served")
                               .HostMemory("since")
                               .HostMemory("places")
                               .HostMemory("counts"),
                           ReadAgainOp);

}  // namespace
}  // namespace dynemb
