// MpiWire: a Wire over an MPI library that is found when the process runs.
//
// Nothing of an implementation is compiled in. The library's symbols show which binary interface it
// has: MPICH's (also Intel MPI, MVAPICH and Cray MPICH), Open MPI's, or the standard one in MPI 5.
// MPI must grant MPI_THREAD_MULTIPLE. If MPI is not initialized, the first wire starts a thread
// that initializes it, and finalizes it when the process exits: neither has a timeout, so that the
// process does not wait for that thread without end.
//
// Failure. MPI does not say that a rank has gone. Each rank therefore always receives a last word
// of each other one, and an exchange looks at these. A rank that fails sends its reason, and one
// that exits says so; a rank that is killed says nothing, and its launcher usually ends the others.
#ifndef DYNEMB_RANKS_MPI_WIRE_H_
#define DYNEMB_RANKS_MPI_WIRE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "cc/ranks/wire.h"

namespace dynemb {

class MpiWire : public Wire {
 public:
  // Joins a copy of MPI_COMM_WORLD. `library` is the name or path of a shared library for dlopen.
  // Collective. FailedPrecondition says what the library is missing; Internal, which call of MPI
  // failed, or has not returned within the timeout.
  static Status Join(const std::string& library, std::chrono::milliseconds timeout,
                     std::unique_ptr<MpiWire>* wire);
  ~MpiWire() override;

  // The implementation and its version, as the library says it.
  const std::string& version() const { return version_; }

  Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                  const Slices& from) override;
  Status Look(std::vector<bool>* ended) override;
  Status Fail(const std::string& reason) override;

 private:
  struct Mpi;         // the functions and constants of the library
  struct Membership;  // the communicator, and what MPI says of it
  class LastWords;    // of this rank, and of the others
  class Process;      // MPI in this process
  using Clock = std::chrono::steady_clock;

  MpiWire(const Membership& group, std::chrono::milliseconds timeout,
          std::shared_ptr<const Mpi> mpi);

  const std::shared_ptr<const Mpi> mpi_;
  const std::intptr_t communicator_;
  const int most_tag_;
  const std::shared_ptr<LastWords> words_;
  std::string version_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_MPI_WIRE_H_
