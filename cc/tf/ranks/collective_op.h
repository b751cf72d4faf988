// What the operators of a group of ranks share: the resource of the group, and the kernel of a
// collective operation, which waits in a thread of a pool without a bound, so that it holds up
// neither a thread of TensorFlow's pools nor another operation.
#ifndef DYNEMB_TF_RANKS_COLLECTIVE_OP_H_
#define DYNEMB_TF_RANKS_COLLECTIVE_OP_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/ranks/gloo_wire.h"
#include "cc/ranks/group.h"
#include "cc/ranks/hosts_wire.h"
#include "cc/ranks/nccl.h"
#include "cc/tf/place.h"
#include "cc/tf/table_resource.h"
#include "tensorflow/core/platform/unbounded_work_queue.h"

namespace dynemb {

// An error of another rank, or of a connection. (In a function, TensorFlow makes an InternalError
// of an UnavailableError.)
inline absl::Status OfGroup(const Status& status) {
  return status.code() == Code::kInternal ? absl::AbortedError(status.message()) : ToAbsl(status);
}

class GroupResource : public tf::ResourceBase {
 public:
  explicit GroupResource(std::unique_ptr<GlooWire> wire) : listening_(std::move(wire)) {}
  explicit GroupResource(std::unique_ptr<Wire> wire)
      : group_(std::make_unique<Group>(std::move(wire))) {}

  std::string DebugString() const override { return "a group of ranks"; }

  absl::Status Connect(const std::vector<std::string>& addresses,
                       const std::vector<std::string>& hosts) {
    if (listening_ == nullptr) return absl::FailedPreconditionError("group is connected already");
    if (hosts.size() != addresses.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(hosts.size(), " hosts for ", addresses.size(), " addresses"));
    }
    Status status = listening_->Connect(addresses);
    if (!status.ok()) return OfGroup(status);
    std::unique_ptr<Wire> wire;
    status = HostsWire::Join(std::move(listening_), hosts, &wire);
    if (!status.ok()) return OfGroup(status);
    group_ = std::make_unique<Group>(std::move(wire));
    return absl::OkStatus();
  }
  // Null before Connect.
  Group* group() const { return group_.get(); }
  // Null if the group does not use NCCL.
  Nccl* nccl() const { return nccl_.get(); }
  void Use(std::unique_ptr<Nccl> nccl) { nccl_ = std::move(nccl); }
  void Leave() {
    if (group_ != nullptr) group_->Leave();
    if (nccl_ != nullptr) nccl_->Abort();
  }

 private:
  std::unique_ptr<GlooWire> listening_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<Nccl> nccl_;
};

inline absl::Status GetGroup(tf::OpKernelContext* ctx,
                             tf::core::RefCountPtr<GroupResource>* group) {
  TF_RETURN_IF_ERROR(CheckScalar(ctx->input(0), "group"));
  return tf::LookupResource(ctx, ctx->input(0).scalar<tf::ResourceHandle>()(), group);
}

// A collective operation. Run blocks until the other ranks have called it, too.
class CollectiveOp : public tf::AsyncOpKernel {
 public:
  explicit CollectiveOp(tf::OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("operation", &operation_));
  }

  void ComputeAsync(tf::OpKernelContext* ctx, DoneCallback done) final {
    static auto* const threads = new tf::UnboundedWorkQueue(tf::Env::Default(), "dynemb_ranks");
    threads->Schedule([this, ctx, done = std::move(done)] {
      try {
        const absl::Status status = RunInGroup(ctx);
        if (!status.ok()) ctx->SetStatus(Decodable(status));
      } catch (const std::bad_alloc&) {
        ctx->SetStatus(absl::ResourceExhaustedError(absl::StrCat(name(), ": out of memory")));
      } catch (const std::exception& e) {
        ctx->SetStatus(absl::InternalError(absl::StrCat(name(), ": ", e.what())));
      }
      done();
    });
  }

 protected:
  virtual absl::Status Run(tf::OpKernelContext* ctx, const Group::Operation& operation,
                           GroupResource* resource) = 0;

  // The bytes of a row, if the first dimension has the rows. Fails if data has no such dimension,
  // or elements that are not plain bytes.
  absl::Status RowBytes(const tf::Tensor& data, size_t* bytes) const {
    TF_RETURN_IF_ERROR(CheckBytes(data));
    if (data.dims() < 1) return absl::InvalidArgumentError("data must have at least one dimension");
    *bytes = static_cast<size_t>(tf::DataTypeSize(data.dtype()));
    for (int d = 1; d < data.dims(); ++d) *bytes *= static_cast<size_t>(data.dim_size(d));
    return absl::OkStatus();
  }
  absl::Status CheckBytes(const tf::Tensor& data) const {
    if (tf::DataTypeCanUseMemcpy(data.dtype())) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("data of type ", tf::DataTypeString(data.dtype()), " cannot be sent"));
  }
  // Returns an error in this rank's arguments, after the other ranks have it.
  static absl::Status Refuse(const char* kind, const Group::Operation& operation,
                             const absl::Status& error, Group* group) {
    (void)group->Refuse(kind, operation, std::string(error.message()));
    return error;
  }
  static char* Bytes(const tf::Tensor& tensor) {
    static char none;  // an empty tensor has no memory
    return tensor.TotalBytes() == 0 ? &none : static_cast<char*>(tensor.data());
  }
  // Allocates output 0 for n rows, each like a row of input 1; returns its memory, or null.
  static char* AllocateRows(tf::OpKernelContext* ctx, int64_t n) {
    tf::TensorShape shape = ctx->input(1).shape();
    shape.set_dim(0, n);
    tf::Tensor* result = nullptr;
    return ctx->allocate_output(0, shape, &result).ok() ? Bytes(*result) : nullptr;
  }

 private:
  absl::Status RunInGroup(tf::OpKernelContext* ctx) {
    tf::core::RefCountPtr<GroupResource> group;
    TF_RETURN_IF_ERROR(GetGroup(ctx, &group));
    if (group->group() == nullptr) {
      return absl::FailedPreconditionError("group is not connected yet");
    }
    // Before it uses any memory that would have to be kept.
    const Status failure = group->group()->failure();
    if (!failure.ok()) return OfGroup(failure);
    if (OnGpu(ctx) && group->nccl() == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("the group of ranks does not use NCCL, which an operation on ",
                       ctx->device()->name(), " needs"));
    }
    const absl::Status status =
        Run(ctx, {operation_, ctx->frame_iter().iter_id, Form(ctx)}, group.get());
    if (absl::IsAborted(status)) {
      for (int i = 1; i < ctx->num_inputs(); ++i) KeepForever(ctx->input(i));
      for (int i = 0; i < ctx->num_outputs(); ++i) {
        if (ctx->mutable_output(i) != nullptr) KeepForever(*ctx->mutable_output(i));
      }
    }
    return status;
  }

  // The form on which ranks must agree: the type, and the shape without the number of rows.
  virtual std::string Form(tf::OpKernelContext* ctx) const {
    tf::TensorShape shape = ctx->input(1).shape();
    if (shape.dims() > 0) shape.RemoveDim(0);
    return absl::StrCat(tf::DataTypeString(ctx->input_dtype(1)), " rows of shape ",
                        shape.DebugString());
  }

  std::string operation_;
};

}  // namespace dynemb

#endif  // DYNEMB_TF_RANKS_COLLECTIVE_OP_H_
