// Kernels of table_ops.cc: unpack, call the library, pack.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/lookups.h"
#include "cc/table/rounding.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

// The attributes that identify an optimizer's state.
struct StateAttributes {
  StateSpec spec;
  std::string owner;

  absl::Status Read(tf::OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("optimizer", &spec.optimizer));
    TF_RETURN_IF_ERROR(ctx->GetAttr("widths", &spec.widths));
    TF_RETURN_IF_ERROR(ctx->GetAttr("inits", &spec.inits));
    return ctx->GetAttr("owner", &owner);
  }
};

class AttachStateOp : public OneTableOp {
 public:
  explicit AttachStateOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, state_.Read(ctx));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    bool* was_reset;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &was_reset));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.TakeState(*exec, state_.spec, state_.owner, was_reset));
  }

 private:
  StateAttributes state_;
};

class UpsertOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& values = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckDType(table, values.dtype(), "values"));
    TF_RETURN_IF_ERROR(CheckVectors(keys, values, table.options().dim, "values"));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.Upsert(*exec, KeysOf(keys), values.data(), ProcessClock().Next()));
  }
};

class AccumulateOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TableRef ref;
    TF_RETURN_IF_ERROR(GetTable(ctx, ctx->input(0), &ref));
    Table& table = ref->table();
    const int64_t dim = table.options().dim;
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& deltas = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckVectors(keys, deltas, dim, "deltas"));

    const int64_t n = keys.NumElements();
    Bags bags;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(bags.InitUniform(1, n, n));
    BackwardTask sum;
    sum.key_type = table.options().key_type;
    sum.keys = keys.data();
    sum.bags = &bags;
    sum.dtype = ToDType(deltas.dtype());
    sum.upstream = deltas.data();
    sum.dim = dim;
    tf::Tensor unique_keys, unique_sums;
    float* sums = nullptr;
    const auto allocate = [&](size_t, int64_t num_unique, BackwardOutput* out) -> absl::Status {
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(keys.dtype(), tf::TensorShape({num_unique}), &unique_keys));
      TF_RETURN_IF_ERROR(Temporary(ctx, num_unique * dim, &unique_sums, &sums));
      out->keys = unique_keys.data();
      out->sums = sums;
      return absl::OkStatus();
    };
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TF_RETURN_IF_ERROR(SumGradients(&ref->lookups(), *exec, {sum}, allocate));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.Accumulate(*exec, KeysOf(unique_keys), sums, ProcessClock().Next()));
  }
};

class ReadRowsOp : public OneTableOp {
 public:
  explicit ReadRowsOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, wanted_.Read(ctx));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    const int64_t n = keys.NumElements();
    TF_RETURN_IF_ERROR(CheckShape(keys, tf::TensorShape({n}), "keys"));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kShared);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.CheckState(wanted_.spec, wanted_.owner));
    float* values;
    float* state;
    bool* found;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {n, table.options().dim}, &values));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n, table.layout().state_width}, &state));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {n}, &found));
    table.ReadRows(*exec, KeysOf(keys), values, state, found);
    return absl::OkStatus();
  }

 private:
  StateAttributes wanted_;
};

class WriteRowsOp : public OneTableOp {
 public:
  explicit WriteRowsOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
    OP_REQUIRES_OK(ctx, wanted_.Read(ctx));
    std::string what;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what));
    update_ = what == "constraint" ? Update::kConstraint : Update::kOptimizer;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(4), "step"));
    const auto step = static_cast<uint64_t>(ctx->input(4).scalar<int64_t>()());
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(keys, tf::TensorShape({n}), "keys"));
    TF_RETURN_IF_ERROR(CheckVectors(keys, ctx->input(2), table.options().dim, "values"));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.CheckState(wanted_.spec, wanted_.owner));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(3), {n, table.layout().state_width}, "state"));
    table.OwnState(wanted_.spec, wanted_.owner);
    const Tick tick = ProcessClock().Next();
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.WriteRows(*exec, KeysOf(keys), Data<float>(ctx->input(2)),
                                                   Data<float>(ctx->input(3)), insert_,
                                                   RoundingStep(update_, step), tick));
    // This operator ends the steps of optimizers that DynembApplyGradients does not implement.
    return ToAbsl(table.PromoteIfDue(*exec, tick));
  }

 private:
  bool insert_;
  Update update_;
  StateAttributes wanted_;
};

class EraseOp : public OneTableOp {
 public:
  explicit EraseOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("wipe", &wipe_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    int64_t* erased;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &erased));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    *erased = static_cast<int64_t>(table.Erase(*exec, KeysOf(keys), ProcessClock().Next(),
                                               wipe_ ? Removal::kWipe : Removal::kErase));
    return absl::OkStatus();
  }

 private:
  bool wipe_;
};

class ContainsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    bool* found;
    TF_RETURN_IF_ERROR(Output(ctx, 0, keys.shape(), &found));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kShared);
    table.Contains(*exec, KeysOf(keys), found);
    return absl::OkStatus();
  }
};

class InsertAndEvictOp : public OneTableOp {
 public:
  explicit InsertAndEvictOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckDType(table, dtype_, "evicted_values"));
    const int64_t n = keys.NumElements();
    tf::Tensor rows_tensor;
    RowId* rows;
    TF_RETURN_IF_ERROR(Temporary(ctx, n, &rows_tensor, &rows));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    // The table is changing when it knows how many rows it evicts. If there is no memory for the
    // outputs then, the rows go to an array, or on a GPU nowhere, so that the table remains
    // consistent.
    absl::Status allocated;
    EvictedRows instead(table.layout());
    const EvictedRows::Memory memory =
        OnGpu(ctx) ? EvictedRows::Memory::kDevice : EvictedRows::Memory::kHost;
    const auto allocate = [&](size_t num) {
      TickColumns to;
      allocated = AllocateColumns(ctx, table, num, &to);
      if (allocated.ok()) return to;
      return memory == EvictedRows::Memory::kHost ? instead.Place(num) : TickColumns{};
    };
    EvictedRows evicted(table.layout(), allocate, memory);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        table.InsertAndEvict(*exec, KeysOf(keys), ProcessClock().Next(), rows, &evicted));
    evicted.Finish();
    return allocated;
  }

 private:
  // The outputs, for this number of rows.
  static absl::Status AllocateColumns(tf::OpKernelContext* ctx, const Table& table, size_t num,
                                      TickColumns* to) {
    const auto size = static_cast<int64_t>(num);
    TF_RETURN_IF_ERROR(Output(ctx, 0, {size}, &to->keys));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {size, table.options().dim}, &to->vectors));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {size, table.layout().state_width}, &to->state));
    return Output(ctx, 3, {size}, &to->scores);
  }

  tf::DataType dtype_;
};

class SizeOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    int64_t* size;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &size));
    TableLock lock({&table}, TableLock::Mode::kShared);
    *size = static_cast<int64_t>(table.size());
    return absl::OkStatus();
  }
};

class ClearOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.Clear(*exec, ProcessClock().Next()));
  }
};

class ExportOp : public OneTableOp {
 public:
  explicit ExportOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key_type", &key_type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const char* const names[] = {"handle", "cursor", "limit", "since"};
    for (int i = 1; i < 4; ++i) TF_RETURN_IF_ERROR(CheckScalar(ctx->input(i), names[i]));
    const int64_t cursor = ctx->input(1).scalar<int64_t>()();
    const int64_t limit = ctx->input(2).scalar<int64_t>()();
    const int64_t since = ctx->input(3).scalar<int64_t>()();
    if (cursor < 0)
      return absl::InvalidArgumentError(absl::StrCat("cursor=", cursor, " is negative"));
    if (limit <= 0)
      return absl::InvalidArgumentError(absl::StrCat("limit=", limit, " is not positive"));
    if (ToTf(table.options().key_type) != key_type_) {
      return absl::InvalidArgumentError("key_type differs from the key_type of the table");
    }
    TF_RETURN_IF_ERROR(CheckDType(table, dtype_, "dtype"));

    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kShared);
    const ExportPlan plan =
        table.PlanExport(*exec, static_cast<uint64_t>(cursor), static_cast<uint64_t>(limit),
                         since < 0 ? 0 : static_cast<Tick>(since));
    const auto n = static_cast<int64_t>(plan.rows.size());
    void *keys, *values;
    float* state;
    int64_t *updates, *next;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {n}, &keys));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n, table.options().dim}, &values));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {n, table.layout().state_width}, &state));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {n}, &updates));
    TF_RETURN_IF_ERROR(Output(ctx, 4, {}, &next));
    table.Export(*exec, plan, {keys, values, state, updates, nullptr});
    *next = plan.next_cursor;
    return absl::OkStatus();
  }

 private:
  tf::DataType key_type_, dtype_;
};

class StatsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    TableStats s;
    {
      TableLock lock({&table}, TableLock::Mode::kShared);
      s = table.stats();
    }
    const std::pair<const char*, uint64_t> entries[] = {
        {"size", s.size},
        {"slots", s.slots},
        {"index_bytes", s.index_bytes},
        {"row_bytes", s.row_bytes},
        {"metadata_bytes", s.metadata_bytes},
        {"hits", s.hits},
        {"device_hits", s.device_hits},
        {"misses", s.misses},
        {"inserts", s.inserts},
        {"evictions", s.evictions},
        {"erased", s.erased},
        {"expired", s.expired},
        {"refused", s.refused},
        {"unadmitted", s.unadmitted},
        {"dropped_gradients", s.dropped_gradients},
        {"nonfinite_gradients", s.nonfinite_gradients},
        {"device_rows", s.device_rows},
        {"promotions", s.promotions},
        {"file_rows", s.cold.rows},
        {"file_hits", s.cold.hits},
        {"file_hits_ahead", s.cold.found_ahead},
        {"file_bytes", s.cold.file_bytes},
        {"file_row_bytes", s.cold.row_bytes},
        {"file_index_bytes", s.cold.index_bytes},
        {"file_buffer_bytes", s.cold.buffer_bytes},
        {"file_rows_written", s.cold.rows_added},
        {"file_rows_compacted", s.cold.rows_compacted},
        {"file_bytes_read", s.cold.bytes_read},
        {"file_bytes_written", s.cold.bytes_written},
        {"file_reads", s.cold.reads},
        {"file_writes", s.cold.writes},
        {"file_errors", s.cold.errors},
        {"clock_jumps", SystemTime::OfProcess().jumps().count},
    };
    const auto n = static_cast<int64_t>(std::size(entries));
    tf::tstring* names;
    int64_t* values;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {n}, &names));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n}, &values));
    for (int64_t i = 0; i < n; ++i) {
      names[i] = entries[i].first;
      values[i] = static_cast<int64_t>(entries[i].second);
    }
    return absl::OkStatus();
  }
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembAttachState", AttachStateOp);
REGISTER("DynembUpsert", UpsertOp);
REGISTER("DynembAccumulate", AccumulateOp);
REGISTER("DynembReadRows", ReadRowsOp);
REGISTER("DynembWriteRows", WriteRowsOp);
REGISTER("DynembErase", EraseOp);
REGISTER("DynembContains", ContainsOp);
REGISTER("DynembInsertAndEvict", InsertAndEvictOp);
REGISTER("DynembSize", SizeOp);
REGISTER("DynembClear", ClearOp);
REGISTER("DynembExport", ExportOp);
REGISTER("DynembStats", StatsOp);
#undef REGISTER

// On a GPU, handles are in host memory, and so are outputs that Table's calls write on the host.
#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle")
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembAttachState").HostMemory("was_reset"), AttachStateOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembUpsert"), UpsertOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembAccumulate"), AccumulateOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembReadRows"), ReadRowsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembWriteRows").HostMemory("step"), WriteRowsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembErase").HostMemory("erased"), EraseOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembContains"), ContainsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembInsertAndEvict"), InsertAndEvictOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembSize").HostMemory("size"), SizeOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembClear"), ClearOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembExport")
                               .HostMemory("cursor")
                               .HostMemory("limit")
                               .HostMemory("since")
                               .HostMemory("keys")
                               .HostMemory("values")
                               .HostMemory("state")
                               .HostMemory("updates")
                               .HostMemory("next_cursor"),
                           ExportOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembStats").HostMemory("names").HostMemory("values"), StatsOp);
#undef GPU

}  // namespace
}  // namespace dynemb
