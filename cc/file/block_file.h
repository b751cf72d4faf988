// Files of blocks: how they are opened to be read, and buffers for their blocks.
#ifndef DYNEMB_FILE_BLOCK_FILE_H_
#define DYNEMB_FILE_BLOCK_FILE_H_

#include <cstddef>
#include <string>

#include "cc/file/block_reader.h"
#include "cc/file/file_system.h"
#include "cc/table/status.h"

namespace dynemb {

// Opens a file for random reads of blocks: past the page cache (O_DIRECT) if its file system can do
// that, otherwise through it and without read-ahead. *direct says which. Some file systems refuse
// direct reads only at the first read, so the first block is read if the file has one; an empty
// file is opened directly, and its later reads may fail with EINVAL. After an error, nothing is
// open.
Status OpenForReading(FileSystem& files, const std::string& path, bool* direct, int* fd);
// The same without a test, for a file of which `direct` is known.
Status ReopenForReading(FileSystem& files, const std::string& path, bool direct, int* fd);

// Memory for blocks, aligned to kBlockBytes, as direct reads and writes need it. It counts as
// memory of the tables (cc/table/memory_limit.h).
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) { Resize(bytes); }
  ~AlignedBuffer();
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;

  // Keeps the contents, up to the lesser size; new bytes are undefined. Memory that a smaller size
  // does not need is kept for a larger one. Throws std::bad_alloc if the heap is exhausted or the
  // process may not use more memory; the buffer is then unchanged.
  void Resize(size_t bytes);

  char* data() { return data_; }
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }

 private:
  void Release();

  char* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;  // whole blocks
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_BLOCK_FILE_H_
