// Kernels of snapshot_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/io/crc32c.h"
#include "cc/io/key_index.h"
#include "cc/table/snapshot.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

// Gets a scalar input, which must be at least `least`.
absl::Status Int64(tf::OpKernelContext* ctx, int input, const char* name, int64_t least,
                   int64_t* value) {
  TF_RETURN_IF_ERROR(CheckScalar(ctx->input(input), name));
  *value = ctx->input(input).scalar<int64_t>()();
  if (*value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, "=", *value, ": must be at least ", least));
}

// The largest tick that an input may be. The clock continues from it.
constexpr int64_t kLastTick = int64_t{1} << 62;

absl::Status TickInput(tf::OpKernelContext* ctx, int input, const char* name, int64_t least,
                       int64_t* tick) {
  TF_RETURN_IF_ERROR(Int64(ctx, input, name, least, tick));
  if (*tick <= kLastTick) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, "=", *tick, ": must be at most 2^62"));
}

// Fails if a call names a table twice.
absl::Status CheckDistinct(std::vector<Table*> tables) {
  std::sort(tables.begin(), tables.end(), std::less<Table*>());
  if (std::adjacent_find(tables.begin(), tables.end()) == tables.end()) return absl::OkStatus();
  return absl::InvalidArgumentError("a table is named twice");
}

// For DynembSnapshot and DynembSwapRows, whose tables may be in any place.
absl::Status GetTablesOnAnyDevice(tf::OpKernelContext* ctx, int n, std::vector<TableRef>* refs,
                                  std::vector<Table*>* tables) {
  for (int i = 0; i < n; ++i) {
    TableRef ref;
    TF_RETURN_IF_ERROR(GetTableOnAnyDevice(ctx, ctx->input(i), &ref));
    tables->push_back(&ref->table());
    refs->push_back(std::move(ref));
  }
  return absl::OkStatus();
}

// A running snapshot, with the tables that it reads. The caller of snapshot() or End holds `mutex`.
class SnapshotResource : public tf::ResourceBase {
 public:
  SnapshotResource(std::vector<TableRef> tables, std::unique_ptr<Snapshot> snapshot)
      : tables_(std::move(tables)), snapshot_(std::move(snapshot)) {}
  ~SnapshotResource() override { snapshot_.reset(); }
  std::string DebugString() const override { return "snapshot of dynamic embedding tables"; }
  std::mutex& mutex() { return mutex_; }
  Snapshot* snapshot() { return snapshot_.get(); }  // null after End
  Table& table(size_t t) { return tables_[t]->table(); }
  size_t num_tables() const { return tables_.size(); }
  void End() { snapshot_.reset(); }

 private:
  std::mutex mutex_;
  std::vector<TableRef> tables_;
  std::unique_ptr<Snapshot> snapshot_;
};

class SnapshotOp : public DynembOp {
 public:
  explicit SnapshotOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    bool deleted, used;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_deleted", &deleted));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_used", &used));
    OP_REQUIRES(ctx, deleted || !used, absl::InvalidArgumentError("with_used needs with_deleted"));
    of_ = used ? CutOf::kDeltaAndUsed : deleted ? CutOf::kDelta : CutOf::kRows;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int n = ctx->num_inputs() - 1;
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    TF_RETURN_IF_ERROR(GetTablesOnAnyDevice(ctx, n, &refs, &tables));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(n), tf::TensorShape({n}), "since"));
    const auto* given = Data<int64_t>(ctx->input(n));
    std::vector<Tick> since;
    for (int t = 0; t < n; ++t) since.push_back(given[t] < 0 ? 0 : static_cast<Tick>(given[t]));
    TF_RETURN_IF_ERROR(CheckDistinct(tables));
    tf::Tensor* handle = nullptr;
    int64_t *watermark, *utc_ns;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tf::TensorShape({}), &handle));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &watermark));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {}, &utc_ns));
    PoolExec exec = MakeHostExec(ctx);
    std::unique_ptr<Snapshot> snapshot;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        Snapshot::Begin(exec, tables, since, of_, &ProcessClock(), &snapshot));
    *watermark = static_cast<int64_t>(snapshot->watermark());
    *utc_ns = snapshot->watermark_utc_ns();
    handle->scalar<tf::ResourceHandle>()() = tf::ResourceHandle::MakeRefCountingHandle(
        new SnapshotResource(std::move(refs), std::move(snapshot)), ctx->device()->name());
    return absl::OkStatus();
  }

 private:
  CutOf of_ = CutOf::kRows;
};

// An operator on the snapshot that input 0 names.
class OneSnapshotOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) final {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(0), "snapshot"));
    tf::core::RefCountPtr<SnapshotResource> ref;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, ctx->input(0).scalar<tf::ResourceHandle>()(), &ref));
    std::lock_guard<std::mutex> lock(ref->mutex());
    return Run(ctx, ref.get());
  }
  virtual absl::Status Run(tf::OpKernelContext* ctx, SnapshotResource* resource) = 0;

  static absl::Status Running(SnapshotResource* resource) {
    if (resource->snapshot() != nullptr) return absl::OkStatus();
    return absl::FailedPreconditionError("the snapshot has ended");
  }
  // Running, and gets input 1: the number of a table.
  static absl::Status TableInput(tf::OpKernelContext* ctx, SnapshotResource* resource, size_t* t) {
    TF_RETURN_IF_ERROR(Running(resource));
    int64_t table;
    TF_RETURN_IF_ERROR(Int64(ctx, 1, "table", 0, &table));
    *t = static_cast<size_t>(table);
    if (*t < resource->num_tables()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("table=", table, ": there are ", resource->num_tables(), " tables"));
  }
};

class SnapshotInfoOp : public OneSnapshotOp {
 public:
  using OneSnapshotOp::OneSnapshotOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, SnapshotResource* resource) override {
    size_t t;
    TF_RETURN_IF_ERROR(TableInput(ctx, resource, &t));
    const Snapshot& s = *resource->snapshot();
    const StateSpec& spec = s.state_spec(t);
    const auto states = static_cast<int64_t>(spec.widths.size());
    const auto num_deleted = static_cast<int64_t>(s.deleted(t).size());
    const std::vector<int64_t>& marks = s.expiry_marks(t);
    const std::vector<double> saved_steps = s.steps(t);
    int64_t *most_rows, *base, *widths, *expiry_marks;
    tf::tstring* optimizer;
    float* inits;
    uint64_t* deleted;
    double* steps;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &most_rows));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &base));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {}, &optimizer));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {states}, &widths));
    TF_RETURN_IF_ERROR(Output(ctx, 4, {states}, &inits));
    TF_RETURN_IF_ERROR(Output(ctx, 5, {num_deleted}, &deleted));
    TF_RETURN_IF_ERROR(Output(ctx, 6, {static_cast<int64_t>(marks.size())}, &expiry_marks));
    TF_RETURN_IF_ERROR(Output(ctx, 7, {static_cast<int64_t>(saved_steps.size())}, &steps));
    *most_rows = static_cast<int64_t>(s.most_rows(t));
    *base = static_cast<int64_t>(s.base(t));
    *optimizer = spec.optimizer;
    std::copy(spec.widths.begin(), spec.widths.end(), widths);
    std::copy(spec.inits.begin(), spec.inits.end(), inits);
    std::copy(s.deleted(t).begin(), s.deleted(t).end(), deleted);
    std::copy(marks.begin(), marks.end(), expiry_marks);
    std::copy(saved_steps.begin(), saved_steps.end(), steps);
    return absl::OkStatus();
  }
};

class SnapshotAdmissionOp : public OneSnapshotOp {
 public:
  using OneSnapshotOp::OneSnapshotOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, SnapshotResource* resource) override {
    size_t t;
    TF_RETURN_IF_ERROR(TableInput(ctx, resource, &t));
    const std::vector<uint64_t>& saved = resource->snapshot()->admission(t);
    uint64_t* lines;
    int64_t* first_line;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(saved.size() / 8), 8}, &lines));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &first_line));
    std::copy(saved.begin(), saved.end(), lines);
    *first_line = resource->snapshot()->first_admission_line(t);
    return absl::OkStatus();
  }
};

class SnapshotNextOp : public OneSnapshotOp {
 public:
  using OneSnapshotOp::OneSnapshotOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, SnapshotResource* resource) override {
    TF_RETURN_IF_ERROR(Running(resource));
    Snapshot* s = resource->snapshot();
    int64_t limit_bytes;
    TF_RETURN_IF_ERROR(Int64(ctx, 1, "limit_bytes", 1, &limit_bytes));
    size_t stride = 1;
    for (size_t t = 0; t < resource->num_tables(); ++t) {
      stride = std::max(stride, s->layout(t).stride);
    }
    Snapshot::Block block;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        s->Next(std::max<size_t>(1, static_cast<size_t>(limit_bytes) / stride), &block));
    const auto n = static_cast<int64_t>(block.n);
    const RowLayout& l = s->layout(block.table);
    int64_t* table;
    void *keys, *vectors;
    float* state;
    uint32_t *updates, *scores;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &table));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n, static_cast<int64_t>(l.key_size)}, &keys));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {n, static_cast<int64_t>(l.vector_bytes())}, &vectors));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {n, l.state_width}, &state));
    TF_RETURN_IF_ERROR(Output(ctx, 4, {n}, &updates));
    TF_RETURN_IF_ERROR(Output(ctx, 5, {n}, &scores));
    *table = n == 0 ? -1 : static_cast<int64_t>(block.table);
    SerialExec exec;  // leaves the other threads to training, which continues meanwhile
    return ToAbsl(s->Read(exec, &block, {keys, vectors, state, updates, scores}));
  }
};

class SnapshotEndOp : public OneSnapshotOp {
 public:
  using OneSnapshotOp::OneSnapshotOp;

 protected:
  absl::Status Run(tf::OpKernelContext*, SnapshotResource* resource) override {
    resource->End();
    return absl::OkStatus();
  }
};

class LoadRowsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& vectors = ctx->input(2);
    const tf::Tensor& state = ctx->input(3);
    const int64_t n = keys.NumElements();
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(keys, tf::TensorShape({n}), "keys"));
    TF_RETURN_IF_ERROR(CheckDType(table, vectors.dtype(), "vectors"));
    TF_RETURN_IF_ERROR(CheckVectors(keys, vectors, table.options().dim, "vectors"));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(4), tf::TensorShape({n}), "updates"));
    // Without scores, rows get the scores of new rows.
    const bool has_scores = ctx->input(5).NumElements() != 0;
    if (has_scores) TF_RETURN_IF_ERROR(CheckShape(ctx->input(5), tf::TensorShape({n}), "accesses"));
    int64_t base, tick;
    TF_RETURN_IF_ERROR(TickInput(ctx, 6, "base", 0, &base));
    TF_RETURN_IF_ERROR(TickInput(ctx, 7, "tick", -1, &tick));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    const bool has_state = state.NumElements() != 0;
    if (has_state) {
      TF_RETURN_IF_ERROR(CheckShape(state, {n, table.layout().state_width}, "state"));
    }
    Table::LoadedRows rows;
    rows.keys = KeysOf(keys);
    rows.vectors = vectors.data();
    rows.state = has_state ? Data<float>(state) : nullptr;
    rows.updates = Data<uint32_t>(ctx->input(4));
    rows.scores = has_scores ? Data<uint32_t>(ctx->input(5)) : nullptr;
    rows.base = static_cast<Tick>(base);
    std::vector<CutTime> now;
    if (tick < 0) {  // the rows get the current time
      tick = static_cast<int64_t>(ProcessClock().Next());
      now.assign(rows.keys.size(), 1);
      rows.updates = now.data();
      if (Scoring(table.options().evict_strategy, 0).by_time()) rows.scores = nullptr;
      rows.base = static_cast<Tick>(tick) - 1;
    }
    return ToAbsl(table.LoadRows(*exec, rows, static_cast<Tick>(tick)));
  }
};

class SetExpiryMarksOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& marks = ctx->input(1);
    const auto* data = Data<int64_t>(marks);
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.SetExpiryMarks({data, data + marks.NumElements()}));
  }
};

class LoadStepsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& steps = ctx->input(1);
    const auto* data = Data<double>(steps);
    int64_t tick;
    TF_RETURN_IF_ERROR(TickInput(ctx, 2, "tick", 0, &tick));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(
        table.LoadSteps(*exec, {data, data + steps.NumElements()}, static_cast<Tick>(tick)));
  }
};

class SwapRowsOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int n = (ctx->num_inputs() - 2) / 2;
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    TF_RETURN_IF_ERROR(GetTablesOnAnyDevice(ctx, 2 * n, &refs, &tables));
    int64_t tick, utc_ns;
    TF_RETURN_IF_ERROR(TickInput(ctx, 2 * n, "tick", 0, &tick));
    TF_RETURN_IF_ERROR(Int64(ctx, 2 * n + 1, "utc_ns", Clock::kNow, &utc_ns));
    TF_RETURN_IF_ERROR(CheckDistinct(tables));
    for (int t = 0; t < n; ++t) {
      const TableOptions& a = tables[t]->options();
      const TableOptions& b = tables[n + t]->options();
      if (a.dim != b.dim || a.dtype != b.dtype || a.key_type != b.key_type ||
          a.max_capacity != b.max_capacity || a.max_hbm_bytes != b.max_hbm_bytes ||
          a.max_dram_bytes != b.max_dram_bytes ||
          tables[t]->has_cold_rows() != tables[n + t]->has_cold_rows() ||
          &refs[t]->lookups() != &refs[n + t]->lookups()) {
        return absl::InvalidArgumentError(
            absl::StrCat("table '", a.name,
                         "' and the table to swap it with differ in dim, dtype, key_type, "
                         "max_capacity, limits of memory or place"));
      }
    }
    TableLock lock(tables, TableLock::Mode::kExclusive);
    ProcessClock().Advance(static_cast<Tick>(tick), utc_ns);
    for (int t = 0; t < n; ++t) tables[t]->SwapRows(tables[n + t], static_cast<Tick>(tick));
    return ErrorOf(tables);
  }
};

class AdvanceClockOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    int64_t tick, utc_ns;
    TF_RETURN_IF_ERROR(TickInput(ctx, 0, "tick", 0, &tick));
    TF_RETURN_IF_ERROR(Int64(ctx, 1, "utc_ns", Clock::kNow, &utc_ns));
    ProcessClock().Advance(static_cast<Tick>(tick), utc_ns);
    return absl::OkStatus();
  }
};

class TickBeforeOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(0), "utc_ns"));
    int64_t* tick;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &tick));
    *tick = static_cast<int64_t>(ProcessClock().TickBefore(ctx->input(0).scalar<int64_t>()()));
    return absl::OkStatus();
  }
};

class Crc32cOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& data = ctx->input(0);
    int64_t room, block;
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "initial"));
    TF_RETURN_IF_ERROR(Int64(ctx, 2, "room", 0, &room));
    TF_RETURN_IF_ERROR(Int64(ctx, 3, "block_bytes", 1, &block));
    PoolExec exec = MakeHostExec(ctx);
    const std::vector<uint32_t> sums = Crc32cBlocks(
        exec, data.data(), static_cast<size_t>(data.NumElements()),
        ctx->input(1).scalar<uint32_t>()(), static_cast<size_t>(room), static_cast<size_t>(block));
    uint32_t* out;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(sums.size())}, &out));
    std::copy(sums.begin(), sums.end(), out);
    return absl::OkStatus();
  }
};

class BuildKeyIndexOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    for (int i : {0, 4}) TF_RETURN_IF_ERROR(CheckScalar(ctx->input(i), "path"));
    int64_t keys_offset, n, key_bytes, index_offset, log_slots;
    TF_RETURN_IF_ERROR(Int64(ctx, 1, "keys_offset", 0, &keys_offset));
    TF_RETURN_IF_ERROR(Int64(ctx, 2, "num_keys", 0, &n));
    TF_RETURN_IF_ERROR(Int64(ctx, 3, "key_bytes", 0, &key_bytes));
    TF_RETURN_IF_ERROR(Int64(ctx, 5, "index_offset", 0, &index_offset));
    TF_RETURN_IF_ERROR(Int64(ctx, 6, "log_slots", 0, &log_slots));
    uint64_t* salt;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &salt));
    return ToAbsl(BuildKeyIndexFile(
        std::string(ctx->input(0).scalar<tf::tstring>()()), static_cast<size_t>(keys_offset),
        static_cast<size_t>(n), static_cast<size_t>(key_bytes),
        std::string(ctx->input(4).scalar<tf::tstring>()()), static_cast<size_t>(index_offset),
        static_cast<uint32_t>(std::min<int64_t>(log_slots, 64)), salt));
  }
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembSnapshot", SnapshotOp);
REGISTER("DynembSnapshotInfo", SnapshotInfoOp);
REGISTER("DynembSnapshotAdmission", SnapshotAdmissionOp);
REGISTER("DynembSnapshotNext", SnapshotNextOp);
REGISTER("DynembSnapshotEnd", SnapshotEndOp);
REGISTER("DynembLoadRows", LoadRowsOp);
REGISTER("DynembSetExpiryMarks", SetExpiryMarksOp);
REGISTER("DynembLoadSteps", LoadStepsOp);
REGISTER("DynembSwapRows", SwapRowsOp);
REGISTER("DynembAdvanceClock", AdvanceClockOp);
REGISTER("DynembTickBefore", TickBeforeOp);
REGISTER("DynembCrc32c", Crc32cOp);
REGISTER("DynembBuildKeyIndex", BuildKeyIndexOp);
#undef REGISTER

DYNEMB_REGISTER_GPU_KERNEL(Name("DynembLoadRows")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handle")
                               .HostMemory("keys")
                               .HostMemory("vectors")
                               .HostMemory("state")
                               .HostMemory("updates")
                               .HostMemory("accesses")
                               .HostMemory("base")
                               .HostMemory("tick"),
                           LoadRowsOp);

DYNEMB_REGISTER_GPU_KERNEL(Name("DynembSetExpiryMarks")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handle")
                               .HostMemory("marks"),
                           SetExpiryMarksOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembLoadSteps")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handle")
                               .HostMemory("steps")
                               .HostMemory("tick"),
                           LoadStepsOp);

}  // namespace
}  // namespace dynemb
