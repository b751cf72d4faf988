#include "cc/serving/verified_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cc/io/crc32c.h"

namespace dynemb {
namespace {

// Reads [begin, begin + n) of a file into the disk cache, rounded to pages of 2 MiB, and in such
// pages if the kernel can. The mapping of the file then has them too. Only a hint: what is not read
// here is read later, and so are its errors found, which a mapping would not report.
void ReadInHugePages(int file, size_t begin, size_t n, size_t size) {
  constexpr size_t kHugePage = size_t{2} << 20;
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers do not have
  const size_t first = begin / kHugePage * kHugePage;
  const size_t bytes = std::min((begin + n + kHugePage - 1) / kHugePage * kHugePage, size) - first;
  void* const pages = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, static_cast<off_t>(first));
  if (pages == MAP_FAILED) return;
  if (madvise(pages, bytes, MADV_HUGEPAGE) == 0 && madvise(pages, bytes, MADV_RANDOM) == 0) {
    (void)madvise(pages, bytes, kPopulateRead);
  }
  munmap(pages, bytes);
}

}  // namespace

Status VerifiedFile::Open(const Manifest& manifest, const ColumnEntry& column,
                          std::unique_ptr<VerifiedFile>* file) {
  std::unique_ptr<VerifiedFile> opened(new VerifiedFile);
  opened->path_ = manifest.directory + "/" + column.file;
  DYNEMB_RETURN_IF_ERROR(MappedFile::OpenShared(opened->path_, &opened->mapped_));
  if (opened->mapped_->size() != column.bytes) {
    return DataLoss(opened->path_ + " has " + std::to_string(opened->mapped_->size()) +
                    " bytes; MANIFEST.json says " + std::to_string(column.bytes));
  }
  if (memcmp(opened->mapped_->data(), column.header.data(), column.header.size()) != 0) {
    return DataLoss(opened->path_ + " is damaged at byte offset 0: its header is not " +
                    column.header.substr(10, column.header.find('}') - 9));
  }
  opened->header_bytes_ = column.header.size();
  opened->block_bytes_ = manifest.block_bytes;
  if ((manifest.block_bytes & (manifest.block_bytes - 1)) == 0) {
    opened->log_block_ = __builtin_ctzll(manifest.block_bytes);
  }
  opened->crcs_ = column.crcs;
  opened->unverified_ = column.crcs.size();
  opened->verified_.reset(new std::atomic<uint8_t>[column.crcs.size()]());
  *file = std::move(opened);
  return Status();
}

Status VerifiedFile::VerifyAll(Exec& exec) {
  exec.ParallelFor(crcs_.size(), 1, [this](size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
      if (verified_[b].load(std::memory_order_relaxed) == 0) VerifyBlock(b);
    }
  });
  return damage();
}

bool VerifiedFile::VerifyBlock(size_t block) const {
  const size_t begin = block * block_bytes_;
  const size_t n = std::min(block_bytes_, mapped_->size() - begin);
  const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  uint32_t crc = 0;
  if (file < 0) {
    // The name is gone (a newer base has superseded it); the mapping still has the contents.
    crc = Crc32c(0, mapped_->data() + begin, n);
  } else {
    ReadInHugePages(file, begin, n, mapped_->size());
    constexpr size_t kBuffer = size_t{1} << 16;
    const std::unique_ptr<char[]> buffer(new char[kBuffer]);
    for (size_t done = 0; done < n;) {
      const ssize_t got =
          pread(file, buffer.get(), std::min(kBuffer, n - done), static_cast<off_t>(begin + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      crc = Crc32c(crc, buffer.get(), static_cast<size_t>(got));
      done += static_cast<size_t>(got);
    }
    close(file);
  }
  if (crc != crcs_[block]) {
    damaged_.store(static_cast<int64_t>(block), std::memory_order_release);
    return false;
  }
  // Once, if several threads have verified the block.
  if (verified_[block].exchange(1, std::memory_order_relaxed) == 0) {
    unverified_.fetch_sub(1, std::memory_order_relaxed);
  }
  return true;
}

Status VerifiedFile::damage() const {
  const int64_t block = damaged_.load(std::memory_order_acquire);
  return block < 0 ? Status() : DamageAt(static_cast<size_t>(block));
}

Status VerifiedFile::DamageAt(size_t block) const {
  return DataLoss(path_ + " is damaged: the CRC32C of its block of up to " +
                  std::to_string(block_bytes_) + " bytes at byte offset " +
                  std::to_string(block * block_bytes_) +
                  " differs from the CRC32C in the manifest");
}

}  // namespace dynemb
