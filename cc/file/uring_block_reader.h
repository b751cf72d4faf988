// UringBlockReader: reads blocks with io_uring.
//
// Each call of Read has a ring to itself, from a small pool: threads that call at the same time
// neither take a lock for each read nor wait for each other's reads, as they would with one ring.
// A call waits for a ring if all are in use and there can be no more. A call with a single read
// needs none: the caller reads with pread.
#ifndef DYNEMB_FILE_URING_BLOCK_READER_H_
#define DYNEMB_FILE_URING_BLOCK_READER_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "cc/file/block_reader.h"
#include "cc/table/status.h"

namespace dynemb {

class UringBlockReader final : public BlockReader {
 public:
  // As BlockReader::Create. `vectored`: as Ring::Open; for tests.
  static Status Create(const Options& options, bool vectored, std::unique_ptr<BlockReader>* reader);
  ~UringBlockReader() override;

  void Read(BlockRead* reads, size_t n, const EndedFn& ended) override;
  const char* kind() const override { return "io_uring"; }

 private:
  class Lane;
  class Pool;

  UringBlockReader(const Options& options, std::unique_ptr<Pool> pool);

  const Options options_;
  std::unique_ptr<Pool> pool_;
  const pid_t pid_;  // the process that has the rings
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_URING_BLOCK_READER_H_
