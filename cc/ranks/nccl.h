// Nccl: moves bytes between the GPUs of the ranks of a group, by an NCCL library that is found when
// the process runs.
//
// Contract. Each rank has one GPU, another one than any other rank. All ranks call Exchange in the
// same order, as in Group's turns. The GPU must be the current device of CUDA of the thread, in all
// calls.
//
// The first exchange joins the GPUs: by then a script has chosen which GPU is its rank's, and a
// group whose tables are in host memory does not take memory of any GPU.
//
// Failure. The communicator is one that does not block (NCCL 2.14 and later), so that a rank that
// does not come is an error within the timeout of the group. An exchange that has started waits on
// the GPU for the other ranks; Abort ends it, and what it has written is undefined.
#ifndef DYNEMB_RANKS_NCCL_H_
#define DYNEMB_RANKS_NCCL_H_

#include <memory>
#include <mutex>
#include <string>

#include "cc/ranks/group.h"
#include "cc/ranks/wire.h"

namespace dynemb {

class Nccl {
 public:
  // `library` is the name or path of a shared library for dlopen. FailedPrecondition says what is
  // missing.
  static Status Load(const std::string& library, std::unique_ptr<Nccl>* nccl);
  // Leaves a communicator that is not aborted to the end of the process: the other ranks may have
  // gone, and so may CUDA.
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int version() const { return version_; }  // 22707 is 2.27.7

  // Starts an exchange on `stream`, a stream of CUDA: to[r] goes to each rank r, and from[r] comes
  // from it. It has ended when the work of the stream has. Both sides agree on the lengths.
  Status Exchange(Group* group, const Slices& to, const Slices& from, void* stream);

  // Waits until `has_ended` says that the exchange of an operation has. An exchange that NCCL gives
  // up ends, too; this returns its error, which ends the group.
  Status Await(Group* group, const std::string& operation, Group::Poll has_ended);

  // Ends the exchanges that have started. Later calls fail.
  void Abort();

 private:
  struct Library;

  explicit Nccl(std::unique_ptr<Library> library);
  Status Join(Group* group);
  // Fails unless the result of a call is that it has succeeded, or goes on.
  Status Check(const char* call, int result) const;
  // Fails as `what` if the communicator has failed; sets *goes_on to whether a call does.
  Status Look(const char* what, bool* goes_on);
  // Waits until the call that goes on has succeeded.
  Status AwaitCall(Group* group, const char* call);

  const std::unique_ptr<Library> library_;
  int version_ = 0;
  std::mutex mutex_;
  void* communicator_ = nullptr;  // guarded by mutex_
  bool aborted_ = false;          // guarded by mutex_
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_NCCL_H_
