// Kernels of ranks_ops.cc.
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/ranks/mpi_wire.h"
#include "cc/ranks/tls.h"
#include "cc/tf/ranks/collective_op.h"
#include "cc/tf/ranks/on_gpu.h"

namespace dynemb {
namespace {

constexpr int kMostRanks = 1 << 16;

absl::Status GetTimeout(const tf::Tensor& tensor, std::chrono::milliseconds* timeout) {
  TF_RETURN_IF_ERROR(CheckScalar(tensor, "timeout"));
  const double seconds = tensor.scalar<double>()();
  if (!(seconds > 0 && seconds <= 1e9)) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout must be in (0, 1e9] seconds, got ", seconds));
  }
  *timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
  return absl::OkStatus();
}

// Null if the vector is empty.
absl::Status GetTls(const tf::Tensor& tensor, std::shared_ptr<const Tls>* tls) {
  if (tensor.dims() != 1 || (tensor.NumElements() != 0 && tensor.NumElements() != 4)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls must be empty, or a library, a certificate, a key and an authority, got ",
                     tensor.NumElements(), " strings"));
  }
  if (tensor.NumElements() == 0) return absl::OkStatus();
  const auto given = tensor.vec<tf::tstring>();
  return ToAbsl(Tls::Load(given(0), {given(1), given(2), given(3)}, tls));
}

// Outputs a handle, and takes over the reference. `device` is where the handle says that the group
// is: eagerly, TensorFlow runs an operator only there.
absl::Status OutputGroup(tf::OpKernelContext* ctx, GroupResource* group,
                         const std::string& device) {
  tf::Tensor* handle = nullptr;
  const absl::Status status = ctx->allocate_output(0, tf::TensorShape({}), &handle);
  if (!status.ok()) {
    group->Unref();
    return status;
  }
  handle->scalar<tf::ResourceHandle>()() = tf::ResourceHandle::MakeRefCountingHandle(group, device);
  return absl::OkStatus();
}

class ListenOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(0), "host"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "rank"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(2), "size"));
    std::chrono::milliseconds timeout;
    TF_RETURN_IF_ERROR(GetTimeout(ctx->input(3), &timeout));
    const std::string host = ctx->input(0).scalar<tf::tstring>()();
    const int rank = ctx->input(1).scalar<int32_t>()(), size = ctx->input(2).scalar<int32_t>()();
    if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) {
      return absl::InvalidArgumentError(absl::StrCat("size must be in [1, ", kMostRanks,
                                                     "] and rank in [0, size), got rank ", rank,
                                                     " and size ", size));
    }
    std::shared_ptr<const Tls> tls;
    TF_RETURN_IF_ERROR(GetTls(ctx->input(4), &tls));
    std::unique_ptr<GlooWire> wire;
    const Status status = GlooWire::Listen(rank, size, host, timeout, std::move(tls), &wire);
    if (!status.ok()) return OfGroup(status);
    tf::tstring* addresses;
    TF_RETURN_IF_ERROR(Output(ctx, 1, {size}, &addresses));
    for (const std::string& address : wire->addresses()) *addresses++ = address;
    return OutputGroup(ctx, new GroupResource(std::move(wire)), ctx->device()->name());
  }
};

class ConnectOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    tf::core::RefCountPtr<GroupResource> group;
    TF_RETURN_IF_ERROR(GetGroup(ctx, &group));
    std::vector<std::string> texts[2];
    for (int i = 0; i < 2; ++i) {
      const tf::Tensor& given = ctx->input(1 + i);
      if (given.dims() != 1) {
        return absl::InvalidArgumentError(
            absl::StrCat(i == 0 ? "addresses" : "hosts", " must be a vector"));
      }
      const auto vector = given.vec<tf::tstring>();
      texts[i].assign(vector.data(), vector.data() + vector.size());
    }
    return group->Connect(texts[0], texts[1]);
  }
};

class UseNcclOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    tf::core::RefCountPtr<GroupResource> group;
    TF_RETURN_IF_ERROR(GetGroup(ctx, &group));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(1), "library"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(2), "device"));
    if (group->nccl() != nullptr) {
      return absl::FailedPreconditionError("the group of ranks uses NCCL already");
    }
    std::unique_ptr<Nccl> nccl;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(Nccl::Load(ctx->input(1).scalar<tf::tstring>()(), &nccl));
    int32_t* version;
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &version));
    *version = nccl->version();
    group->Use(std::move(nccl));
    return OutputGroup(ctx, group.release(), ctx->input(2).scalar<tf::tstring>()());
  }
};

class LeaveOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    tf::core::RefCountPtr<GroupResource> group;
    TF_RETURN_IF_ERROR(GetGroup(ctx, &group));
    group->Leave();
    return absl::OkStatus();
  }
};

class JoinMpiOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(0), "library"));
    std::chrono::milliseconds timeout;
    TF_RETURN_IF_ERROR(GetTimeout(ctx->input(1), &timeout));
    std::unique_ptr<MpiWire> wire;
    const Status status = MpiWire::Join(ctx->input(0).scalar<tf::tstring>()(), timeout, &wire);
    if (!status.ok()) return OfGroup(status);
    int32_t *rank, *size;
    tf::tstring* version;
    TF_RETURN_IF_ERROR(Output(ctx, 1, {}, &rank));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {}, &size));
    TF_RETURN_IF_ERROR(Output(ctx, 3, {}, &version));
    *rank = wire->rank();
    *size = wire->size();
    *version = wire->version();
    return OutputGroup(ctx, new GroupResource(std::unique_ptr<Wire>(std::move(wire))),
                       ctx->device()->name());
  }
};

class AlltoallOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx, const Group::Operation& operation,
                   GroupResource* resource) override {
    Group* const group = resource->group();
    const tf::Tensor &data = ctx->input(1), &splits = ctx->input(2);
    size_t row_bytes = 0;
    const absl::Status checked = Check(data, splits, group->size(), &row_bytes);
    if (!checked.ok()) return Refuse("alltoall", operation, checked, group);
    const int32_t* split = Data<int32_t>(splits);
    const std::vector<int64_t> rows(split, split + group->size());
    std::vector<int64_t> received;
    const auto allocate = [ctx](int64_t n) { return AllocateRows(ctx, n); };
    TF_RETURN_IF_ERROR(MoveData(ctx, resource, [&](const Group::TakeTurn* take_turn) {
      return group->Alltoall(operation, Bytes(data), rows, row_bytes, &received, allocate,
                             take_turn);
    }));
    int32_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, 1, {group->size()}, &counts));
    std::copy(received.begin(), received.end(), counts);
    return absl::OkStatus();
  }

  absl::Status Check(const tf::Tensor& data, const tf::Tensor& splits, int ranks,
                     size_t* row_bytes) const {
    TF_RETURN_IF_ERROR(RowBytes(data, row_bytes));
    TF_RETURN_IF_ERROR(CheckShape(splits, tf::TensorShape({ranks}), "splits"));
    int64_t left = data.dim_size(0);
    for (int r = 0; r < ranks; ++r) {
      const int32_t n = Data<int32_t>(splits)[r];
      if (n < 0 || n > left) left = -1;
      if (left >= 0) left -= n;
    }
    if (left == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("splits must be the numbers of rows for each rank, ", data.dim_size(0),
                     " together, got ", splits.SummarizeValue(ranks)));
  }
};

class AllgatherOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 private:
  absl::Status Run(tf::OpKernelContext* ctx, const Group::Operation& operation,
                   GroupResource* resource) override {
    Group* const group = resource->group();
    const tf::Tensor& data = ctx->input(1);
    size_t row_bytes = 0;
    const absl::Status checked = RowBytes(data, &row_bytes);
    if (!checked.ok()) return Refuse("allgather", operation, checked, group);
    const auto allocate = [ctx](int64_t n) { return AllocateRows(ctx, n); };
    return MoveData(ctx, resource, [&](const Group::TakeTurn* take_turn) {
      return group->Allgather(operation, Bytes(data), data.dim_size(0), row_bytes, allocate,
                              take_turn);
    });
  }
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(tf::OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
  }

 private:
  absl::Status Run(tf::OpKernelContext* ctx, const Group::Operation& operation,
                   GroupResource* resource) override {
    Group* const group = resource->group();
    const tf::Tensor& data = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckBytes(data));
    tf::Tensor* result = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, data.shape(), &result));
    if (group->rank() == root_) memcpy(Bytes(*result), Bytes(data), data.TotalBytes());
    return OfGroup(group->Broadcast(operation, root_, Bytes(*result), data.TotalBytes()));
  }

  std::string Form(tf::OpKernelContext* ctx) const override {
    return absl::StrCat(tf::DataTypeString(ctx->input_dtype(1)), " ",
                        ctx->input(1).shape().DebugString());
  }

  int root_;
};

Number NumberOf(tf::DataType type) {
  switch (type) {
    case tf::DT_INT32:
      return Number::kInt32;
    case tf::DT_INT64:
      return Number::kInt64;
    case tf::DT_HALF:
      return Number::kFloat16;
    case tf::DT_BFLOAT16:
      return Number::kBfloat16;
    case tf::DT_DOUBLE:
      return Number::kFloat64;
    default:
      return Number::kFloat32;
  }
}

// Several tensors are reduced as one.
class AllreduceOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 private:
  std::string Form(tf::OpKernelContext* ctx) const override {
    std::string form = tf::DataTypeString(ctx->input_dtype(1));
    for (int i = 1; i < ctx->num_inputs(); ++i) {
      absl::StrAppend(&form, " ", ctx->input(i).shape().DebugString());
    }
    return form;
  }
  absl::Status Run(tf::OpKernelContext* ctx, const Group::Operation& operation,
                   GroupResource* resource) override {
    Group* const group = resource->group();
    const int tensors = ctx->num_outputs();
    const Number type = NumberOf(ctx->input_dtype(1));
    int64_t n = 0;
    std::vector<tf::Tensor*> results(static_cast<size_t>(tensors));
    for (int i = 0; i < tensors; ++i) {
      n += ctx->input(1 + i).NumElements();
      TF_RETURN_IF_ERROR(
          ctx->allocate_output(i, ctx->input(1 + i).shape(), &results[static_cast<size_t>(i)]));
    }
    if (tensors == 1) {
      return OfGroup(group->Allreduce(operation, type, Bytes(ctx->input(1)), Bytes(*results[0]),
                                      static_cast<size_t>(n)));
    }
    tf::Tensor packed;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(ctx->input_dtype(1), tf::TensorShape({n}), &packed));
    char* const all = Bytes(packed);
    size_t at = 0;
    for (int i = 0; i < tensors; ++i) {
      const tf::Tensor& data = ctx->input(1 + i);
      memcpy(all + at, Bytes(data), data.TotalBytes());
      at += data.TotalBytes();
    }
    const Status status = group->Allreduce(operation, type, all, all, static_cast<size_t>(n));
    if (!status.ok()) {
      KeepForever(packed);
      return OfGroup(status);
    }
    at = 0;
    for (const tf::Tensor* result : results) {
      memcpy(Bytes(*result), all + at, result->TotalBytes());
      at += result->TotalBytes();
    }
    return absl::OkStatus();
  }
};

#define DYNEMB_REGISTER(op, Kernel) \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU), Kernel)
DYNEMB_REGISTER("DynembRanksListen", ListenOp);
DYNEMB_REGISTER("DynembRanksConnect", ConnectOp);
DYNEMB_REGISTER("DynembRanksLeave", LeaveOp);
DYNEMB_REGISTER("DynembRanksJoinMpi", JoinMpiOp);
DYNEMB_REGISTER("DynembRanksUseNccl", UseNcclOp);
DYNEMB_REGISTER("DynembRanksAlltoall", AlltoallOp);
DYNEMB_REGISTER("DynembRanksAllgather", AllgatherOp);
DYNEMB_REGISTER("DynembRanksBroadcast", BroadcastOp);
DYNEMB_REGISTER("DynembRanksAllreduce", AllreduceOp);
#if DYNEMB_RANKS_ON_GPU
REGISTER_KERNEL_BUILDER(Name("DynembRanksAlltoall")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("group")
                            .HostMemory("splits")
                            .HostMemory("received_splits"),
                        AlltoallOp);
REGISTER_KERNEL_BUILDER(
    Name("DynembRanksAllgather").Device(tensorflow::DEVICE_GPU).HostMemory("group"), AllgatherOp);
#endif

}  // namespace
}  // namespace dynemb
