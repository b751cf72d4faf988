// FaultyFileSystem: a file system whose calls fail when a test says so, and that counts them.
//
//   FaultyFileSystem files;
//   files.Fail(FaultyFileSystem::kPread, 3, EIO);  // the third Pread from now on
//
// Each kind of call has one plan, which a new one replaces. Thread-safe: of calls that are made at
// the same time, exactly one is the n-th.
#ifndef DYNEMB_TESTS_CC_FAULTY_FILE_SYSTEM_H_
#define DYNEMB_TESTS_CC_FAULTY_FILE_SYSTEM_H_

#include <errno.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cc/file/file_system.h"

namespace dynemb {

class FaultyFileSystem : public FileSystem {
 public:
  enum Call {
    kOpen,
    kClose,
    kPread,
    kPwrite,
    kFsync,
    kSyncDirectory,
    kRename,
    kUnlink,
    kLink,
    kMakeDirectory,
    kTruncate,
    kSize,
    kList,
    kRemoveDirectory,
    kLock,
    kIdentify,
    kCalls
  };
  static constexpr int64_t kForever = INT64_MAX;

  // The n-th call of this kind from now on (from 1), and the `times` - 1 after it, fail without
  // effect. A Close fails after it has closed.
  void Fail(Call call, int64_t n, int error, int64_t times = 1) {
    Set(call, Plan{n, times, error, 0});
  }
  // The same Preads or Pwrites transfer at most `bytes` bytes (0: as at the end of a file).
  void Shorten(Call call, int64_t n, size_t bytes, int64_t times = 1) {
    Set(call, Plan{n, times, 0, bytes});
  }
  // Loses power at the n-th call from now on that changes files: it and all calls after it, of
  // every kind except Close, fail with EIO. If it is a Pwrite, its first `torn` bytes are written.
  void Crash(int64_t n, size_t torn = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    crash_ = n;
    torn_ = torn;
  }
  // Drops all plans, and the counts.
  void Heal() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::fill(plans_, plans_ + kCalls, Plan{});
    std::fill(calls_, calls_ + kCalls, 0);
    changes_ = 0;
    crash_ = 0;
    crashed_ = false;
  }

  int64_t calls(Call call) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_[call];
  }
  // The calls that change files: Pwrite, Fsync, SyncDirectory, Rename, Unlink, Link, MakeDirectory,
  // Truncate, RemoveDirectory, and Open for writing.
  int64_t changes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return changes_;
  }
  // Descriptors that were opened and not closed, since the construction.
  int64_t open_files() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return open_files_;
  }

  int Open(const std::string& path, int flags, unsigned mode) override {
    const bool writes = (flags & 3) != 0;
    const Fault fault = Next(kOpen, writes);
    if (fault.error != 0) return -fault.error;
    const int fd = FileSystem::Open(path, flags, mode);
    if (fd >= 0) CountFile(1);
    return fd;
  }
  int Close(int fd) override {
    const Fault fault = Next(kClose, false);
    const int closed = FileSystem::Close(fd);
    if (closed == 0) CountFile(-1);
    return fault.error != 0 ? -fault.error : closed;
  }
  int64_t Pread(int fd, void* to, size_t n, int64_t offset) override {
    const Fault fault = Next(kPread, false);
    if (fault.error != 0) return -fault.error;
    return FileSystem::Pread(fd, to, std::min(n, fault.bytes), offset);
  }
  int64_t Pwrite(int fd, const void* from, size_t n, int64_t offset) override {
    const Fault fault = Next(kPwrite, true);
    if (fault.error == 0 || fault.bytes != 0) {
      const int64_t written = FileSystem::Pwrite(fd, from, std::min(n, fault.bytes), offset);
      if (fault.error == 0) return written;
    }
    return -fault.error;
  }
  int Fsync(int fd) override {
    const Fault fault = Next(kFsync, true);
    return fault.error != 0 ? -fault.error : FileSystem::Fsync(fd);
  }
  int SyncDirectory(const std::string& path) override {
    const Fault fault = Next(kSyncDirectory, true);
    return fault.error != 0 ? -fault.error : FileSystem::SyncDirectory(path);
  }
  int Rename(const std::string& from, const std::string& to) override {
    const Fault fault = Next(kRename, true);
    return fault.error != 0 ? -fault.error : FileSystem::Rename(from, to);
  }
  int Unlink(const std::string& path) override {
    const Fault fault = Next(kUnlink, true);
    return fault.error != 0 ? -fault.error : FileSystem::Unlink(path);
  }
  int Link(const std::string& from, const std::string& to) override {
    const Fault fault = Next(kLink, true);
    return fault.error != 0 ? -fault.error : FileSystem::Link(from, to);
  }
  int MakeDirectory(const std::string& path) override {
    const Fault fault = Next(kMakeDirectory, true);
    return fault.error != 0 ? -fault.error : FileSystem::MakeDirectory(path);
  }
  int Truncate(int fd, int64_t size) override {
    const Fault fault = Next(kTruncate, true);
    return fault.error != 0 ? -fault.error : FileSystem::Truncate(fd, size);
  }
  int64_t Size(int fd) override {
    const Fault fault = Next(kSize, false);
    return fault.error != 0 ? -fault.error : FileSystem::Size(fd);
  }
  int List(const std::string& path, std::vector<std::string>* names) override {
    const Fault fault = Next(kList, false);
    return fault.error != 0 ? -fault.error : FileSystem::List(path, names);
  }
  int RemoveDirectory(const std::string& path) override {
    const Fault fault = Next(kRemoveDirectory, true);
    return fault.error != 0 ? -fault.error : FileSystem::RemoveDirectory(path);
  }
  int Lock(int fd) override {
    const Fault fault = Next(kLock, false);
    return fault.error != 0 ? -fault.error : FileSystem::Lock(fd);
  }
  int Identify(int fd, FileId* id) override {
    const Fault fault = Next(kIdentify, false);
    return fault.error != 0 ? -fault.error : FileSystem::Identify(fd, id);
  }
  // The process seems to be a child of the one that it was.
  void Fork() { forks_ = true; }
  int ProcessId() override { return FileSystem::ProcessId() + forks_; }

 private:
  struct Plan {
    int64_t first = 0;  // the calls until the first that fails; 0: none does
    int64_t times = 0;
    int error = 0;
    size_t bytes = 0;
  };
  struct Fault {
    int error = 0;
    size_t bytes = SIZE_MAX;  // the most to transfer, before the error if there is one
  };

  void Set(Call call, Plan plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    plans_[call] = plan;
  }

  void CountFile(int64_t more) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_files_ += more;
  }

  Fault Next(Call call, bool changes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[call];
    changes_ += changes;
    if (crashed_ && call != kClose) return {EIO, 0};
    if (changes && crash_ > 0 && --crash_ == 0) {
      crashed_ = true;
      return {EIO, torn_};
    }
    Plan& plan = plans_[call];
    if (plan.first == 0) return {};
    if (plan.first > 1) {
      --plan.first;
      return {};
    }
    const Plan now = plan;
    if (plan.times != kForever && --plan.times == 0) plan.first = 0;
    return now.error != 0 ? Fault{now.error, 0} : Fault{0, now.bytes};
  }

  mutable std::mutex mutex_;
  Plan plans_[kCalls];
  int64_t calls_[kCalls] = {};
  int64_t changes_ = 0;
  int64_t open_files_ = 0;
  int64_t crash_ = 0;  // the changes until the crash; 0: none
  size_t torn_ = 0;
  bool crashed_ = false;
  std::atomic<bool> forks_{false};
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FAULTY_FILE_SYSTEM_H_
