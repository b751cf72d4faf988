// One read of blocks: what its next transfer is, and what the result of a transfer means. Both
// kinds of reader use it.
#ifndef DYNEMB_FILE_BLOCK_TRANSFER_H_
#define DYNEMB_FILE_BLOCK_TRANSFER_H_

#include <cstddef>
#include <cstdint>

#include "cc/file/block_reader.h"
#include "cc/file/file_system.h"

namespace dynemb {

class BlockTransfer {
 public:
  BlockTransfer() = default;
  // Sets read->error to 0, or to EINVAL if the read is not of whole blocks.
  explicit BlockTransfer(BlockRead* read);

  // Whether the read has ended, with read->error.
  bool ended() const { return ended_; }
  BlockRead* read() const { return read_; }

  // The next transfer.
  char* to() const { return read_->to + done_; }
  uint64_t offset() const { return read_->offset + done_; }
  size_t bytes() const;

  // Applies the result of the transfer: its bytes, or -errno.
  void Apply(FileSystem& files, int64_t result);
  // Transfers what remains, with Pread. ended() is true afterwards.
  void Finish(FileSystem& files);

 private:
  void End(int error);

  BlockRead* read_ = nullptr;
  size_t done_ = 0;
  unsigned retries_ = 0;
  bool ended_ = true;
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_BLOCK_TRANSFER_H_
