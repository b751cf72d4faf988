// Kernels of exchange_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/exchange.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/table_resource.h"
#include "cc/tf/wire_side.h"

namespace dynemb {
namespace {

void Count(std::atomic<int64_t>* counter, size_t amount) {
  counter->fetch_add(static_cast<int64_t>(amount), std::memory_order_relaxed);
}

class RouteOp : public DynembOp {
 public:
  // Values of attribute `owners`. Any other value is the rank that holds the table.
  static constexpr int64_t kHash = -1, kModulo = -2;

  explicit RouteOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    int64_t ranks;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &ranks));
    OP_REQUIRES(ctx, ranks <= int64_t{Owners::kMaxRanks},
                absl::InvalidArgumentError(
                    absl::StrCat("num_ranks is ", ranks, ", must be at most ", Owners::kMaxRanks)));
    ranks_ = static_cast<uint32_t>(ranks);
    OP_REQUIRES_OK(ctx, GetRank(ctx, &rank_));
    OP_REQUIRES(ctx, rank_ < ranks_,
                absl::InvalidArgumentError(absl::StrCat("rank ", rank_, " of ", ranks_)));
    std::vector<int64_t> owners;
    OP_REQUIRES_OK(ctx, GetInts(ctx, "owners", kModulo, ranks - 1, &owners));
    for (int64_t owner : owners) {
      Owners o;
      o.ranks = ranks_;
      o.rule = owner == kHash     ? Owners::Rule::kHash
               : owner == kModulo ? Owners::Rule::kModulo
                                  : Owners::Rule::kOne;
      o.one = owner < 0 ? 0 : static_cast<uint32_t>(owner);
      owners_.push_back(o);
    }
    OP_REQUIRES_OK(ctx,
                   GetInts(ctx, "tables", 0, static_cast<int64_t>(owners.size()) - 1, &table_of_));
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &key_types_));
    OP_REQUIRES_OK(ctx, HasLength(ctx, "N", key_types_.size()));
    key_type_of_table_.assign(owners_.size(), tf::DT_INVALID);
    OP_REQUIRES(ctx, table_of_.size() == key_types_.size() && counters_.size() == owners_.size(),
                absl::InvalidArgumentError("tables, Tkeys, owners, names: lengths differ"));
    for (size_t i = 0; i < table_of_.size(); ++i) {
      tf::DataType& type = key_type_of_table_[static_cast<size_t>(table_of_[i])];
      OP_REQUIRES(ctx, type == tf::DT_INVALID || type == key_types_[i],
                  absl::InvalidArgumentError("features of one table have keys of two types"));
      type = key_types_[i];
    }
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const size_t num_tables = owners_.size();
    std::vector<RouteTask> tasks(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      tasks[t].key_type = ToKeyType(key_type_of_table_[t]);
      tasks[t].owners = owners_[t];
    }
    for (size_t i = 0; i < table_of_.size(); ++i) {
      const tf::Tensor& keys = ctx->input(static_cast<int>(i));
      TF_RETURN_IF_ERROR(CheckShape(keys, {keys.NumElements()}, "keys"));
      RouteIds ids;
      ids.keys = keys.data();
      ids.n = static_cast<size_t>(keys.NumElements());
      TF_RETURN_IF_ERROR(Output(ctx, 4 + static_cast<int>(i), keys.shape(), &ids.index));
      tasks[static_cast<size_t>(table_of_[i])].features.push_back(ids);
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    Placing placing;
    return placing.Result(exchange->RequestKeys(
        *exec, tasks, ranks_, rank_, [&](const RouteSizes& sizes, int32_t** words, int32_t** own) {
          return placing.Keep(Place(ctx, tasks, sizes, words, own));
        }));
  }

 private:
  absl::Status Place(tf::OpKernelContext* ctx, const std::vector<RouteTask>& tasks,
                     const RouteSizes& sizes, int32_t** words, int32_t** own) const {
    const size_t num_words = std::accumulate(sizes.words.begin(), sizes.words.end(), size_t{0});
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(num_words)}, words));
    TF_RETURN_IF_ERROR(OutputSplits(ctx, 1, sizes.words));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {static_cast<int64_t>(sizes.num_own_words)}, own));
    TF_RETURN_IF_ERROR(Output(
        ctx, 3, {static_cast<int64_t>(tasks.size()), static_cast<int64_t>(ranks_)}, &counts));
    std::copy(sizes.counts.begin(), sizes.counts.end(), counts);
    for (size_t t = 0; t < tasks.size(); ++t) {
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const auto keys = static_cast<size_t>(counts[t * ranks_ + rank]);
        if (rank == rank_) continue;
        Count(&counters_[t]->keys, keys);
        Count(&counters_[t]->key_bytes, sizeof(int32_t) + keys * SizeOf(tasks[t].key_type));
      }
    }
    return absl::OkStatus();
  }

  uint32_t ranks_;
  uint32_t rank_;
  std::vector<Owners> owners_;
  std::vector<int64_t> table_of_;
  std::vector<tf::DataType> key_types_;
  std::vector<tf::DataType> key_type_of_table_;
  std::vector<ExchangeCounters*> counters_;
};

class ReceiveKeysOp : public DynembOp {
 public:
  explicit ReceiveKeysOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::vector<tf::DataType> types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &types));
    for (tf::DataType type : types) key_types_.push_back(ToKeyType(type));
    OP_REQUIRES_OK(ctx, GetRank(ctx, &rank_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& splits = ctx->input(1);
    const tf::Tensor& own = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckShape(words, {words.NumElements()}, "words"));
    TF_RETURN_IF_ERROR(CheckShape(splits, {splits.NumElements()}, "splits"));
    TF_RETURN_IF_ERROR(CheckShape(own, {own.NumElements()}, "own"));
    const int64_t ranks = splits.NumElements();
    if (rank_ >= ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank_, " of ", ranks));
    }
    const auto num_tables = static_cast<int64_t>(key_types_.size());
    Requests::Received received;
    received.words = Data<int32_t>(words);
    received.num_words = words.NumElements();
    received.splits = Data<int32_t>(splits);
    received.ranks = static_cast<uint32_t>(ranks);
    received.self = rank_;
    received.own = Data<int32_t>(own);
    received.num_own_words = own.NumElements();
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(num_tables), {num_tables, ranks}, &counts));
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    Placing placing;
    return placing.Result(exchange->ReceiveKeys(
        *exec, received, key_types_, [&](size_t table, const int64_t* of_ranks, void** keys) {
          std::copy_n(of_ranks, ranks, counts + static_cast<int64_t>(table) * ranks);
          const int64_t n = std::accumulate(of_ranks, of_ranks + ranks, int64_t{0});
          return placing.Keep(Output(ctx, static_cast<int>(table), {n}, keys));
        }));
  }

 private:
  std::vector<KeyType> key_types_;
  uint32_t rank_;
};

class PackRowsOp : public DynembOp {
 public:
  explicit PackRowsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::string what;
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "dtypes"));
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES(ctx, counters_.size() == side_.num_tables(),
                absl::InvalidArgumentError("names, dtypes: lengths differ"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what));
    counter_ = what == "vectors"     ? &ExchangeCounters::vector_bytes
               : what == "gradients" ? &ExchangeCounters::gradient_bytes
                                     : &ExchangeCounters::other_bytes;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const size_t num_tables = side_.num_tables();
    std::vector<int64_t> dims(num_tables);
    std::vector<const void*> rows;
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& of_table = ctx->input(static_cast<int>(t));
      TF_RETURN_IF_ERROR(WidthOf(of_table, "rows", &dims[t]));
      rows.push_back(of_table.data());
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(static_cast<int>(num_tables)), dims, &layout));
    for (size_t t = 0; t < num_tables; ++t) {
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(CheckShape(ctx->input(static_cast<int>(t)), {n, dims[t]}, "rows"));
      // PackRows would skip a table whose rows are null.
      if (rows[t] == nullptr) rows[t] = &layout;
    }
    int32_t* words;
    TF_RETURN_IF_ERROR(OutputWords(ctx, layout, &words));
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    DYNEMB_RETURN_IF_LIBRARY_ERROR(exchange->PackRows(*exec, layout, rows, words));
    CountBytes(layout, counter_, counters_);
    return absl::OkStatus();
  }

 private:
  WireSide side_;
  std::atomic<int64_t> ExchangeCounters::*counter_;
  std::vector<ExchangeCounters*> counters_;
};

class UnpackRowsOp : public DynembOp {
 public:
  explicit UnpackRowsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "dtypes"));
    OP_REQUIRES_OK(ctx, GetInts(ctx, "dims", 1, int64_t{1} << 20, &dims_));
    OP_REQUIRES(ctx, dims_.size() == side_.num_tables(),
                absl::InvalidArgumentError("dims, dtypes: lengths differ"));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& counts = ctx->input(1);
    const size_t num_tables = side_.num_tables();
    const tf::Tensor& sent = ctx->input(2 + static_cast<int>(num_tables));
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(counts, dims_, &layout));
    TF_RETURN_IF_ERROR(CheckShape(sent, counts.shape(), "sent"));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout.num_words())}, "words"));
    std::vector<const void*> own(num_tables);
    std::vector<void*> rows(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& packed = ctx->input(2 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(side_.FindOwn(packed, "own", sent, layout, t, &own[t]));
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(t), {n, dims_[t]}, &rows[t]));
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ToAbsl(exchange->UnpackRows(*exec, layout, Data<int32_t>(words), own, rows));
  }

 private:
  WireSide side_;
  std::vector<int64_t> dims_;
};

class OwnersOp : public DynembOp {
 public:
  explicit OwnersOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    int64_t ranks;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &ranks));
    OP_REQUIRES(ctx, ranks <= int64_t{Owners::kMaxRanks},
                absl::InvalidArgumentError(
                    absl::StrCat("num_ranks is ", ranks, ", must be at most ", Owners::kMaxRanks)));
    owners_.rule = Owners::Rule::kHash;
    owners_.ranks = static_cast<uint32_t>(ranks);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& keys = ctx->input(0);
    int32_t* ranks;
    TF_RETURN_IF_ERROR(Output(ctx, 0, keys.shape(), &ranks));
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ToAbsl(exchange->FindOwners(*exec, owners_, ToKeyType(keys.dtype()), keys.data(),
                                       static_cast<size_t>(keys.NumElements()), ranks));
  }

 private:
  Owners owners_;
};

class ExchangeStatsOp : public DynembOp {
 public:
  explicit ExchangeStatsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &name));
    counters_ = ExchangeCounters::Of(name);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const std::vector<std::pair<const char*, const std::atomic<int64_t>*>> counters = {
        {"keys_asked_of_other_ranks", &counters_->keys},
        {"key_bytes_sent", &counters_->key_bytes},
        {"vector_bytes_sent", &counters_->vector_bytes},
        {"gradient_bytes_sent", &counters_->gradient_bytes},
        {"other_bytes_sent", &counters_->other_bytes},
    };
    const auto n = static_cast<int64_t>(counters.size());
    tf::Tensor* names;
    int64_t* values;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {n}, &names));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n}, &values));
    for (size_t i = 0; i < counters.size(); ++i) {
      names->flat<tf::tstring>()(static_cast<int64_t>(i)) = counters[i].first;
      values[i] = counters[i].second->load(std::memory_order_relaxed);
    }
    return absl::OkStatus();
  }

 private:
  const ExchangeCounters* counters_;
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembRoute", RouteOp);
REGISTER("DynembReceiveKeys", ReceiveKeysOp);
REGISTER("DynembPackRows", PackRowsOp);
REGISTER("DynembUnpackRows", UnpackRowsOp);
REGISTER("DynembOwners", OwnersOp);
REGISTER("DynembExchangeStats", ExchangeStatsOp);
#undef REGISTER

#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU)
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembRoute").HostMemory("splits").HostMemory("counts"), RouteOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembReceiveKeys").HostMemory("splits").HostMemory("counts"),
                           ReceiveKeysOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembPackRows").HostMemory("counts").HostMemory("splits"),
                           PackRowsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembUnpackRows").HostMemory("counts").HostMemory("sent"),
                           UnpackRowsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembOwners"), OwnersOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembExchangeStats").HostMemory("names").HostMemory("values"),
                           ExchangeStatsOp);
#undef GPU

}  // namespace
}  // namespace dynemb
