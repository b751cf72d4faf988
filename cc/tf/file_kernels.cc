// Kernels of file_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <memory>
#include <string>

#include "cc/table/warning.h"
#include "cc/tf/table_resource.h"
#include "tensorflow/core/platform/logging.h"

namespace dynemb {
namespace {

[[maybe_unused]] const bool kWarns = [] {
  SetWarningFn([](const char* text) { LOG(WARNING) << "tf_dynemb: " << text; });
  return true;
}();

// An operator on a table and a folder; it locks the table exclusively.
class FolderOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) final {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "folder"));
    const std::string folder = ctx->input(1).scalar<tf::tstring>()();
    if ((folder.empty() && !MayBeNone()) || folder.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError("folder is not the name of a folder");
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return Run(ctx, *exec, table, folder);
  }
  // Whether an empty name says that there is no folder.
  virtual bool MayBeNone() const { return false; }
  virtual absl::Status Run(tf::OpKernelContext* ctx, Exec& exec, Table& table,
                           const std::string& folder) = 0;
};

class FlushOp : public FolderOp {
 public:
  using FolderOp::FolderOp;

 private:
  absl::Status Run(tf::OpKernelContext*, Exec& exec, Table& table,
                   const std::string& folder) override {
    int64_t utc_ns;
    const Tick tick = ProcessClock().Next(&utc_ns);
    return ToAbsl(table.Flush(exec, folder, tick, utc_ns));
  }
};

class KeepFlushOp : public FolderOp {
 public:
  using FolderOp::FolderOp;

 private:
  bool MayBeNone() const override { return true; }
  absl::Status Run(tf::OpKernelContext*, Exec&, Table& table, const std::string& folder) override {
    return ToAbsl(table.KeepFlush(folder));
  }
};

class RestoreOp : public FolderOp {
 public:
  using FolderOp::FolderOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx, Exec& exec, Table& table,
                   const std::string& folder) override {
    FlushInfo info;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(table.Restore(exec, folder, &info));
    ProcessClock().Advance(info.tick, info.utc_ns);
    const auto states = static_cast<int64_t>(info.state_spec.widths.size());
    tf::tstring* optimizer;
    int64_t* widths;
    float* inits;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {}, &optimizer));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {states}, &widths));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {states}, &inits));
    *optimizer = info.state_spec.optimizer;
    std::copy(info.state_spec.widths.begin(), info.state_spec.widths.end(), widths);
    std::copy(info.state_spec.inits.begin(), info.state_spec.inits.end(), inits);
    return absl::OkStatus();
  }
};

class ReadAheadOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    table.ReadAhead(*exec, KeysOf(keys));  // takes the lock itself
    return absl::OkStatus();
  }
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembFlush", FlushOp);
REGISTER("DynembKeepFlush", KeepFlushOp);
REGISTER("DynembRestore", RestoreOp);
REGISTER("DynembReadAhead", ReadAheadOp);
#undef REGISTER

DYNEMB_REGISTER_GPU_KERNEL(
    Name("DynembFlush").Device(tensorflow::DEVICE_GPU).HostMemory("handle").HostMemory("folder"),
    FlushOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembKeepFlush")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handle")
                               .HostMemory("folder"),
                           KeepFlushOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembRestore")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handle")
                               .HostMemory("folder")
                               .HostMemory("optimizer")
                               .HostMemory("widths")
                               .HostMemory("inits"),
                           RestoreOp);
DYNEMB_REGISTER_GPU_KERNEL(
    Name("DynembReadAhead").Device(tensorflow::DEVICE_GPU).HostMemory("handle"), ReadAheadOp);

}  // namespace
}  // namespace dynemb
