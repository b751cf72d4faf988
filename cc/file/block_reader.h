// BlockReader: many reads of blocks at once, in parallel, which is how an NVMe device is fast.
//
// Contract. Read ends when all of its reads have ended. It calls ended(read) for each of them, in
// any order, on the calling thread, which can use the bytes while other reads are in flight. The
// call must not throw. A read that fails sets only its own error; a read that is interrupted, or
// transfers a part, is continued. Each request is one read: reads of adjacent blocks are not
// merged. Any number of threads may call Read at the same time. Read does not throw, and allocates
// nothing that it cannot do without: if there are no threads, or the ring fails, the caller reads
// by itself, with FileSystem::Pread.
//
// A child of fork can use and destroy its copy of the reader. Its reads are made by the caller, one
// after another.
//
// There are two kinds. "io_uring" makes one system call for many reads, without threads; many
// containers forbid it. It has a ring (and a descriptor) for each thread that is in Read, up to 16;
// further threads wait. "threads" makes one pread per read, in up to 64 threads. With both, a
// single read is a pread in the caller. So that threads and rings do not grow with the number of
// tables, the tables of a process share a reader (OfProcess).
#ifndef DYNEMB_FILE_BLOCK_READER_H_
#define DYNEMB_FILE_BLOCK_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cc/file/file_system.h"
#include "cc/table/function_ref.h"
#include "cc/table/status.h"

namespace dynemb {

constexpr size_t kBlockBytes = 4096;

// `offset` and `bytes` are multiples of kBlockBytes, and `to` is aligned to it; otherwise the error
// is EINVAL.
struct BlockRead {
  static constexpr int kShort = -1;

  int fd;
  uint64_t offset;
  size_t bytes;
  char* to;
  // The result: 0, an errno, or kShort if the file ends before. Unless it is 0, the contents of
  // `to` are undefined.
  int error;
};

class BlockReader {
 public:
  struct Options {
    enum class Kind { kAuto, kUring, kThreads } kind = Kind::kAuto;
    // The reads that are in flight at once: for each calling thread with io_uring (at most 4096),
    // for the whole reader with threads (at most 64, and one for each further calling thread).
    unsigned depth = 64;
    // Outlives the reader. io_uring itself does not pass through it.
    FileSystem* files = &FileSystem::Posix();
    // For tests: "threads" calls ended(read) from the last read to the first.
    bool from_last = false;
    // For tests: called with each completion of io_uring, from any calling thread; returns the
    // result to use instead (the bytes transferred, or -errno).
    int (*inject)(const BlockRead& read, int result) = nullptr;
  };

  virtual ~BlockReader() = default;

  using EndedFn = FunctionRef<void(const BlockRead& read)>;
  virtual void Read(BlockRead* reads, size_t n, const EndedFn& ended) = 0;
  // "io_uring" or "threads".
  virtual const char* kind() const = 0;

  // The reader of this process for these options, which all of its tables share; it ends with the
  // last of them. Errors as Create.
  static Status OfProcess(const Options& options, std::shared_ptr<BlockReader>* reader);
  // kAuto: io_uring if the system permits it, otherwise threads. kUring: FailedPrecondition or
  // ResourceExhausted says why the system refuses it. InvalidArgument if depth is 0.
  static Status Create(const Options& options, std::unique_ptr<BlockReader>* reader);
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_BLOCK_READER_H_
