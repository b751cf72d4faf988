#include "cc/file/block_file.h"

#include <errno.h>
#include <fcntl.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "cc/table/memory_limit.h"

namespace dynemb {
namespace {

constexpr std::align_val_t kAlignment{kBlockBytes};

bool RefusesDirect(int64_t result) { return result == -EINVAL || result == -EOPNOTSUPP; }

}  // namespace

Status OpenForReading(FileSystem& files, const std::string& path, bool* direct, int* fd) {
  AlignedBuffer block(kBlockBytes);
  int opened = files.Open(path, O_RDONLY | O_DIRECT, 0);
  if (opened >= 0) {
    // Other errors are not about O_DIRECT, and the reads that meet them report them.
    if (!RefusesDirect(files.Pread(opened, block.data(), kBlockBytes, 0))) {
      *direct = true;
      *fd = opened;
      return Status();
    }
    (void)files.Close(opened);
  } else if (!RefusesDirect(opened)) {
    return FileError(path, -opened);
  }
  *direct = false;
  return ReopenForReading(files, path, false, fd);
}

Status ReopenForReading(FileSystem& files, const std::string& path, bool direct, int* fd) {
  const int opened = files.Open(path, direct ? O_RDONLY | O_DIRECT : O_RDONLY, 0);
  if (opened < 0) return FileError(path, -opened);
  if (!direct) (void)posix_fadvise(opened, 0, 0, POSIX_FADV_RANDOM);  // only advice
  *fd = opened;
  return Status();
}

AlignedBuffer::~AlignedBuffer() { Release(); }

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  capacity_ = std::exchange(other.capacity_, 0);
  return *this;
}

void AlignedBuffer::Release() {
  if (data_ != nullptr) ::operator delete(data_, kAlignment);
  DischargeMemory(capacity_);
  data_ = nullptr;
  size_ = capacity_ = 0;
}

void AlignedBuffer::Resize(size_t bytes) {
  if (bytes > capacity_) {
    if (bytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
    const size_t capacity = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    if (!ChargeMemory(capacity)) throw std::bad_alloc();
    char* data;
    try {
      data = static_cast<char*>(::operator new(capacity, kAlignment));
    } catch (...) {
      DischargeMemory(capacity);
      throw;
    }
    if (size_ != 0) std::memcpy(data, data_, size_);
    Release();
    data_ = data;
    capacity_ = capacity;
  }
  size_ = bytes;
}

}  // namespace dynemb
