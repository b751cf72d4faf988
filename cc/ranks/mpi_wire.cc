#include "cc/ranks/mpi_wire.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

// A handle of MPI: an int in MPICH's interface, a pointer in the others. As an argument, either is
// passed in a register; an int that is written to a Handle of 0 is the same on a little-endian
// machine.
using Handle = intptr_t;

// MPI counts bytes with an int.
constexpr size_t kMostBytes = size_t{1} << 30;

// MPI does not sleep while it waits, so this does: an operation that waits for another rank's
// computation must not take a core from it.
void Pause(int* calls) {
  if (++*calls > 2000) {
    usleep(50);
  } else if (*calls > 20) {
    sched_yield();
  }
}

}  // namespace

struct MpiWire::Mpi {
  using Transfer = int (*)(void*, int, Handle, int, int, Handle, Handle*);

  int (*initialized)(int*);
  int (*finalized)(int*);
  int (*init_thread)(int*, char***, int, int*);
  int (*query_thread)(int*);
  int (*finalize)();
  int (*set_error_handler)(Handle, Handle);
  int (*duplicate)(Handle, Handle*);
  int (*comm_rank)(Handle, int*);
  int (*comm_size)(Handle, int*);
  int (*get_attribute)(Handle, int, void*, int*);
  int (*get_version)(char*, int*);
  int (*error_text)(int, char*, int*);
  Transfer send, receive;
  int (*test)(Handle*, int*, void*);
  int (*cancel)(Handle*);

  Handle world, byte, errors_return;
  int thread_multiple, tag_limit;
  void* ignored_status;

  Handle group = 0;
  int most_tag = 32767;

  Status Load(const std::string& library);
  std::string Error(const char* call, int code) const;
};

Status MpiWire::Mpi::Load(const std::string& library) {
  // Its plugins look for its symbols among the symbols of the process.
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (loaded == nullptr) return FailedPrecondition(dlerror());
  const char* missing = nullptr;
  const auto get = [&](auto* function, const char* name) {
    void* const symbol = dlsym(loaded, name);
    if (symbol == nullptr) missing = name;
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(symbol);
  };
  get(&initialized, "MPI_Initialized");
  get(&finalized, "MPI_Finalized");
  get(&init_thread, "MPI_Init_thread");
  get(&query_thread, "MPI_Query_thread");
  get(&finalize, "MPI_Finalize");
  get(&set_error_handler, "MPI_Comm_set_errhandler");
  get(&duplicate, "MPI_Comm_dup");
  get(&comm_rank, "MPI_Comm_rank");
  get(&comm_size, "MPI_Comm_size");
  get(&get_attribute, "MPI_Comm_get_attr");
  get(&get_version, "MPI_Get_library_version");
  get(&error_text, "MPI_Error_string");
  get(&send, "MPI_Isend");
  get(&receive, "MPI_Irecv");
  get(&test, "MPI_Test");
  get(&cancel, "MPI_Cancel");
  if (dlsym(loaded, "ompi_mpi_comm_world") != nullptr) {
    get(&world, "ompi_mpi_comm_world");
    get(&byte, "ompi_mpi_byte");
    get(&errors_return, "ompi_mpi_errors_return");
    thread_multiple = 3, tag_limit = 0, ignored_status = nullptr;
  } else if (library.find("mpi_abi") != std::string::npos) {  // MPI 5.0, appendix A.2
    world = 0x101, byte = 0x247, errors_return = 0x143;
    thread_multiple = 4096, tag_limit = 501, ignored_status = nullptr;
  } else {
    world = 0x44000000, byte = 0x4c00010d, errors_return = 0x54000001;
    thread_multiple = 3, tag_limit = 0x64400001, ignored_status = reinterpret_cast<void*>(1);
  }
  if (missing != nullptr) return FailedPrecondition(library + " has no " + missing);
  return Status();
}

std::string MpiWire::Mpi::Error(const char* call, int code) const {
  char text[8192] = "";  // MPI_MAX_ERROR_STRING is at most 1024
  int length = 0;
  if (error_text(code, text, &length) != 0) text[0] = '\0';
  return std::string(call) + " failed with " + std::to_string(code) + ": " + text;
}

Status MpiWire::Join(const std::string& library, std::chrono::milliseconds timeout,
                     std::unique_ptr<MpiWire>* wire) {
  auto mpi = std::make_unique<Mpi>();
  DYNEMB_RETURN_IF_ERROR(mpi->Load(library));
  int flag = 0, level = 0, code = 0;
  if ((code = mpi->initialized(&flag)) != 0) return Internal(mpi->Error("MPI_Initialized", code));
  if (!flag) {
    code = mpi->init_thread(nullptr, nullptr, mpi->thread_multiple, &level);
    if (code != 0) return Internal(mpi->Error("MPI_Init_thread", code));
    static const auto finalize = mpi->finalize;
    static const auto finalized = mpi->finalized;
    atexit([] {
      int done = 0;
      if (finalized(&done) == 0 && !done) finalize();
    });
  }
  if ((code = mpi->query_thread(&level)) != 0)
    return Internal(mpi->Error("MPI_Query_thread", code));
  if (level != mpi->thread_multiple) {
    return FailedPrecondition(
        "MPI was initialized without MPI_THREAD_MULTIPLE, which operations that run at the same "
        "time need");
  }
  code = mpi->duplicate(mpi->world, &mpi->group);
  if (code != 0) return Internal(mpi->Error("MPI_Comm_dup", code));
  // Otherwise an error would end the process.
  mpi->set_error_handler(mpi->group, mpi->errors_return);
  Place place{};
  if ((code = mpi->comm_rank(mpi->group, &place.rank)) != 0 ||
      (code = mpi->comm_size(mpi->group, &place.size)) != 0) {
    return Internal(mpi->Error("MPI_Comm_rank", code));
  }
  int* limit = nullptr;
  if (mpi->get_attribute(mpi->group, mpi->tag_limit, &limit, &flag) == 0 && flag) {
    mpi->most_tag = *limit;
  }
  std::string version(8192, '\0');
  int length = 0;
  if (mpi->get_version(version.data(), &length) != 0) length = 0;
  version.resize(std::min(version.find('\n'), strnlen(version.data(), version.size())));
  wire->reset(new MpiWire(place, timeout, std::move(mpi)));
  (*wire)->version_ = std::move(version);
  return Status();
}

MpiWire::MpiWire(Place place, std::chrono::milliseconds timeout, std::unique_ptr<const Mpi> mpi)
    : Wire(place.rank, place.size, timeout), mpi_(std::move(mpi)) {}

MpiWire::~MpiWire() = default;

Status MpiWire::Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                         const Slices& from) {
  DYNEMB_RETURN_IF_ERROR(failure());
  const std::string on = operation + " on rank " + std::to_string(rank()) + ": ";
  // Two tags may become the same number; the headers of operations tell them apart (group.h).
  const int number = static_cast<int>(tag % (static_cast<uint64_t>(mpi_->most_tag) + 1));
  struct Pending {
    int rank;
    bool is_receive;
    Handle request;
  };
  std::vector<Pending> pending;
  const auto start = [&](Mpi::Transfer transfer, const Slices::Slice& slice, int other) {
    for (size_t done = 0; done < slice.bytes; done += kMostBytes) {
      pending.push_back({other, transfer == mpi_->receive, 0});
      const int n = static_cast<int>(std::min(kMostBytes, slice.bytes - done));
      const int code = transfer(slice.data + done, n, mpi_->byte, other, number, mpi_->group,
                                &pending.back().request);
      if (code != 0) return code;
    }
    return 0;
  };
  int code = 0, other = rank();
  for (int i = 1; i < size() && code == 0; ++i) {
    other = (rank() + size() - i) % size();
    code = start(mpi_->receive, from[other], other);
  }
  for (int i = 1; i < size() && code == 0; ++i) {
    other = (rank() + i) % size();
    code = start(mpi_->send, to[other], other);
  }
  if (code != 0) {
    return Fail(on + "rank " + std::to_string(other) + ": " + mpi_->Error("MPI_Isend", code));
  }
  if (to[rank()].bytes != 0) memcpy(from[rank()].data, to[rank()].data, to[rank()].bytes);

  const auto end = std::chrono::steady_clock::now() + timeout();
  int calls = 0;
  for (size_t first = 0; first < pending.size();) {
    int done = 0;
    code = mpi_->test(&pending[first].request, &done, mpi_->ignored_status);
    if (code != 0) {
      return Fail(on + "rank " + std::to_string(pending[first].rank) + ": " +
                  mpi_->Error("MPI_Test", code));
    }
    if (done) {
      ++first, calls = 0;
      continue;
    }
    Pause(&calls);
    if (std::chrono::steady_clock::now() < end) continue;
    std::vector<int> ranks;
    const bool receives = pending[first].is_receive;
    for (size_t i = first; i < pending.size(); ++i) {
      done = 0;
      if (pending[i].is_receive != receives) break;
      (void)mpi_->test(&pending[i].request, &done, mpi_->ignored_status);
      if (!done && (ranks.empty() || ranks.back() != pending[i].rank)) {
        ranks.push_back(pending[i].rank);
      }
      if (!done && receives) (void)mpi_->cancel(&pending[i].request);
    }
    if (ranks.empty()) continue;
    return Fail(on + Late(ranks, receives ? "sent nothing" : "received nothing"));
  }
  return Status();
}

Status MpiWire::Fail(const std::string& reason) {
  Record(reason);
  return failure();
}

}  // namespace dynemb
