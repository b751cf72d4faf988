// Kernels of file_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <memory>
#include <string>

#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

absl::Status FolderInput(tf::OpKernelContext* ctx, std::string* folder) {
  TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "folder"));
  *folder = ctx->input(1).scalar<tf::tstring>()();
  if (!folder->empty() && folder->find('\0') == std::string::npos) return absl::OkStatus();
  return absl::InvalidArgumentError("folder is not the name of a folder");
}

class FlushOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    std::string folder;
    TF_RETURN_IF_ERROR(FolderInput(ctx, &folder));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    int64_t utc_ns;
    const Tick tick = ProcessClock().Next(&utc_ns);
    return ToAbsl(table.Flush(*exec, folder, tick, utc_ns));
  }
};

class RestoreOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    std::string folder;
    TF_RETURN_IF_ERROR(FolderInput(ctx, &folder));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    FlushInfo info;
    {
      TableLock lock({&table}, TableLock::Mode::kExclusive);
      DYNEMB_RETURN_IF_LIBRARY_ERROR(table.Restore(*exec, folder, &info));
      ProcessClock().Advance(info.tick, info.utc_ns);
    }
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
REGISTER("DynembRestore", RestoreOp);
REGISTER("DynembReadAhead", ReadAheadOp);
#undef REGISTER

}  // namespace
}  // namespace dynemb
