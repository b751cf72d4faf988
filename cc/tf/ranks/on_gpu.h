// Collective operations on tensors in the memory of a GPU, by NCCL, on the stream of TensorFlow.
#ifndef DYNEMB_TF_RANKS_ON_GPU_H_
#define DYNEMB_TF_RANKS_ON_GPU_H_

#include "cc/table/function_ref.h"
#include "cc/tf/ranks/collective_op.h"

// The headers of TensorFlow 2.18 and 2.19 lack files of its interface to streams and devices.
#define DYNEMB_RANKS_ON_GPU (DYNEMB_TENSORFLOW_MINOR >= 20)

namespace dynemb {

// Runs an operation of the group, to which it gives the means to move data: none if `ctx` is on a
// CPU, and NCCL if it is on a GPU.
//
// It returns when the data have been moved, and not when this has begun: if another rank failed in
// between, later operations of this rank, such as the step of an optimizer, would use what was not
// received.
using RunInTurn = FunctionRef<Status(const Group::TakeTurn* take_turn)>;
absl::Status MoveData(tf::OpKernelContext* ctx, GroupResource* resource, RunInTurn run);

}  // namespace dynemb

#endif  // DYNEMB_TF_RANKS_ON_GPU_H_
