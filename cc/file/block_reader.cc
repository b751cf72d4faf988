#include "cc/file/block_reader.h"

#include <unistd.h>

#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

#include "cc/file/thread_block_reader.h"
#include "cc/file/uring_block_reader.h"
#include "cc/table/process_state.h"

namespace dynemb {
namespace {

// By process, as a child of fork has no threads and no rings, and by options.
using Key = std::tuple<int, BlockReader::Options::Kind, unsigned, FileSystem*, bool,
                       int (*)(const BlockRead&, int)>;
struct State {
  void InChild() {}

  std::mutex mutex;
  std::map<Key, std::weak_ptr<BlockReader>> readers;
};

}  // namespace

Status BlockReader::OfProcess(const Options& options, std::shared_ptr<BlockReader>* reader) {
  State& state = ProcessState<State>();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (auto at = state.readers.begin(); at != state.readers.end();) {
    at = at->second.expired() ? state.readers.erase(at) : std::next(at);
  }
  std::weak_ptr<BlockReader>& known = state.readers[{
      getpid(), options.kind, options.depth, options.files, options.from_last, options.inject}];
  *reader = known.lock();
  if (*reader != nullptr) return Status();
  std::unique_ptr<BlockReader> made;
  DYNEMB_RETURN_IF_ERROR(Create(options, &made));
  *reader = std::move(made);
  known = *reader;
  return Status();
}

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
