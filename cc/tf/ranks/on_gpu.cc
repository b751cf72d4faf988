#include "cc/tf/ranks/on_gpu.h"

#include <memory>
#include <string>

#if DYNEMB_RANKS_ON_GPU
#include "xla/stream_executor/activate_context.h"
#include "xla/stream_executor/event.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"
#endif

namespace dynemb {
namespace {

#if DYNEMB_RANKS_ON_GPU

absl::Status MoveOnGpu(tf::OpKernelContext* ctx, GroupResource* resource, RunInTurn run) {
  using stream_executor::Event;
  Group* const group = resource->group();
  Nccl* const nccl = resource->nccl();
  tf::DeviceContext* const context = ctx->op_device_context();
  stream_executor::Stream* const stream = context != nullptr ? context->stream() : nullptr;
  if (stream == nullptr) {
    return absl::InternalError(absl::StrCat(ctx->device()->name(), " has no stream"));
  }
  const auto active = stream->parent()->Activate();
  const absl::StatusOr<std::unique_ptr<Event>> created = stream->parent()->CreateEvent();
  if (!created.ok()) return created.status();
  Event* const end = created->get();
  const auto exchange = [&](const Slices& to, const Slices& from) {
    DYNEMB_RETURN_IF_ERROR(
        nccl->Exchange(group, to, from, stream->platform_specific_handle().stream));
    const absl::Status recorded = stream->RecordEvent(end);
    return recorded.ok() ? Status() : Internal(std::string(recorded.message()));
  };
  const Group::TakeTurn take_turn = exchange;
  Status status = run(&take_turn);
  if (status.ok()) {
    status = nccl->Await(group, ctx->op_kernel().name(), [&](bool* done) {
      const Event::Status state = end->PollForStatus();
      *done = state == Event::Status::kComplete;
      return state == Event::Status::kError ? Internal("the stream of the GPU has failed")
                                            : Status();
    });
  }
  if (!group->failure().ok()) nccl->Abort();
  return OfGroup(status);
}

#else

absl::Status MoveOnGpu(tf::OpKernelContext*, GroupResource*, RunInTurn) {
  return absl::UnimplementedError("an exchange on a GPU needs TensorFlow 2.20 or later");
}

#endif

}  // namespace

absl::Status MoveData(tf::OpKernelContext* ctx, GroupResource* resource, RunInTurn run) {
  return OnGpu(ctx) ? MoveOnGpu(ctx, resource, run) : OfGroup(run(nullptr));
}

}  // namespace dynemb
