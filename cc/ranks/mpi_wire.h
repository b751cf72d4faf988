// MpiWire: a Wire over an MPI library that is found when the process runs.
//
// Nothing of an implementation is compiled in. The library's symbols show which binary interface it
// has: MPICH's (also Intel MPI, MVAPICH and Cray MPICH), Open MPI's, or the standard one in MPI 5.
// MPI must grant MPI_THREAD_MULTIPLE. If MPI is not initialized, the first wire initializes it, and
// finalizes it when the process exits.
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
  // failed.
  static Status Join(const std::string& library, std::chrono::milliseconds timeout,
                     std::unique_ptr<MpiWire>* wire);
  ~MpiWire() override;

  // The implementation and its version, as the library says it.
  const std::string& version() const { return version_; }

  Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                  const Slices& from) override;
  Status Fail(const std::string& reason) override;

 private:
  struct Mpi;  // the functions and constants of the library, and the communicator
  struct Place {
    int rank, size;
  };

  MpiWire(Place place, std::chrono::milliseconds timeout, std::unique_ptr<const Mpi> mpi);

  const std::unique_ptr<const Mpi> mpi_;
  std::string version_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_MPI_WIRE_H_
