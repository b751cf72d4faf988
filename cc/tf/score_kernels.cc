// Kernels of the operators of table_ops.cc that decide which rows stay: scores, predicates,
// eviction, expiry.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

class ScoresOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    int64_t* scores;
    TF_RETURN_IF_ERROR(Output(ctx, 0, keys.shape(), &scores));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kShared);
    table.Scores(*exec, KeysOf(keys), scores);
    return ToAbsl(table.Error());
  }
};

class SetScoresOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& given = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(given, keys.shape(), "scores"));
    const auto* wide = Data<int64_t>(given);
    std::vector<Score> scores(static_cast<size_t>(given.NumElements()));
    for (size_t i = 0; i < scores.size(); ++i) {
      if (wide[i] < 0 || wide[i] > int64_t{0xFFFFFFFF}) {
        return absl::InvalidArgumentError(
            absl::StrCat("scores has ", wide[i], ", expected numbers in [0, 2^32)"));
      }
      scores[i] = static_cast<Score>(wide[i]);
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.SetScores(*exec, KeysOf(keys), scores.data()));
  }
};

class AddCountsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& counts = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(counts, keys.shape(), "counts"));
    const auto* data = Data<int32_t>(counts);
    const int32_t* const end = data + counts.NumElements();
    if (std::any_of(data, end, [](int32_t count) { return count < 0; })) {
      return absl::InvalidArgumentError("counts has a negative number");
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.AddCounts(*exec, KeysOf(keys), reinterpret_cast<const uint32_t*>(data)));
  }
};

class LoadAdmissionOp : public OneTableOp {
 public:
  explicit LoadAdmissionOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("merge", &merge_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& lines = ctx->input(1);
    const int64_t num = lines.dims() == 2 ? lines.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(CheckShape(lines, {num, 8}, "lines"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(2), "first_line"));
    const int64_t first = ctx->input(2).scalar<int64_t>()();
    if (first < 0 || first > AdmissionCounters::kMostLines - num) {
      return absl::InvalidArgumentError(absl::StrCat("first_line=", first, ": out of range"));
    }
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.LoadAdmission(Data<uint64_t>(lines), first, num, merge_));
  }

 private:
  bool merge_;
};

class AdvanceEpochOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.AdvanceEpoch(*exec));
  }
};

class ExplainOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    int32_t *tiers, *losses, *admission_counts;
    int64_t *updates, *update_times, *scores, *access_times, *loss_times;
    TF_RETURN_IF_ERROR(Output(ctx, 0, keys.shape(), &tiers));
    TF_RETURN_IF_ERROR(Output(ctx, 1, keys.shape(), &updates));
    TF_RETURN_IF_ERROR(Output(ctx, 2, keys.shape(), &update_times));
    TF_RETURN_IF_ERROR(Output(ctx, 3, keys.shape(), &scores));
    TF_RETURN_IF_ERROR(Output(ctx, 4, keys.shape(), &access_times));
    TF_RETURN_IF_ERROR(Output(ctx, 5, keys.shape(), &losses));
    TF_RETURN_IF_ERROR(Output(ctx, 6, keys.shape(), &loss_times));
    TF_RETURN_IF_ERROR(Output(ctx, 7, keys.shape(), &admission_counts));
    const auto n = static_cast<size_t>(keys.NumElements());
    std::vector<Table::KeyState> states(n);
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    if (!table.tracking()) table.Track(ProcessClock().Next());
    // Keys whose rows have expired are then known as lost.
    uint64_t expired;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.Expire(*exec, ProcessClock().Next(), &expired));
    table.Explain(*exec, KeysOf(keys), states.data());
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.Error());
    const Clock& clock = ProcessClock();
    const bool by_time = Scoring(table.options().evict_strategy, 0).by_time();
    for (size_t i = 0; i < n; ++i) {
      const Table::KeyState& state = states[i];
      tiers[i] = !state.has_row ? -1 : state.in_device ? 1 : state.is_cold ? 2 : 0;
      updates[i] = static_cast<int64_t>(state.updated);
      update_times[i] = state.has_row ? clock.TimeOf(state.updated) : 0;
      scores[i] = state.score;
      access_times[i] = state.has_row && by_time ? clock.TimeOf(static_cast<Tick>(state.score)) : 0;
      losses[i] = state.lost == 0 ? -1 : static_cast<int32_t>(state.lost_by);
      admission_counts[i] = static_cast<int32_t>(state.admission_count);
      loss_times[i] = state.lost == 0 ? 0 : clock.TimeOf(state.lost);
    }
    return absl::OkStatus();
  }
};

class ExportIfOp : public OneTableOp {
 public:
  explicit ExportIfOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key_type", &key_type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keys_only", &keys_only_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "cursor"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(2), "limit"));
    const int64_t cursor = ctx->input(1).scalar<int64_t>()();
    const int64_t limit = ctx->input(2).scalar<int64_t>()();
    if (cursor < 0 || limit <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("cursor=", cursor, ", limit=", limit, ": out of range"));
    }
    if (ToTf(table.options().key_type) != key_type_) {
      return absl::InvalidArgumentError("key_type differs from the key_type of the table");
    }
    TF_RETURN_IF_ERROR(CheckDType(table, dtype_, "dtype"));
    RowPredicate where;
    TF_RETURN_IF_ERROR(Read(ctx->input(3), ctx->input(4), &where));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kShared);
    const ExportPlan plan =
        table.SelectRows(*exec, static_cast<uint64_t>(cursor), static_cast<uint64_t>(limit), where);
    const auto n = static_cast<int64_t>(plan.rows.size());
    const int64_t rest = keys_only_ ? 0 : n;
    void *keys, *values;
    float* state;
    int64_t *updates, *scores, *next;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {n}, &keys));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {rest, table.options().dim}, &values));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {rest, table.layout().state_width}, &state));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {rest}, &updates));
    TF_RETURN_IF_ERROR(Output(ctx, 4, {rest}, &scores));
    TF_RETURN_IF_ERROR(Output(ctx, 5, {}, &next));
    *next = plan.next_cursor;
    table.Export(
        *exec, plan,
        keys_only_ ? TickColumns::Keys(keys) : TickColumns{keys, values, state, updates, scores});
    return ToAbsl(table.Error());
  }

 private:
  static absl::Status Read(const tf::Tensor& ranges, const tf::Tensor& norms, RowPredicate* where) {
    TF_RETURN_IF_ERROR(CheckShape(ranges, {7}, "ranges"));
    TF_RETURN_IF_ERROR(CheckShape(norms, {2}, "norms"));
    const auto* r = Data<int64_t>(ranges);
    if (r[0] < 0 || r[1] < 0) return absl::InvalidArgumentError("ranges has a negative tick");
    where->updated_after = static_cast<Tick>(r[0]);
    where->updated_until = static_cast<Tick>(r[1]);
    where->score_from = r[2];
    where->score_to = r[3];
    where->has_keys = r[4] != 0;
    where->key_from = static_cast<uint64_t>(r[5]);
    where->key_to = static_cast<uint64_t>(r[6]);
    where->norm_from = Data<double>(norms)[0];
    where->norm_below = Data<double>(norms)[1];
    const RowPredicate any;
    where->has_norms = where->norm_from != any.norm_from || where->norm_below != any.norm_below;
    return absl::OkStatus();
  }

  tf::DataType key_type_, dtype_;
  bool keys_only_;
};

class EvictOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "to_rows"));
    const int64_t to_rows = ctx->input(1).scalar<int64_t>()();
    if (to_rows < 0) {
      return absl::InvalidArgumentError(absl::StrCat("to_rows=", to_rows, " is negative"));
    }
    int64_t* evicted;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &evicted));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    uint64_t count = 0;
    const Status status =
        table.EvictTo(*exec, static_cast<uint64_t>(to_rows), ProcessClock().Next(), &count);
    *evicted = static_cast<int64_t>(count);
    return ToAbsl(status);
  }
};

class ExpireOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    int64_t* expired;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &expired));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    uint64_t count = 0;
    const Status status = table.Expire(*exec, ProcessClock().Next(), &count);
    *expired = static_cast<int64_t>(count);
    return ToAbsl(status);
  }
};

class SetDataTimeOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "time"));
    const int64_t time = ctx->input(1).scalar<int64_t>()();
    if (time < 0) return absl::InvalidArgumentError(absl::StrCat("time=", time, " is negative"));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.SetDataTime(time, ProcessClock().Next()));
  }
};

#define REGISTER(name, Kernel, ...)                                           \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), Kernel); \
  DYNEMB_REGISTER_GPU_KERNEL(                                                 \
      Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle") __VA_ARGS__, Kernel)
REGISTER("DynembScores", ScoresOp, .HostMemory("scores"));
REGISTER("DynembSetScores", SetScoresOp, .HostMemory("scores"));
REGISTER("DynembAddCounts", AddCountsOp, .HostMemory("counts"));
REGISTER("DynembLoadAdmission", LoadAdmissionOp, .HostMemory("lines").HostMemory("first_line"));
REGISTER("DynembAdvanceEpoch", AdvanceEpochOp);
REGISTER("DynembExportIf", ExportIfOp,
         .HostMemory("cursor")
             .HostMemory("limit")
             .HostMemory("ranges")
             .HostMemory("norms")
             .HostMemory("keys")
             .HostMemory("values")
             .HostMemory("state")
             .HostMemory("updates")
             .HostMemory("scores")
             .HostMemory("next_cursor"));
REGISTER("DynembExplain", ExplainOp,
         .HostMemory("tiers")
             .HostMemory("updates")
             .HostMemory("update_times")
             .HostMemory("scores")
             .HostMemory("access_times")
             .HostMemory("losses")
             .HostMemory("loss_times")
             .HostMemory("admission_counts"));
REGISTER("DynembEvict", EvictOp, .HostMemory("to_rows").HostMemory("evicted"));
REGISTER("DynembExpire", ExpireOp, .HostMemory("expired"));
REGISTER("DynembSetDataTime", SetDataTimeOp, .HostMemory("time"));
#undef REGISTER

}  // namespace
}  // namespace dynemb
