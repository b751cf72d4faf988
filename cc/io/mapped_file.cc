#include "cc/io/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace dynemb {
namespace {

Status Failed(const std::string& path) {
  return errno == ENOENT || errno == ENOTDIR ? DataLoss(path + " is missing")
                                             : ResourceExhausted(path + ": " + strerror(errno));
}

struct Registry {
  std::mutex mutex;
  std::map<FileIdentity, std::weak_ptr<const MappedFile>> files;
};

Registry& Shared() {
  static Registry* const registry = new Registry;  // never destroyed: models may live until exit
  return *registry;
}

}  // namespace

Status IdentifyFile(const std::string& path, FileIdentity* identity) {
  // Not stat, which older versions of the C library do not export.
  struct statx found;
  if (statx(AT_FDCWD, path.c_str(), 0, STATX_BASIC_STATS, &found) != 0) return Failed(path);
  *identity = {uint64_t{found.stx_dev_major} << 32 | found.stx_dev_minor, found.stx_ino,
               found.stx_size, found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec};
  return Status();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Status MappedFile::OpenShared(const std::string& path, std::shared_ptr<const MappedFile>* file) {
  FileIdentity identity;
  DYNEMB_RETURN_IF_ERROR(IdentifyFile(path, &identity));
  Registry& registry = Shared();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::weak_ptr<const MappedFile>& known = registry.files[identity];
  *file = known.lock();
  if (*file != nullptr) return Status();
  for (auto it = registry.files.begin(); it != registry.files.end();) {
    it = it->second.expired() && it->first != identity ? registry.files.erase(it) : std::next(it);
  }
  auto opened = std::make_shared<MappedFile>();
  DYNEMB_RETURN_IF_ERROR(opened->Open(path, /*write=*/false, 0));
  // No read-ahead: only the pages that lookups touch become resident.
  if (opened->size() != 0) madvise(opened->data(), opened->size(), MADV_RANDOM);
  known = opened;
  *file = std::move(opened);
  return Status();
}

Status MappedFile::Open(const std::string& path, bool write, size_t at_least) {
  const int file = open(path.c_str(), (write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (file < 0) return Failed(path);
  // Not fstat, which older versions of the C library do not export.
  const off_t size = lseek(file, 0, SEEK_END);
  Status status;
  if (size < 0) {
    status = Failed(path);
  } else if (static_cast<size_t>(size) < at_least) {
    status = InvalidArgument(path + " has " + std::to_string(size) + " bytes, expected at least " +
                             std::to_string(at_least));
  } else if (const int error = write && size != 0 ? posix_fallocate(file, 0, size) : 0) {
    // Writing to a hole in the file would kill the process if the disk has no room for it.
    errno = error;
    status = Failed(path);
  } else if (size != 0) {
    bytes_ = static_cast<size_t>(size);
    void* data =
        mmap(nullptr, bytes_, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) {
      status = Failed(path);
      bytes_ = 0;
    } else {
      data_ = data;
      // Where the file system can, the pages of the file are then made in the size in which lookups
      // map them (tf_dynemb/storage/column_writer.py).
      if (write) madvise(data, bytes_, MADV_HUGEPAGE);
    }
  }
  close(file);
  return status;
}

Status ReadFile(const std::string& path, size_t most, std::string* bytes) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return Failed(path);
  Status status;
  bytes->clear();
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = read(file, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = Failed(path);
    if (got <= 0) break;
    bytes->append(buffer, static_cast<size_t>(got));
    if (bytes->size() > most) {
      status = DataLoss(path + " has more than " + std::to_string(most) + " bytes");
      break;
    }
  }
  close(file);
  return status;
}

}  // namespace dynemb
