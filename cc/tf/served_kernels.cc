// Kernels of served_ops.cc: unpack, call the library, pack.
#include <memory>
#include <string>
#include <utility>

#include "cc/tf/served_resource.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

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
    auto& value = handle->scalar<tf::ResourceHandle>()();
    if (resource_name_.empty()) {
      TableResource* const resource = new ServedResource(options_);
      value = tf::ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
      return absl::OkStatus();
    }
    tf::ResourceMgr* const manager = ctx->resource_manager();
    const std::string& container = manager->default_container();
    TableResource* resource = nullptr;
    TF_RETURN_IF_ERROR(manager->LookupOrCreate<TableResource>(
        container, resource_name_, &resource, [this](TableResource** made) {
          *made = new ServedResource(options_);
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
    int64_t seed;
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
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return served->Open(*exec, ctx->input(1).scalar<tf::tstring>()());
  }
};

class ApplySnapshotsOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TableRef ref;
    ServedResource* served;
    std::shared_ptr<ServedModel> model;
    size_t number;
    uint64_t count;
    int64_t* applied;
    TF_RETURN_IF_ERROR(GetServed(ctx, &ref, &served));
    TF_RETURN_IF_ERROR(served->Get(&model, &number));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "path"));
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &applied));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        model->Apply(*exec, ctx->input(1).scalar<tf::tstring>()(), &count));
    *applied = static_cast<int64_t>(count);
    return absl::OkStatus();
  }
};

class ServedStateOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TableRef ref;
    ServedResource* served;
    std::shared_ptr<ServedModel> model;
    size_t number;
    tf::tstring *id, *error;
    int64_t *watermark, *utc_ns;
    TF_RETURN_IF_ERROR(GetServed(ctx, &ref, &served));
    TF_RETURN_IF_ERROR(served->Get(&model, &number));
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

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembServedTable", ServedTableOp);
REGISTER("DynembOpenServedTable", OpenServedTableOp);
REGISTER("DynembApplySnapshots", ApplySnapshotsOp);
REGISTER("DynembServedState", ServedStateOp);
#undef REGISTER

}  // namespace
}  // namespace dynemb
