// VerifiedFile: a file of a published snapshot, mapped, none of whose bytes is used before its
// checksum has been compared.
//
// The manifest has a CRC32C for each block (1 MiB) of a file. VerifyAll compares all of them. A
// file that is too large for that when a model is opened is verified block by block: a lookup calls
// Ensure before it reads, which costs a load of one byte for a block that has been verified, and
// nothing but a comparison after all have been.
//
// Verification reads through a buffer, not through the mapping, so that a block becomes part of the
// process's resident memory only where lookups touch it.
//
// Threads may verify a block at the same time; each finds the same result.
#ifndef DYNEMB_SERVING_VERIFIED_FILE_H_
#define DYNEMB_SERVING_VERIFIED_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/io/manifest.h"
#include "cc/io/mapped_file.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

class VerifiedFile {
 public:
  // Maps a file, and compares its size and its header. DataLoss names the file.
  static Status Open(const Manifest& manifest, const ColumnEntry& column,
                     std::unique_ptr<VerifiedFile>* file);
  VerifiedFile(const VerifiedFile&) = delete;
  VerifiedFile& operator=(const VerifiedFile&) = delete;

  // Verifies all blocks that have not been. DataLoss names the file and the offset of the block.
  Status VerifyAll(Exec& exec);

  // The data after the header.
  const char* data() const { return mapped_->data() + header_bytes_; }
  size_t bytes() const { return mapped_->size(); }

  // Returns whether the blocks of [at, at + n), in the data and n > 0, have the right checksums.
  bool Ensure(const char* at, size_t n) const {
    if (unverified_.load(std::memory_order_relaxed) == 0) return true;
    const auto begin = static_cast<size_t>(at - mapped_->data());
    for (size_t b = BlockOf(begin); b <= BlockOf(begin + n - 1); ++b) {
      // Relaxed: the file does not change, so a block is readable once any thread has verified it.
      if (verified_[b].load(std::memory_order_relaxed) == 0 && !VerifyBlock(b)) return false;
    }
    return true;
  }

  // The error of a block that Ensure has found to be damaged; ok if there is none.
  Status damage() const;

 private:
  VerifiedFile() = default;
  // A division takes longer than a lookup's other work on a key whose rows are in the cache, and
  // blocks are a power of 2 in all files that this library writes.
  size_t BlockOf(size_t at) const { return log_block_ >= 0 ? at >> log_block_ : at / block_bytes_; }
  bool VerifyBlock(size_t block) const;
  Status DamageAt(size_t block) const;

  std::string path_;
  std::shared_ptr<const MappedFile> mapped_;
  size_t header_bytes_ = 0;
  size_t block_bytes_ = 0;
  int log_block_ = -1;  // of block_bytes_ if it is a power of 2
  std::vector<uint32_t> crcs_;
  mutable std::unique_ptr<std::atomic<uint8_t>[]> verified_;  // for each block
  mutable std::atomic<size_t> unverified_{0};                 // the number of other blocks
  mutable std::atomic<int64_t> damaged_{-1};                  // a damaged block
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_VERIFIED_FILE_H_
