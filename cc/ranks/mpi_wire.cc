#include "cc/ranks/mpi_wire.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cc/ranks/shared_library.h"
#include "cc/table/monotonic.h"

namespace dynemb {
namespace {

// A handle of MPI: an int in MPICH's interface, a pointer in the others. As an argument, either is
// passed in a register; an int that is written to a Handle of 0 is the same on a little-endian
// machine.
using Handle = intptr_t;

// MPI counts bytes with an int.
constexpr size_t kMostBytes = size_t{1} << 30;
constexpr size_t kWordBytes = 1024;
// The first byte of a last word.
constexpr char kFailed = 'F', kExits = 'E';
// How often a waiting exchange looks for last words.
constexpr std::chrono::milliseconds kLook{20};
constexpr std::chrono::seconds kToTell{1};
// The time for the bytes that a rank has sent before its last word.
constexpr std::chrono::seconds kToArrive{1};
// How long a process whose group has failed waits for the others before it exits.
constexpr std::chrono::seconds kToEnd{10};

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

  Status Load(const std::string& library);
  // Initializes MPI, unless it is, and sets `started`; then joins.
  Status Join(Membership* group, bool* started) const;
  std::string Error(const char* call, int code) const;
};

struct MpiWire::Membership {
  Handle communicator = 0;
  int rank = 0, size = 0, most_tag = 32767;
  std::string version;
};

Status MpiWire::Mpi::Load(const std::string& library) {
  // Its plugins look for its symbols among the symbols of the process.
  SharedLibrary loaded(library, RTLD_NOW | RTLD_GLOBAL);
  DYNEMB_RETURN_IF_ERROR(loaded.status());
  loaded.Find(&initialized, "MPI_Initialized");
  loaded.Find(&finalized, "MPI_Finalized");
  loaded.Find(&init_thread, "MPI_Init_thread");
  loaded.Find(&query_thread, "MPI_Query_thread");
  loaded.Find(&finalize, "MPI_Finalize");
  loaded.Find(&set_error_handler, "MPI_Comm_set_errhandler");
  loaded.Find(&duplicate, "MPI_Comm_dup");
  loaded.Find(&comm_rank, "MPI_Comm_rank");
  loaded.Find(&comm_size, "MPI_Comm_size");
  loaded.Find(&get_attribute, "MPI_Comm_get_attr");
  loaded.Find(&get_version, "MPI_Get_library_version");
  loaded.Find(&error_text, "MPI_Error_string");
  loaded.Find(&send, "MPI_Isend");
  loaded.Find(&receive, "MPI_Irecv");
  loaded.Find(&test, "MPI_Test");
  loaded.Find(&cancel, "MPI_Cancel");
  if (loaded.Has("ompi_mpi_comm_world")) {
    loaded.Find(&world, "ompi_mpi_comm_world");
    loaded.Find(&byte, "ompi_mpi_byte");
    loaded.Find(&errors_return, "ompi_mpi_errors_return");
    thread_multiple = 3, tag_limit = 0, ignored_status = nullptr;
  } else if (library.find("mpi_abi") != std::string::npos) {  // MPI 5.0, appendix A.2
    world = 0x101, byte = 0x247, errors_return = 0x143;
    thread_multiple = 4096, tag_limit = 501, ignored_status = nullptr;
  } else {
    world = 0x44000000, byte = 0x4c00010d, errors_return = 0x54000001;
    thread_multiple = 3, tag_limit = 0x64400001, ignored_status = reinterpret_cast<void*>(1);
  }
  return loaded.status();
}

std::string MpiWire::Mpi::Error(const char* call, int code) const {
  char text[8192] = "";  // MPI_MAX_ERROR_STRING is at most 1024
  int length = 0;
  if (error_text(code, text, &length) != 0) text[0] = '\0';
  return std::string(call) + " failed with " + std::to_string(code) + ": " + text;
}

Status MpiWire::Mpi::Join(Membership* group, bool* started) const {
  int flag = 0, level = 0, code = 0;
  if ((code = initialized(&flag)) != 0) return Internal(Error("MPI_Initialized", code));
  if (!flag) {
    code = init_thread(nullptr, nullptr, thread_multiple, &level);
    if (code != 0) return Internal(Error("MPI_Init_thread", code));
    *started = true;
  }
  if ((code = query_thread(&level)) != 0) return Internal(Error("MPI_Query_thread", code));
  if (level != thread_multiple) {
    return FailedPrecondition(
        "MPI was initialized without MPI_THREAD_MULTIPLE, which operations that run at the same "
        "time need");
  }
  if ((code = duplicate(world, &group->communicator)) != 0) {
    return Internal(Error("MPI_Comm_dup", code));
  }
  // Otherwise an error would end the process.
  set_error_handler(group->communicator, errors_return);
  if ((code = comm_rank(group->communicator, &group->rank)) != 0 ||
      (code = comm_size(group->communicator, &group->size)) != 0) {
    return Internal(Error("MPI_Comm_rank", code));
  }
  int* limit = nullptr;
  if (get_attribute(group->communicator, tag_limit, &limit, &flag) == 0 && flag) {
    group->most_tag = *limit;
  }
  std::string version(8192, '\0');
  int length = 0;
  if (get_version(version.data(), &length) != 0) length = 0;
  version.resize(std::min(version.find('\n'), strnlen(version.data(), version.size())));
  group->version = std::move(version);
  return Status();
}

// The last words of the ranks of a wire. They outlive it: at the exit of the process, the wire may
// have gone, and the other ranks may not have ended.
class MpiWire::LastWords {
 public:
  LastWords(const Membership& group, std::chrono::milliseconds timeout,
            std::shared_ptr<const Mpi> mpi)
      : mpi_(std::move(mpi)),
        communicator_(group.communicator),
        tag_(group.most_tag),
        rank_(group.rank),
        timeout_(timeout),
        heard_(static_cast<size_t>(group.size)) {}

  // Receives the words of the others from now on.
  Status Listen() {
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      Heard& word = heard_[static_cast<size_t>(r)];
      const int code = mpi_->receive(word.text, sizeof(word.text), mpi_->byte, r, tag_,
                                     communicator_, &word.request);
      if (code != 0) return Internal(mpi_->Error("MPI_Irecv", code));
    }
    return Status();
  }

  // Sends this rank's word to the others, unless it is said, and waits a little for it to leave.
  void Tell(char kind, const std::string& text) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(told_, true)) return;
      failed_ = failed_ || kind == kFailed;
    }
    // MPI may go on to read it.
    auto* const said = new Heard;
    said->text[0] = kind;
    text.copy(said->text + 1, kWordBytes - 2);
    std::vector<Handle> requests;
    for (int r = 0; r < size(); ++r) {
      Handle request = 0;
      if (r != rank_ &&
          mpi_->send(said->text, kWordBytes, mpi_->byte, r, tag_, communicator_, &request) == 0) {
        requests.push_back(request);
      }
    }
    const auto end = Clock::now() + kToTell;
    for (Handle& request : requests) {
      int done = 0, calls = 0;
      while (mpi_->test(&request, &done, mpi_->ignored_status) == 0 && !done &&
             Clock::now() < end) {
        Pause(&calls);
      }
    }
  }

  // Returns which other ranks have said their word. Sets `reason` to one's that has failed.
  std::vector<bool> Hear(std::string* reason) {
    std::vector<bool> ended(heard_.size());
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t r = 0; r < heard_.size(); ++r) {
      Heard& word = heard_[r];
      if (r == static_cast<size_t>(rank_)) continue;
      int done = word.is_here;
      if (!done && mpi_->test(&word.request, &done, mpi_->ignored_status) != 0) continue;
      ended[r] = word.is_here = done != 0;
      if (!done || word.text[0] != kFailed) continue;
      failed_ = true;
      if (reason->empty()) *reason = word.text + 1;
    }
    return ended;
  }

  // Waits for the words of all; says who is missing at the end.
  std::string Await(Clock::time_point end) {
    for (int calls = 0;; Pause(&calls)) {
      std::string reason;
      std::vector<bool> ended = Hear(&reason);
      ended[static_cast<size_t>(rank_)] = true;
      const auto missing = std::find(ended.begin(), ended.end(), false);
      if (missing == ended.end()) return "";
      if (Clock::now() < end) continue;
      return "rank " + std::to_string(missing - ended.begin()) + " has not ended";
    }
  }

  // How long the process may wait for the others when it exits.
  Clock::duration patience() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_ ? Clock::duration(kToEnd) : Clock::duration(timeout_);
  }

 private:
  struct Heard {
    char text[kWordBytes] = "";
    Handle request = 0;
    bool is_here = false;
  };
  int size() const { return static_cast<int>(heard_.size()); }

  const std::shared_ptr<const Mpi> mpi_;
  const Handle communicator_;
  const int tag_, rank_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  bool told_ = false, failed_ = false;  // guarded by mutex_
  std::vector<Heard> heard_;            // by rank; guarded by mutex_
};

// MPI in this process: the last words of all wires, and the thread that has initialized MPI.
class MpiWire::Process {
 public:
  static Process& Get() {
    static auto* const process = new Process;
    return *process;
  }

  void Add(std::shared_ptr<LastWords> words) {
    std::lock_guard<std::mutex> lock(mutex_);
    words_.push_back(std::move(words));
  }
  // MPI may be called: the process does not exit, and is not a child of the one that has joined.
  bool CanCall() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !exits_ && getpid() == id_;
  }

  // In the thread that has initialized MPI: finalizes it when the process exits.
  void Finalize(const Mpi& mpi) {
    on_exit([](int status, void*) { Get().OnExit(status); }, nullptr);
    std::unique_lock<std::mutex> lock(mutex_);
    has_thread_ = true;
    changed_.wait(lock, [&] { return finalizes_; });
    lock.unlock();
    int done = 0;
    if (mpi.finalized(&done) == 0 && !done) (void)mpi.finalize();
    lock.lock();
    finalized_ = true;
    changed_.notify_all();
  }

 private:
  void OnExit(int status) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (getpid() != id_ || !has_thread_) return;
    exits_ = true;
    // All of them speak before any listens: another rank may have them in another order.
    Clock::duration patience = kToEnd;
    for (const auto& words : words_) {
      words->Tell(kExits, "");
      patience = std::max(patience, words->patience());
    }
    std::string missing;
    const auto end = Clock::now() + patience;
    for (const auto& words : words_) {
      if (missing.empty()) missing = words->Await(std::min(end, Clock::now() + words->patience()));
    }
    if (missing.empty()) {
      finalizes_ = true;
      changed_.notify_all();
      // A rank may have said its word long before it exits.
      if (changed_.wait_for(lock, end - Clock::now(), [&] { return finalized_; })) return;
      missing = "MPI_Finalize does not return";
    }
    fprintf(stderr, "tf_dynemb: the process exits without MPI_Finalize: %s\n", missing.c_str());
    fflush(nullptr);
    _exit(status);
  }

  std::mutex mutex_;
  MonotonicCondition changed_;
  std::vector<std::shared_ptr<LastWords>> words_;
  const pid_t id_ = getpid();
  bool has_thread_ = false, exits_ = false, finalizes_ = false, finalized_ = false;
};

Status MpiWire::Join(const std::string& library, std::chrono::milliseconds timeout,
                     std::unique_ptr<MpiWire>* wire) {
  auto mpi = std::make_shared<Mpi>();
  DYNEMB_RETURN_IF_ERROR(mpi->Load(library));
  struct Joined {
    std::mutex mutex;
    MonotonicCondition changed;
    bool done = false;
    Status status;
    Membership group;
  };
  const auto joined = std::make_shared<Joined>();
  std::thread([mpi, joined] {
    bool started = false;
    Membership group;
    Status status = mpi->Join(&group, &started);
    {
      std::lock_guard<std::mutex> lock(joined->mutex);
      joined->done = true;
      joined->status = std::move(status);
      joined->group = std::move(group);
      joined->changed.notify_all();
    }
    if (started) Process::Get().Finalize(*mpi);
  }).detach();
  std::unique_lock<std::mutex> lock(joined->mutex);
  if (!joined->changed.wait_for(lock, timeout, [&] { return joined->done; })) {
    return Internal("MPI has not started for " + Seconds(timeout) +
                    ": not all ranks have started, or have called init");
  }
  DYNEMB_RETURN_IF_ERROR(joined->status);
  std::unique_ptr<MpiWire> made(new MpiWire(joined->group, timeout, mpi));
  made->version_ = joined->group.version;
  DYNEMB_RETURN_IF_ERROR(made->words_->Listen());
  *wire = std::move(made);
  return Status();
}

MpiWire::MpiWire(const Membership& group, std::chrono::milliseconds timeout,
                 std::shared_ptr<const Mpi> mpi)
    : Wire(group.rank, group.size, timeout),
      mpi_(mpi),
      communicator_(group.communicator),
      most_tag_(group.most_tag),
      words_(std::make_shared<LastWords>(group, timeout, std::move(mpi))) {
  Process::Get().Add(words_);
}

MpiWire::~MpiWire() {
  if (Process::Get().CanCall()) words_->Tell(kExits, "");
}

Status MpiWire::Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                         const Slices& from) {
  DYNEMB_RETURN_IF_ERROR(failure());
  const std::string on = operation + " on rank " + std::to_string(rank()) + ": ";
  // Two tags may become the same number; the headers of operations tell them apart (group.h). The
  // largest number is that of last words.
  const int number = static_cast<int>(tag % static_cast<uint64_t>(most_tag_));
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
      const int code = transfer(slice.data + done, n, mpi_->byte, other, number, communicator_,
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

  const auto is_done = [&](Pending* transfer) {
    int done = 0;
    code = mpi_->test(&transfer->request, &done, mpi_->ignored_status);
    return done != 0;
  };
  const auto end = Clock::now() + timeout();
  auto next_look = Clock::now() + kLook;
  Clock::time_point noticed = Clock::time_point::max();  // that a rank has ended
  int calls = 0;
  for (size_t first = 0; first < pending.size();) {
    const bool done = is_done(&pending[first]);
    if (code != 0) {
      return Fail(on + "rank " + std::to_string(pending[first].rank) + ": " +
                  mpi_->Error("MPI_Test", code));
    }
    if (done) {
      ++first, calls = 0;
      continue;
    }
    Pause(&calls);
    const auto now = Clock::now();
    if (now < next_look) continue;
    next_look = now + kLook;
    std::vector<bool> ended;
    DYNEMB_RETURN_IF_ERROR(Look(&ended));
    for (size_t i = first; i < pending.size(); ++i) {
      const int that = pending[i].rank;
      if (!ended[static_cast<size_t>(that)] || is_done(&pending[i])) continue;
      noticed = std::min(noticed, now);
      if (now < noticed + kToArrive) continue;
      return Fail(on + "rank " + std::to_string(that) + " has ended");
    }
    if (now < end) continue;
    std::vector<int> ranks;
    const bool receives = pending[first].is_receive;
    for (size_t i = first; i < pending.size() && pending[i].is_receive == receives; ++i) {
      const bool is_late = !is_done(&pending[i]);
      if (is_late && (ranks.empty() || ranks.back() != pending[i].rank)) {
        ranks.push_back(pending[i].rank);
      }
      if (is_late && receives) (void)mpi_->cancel(&pending[i].request);
    }
    if (ranks.empty()) continue;
    return Fail(on + Late(ranks, receives ? "sent nothing" : "received nothing"));
  }
  return Status();
}

Status MpiWire::Look(std::vector<bool>* ended) {
  std::string reason;
  *ended = words_->Hear(&reason);
  if (!reason.empty()) Record(reason);
  return failure();
}

Status MpiWire::Fail(const std::string& reason) {
  if (Record(reason)) words_->Tell(kFailed, reason);
  return failure();
}

}  // namespace dynemb
