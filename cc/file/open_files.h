// OpenFiles: the descriptors that the tables of a process use for their files, within a budget.
//
// A table has a segment for each few MiB of its rows, and a process may have thousands of tables,
// but only some hundred descriptors (RLIMIT_NOFILE). So a file is open while it is used, and
// afterwards as long as its descriptor is not needed:
//
//   ReadFile file(&files, path);
//   ReadFile::Use use;
//   DYNEMB_RETURN_IF_ERROR(file.Open(ReadFile::Wait::kYes, &use));
//   ... use.fd() ...                     // it stays open until `use` ends
//
// - Files that are open to be read are at most a quarter of what the process may have, and at most
//   kMost. The rest is for everybody else: the files that are written, dumps, sockets.
// - Files that are not in use are closed when others are to be opened and the budget is used up,
//   those first that were not used for the longest time; and when the system refuses a descriptor
//   for whatever purpose of the file tier (OpenFiles::Open).
// - A thread that uses no file waits while all of the budget is in use. A thread that uses one must
//   not wait (Wait::kNo): two such threads would wait for each other.
//
// All calls are thread-safe. A child of fork has its own descriptors for the same files.
#ifndef DYNEMB_FILE_OPEN_FILES_H_
#define DYNEMB_FILE_OPEN_FILES_H_

#include <cstddef>
#include <string>
#include <utility>

#include "cc/file/file_system.h"
#include "cc/table/status.h"

namespace dynemb {

// A file of blocks that is open to be read while it is used.
class ReadFile {
 public:
  class Use {
   public:
    Use() = default;
    ~Use() { End(); }
    Use(Use&& other) noexcept : file_(std::exchange(other.file_, nullptr)) {}
    Use& operator=(Use&& other) noexcept {
      std::swap(file_, other.file_);
      return *this;
    }
    explicit operator bool() const { return file_ != nullptr; }
    int fd() const { return file_->fd_; }
    void End();

   private:
    friend class ReadFile;
    ReadFile* file_ = nullptr;
  };

  // The file system outlives the object. The file need not exist yet.
  ReadFile(FileSystem* files, std::string path) : files_(files), path_(std::move(path)) {}
  // The file is not in use.
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  const std::string& path() const { return path_; }
  enum class Wait { kNo, kYes };
  // Opens the file as OpenForReading (block_file.h) does, unless it is open. *use is empty before;
  // with kNo, it stays empty if all of the budget is in use. Throws std::bad_alloc.
  Status Open(Wait wait, Use* use);
  // From now on, reads go through the page cache: it may have what the device has not.
  void UsePageCache();

 private:
  friend class OpenFiles;
  FileSystem* const files_;
  const std::string path_;
  // Guarded by the mutex of OpenFiles; fd_ does not change while the file is used.
  int fd_ = -1;
  enum class Mode { kUnknown, kDirect, kCached } mode_ = Mode::kUnknown;
  bool closes_ = false;  // when it is not used anymore
  size_t uses_ = 0;
  // In the list of the files that are open and not used.
  ReadFile* before_ = nullptr;
  ReadFile* after_ = nullptr;
};

class OpenFiles {
 public:
  static constexpr size_t kLeast = 8, kMost = 1024;

  // FileSystem::Open; closes files that are not in use if the system has no descriptor left.
  static int Open(FileSystem& files, const std::string& path, int flags, unsigned mode);
  // For tests: the files that are open to be read, and the most that may be.
  static size_t open();
  static size_t budget();

 private:
  friend class ReadFile;
  struct State;
  static State& Get();
  static void AddIdle(State* state, ReadFile* file);
  static void RemoveIdle(State* state, ReadFile* file);
  static void Close(State* state, ReadFile* file);
  // Closes the file that was not used for the longest time; false if all are used.
  static bool CloseIdle(State* state);
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_OPEN_FILES_H_
