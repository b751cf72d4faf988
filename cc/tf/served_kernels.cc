// Kernels of served_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/tf/served_resource.h"
#include "cc/tf/table_resource.h"
#include "tensorflow/core/framework/allocation_description.pb.h"

namespace dynemb {
namespace {

// Gets the model of the served table that input 0 of the operator names, and the table's number.
absl::Status GetModel(tf::OpKernelContext* ctx, std::shared_ptr<ServedModel>* model,
                      size_t* number) {
  TableRef ref;
  ServedResource* served;
  TF_RETURN_IF_ERROR(GetServed(ctx, &ref, &served));
  return served->Get(model, number);
}

absl::Status GetModel(tf::OpKernelContext* ctx, std::shared_ptr<ServedModel>* model) {
  size_t number;
  return GetModel(ctx, model, &number);
}

class ServedTableOp : public DynembOp {
 public:
  explicit ServedTableOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("resource_name", &resource_name_));
    OP_REQUIRES_OK(ctx, ReadOptions(ctx));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    tf::Tensor* handle = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tf::TensorShape({}), &handle));
    ServedOptions options = options_;
    TF_RETURN_IF_ERROR(GetServedPlace(ctx, &options.place));
    auto& value = handle->scalar<tf::ResourceHandle>()();
    if (resource_name_.empty()) {
      TableResource* const resource = new ServedResource(options);
      value = tf::ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
      return absl::OkStatus();
    }
    tf::ResourceMgr* const manager = ctx->resource_manager();
    const std::string& container = manager->default_container();
    TableResource* resource = nullptr;
    TF_RETURN_IF_ERROR(manager->LookupOrCreate<TableResource>(container, resource_name_, &resource,
                                                              [&options](TableResource** made) {
                                                                *made = new ServedResource(options);
                                                                return absl::OkStatus();
                                                              }));
    const TableRef held(resource);
    if (held->served() == nullptr) {
      return absl::InvalidArgumentError("'" + resource_name_ + "' is a trained table");
    }
    value = tf::MakeResourceHandle<TableResource>(ctx, container, resource_name_);
    return absl::OkStatus();
  }

 private:
  absl::Status ReadOptions(tf::OpKernelConstruction* ctx) {
    tf::DataType key_dtype, dtype;
    std::string absent;
    int64_t seed, max_hbm_bytes;
    TF_RETURN_IF_ERROR(ctx->GetAttr("max_hbm_bytes", &max_hbm_bytes));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table", &options_.name));
    TF_RETURN_IF_ERROR(ctx->GetAttr("key_dtype", &key_dtype));
    TF_RETURN_IF_ERROR(ctx->GetAttr("dtype", &dtype));
    TF_RETURN_IF_ERROR(ctx->GetAttr("dim", &options_.dim));
    TF_RETURN_IF_ERROR(ctx->GetAttr("seed", &seed));
    TF_RETURN_IF_ERROR(ctx->GetAttr("default_vector", &options_.default_vector));
    TF_RETURN_IF_ERROR(ctx->GetAttr("absent", &absent));
    TF_RETURN_IF_ERROR(ReadInitializer(ctx, &options_.initializer));
    options_.key_type = ToKeyType(key_dtype);
    options_.dtype = ToDType(dtype);
    options_.seed = static_cast<uint64_t>(seed);
    options_.max_device_bytes = static_cast<uint64_t>(max_hbm_bytes);
    options_.absent = absent == "zeros"  ? Unadmitted::kZeros
                      : absent == "skip" ? Unadmitted::kSkip
                                         : Unadmitted::kInitial;
    std::shared_ptr<ServedTable> table;  // only to check the options
    return ToAbsl(ServedTable::Create(options_, &table));
  }

  std::string resource_name_;
  ServedOptions options_;
};

class OpenServedTableOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TableRef ref;
    ServedResource* served;
    TF_RETURN_IF_ERROR(GetServed(ctx, &ref, &served));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "descriptor"));
    PoolExec exec = MakeHostExec(ctx);
    return served->Open(exec, ctx->input(1).scalar<tf::tstring>()());
  }
};

class ApplySnapshotsOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    std::shared_ptr<ServedModel> model;
    uint64_t count;
    int64_t* applied;
    TF_RETURN_IF_ERROR(GetModel(ctx, &model));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "path"));
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &applied));
    PoolExec exec = MakeHostExec(ctx);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        model->Apply(exec, ctx->input(1).scalar<tf::tstring>()(), &count));
    *applied = static_cast<int64_t>(count);
    return absl::OkStatus();
  }
};

class ServedStateOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    std::shared_ptr<ServedModel> model;
    tf::tstring *id, *error;
    int64_t *watermark, *utc_ns;
    TF_RETURN_IF_ERROR(GetModel(ctx, &model));
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &id));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &watermark));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {}, &utc_ns));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {}, &error));
    const std::shared_ptr<const ServedState> state = model->StateOf(StepOf(ctx));
    *id = state->last.id;
    *watermark = static_cast<int64_t>(state->last.watermark);
    *utc_ns = static_cast<int64_t>(state->last.watermark_utc_ns);
    *error = model->follow_error().message();
    return absl::OkStatus();
  }
};

class ServedStatsOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    std::shared_ptr<ServedModel> model;
    size_t number;
    TF_RETURN_IF_ERROR(GetModel(ctx, &model, &number));
    const std::pair<const char*, uint64_t> entries[] = {
        {"lookup_ns", model->state()->tables[number]->lookup_ns()},
        {"snapshots_applied", model->applied()},
        {"snapshots_refused", model->refused()},
    };
    tf::tstring* names;
    int64_t* values;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {std::size(entries)}, &names));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {std::size(entries)}, &values));
    for (const auto& [name, value] : entries) {
      *names++ = name;
      *values++ = static_cast<int64_t>(value);
    }
    return absl::OkStatus();
  }
};

// The memory of a weight, as the memory of a tensor. No operator may reuse it for its output.
class WeightBuffer final : public tf::TensorBuffer {
 public:
  WeightBuffer(std::shared_ptr<const DenseWeights> weights, const DenseWeight& weight)
      : TensorBuffer(const_cast<char*>(weight.data)),
        weights_(std::move(weights)),
        bytes_(weight.bytes) {}
  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tf::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(bytes_));
    description->set_allocator_name("tf_dynemb");
  }

 private:
  const std::shared_ptr<const DenseWeights> weights_;
  const size_t bytes_;
};

// The name of a dtype in a file of weights.
const char* NameOf(tf::DataType dtype) {
  static constexpr struct {
    tf::DataType dtype;
    const char* name;
  } kNames[] = {
      {tf::DT_BOOL, "BOOL"},     {tf::DT_INT8, "I8"},    {tf::DT_UINT8, "U8"},
      {tf::DT_INT16, "I16"},     {tf::DT_UINT16, "U16"}, {tf::DT_HALF, "F16"},
      {tf::DT_BFLOAT16, "BF16"}, {tf::DT_INT32, "I32"},  {tf::DT_UINT32, "U32"},
      {tf::DT_FLOAT, "F32"},     {tf::DT_INT64, "I64"},  {tf::DT_UINT64, "U64"},
      {tf::DT_DOUBLE, "F64"},
  };
  const auto* const found =
      std::find_if(std::begin(kNames), std::end(kNames),
                   [dtype](const auto& known) { return known.dtype == dtype; });
  return found == std::end(kNames) ? "" : found->name;
}

bool HasShape(const DenseWeight& weight, const tf::TensorShape& shape) {
  const auto dims = shape.dim_sizes();
  return std::equal(dims.begin(), dims.end(), weight.shape.begin(), weight.shape.end());
}

class ServedWeightsOp : public DynembOp {
 public:
  explicit ServedWeightsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes_));
    OP_REQUIRES(ctx, names_.size() == dtypes_.size() && names_.size() == shapes_.size(),
                absl::InvalidArgumentError(
                    absl::StrCat("names, dtypes and shapes must have the same length, got ",
                                 names_.size(), ", ", dtypes_.size(), " and ", shapes_.size())));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    std::shared_ptr<ServedModel> model;
    TF_RETURN_IF_ERROR(GetModel(ctx, &model));
    const std::shared_ptr<const ServedState> state = model->StateOf(StepOf(ctx));
    if (state->dense == nullptr) {
      return absl::FailedPreconditionError(
          "the model was exported without dense weights that follow the tables");
    }
    for (size_t i = 0; i < names_.size(); ++i) {
      const DenseWeight* const weight = state->dense->Find(names_[i]);
      if (weight == nullptr || weight->dtype != NameOf(dtypes_[i]) ||
          !HasShape(*weight, shapes_[i])) {
        return absl::FailedPreconditionError(
            absl::StrCat(state->dense_source->directory, " has no ", tf::DataTypeString(dtypes_[i]),
                         " weight '", names_[i], "' of shape ", shapes_[i].DebugString(),
                         ", which the model reads: export the model again"));
      }
      auto* const buffer = new WeightBuffer(state->dense, *weight);
      const tf::core::ScopedUnref own(buffer);
      ctx->set_output(static_cast<int>(i), tf::Tensor(dtypes_[i], shapes_[i], buffer));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::string> names_;
  std::vector<tf::DataType> dtypes_;
  std::vector<tf::TensorShape> shapes_;
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembServedTable", ServedTableOp);
REGISTER("DynembOpenServedTable", OpenServedTableOp);
REGISTER("DynembApplySnapshots", ApplySnapshotsOp);
REGISTER("DynembServedState", ServedStateOp);
REGISTER("DynembServedStats", ServedStatsOp);
REGISTER("DynembServedWeights", ServedWeightsOp);
#undef REGISTER

// Their tensors are in host memory: they work on files.
#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle")
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembServedTable"), ServedTableOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembOpenServedTable").HostMemory("descriptor"),
                           OpenServedTableOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembApplySnapshots").HostMemory("path").HostMemory("applied"),
                           ApplySnapshotsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembServedState")
                               .HostMemory("id")
                               .HostMemory("watermark")
                               .HostMemory("watermark_utc_ns")
                               .HostMemory("follow_error"),
                           ServedStateOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembServedStats").HostMemory("names").HostMemory("values"),
                           ServedStatsOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembServedWeights").HostMemory("weights"), ServedWeightsOp);
#undef GPU

}  // namespace
}  // namespace dynemb
