// FileSystem: the system calls on files that the file tier makes, as a seam for tests, which
// override some of them to fail (tests/cc/faulty_file_system.h).
//
// Contract. Each method makes the call that it is named after, again if a signal interrupts it
// (EINTR), and returns its result, or -errno if it fails. Descriptors are closed on exec. All
// methods are thread-safe, keep no state and do not throw, except List and MakeDirectory, which
// throw std::bad_alloc.
#ifndef DYNEMB_FILE_FILE_SYSTEM_H_
#define DYNEMB_FILE_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

struct FileId {
  uint64_t device = 0, inode = 0;

  bool operator==(const FileId& o) const { return device == o.device && inode == o.inode; }
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual int Open(const std::string& path, int flags, unsigned mode);
  // Not repeated after EINTR, which counts as success: Linux has then closed the descriptor.
  virtual int Close(int fd);
  // Both may transfer fewer bytes; Pread returns 0 at the end of the file.
  virtual int64_t Pread(int fd, void* to, size_t n, int64_t offset);
  virtual int64_t Pwrite(int fd, const void* from, size_t n, int64_t offset);
  // fdatasync: the contents and the size are durable when it returns. The name of a new file is
  // durable after SyncDirectory.
  virtual int Fsync(int fd);
  // Makes what was created, renamed and removed in a directory durable. Success if the file system
  // cannot sync directories (EINVAL).
  virtual int SyncDirectory(const std::string& path);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Unlink(const std::string& path);
  // A second name (hard link) of a file; -EEXIST if `to` exists.
  virtual int Link(const std::string& from, const std::string& to);
  // Also makes the parents that are missing. Success if the directory exists, -ENOTDIR if something
  // else does.
  virtual int MakeDirectory(const std::string& path);
  virtual int Truncate(int fd, int64_t size);
  virtual int64_t Size(int fd);
  // rmdir: fails with -ENOTEMPTY if something is in it.
  virtual int RemoveDirectory(const std::string& path);
  // flock, exclusive, without waiting: -EWOULDBLOCK if the file is locked through another open
  // file. The lock ends when the last copy of this descriptor is closed, in children of fork, too.
  virtual int Lock(int fd);
  // Which file a descriptor is of. Two names are of one file if these are equal.
  virtual int Identify(int fd, FileId* id);
  // getpid.
  virtual int ProcessId();
  // The names in a directory, sorted, without "." and "..". After an error *names is unchanged.
  virtual int List(const std::string& path, std::vector<std::string>* names);

  // The file system without injected faults.
  static FileSystem& Posix();
};

// The status of a failed call: `what` (the path, and the offset if there is one), and the text of
// the error. DataLoss if the file is missing or the device has failed; ResourceExhausted if there
// is no more space, memory, quota or descriptor; FailedPrecondition if permissions or the file
// system forbid the call; otherwise Internal.
Status FileError(const std::string& what, int error);

// Transfer all n bytes, however many calls that takes. An error names path and offset. ReadAll:
// DataLoss if the file ends before.
Status WriteAll(FileSystem& files, int fd, const void* from, size_t n, int64_t offset,
                const std::string& path);
Status ReadAll(FileSystem& files, int fd, void* to, size_t n, int64_t offset,
               const std::string& path);

}  // namespace dynemb

#endif  // DYNEMB_FILE_FILE_SYSTEM_H_
