// The kernel of DynembTable: reads the options and creates the table, or finds it by its name.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/tf/served_resource.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

const char* Name(KeyType t) {
  return t == KeyType::kInt32 ? "int32" : t == KeyType::kUint64 ? "uint64" : "int64";
}
const char* Name(DType t) {
  return t == DType::kFloat16 ? "float16" : t == DType::kBfloat16 ? "bfloat16" : "float32";
}
constexpr EvictStrategy kEvictStrategies[] = {EvictStrategy::kLru,      EvictStrategy::kLfu,
                                              EvictStrategy::kEpochLru, EvictStrategy::kEpochLfu,
                                              EvictStrategy::kScore,    EvictStrategy::kNone};
const char* Name(EvictStrategy s) {
  switch (s) {
    case EvictStrategy::kLru:
      return "lru";
    case EvictStrategy::kLfu:
      return "lfu";
    case EvictStrategy::kEpochLru:
      return "epoch_lru";
    case EvictStrategy::kEpochLfu:
      return "epoch_lfu";
    case EvictStrategy::kScore:
      return "score";
    case EvictStrategy::kNone:
      return "none";
  }
  return "";
}
constexpr TtlClock kTtlClocks[] = {TtlClock::kSteps, TtlClock::kWall, TtlClock::kData};
const char* Name(TtlClock c) {
  return c == TtlClock::kWall ? "wall" : c == TtlClock::kData ? "data" : "steps";
}
const char* Name(Tier t) {
  return t == Tier::kHbm ? "hbm" : t == Tier::kHybrid ? "hybrid" : "host";
}
const char* Name(InitKind k) {
  return k == InitKind::kUniform           ? "uniform"
         : k == InitKind::kNormal          ? "normal"
         : k == InitKind::kTruncatedNormal ? "truncated_normal"
                                           : "constant";
}

constexpr Admit kRules[] = {Admit::kAll, Admit::kFrequency, Admit::kProbability};
const char* Name(Admit rule) {
  return rule == Admit::kFrequency     ? "frequency"
         : rule == Admit::kProbability ? "probability"
                                       : "all";
}
constexpr Unadmitted kUnadmitted[] = {Unadmitted::kZeros, Unadmitted::kInitial, Unadmitted::kSkip};
const char* Name(Unadmitted u) {
  return u == Unadmitted::kInitial ? "initial" : u == Unadmitted::kSkip ? "skip" : "zeros";
}

absl::Status ReadAdmission(tf::OpKernelConstruction* ctx, AdmissionOptions* o) {
  std::string rule, unadmitted;
  float probability;
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission", &rule));
  TF_RETURN_IF_ERROR(ctx->GetAttr("unadmitted", &unadmitted));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_times", &o->times));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_probability", &probability));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_lines", &o->lines));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_first_line", &o->first_line));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_num_lines", &o->num_lines));
  o->probability = probability;
  for (const Admit r : kRules) {
    if (rule == Name(r)) o->rule = r;
  }
  for (const Unadmitted u : kUnadmitted) {
    if (unadmitted == Name(u)) o->unadmitted = u;
  }
  return absl::OkStatus();
}

absl::Status ReadOptions(tf::OpKernelConstruction* ctx, TableOptions* o) {
  tf::DataType key_dtype, dtype;
  std::string strategy, tier, ttl_clock, ttl_since;
  int64_t seed, max_hbm_bytes, max_dram_bytes;
  float max_load_factor;
  TF_RETURN_IF_ERROR(ctx->GetAttr("key_dtype", &key_dtype));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dtype", &dtype));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dim", &o->dim));
  TF_RETURN_IF_ERROR(ctx->GetAttr("init_capacity", &o->init_capacity));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_capacity", &o->max_capacity));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_load_factor", &max_load_factor));
  TF_RETURN_IF_ERROR(ctx->GetAttr("evict_strategy", &strategy));
  TF_RETURN_IF_ERROR(ctx->GetAttr("tier", &tier));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_hbm_bytes", &max_hbm_bytes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("seed", &seed));
  TF_RETURN_IF_ERROR(ctx->GetAttr("stochastic_rounding", &o->stochastic_rounding));
  TF_RETURN_IF_ERROR(ReadInitializer(ctx, &o->initializer));
  TF_RETURN_IF_ERROR(ReadAdmission(ctx, &o->admission));
  TF_RETURN_IF_ERROR(ctx->GetAttr("file_path", &o->file_path));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_dram_bytes", &max_dram_bytes));
  if (max_dram_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_dram_bytes=", max_dram_bytes, ": must not be negative"));
  }
  o->max_dram_bytes = static_cast<uint64_t>(max_dram_bytes);
  if (max_hbm_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_hbm_bytes=", max_hbm_bytes, ": must not be negative"));
  }
  o->tier = tier == "hbm" ? Tier::kHbm : tier == "hybrid" ? Tier::kHybrid : Tier::kHost;
  o->max_hbm_bytes = static_cast<uint64_t>(max_hbm_bytes);
  o->key_type = ToKeyType(key_dtype);
  o->dtype = ToDType(dtype);
  o->seed = static_cast<uint64_t>(seed);
  o->max_load_factor = max_load_factor;
  TF_RETURN_IF_ERROR(ctx->GetAttr("epoch_steps", &o->epoch_steps));
  for (const EvictStrategy s : kEvictStrategies) {
    if (strategy == Name(s)) o->evict_strategy = s;
  }
  TF_RETURN_IF_ERROR(ctx->GetAttr("ttl", &o->ttl));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ttl_clock", &ttl_clock));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ttl_since", &ttl_since));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ttl_min_rows", &o->ttl_min_rows));
  for (const TtlClock c : kTtlClocks) {
    if (ttl_clock == Name(c)) o->ttl_clock = c;
  }
  o->ttl_since_access = ttl_since == "access";
  return absl::OkStatus();
}

// Fails unless the options of an operator equal those of the existing table that it names.
// init_capacity may differ, because it is only a hint for the table's creation.
absl::Status CheckSame(const TableOptions& have, const TableOptions& want) {
  absl::Status status;
  const auto same = [&](const char* option, const auto& a, const auto& b) {
    if (!status.ok() || a == b) return;
    status = absl::InvalidArgumentError(
        absl::StrCat("table '", have.name, "' exists with ", option, "=", a, ", not ", b));
  };
  const auto name = [](auto value) { return std::string(Name(value)); };
  same("key_dtype", name(have.key_type), name(want.key_type));
  same("dtype", name(have.dtype), name(want.dtype));
  same("dim", have.dim, want.dim);
  same("max_capacity", have.max_capacity, want.max_capacity);
  same("max_load_factor", have.max_load_factor, want.max_load_factor);
  same("evict_strategy", name(have.evict_strategy), name(want.evict_strategy));
  same("epoch_steps", have.epoch_steps, want.epoch_steps);
  same("ttl", have.ttl, want.ttl);
  same("ttl_clock", name(have.ttl_clock), name(want.ttl_clock));
  same("ttl_since_access", have.ttl_since_access, want.ttl_since_access);
  same("ttl_min_rows", have.ttl_min_rows, want.ttl_min_rows);
  const AdmissionOptions &admits = have.admission, &wanted = want.admission;
  same("admission", name(admits.rule), name(wanted.rule));
  same("unadmitted", name(admits.unadmitted), name(wanted.unadmitted));
  same("admission_times", admits.times, wanted.times);
  same("admission_probability", admits.probability, wanted.probability);
  same("admission_lines", admits.lines, wanted.lines);
  same("admission_first_line", admits.first_line, wanted.first_line);
  same("admission_num_lines", admits.num_lines, wanted.num_lines);
  same("tier", name(have.tier), name(want.tier));
  same("max_hbm_bytes", have.max_hbm_bytes, want.max_hbm_bytes);
  same("file_path", have.file_path, want.file_path);
  same("max_dram_bytes", have.max_dram_bytes, want.max_dram_bytes);
  same("seed", static_cast<int64_t>(have.seed), static_cast<int64_t>(want.seed));
  same("stochastic_rounding", have.stochastic_rounding, want.stochastic_rounding);
  same("the length of initializers", have.initializer.size(), want.initializer.size());
  for (size_t c = 0; status.ok() && c < have.initializer.size(); ++c) {
    const ColumnInit &a = have.initializer[c], &b = want.initializer[c];
    same(absl::StrCat("initializers[", c, "]").c_str(), name(a.kind), name(b.kind));
    same(absl::StrCat("initializer_args[", 2 * c, "]").c_str(), a.a, b.a);
    same(absl::StrCat("initializer_args[", 2 * c + 1, "]").c_str(), a.b, b.b);
  }
  return status;
}

class TableOp : public DynembOp {
 public:
  explicit TableOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(ctx, ReadOptions(ctx, &options_));
    options_.name = shared_name_.empty() ? std::string(name()) : shared_name_;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    tf::Tensor* handle = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tf::TensorShape({}), &handle));
    const auto make = [this, ctx](TableResource** resource) -> absl::Status {
      std::unique_ptr<Table> table;
      Lookups* lookups;
      TF_RETURN_IF_ERROR(MakeTable(ctx, options_, &table, &lookups));
      *resource = new TableResource(std::move(table), lookups);
      return absl::OkStatus();
    };
    if (shared_name_.empty()) {
      TableResource* resource = nullptr;
      TF_RETURN_IF_ERROR(make(&resource));
      handle->scalar<tf::ResourceHandle>()() =
          tf::ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
      return absl::OkStatus();
    }
    tf::ResourceMgr* manager = ctx->resource_manager();
    const std::string& container = container_.empty() ? manager->default_container() : container_;
    TableResource* resource = nullptr;
    TF_RETURN_IF_ERROR(
        manager->LookupOrCreate<TableResource>(container, shared_name_, &resource, make));
    const TableRef held(resource);
    if (held->served() != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", shared_name_, "' is a table of an exported model"));
    }
    TF_RETURN_IF_ERROR(CheckSame(held->table().options(), options_));
    handle->scalar<tf::ResourceHandle>()() =
        tf::MakeResourceHandle<TableResource>(ctx, container, shared_name_);
    return absl::OkStatus();
  }

 private:
  std::string container_, shared_name_;
  TableOptions options_;
};

REGISTER_KERNEL_BUILDER(Name("DynembTable").Device(tensorflow::DEVICE_CPU), TableOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembTable").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
                           TableOp);

}  // namespace
}  // namespace dynemb
