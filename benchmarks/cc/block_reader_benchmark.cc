// Random reads of 4 KiB blocks from a file, directly (O_DIRECT) if the file system permits it, with
// each kind of reader. The file has 2 GiB; it is made in $DYNEMB_BENCHMARK_FOLDER (default: the
// current folder) and removed at the end. Compare with the same reads by fio:
//
//   fio --name=r --filename=F --size=2G --rw=randread --bs=4k --direct=1 --ioengine=io_uring
//       --iodepth=64 --runtime=5 --time_based
//
//   BlockReads / kind / depth     kind 0: io_uring, 1: threads; batches of 4096 reads by one
//   thread.
//                                 items: reads
//   Callers / kind / threads      the same by several threads with one reader, depth 64
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <stdlib.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/file/block_file.h"
#include "cc/file/block_reader.h"

namespace dynemb {
namespace {

constexpr size_t kFileBytes = size_t{2} << 30;
constexpr size_t kBatch = 4096;

class BenchmarkFile {
 public:
  BenchmarkFile() {
    const char* const folder = getenv("DYNEMB_BENCHMARK_FOLDER");
    path_ = std::string(folder == nullptr ? "." : folder) + "/block_reader_benchmark.bin";
    FileSystem& files = FileSystem::Posix();
    const int fd = files.Open(path_, O_RDWR | O_CREAT | O_TRUNC, 0600);
    AlignedBuffer chunk(size_t{16} << 20);
    std::mt19937_64 random(1);  // some devices store zeros and repetitions for less
    for (size_t at = 0; at < kFileBytes; at += chunk.size()) {
      for (size_t i = 0; i < chunk.size(); i += sizeof(uint64_t)) {
        const uint64_t word = random();
        std::memcpy(chunk.data() + i, &word, sizeof(word));
      }
      Require(WriteAll(files, fd, chunk.data(), chunk.size(), static_cast<int64_t>(at), path_));
    }
    if (files.Fsync(fd) != 0) std::perror("fsync");
    (void)files.Close(fd);
    Require(OpenForReading(files, path_, &direct, &this->fd));
  }
  ~BenchmarkFile() {
    (void)FileSystem::Posix().Close(fd);
    (void)FileSystem::Posix().Unlink(path_);
  }

  int fd = -1;
  bool direct = false;

 private:
  std::string path_;
};

const BenchmarkFile& File() {
  static const BenchmarkFile file;
  return file;
}

// Null if the system refuses this kind.
std::unique_ptr<BlockReader> MakeReader(int64_t kind, int64_t depth) {
  BlockReader::Options options;
  options.kind =
      kind == 0 ? BlockReader::Options::Kind::kUring : BlockReader::Options::Kind::kThreads;
  options.depth = static_cast<unsigned>(depth);
  std::unique_ptr<BlockReader> reader;
  const Status status = BlockReader::Create(options, &reader);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return reader;
}

void ReadBatches(benchmark::State& state, BlockReader* reader) {
  if (reader == nullptr) return state.SkipWithError("this system refuses it");
  const BenchmarkFile& file = File();
  AlignedBuffer room(kBatch * kBlockBytes);
  std::vector<BlockRead> reads(kBatch);
  std::mt19937_64 random(static_cast<uint64_t>(state.thread_index()));
  for (auto _ : state) {
    for (size_t i = 0; i < kBatch; ++i) {
      const uint64_t block = random() % (kFileBytes / kBlockBytes);
      reads[i] = {file.fd, block * kBlockBytes, kBlockBytes, room.data() + i * kBlockBytes, 0};
    }
    reader->Read(reads.data(), kBatch, [](const BlockRead&) {});
    for (const BlockRead& read : reads) {
      if (read.error != 0) state.SkipWithError(strerror(read.error));
    }
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kBatch));
  state.SetLabel(std::string(reader->kind()) + (file.direct ? ", direct" : ", buffered"));
}

void BlockReads(benchmark::State& state) {
  ReadBatches(state, MakeReader(state.range(0), state.range(1)).get());
}
BENCHMARK(BlockReads)
    ->ArgNames({"kind", "depth"})
    ->ArgsProduct({{0, 1}, {1, 16, 64, 256}})
    ->MinTime(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void Callers(benchmark::State& state) {
  static const std::unique_ptr<BlockReader> readers[] = {MakeReader(0, 64), MakeReader(1, 64)};
  ReadBatches(state, readers[state.range(0)].get());
}
BENCHMARK(Callers)->ArgNames({"kind"})->Arg(0)->Arg(1)->Threads(2)->MinTime(2)->UseRealTime()->Unit(
    benchmark::kMillisecond);

}  // namespace
}  // namespace dynemb
