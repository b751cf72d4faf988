// Group: the collective operations of ranks, over a Wire.
//
// An operation has a kind and a name, and matches the operation of the same kind and name on the
// other ranks; operations with other names may run at the same time. Each rank announces to each
// other what it sends, with the data themselves if they are few; otherwise the data follow. Ranks
// whose announcements do not fit all return an error that says which rank has what, and the group
// goes on; a failure of the wire ends the group.
//
// All calls are thread-safe. Two of the same kind and name at the same time would match in any
// order: the second is an error. Calls block: not for threads of TensorFlow's pools.
//
// Data in the memories of GPUs are moved by NCCL, which has no tags: all ranks must call it in the
// same order (nccl.h). Such operations take turns, in the order in which rank 0 announces them. An
// operation that the program of a rank starts after the end of another one has a later turn, so
// that no operation waits for the turn of one that waits for it.
//
// Sums are in the order of ranks, and computed once: all ranks have the same bits, whichever engine
// has carried them.
#ifndef DYNEMB_RANKS_GROUP_H_
#define DYNEMB_RANKS_GROUP_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/ranks/wire.h"
#include "cc/table/function_ref.h"

namespace dynemb {

enum class Number { kInt32, kInt64, kFloat16, kBfloat16, kFloat32, kFloat64 };

class Group {
 public:
  explicit Group(std::unique_ptr<Wire> wire) : wire_(std::move(wire)) {}

  int rank() const { return wire_->rank(); }
  int size() const { return wire_->size(); }

  // The failure that has ended the group.
  Status failure() const { return wire_->failure(); }

  // An operation in the iteration `iteration` of a loop, if it is in one: iterations of one
  // operation may run at the same time.
  struct Operation {
    std::string name;
    int64_t iteration = 0;
    std::string form{};  // the type of the data, and all of their shape that ranks must agree on
  };

  // Takes the place of an operation, "alltoall" or another, whose arguments on this rank are wrong:
  // the other ranks return `reason` as an error of this rank, and do not wait for it.
  Status Refuse(const char* kind, const Operation& operation, const std::string& reason);

  // Ends the group on this rank: its operations fail, and operations of other ranks that wait for
  // this rank fail, too.
  void Leave();

  // Returns the memory for a result of `rows` rows; null if there is none, and never otherwise.
  using Allocate = FunctionRef<char*(int64_t rows)>;

  // Starts to move data that are in the memories of GPUs.
  using TakeTurn = FunctionRef<Status(const Slices& to, const Slices& from)>;

  // Sends rows[r] rows of row_bytes bytes to each rank r, in the order of ranks in `data`. Sets
  // received[r] to the number of rows that rank r has sent; they are written in the order of ranks
  // to the memory that `allocate` returns for all of them.
  //
  // If `take_turn` is given, the data and the result are in the memory of a GPU. It is called in
  // the turn of the operation, which ends when it returns. If it fails, the group ends.
  Status Alltoall(const Operation& operation, const char* data, const std::vector<int64_t>& rows,
                  size_t row_bytes, std::vector<int64_t>* received, Allocate allocate,
                  const TakeTurn* take_turn = nullptr);

  // Writes the rows of all ranks, in the order of ranks, to the memory that `allocate` returns.
  // `take_turn` is as in Alltoall.
  Status Allgather(const Operation& operation, const char* data, int64_t rows, size_t row_bytes,
                   Allocate allocate, const TakeTurn* take_turn = nullptr);

  // Waits until `poll` sets *done. If it fails, if another rank ends, or if the timeout of the wire
  // passes, the group ends with an error that names `operation`.
  using Poll = FunctionRef<Status(bool* done)>;
  Status Await(const std::string& operation, Poll poll);

  // Overwrites `bytes` bytes at `data` by the bytes of rank `root`.
  Status Broadcast(const Operation& operation, int root, char* data, size_t bytes);

  // Sets result[i] to the sum of data[i] of all ranks, for n numbers. 16-bit numbers are summed as
  // float32 and rounded once. `data` and `result` may be the same.
  Status Allreduce(const Operation& operation, Number type, const char* data, char* result,
                   size_t n);

 private:
  struct Call;
  Status Announce(Call* call, const std::vector<int64_t>& rows, size_t row_bytes, const Slices& to,
                  std::vector<int64_t>* received);
  Status Deliver(Call* call, const Slices& to, const Slices& from);
  Status Gather(Call* call, const std::vector<int64_t>& rows, size_t row_bytes, const Slices& to,
                std::vector<int64_t>* received, Allocate allocate, const TakeTurn* take_turn);
  Status AwaitTurn(const Call& call);
  void EndTurn(int64_t turn);

  const std::unique_ptr<Wire> wire_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::set<std::pair<uint64_t, int64_t>> running_;  // hashes and iterations
  int64_t next_number_ = 0;                         // on rank 0: of the next operation
  int64_t turn_ = 0;               // all operations before this one have had theirs
  std::set<int64_t> ended_turns_;  // beyond turn_
  std::condition_variable turn_ended_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_GROUP_H_
