#include "cc/file/open_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>

#include "cc/file/block_file.h"
#include "cc/table/process_state.h"

namespace dynemb {

struct OpenFiles::State {
  void InChild() {
    new (&released) std::condition_variable;
    in_child = true;
  }

  std::mutex mutex;
  std::condition_variable released;  // a file is not used anymore, or closed
  size_t open = 0;                   // files that are open to be read
  // Files may seem to be used for ever, by threads of the parent: the budget does not hold.
  bool in_child = false;
  // The open files that are not in use, in the order of their last use.
  ReadFile* first = nullptr;
  ReadFile* last = nullptr;
};

OpenFiles::State& OpenFiles::Get() { return ProcessState<State>(); }

size_t OpenFiles::budget() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeast;
  return std::clamp<size_t>(std::min<rlim_t>(limit.rlim_cur / 4, kMost), kLeast, kMost);
}

size_t OpenFiles::open() {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.open;
}

void OpenFiles::AddIdle(State* state, ReadFile* file) {
  file->before_ = state->last;
  (state->last != nullptr ? state->last->after_ : state->first) = file;
  state->last = file;
}

void OpenFiles::RemoveIdle(State* state, ReadFile* file) {
  (file->before_ != nullptr ? file->before_->after_ : state->first) = file->after_;
  (file->after_ != nullptr ? file->after_->before_ : state->last) = file->before_;
  file->before_ = file->after_ = nullptr;
}

void OpenFiles::Close(State* state, ReadFile* file) {
  (void)file->files_->Close(std::exchange(file->fd_, -1));
  file->closes_ = false;
  --state->open;
}

bool OpenFiles::CloseIdle(State* state) {
  ReadFile* const file = state->first;
  if (file == nullptr) return false;
  RemoveIdle(state, file);
  Close(state, file);
  return true;
}

int OpenFiles::Open(FileSystem& files, const std::string& path, int flags, unsigned mode) {
  State& state = Get();
  for (;;) {
    const int fd = files.Open(path, flags, mode);
    if (fd != -EMFILE && fd != -ENFILE) return fd;
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!CloseIdle(&state)) return fd;
  }
}

void ReadFile::Use::End() {
  ReadFile* const file = std::exchange(file_, nullptr);
  if (file == nullptr) return;
  OpenFiles::State& state = OpenFiles::Get();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (--file->uses_ != 0) return;
    if (file->closes_) {
      OpenFiles::Close(&state, file);
    } else {
      OpenFiles::AddIdle(&state, file);
    }
  }
  state.released.notify_all();
}

ReadFile::~ReadFile() {
  OpenFiles::State& state = OpenFiles::Get();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (fd_ < 0) return;
    OpenFiles::RemoveIdle(&state, this);
    OpenFiles::Close(&state, this);
  }
  state.released.notify_all();
}

void ReadFile::UsePageCache() {
  OpenFiles::State& state = OpenFiles::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  mode_ = Mode::kCached;
  if (fd_ < 0) return;
  if (uses_ != 0) {
    closes_ = true;
    return;
  }
  OpenFiles::RemoveIdle(&state, this);
  OpenFiles::Close(&state, this);
}

Status ReadFile::Open(Wait wait, Use* use) {
  OpenFiles::State& state = OpenFiles::Get();
  std::unique_lock<std::mutex> lock(state.mutex);
  while (fd_ < 0) {
    Status status;
    if (state.open < OpenFiles::budget() || state.in_child) {
      bool direct = mode_ != Mode::kCached;
      if (mode_ == Mode::kUnknown) {
        status = OpenForReading(*files_, path_, &direct, &fd_);
      } else {
        status = ReopenForReading(*files_, path_, direct, &fd_);
      }
      if (status.ok()) {
        mode_ = direct ? Mode::kDirect : Mode::kCached;
        ++state.open;
        OpenFiles::AddIdle(&state, this);
        break;
      }
      if (status.code() != Code::kResourceExhausted) return status;
    }
    if (OpenFiles::CloseIdle(&state)) continue;
    if (wait == Wait::kNo) return Status();
    if (state.open == 0) return status;  // no thread will give one back
    state.released.wait(lock);
  }
  if (uses_++ == 0) OpenFiles::RemoveIdle(&state, this);
  use->file_ = this;
  return Status();
}

}  // namespace dynemb
