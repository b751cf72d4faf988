// MappedFile: a whole file, mapped to memory.
//
// Shared mappings are read-only. There is one for each file of the process, however often and under
// however many names (hard links) it is opened, so that two versions of a model whose files are the
// same cost the memory of one. The file must not become shorter while it is mapped; files of
// published snapshots never change.
#ifndef DYNEMB_IO_MAPPED_FILE_H_
#define DYNEMB_IO_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "cc/table/status.h"

namespace dynemb {

// The properties by which a file is recognized: they differ if a path names another file, or if the
// contents of the file have changed.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t modified_seconds = 0;
  uint32_t modified_nanoseconds = 0;

  auto AsTuple() const {
    return std::tie(device, inode, bytes, modified_seconds, modified_nanoseconds);
  }
  bool operator<(const FileIdentity& o) const { return AsTuple() < o.AsTuple(); }
  bool operator==(const FileIdentity& o) const { return AsTuple() == o.AsTuple(); }
  bool operator!=(const FileIdentity& o) const { return !(*this == o); }
};

// DataLoss if the file is missing.
Status IdentifyFile(const std::string& path, FileIdentity* identity);

class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // The shared mapping of a file, for accesses in any order. DataLoss if the file is missing.
  static Status OpenShared(const std::string& path, std::shared_ptr<const MappedFile>* file);

  // Maps a file of at least `at_least` bytes. `write`: also for writing; its blocks are then
  // allocated first.
  Status Open(const std::string& path, bool write, size_t at_least);

  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Reads a whole small file. DataLoss if it is missing, or has more than `most` bytes.
Status ReadFile(const std::string& path, size_t most, std::string* bytes);

}  // namespace dynemb

#endif  // DYNEMB_IO_MAPPED_FILE_H_
