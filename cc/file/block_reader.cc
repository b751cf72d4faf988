#include "cc/file/block_reader.h"

#include "cc/file/thread_block_reader.h"
#include "cc/file/uring_block_reader.h"

namespace dynemb {

Status BlockReader::Create(const Options& options, std::unique_ptr<BlockReader>* reader) {
  if (options.depth == 0) return InvalidArgument("the depth of a block reader is 0");
  if (options.kind != Options::Kind::kThreads) {
    const Status status = UringBlockReader::Create(options, /*vectored=*/false, reader);
    if (status.ok() || options.kind == Options::Kind::kUring) return status;
  }
  *reader = std::make_unique<ThreadBlockReader>(*options.files, options.depth, options.from_last);
  return Status();
}

}  // namespace dynemb
