// The kernel of DynembTable: reads the options and creates the table, or finds it by its name.
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/tf/served_resource.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

// A value of an option, and its name in attributes and messages.
template <typename T>
struct Named {
  T value;
  const char* name;
};
constexpr Named<KeyType> kKeyTypes[] = {
    {KeyType::kInt64, "int64"},
    {KeyType::kInt32, "int32"},
    {KeyType::kUint64, "uint64"},
};
constexpr Named<DType> kDTypes[] = {
    {DType::kFloat32, "float32"},
    {DType::kFloat16, "float16"},
    {DType::kBfloat16, "bfloat16"},
};
constexpr Named<EvictStrategy> kEvictStrategies[] = {
    {EvictStrategy::kLru, "lru"},
    {EvictStrategy::kLfu, "lfu"},
    {EvictStrategy::kEpochLru, "epoch_lru"},
    {EvictStrategy::kEpochLfu, "epoch_lfu"},
    {EvictStrategy::kScore, "score"},
    {EvictStrategy::kNone, "none"},
};
constexpr Named<TtlClock> kTtlClocks[] = {
    {TtlClock::kSteps, "steps"},
    {TtlClock::kWall, "wall"},
    {TtlClock::kData, "data"},
};
constexpr Named<bool> kTtlSince[] = {{false, "update"}, {true, "access"}};
constexpr Named<Admit> kAdmissionRules[] = {
    {Admit::kAll, "all"},
    {Admit::kFrequency, "frequency"},
    {Admit::kProbability, "probability"},
};
constexpr Named<Unadmitted> kUnadmitted[] = {
    {Unadmitted::kZeros, "zeros"},
    {Unadmitted::kInitial, "initial"},
    {Unadmitted::kSkip, "skip"},
};
constexpr Named<Tier> kTiers[] = {
    {Tier::kHost, "host"},
    {Tier::kHbm, "hbm"},
    {Tier::kHybrid, "hybrid"},
};
constexpr Named<InitKind> kInitKinds[] = {
    {InitKind::kConstant, "constant"},
    {InitKind::kUniform, "uniform"},
    {InitKind::kNormal, "normal"},
    {InitKind::kTruncatedNormal, "truncated_normal"},
};

// Calls option(attribute, fields..., names...) for each attribute of DynembTable that one field of
// TableOptions takes over. `fields` are that field of each of `o`; `names` are the names of its
// values, if it has names. init_capacity and the initializers are not among them.
template <typename F, typename... O>
void ForEachOption(const F& option, O&... o) {
  option("key_dtype", o.key_type..., kKeyTypes);
  option("dtype", o.dtype..., kDTypes);
  option("dim", o.dim...);
  option("max_capacity", o.max_capacity...);
  option("max_load_factor", o.max_load_factor...);
  option("evict_strategy", o.evict_strategy..., kEvictStrategies);
  option("epoch_steps", o.epoch_steps...);
  option("ttl", o.ttl...);
  option("ttl_clock", o.ttl_clock..., kTtlClocks);
  option("ttl_since", o.ttl_since_access..., kTtlSince);
  option("ttl_min_rows", o.ttl_min_rows...);
  option("admission", o.admission.rule..., kAdmissionRules);
  option("unadmitted", o.admission.unadmitted..., kUnadmitted);
  option("admission_times", o.admission.times...);
  option("admission_probability", o.admission.probability...);
  option("admission_lines", o.admission.lines...);
  option("admission_first_line", o.admission.first_line...);
  option("admission_num_lines", o.admission.num_lines...);
  option("tier", o.tier..., kTiers);
  option("max_hbm_bytes", o.max_hbm_bytes...);
  option("file_path", o.file_path...);
  option("max_dram_bytes", o.max_dram_bytes...);
  option("seed", o.seed...);
  option("stochastic_rounding", o.stochastic_rounding...);
}

absl::Status ReadOptions(tf::OpKernelConstruction* ctx, TableOptions* o) {
  TF_RETURN_IF_ERROR(ReadInitializer(ctx, &o->initializer));
  absl::Status status;  // the first error
  const auto get = [&](const char* attribute, auto value) {
    status.Update(ctx->GetAttr(attribute, &value));
    return value;
  };
  o->init_capacity = get("init_capacity", int64_t{});
  const auto read = [&](const char* attribute, auto& field, const auto&... names) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, KeyType>) {
      field = ToKeyType(get(attribute, tf::DT_INT64));
    } else if constexpr (std::is_same_v<Field, DType>) {
      field = ToDType(get(attribute, tf::DT_FLOAT));
    } else if constexpr (sizeof...(names) != 0) {
      // The registration of the operator admits no other names.
      const std::string name = get(attribute, std::string());
      for (const auto& named : (names, ...)) {
        if (name == named.name) field = named.value;
      }
    } else if constexpr (std::is_same_v<Field, double>) {
      field = get(attribute, float{});
    } else if constexpr (std::is_same_v<Field, uint64_t>) {
      field = static_cast<uint64_t>(get(attribute, int64_t{}));
    } else {
      field = get(attribute, Field());
    }
  };
  ForEachOption(read, *o);
  const auto check_size = [&](const char* option, uint64_t bytes) {
    const auto value = static_cast<int64_t>(bytes);
    if (value >= 0) return;
    status.Update(
        absl::InvalidArgumentError(absl::StrCat(option, "=", value, ": must not be negative")));
  };
  check_size("max_hbm_bytes", o->max_hbm_bytes);
  check_size("max_dram_bytes", o->max_dram_bytes);
  return status;
}

// Fails unless an operator has the same options as the existing table that it names.
// init_capacity may differ, because it is only a hint for the table's creation.
absl::Status CheckSame(const TableOptions& have, const TableOptions& want) {
  absl::Status status;  // of the first difference
  const auto same = [&](const std::string& option, const auto& a, const auto& b,
                        const auto&... names) {
    if (a == b) return;
    // The value of the attribute.
    const auto text = [&](const auto& value) -> std::string {
      using Value = std::decay_t<decltype(value)>;
      if constexpr (sizeof...(names) != 0) {
        for (const auto& named : (names, ...)) {
          if (value == named.value) return named.name;
        }
        return "";
      } else if constexpr (std::is_same_v<Value, uint64_t>) {
        return absl::StrCat(static_cast<int64_t>(value));
      } else {
        return absl::StrCat(value);
      }
    };
    status.Update(absl::InvalidArgumentError(absl::StrCat(
        "table '", have.name, "' exists with ", option, "=", text(a), ", not ", text(b))));
  };
  ForEachOption(same, have, want);
  const std::vector<ColumnInit>&a = have.initializer, &b = want.initializer;
  same("the length of initializers", a.size(), b.size());
  for (size_t c = 0; c < std::min(a.size(), b.size()); ++c) {
    same(absl::StrCat("initializers[", c, "]"), a[c].kind, b[c].kind, kInitKinds);
    same(absl::StrCat("initializer_args[", 2 * c, "]"), a[c].a, b[c].a);
    same(absl::StrCat("initializer_args[", 2 * c + 1, "]"), a[c].b, b[c].b);
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
