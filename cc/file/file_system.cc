#include "cc/file/file_system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace dynemb {
namespace {

// The result of a call, or -errno; repeats the call after EINTR.
template <class Call>
auto Retry(const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0) return result;
    if (errno != EINTR) return static_cast<decltype(call())>(-errno);
  }
}

// mkdir succeeds or finds a directory. open, not stat, which older versions of the C library do not
// export.
int MakeOne(const std::string& path) {
  const int made = Retry([&] { return mkdir(path.c_str(), 0777); });
  if (made != -EEXIST) return made;
  const int fd = Retry([&] { return open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return fd;
  (void)close(fd);
  return 0;
}

Code CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EIO:
    case ENXIO:
    case ENODEV:
    case EUCLEAN:
    case EBADMSG:
    case ESTALE:
      return Code::kDataLoss;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case ENOBUFS:
    case EMFILE:
    case ENFILE:
    case EMLINK:
    case EAGAIN:
      return Code::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS:
    case EEXIST:
    case EISDIR:
    case ENOTEMPTY:
    case EBUSY:
    case EXDEV:
    case ENAMETOOLONG:
    case ELOOP:
    case ENOSYS:
    case EOPNOTSUPP:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

std::string At(const std::string& path, int64_t offset) {
  return path + " at byte offset " + std::to_string(offset);
}

}  // namespace

int FileSystem::Open(const std::string& path, int flags, unsigned mode) {
  return Retry([&] { return open(path.c_str(), flags | O_CLOEXEC, mode); });
}

int FileSystem::Close(int fd) { return close(fd) == 0 || errno == EINTR ? 0 : -errno; }

int64_t FileSystem::Pread(int fd, void* to, size_t n, int64_t offset) {
  return Retry([&] { return static_cast<int64_t>(pread(fd, to, n, offset)); });
}

int64_t FileSystem::Pwrite(int fd, const void* from, size_t n, int64_t offset) {
  return Retry([&] { return static_cast<int64_t>(pwrite(fd, from, n, offset)); });
}

int FileSystem::Fsync(int fd) {
  return Retry([&] { return fdatasync(fd); });
}

int FileSystem::SyncDirectory(const std::string& path) {
  const int fd = Retry([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return fd;
  const int synced = Retry([&] { return fsync(fd); });
  (void)close(fd);
  return synced == -EINVAL ? 0 : synced;
}

int FileSystem::Rename(const std::string& from, const std::string& to) {
  return Retry([&] { return rename(from.c_str(), to.c_str()); });
}

int FileSystem::Unlink(const std::string& path) {
  return Retry([&] { return unlink(path.c_str()); });
}

int FileSystem::Link(const std::string& from, const std::string& to) {
  return Retry([&] { return link(from.c_str(), to.c_str()); });
}

int FileSystem::MakeDirectory(const std::string& path) {
  const int made = MakeOne(path);
  if (made != -ENOENT) return made;
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    if (const int parent = MakeOne(path.substr(0, end)); parent < 0) return parent;
  }
  return MakeOne(path);
}

int FileSystem::Truncate(int fd, int64_t size) {
  return Retry([&] { return ftruncate(fd, size); });
}

int64_t FileSystem::Size(int fd) {
  // Not fstat, which older versions of the C library do not export. No call of this class uses the
  // position that this changes.
  return Retry([&] { return static_cast<int64_t>(lseek(fd, 0, SEEK_END)); });
}

int FileSystem::RemoveDirectory(const std::string& path) {
  return Retry([&] { return rmdir(path.c_str()); });
}

int FileSystem::Lock(int fd) {
  return Retry([&] { return flock(fd, LOCK_EX | LOCK_NB); });
}

int FileSystem::Identify(int fd, FileId* id) {
  // Not fstat, which older versions of the C library do not export.
  struct statx found;
  const int result = Retry([&] { return statx(fd, "", AT_EMPTY_PATH, STATX_INO, &found); });
  if (result < 0) return result;
  *id = {uint64_t{found.stx_dev_major} << 32 | found.stx_dev_minor, found.stx_ino};
  return 0;
}

int FileSystem::ProcessId() { return getpid(); }

int FileSystem::List(const std::string& path, std::vector<std::string>* names) {
  struct Directory {
    explicit Directory(const std::string& path) : stream(opendir(path.c_str())) {}
    ~Directory() {
      if (stream != nullptr) closedir(stream);
    }
    DIR* const stream;
  };
  const Directory directory(path);
  if (directory.stream == nullptr) return -errno;
  std::vector<std::string> found;
  for (;;) {
    errno = 0;
    const dirent* const entry = readdir(directory.stream);
    if (entry == nullptr) break;
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
      found.emplace_back(entry->d_name);
    }
  }
  if (errno != 0) return -errno;
  std::sort(found.begin(), found.end());
  *names = std::move(found);
  return 0;
}

FileSystem& FileSystem::Posix() {
  static FileSystem* const posix = new FileSystem;  // never destroyed: tables may live until exit
  return *posix;
}

Status FileError(const std::string& what, int error) {
  return Status(CodeOf(error), what + ": " + strerror(error));
}

Status WriteAll(FileSystem& files, int fd, const void* from, size_t n, int64_t offset,
                const std::string& path) {
  const char* next = static_cast<const char*>(from);
  while (n != 0) {
    const int64_t written = files.Pwrite(fd, next, n, offset);
    if (written < 0) return FileError(At(path, offset), static_cast<int>(-written));
    if (written == 0) return FileError(At(path, offset), EIO);  // no progress, and no reason given
    next += written;
    offset += written;
    n -= static_cast<size_t>(written);
  }
  return Status();
}

Status ReadAll(FileSystem& files, int fd, void* to, size_t n, int64_t offset,
               const std::string& path) {
  char* next = static_cast<char*>(to);
  while (n != 0) {
    const int64_t got = files.Pread(fd, next, n, offset);
    if (got < 0) return FileError(At(path, offset), static_cast<int>(-got));
    if (got == 0) {
      return DataLoss(path + " ends at byte offset " + std::to_string(offset) + ", where " +
                      std::to_string(n) + " more bytes are expected");
    }
    next += got;
    offset += got;
    n -= static_cast<size_t>(got);
  }
  return Status();
}

}  // namespace dynemb
