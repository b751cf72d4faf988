#include "cc/file/block_transfer.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>

namespace dynemb {
namespace {

// More than any device takes at once; the results of io_uring have 31 bits.
constexpr size_t kMostBytes = size_t{1} << 30;
// How often the system may say that it is too busy (EAGAIN) before that is the error of the read.
constexpr unsigned kMostRetries = 100;

bool IsWhole(const BlockRead& read) {
  return ((read.offset | read.bytes | reinterpret_cast<uintptr_t>(read.to)) % kBlockBytes) == 0;
}

}  // namespace

BlockTransfer::BlockTransfer(BlockRead* read) : read_(read), ended_(false) {
  read->error = 0;
  if (!IsWhole(*read)) {
    End(EINVAL);
  } else if (read->bytes == 0) {
    End(0);
  }
}

size_t BlockTransfer::bytes() const { return std::min(read_->bytes - done_, kMostBytes); }

void BlockTransfer::End(int error) {
  read_->error = error;
  ended_ = true;
}

void BlockTransfer::Apply(FileSystem& files, int64_t result) {
  if (result == -EINTR) return;
  if (result == -EAGAIN && ++retries_ <= kMostRetries) return;
  if (result < 0) return End(static_cast<int>(-result));
  done_ += static_cast<size_t>(result);
  if (done_ >= read_->bytes) return End(0);
  if (result == 0) return End(BlockRead::kShort);
  // Asked instead of reading on: a direct read from the end of a file, inside a block, is refused
  // with EINVAL.
  const int64_t size = done_ % kBlockBytes == 0 ? -1 : files.Size(read_->fd);
  if (size >= 0 && offset() >= static_cast<uint64_t>(size)) End(BlockRead::kShort);
}

void BlockTransfer::Finish(FileSystem& files) {
  while (!ended_) {
    const unsigned retries = retries_;
    Apply(files, files.Pread(read_->fd, to(), bytes(), static_cast<int64_t>(offset())));
    if (retries_ != retries) (void)sched_yield();
  }
}

}  // namespace dynemb
