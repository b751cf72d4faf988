// ThreadBlockReader: reads blocks with pread, in a pool of threads.
//
// A call of Read is a batch on the caller's stack, from which its caller and the workers take reads
// until none is left. The caller therefore finishes its batch alone if there are no workers, and
// nothing is allocated for a batch. Workers start when there is work for them, and stay.
#ifndef DYNEMB_FILE_THREAD_BLOCK_READER_H_
#define DYNEMB_FILE_THREAD_BLOCK_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "cc/file/block_reader.h"

namespace dynemb {

class ThreadBlockReader final : public BlockReader {
 public:
  // Up to `depth` reads at once, for one calling thread. Throws std::bad_alloc.
  ThreadBlockReader(FileSystem& files, unsigned depth, bool from_last);
  ~ThreadBlockReader() override;

  void Read(BlockRead* reads, size_t n, const EndedFn& ended) override;
  const char* kind() const override { return "threads"; }

 private:
  class Pool;

  FileSystem& files_;
  const bool from_last_;
  std::unique_ptr<Pool> pool_;
  const pid_t pid_;  // the process that has the threads
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_THREAD_BLOCK_READER_H_
