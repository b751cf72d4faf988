#include "cc/table/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace dynemb {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// Below this, huge pages would waste more than they save: many tables are small.
constexpr size_t kHugePagesFrom = 2 * kHugePage;
// One commit covers at least this share of what is committed, so that a growing table makes few
// system calls.
constexpr size_t kCommitFraction = 8;
constexpr size_t kCommitMost = size_t{256} << 20;

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

size_t PhysicalMemory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(page)
                               : size_t{16} << 30;
}

Arena::~Arena() { Release(); }

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  reserved_ = std::exchange(other.reserved_, 0);
  committed_ = std::exchange(other.committed_, 0);
  advised_ = std::exchange(other.advised_, 0);
  populated_ = std::exchange(other.populated_, 0);
  mapping_ = std::exchange(other.mapping_, nullptr);
  mapping_bytes_ = std::exchange(other.mapping_bytes_, 0);
  return *this;
}

void Arena::Release() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
  mapping_ = nullptr;
}

Status Arena::Reserve(size_t bytes, size_t at_least) {
  bytes = RoundUp(std::max<size_t>(bytes, kPage), kPage);
  for (size_t size = bytes;; size = RoundUp(size / 2, kPage)) {
    // A huge page more, to begin on a huge page's boundary.
    void* p = mmap(nullptr, size + kHugePage, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
      mapping_ = p;
      mapping_bytes_ = size + kHugePage;
      data_ = reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(p), kHugePage));
      reserved_ = size;
      return Status();
    }
    if (size / 2 < at_least || size <= kPage) {
      return ResourceExhausted("cannot reserve " + std::to_string(size) +
                               " bytes of address space");
    }
  }
}

Status Arena::Commit(size_t bytes) {
  if (bytes <= committed_) return Status();
  if (bytes > reserved_) {
    return ResourceExhausted("needs " + std::to_string(bytes) + " bytes, more than the " +
                             std::to_string(reserved_) + " reserved for it");
  }
  size_t target = std::max(bytes, committed_ + std::min(committed_ / kCommitFraction, kCommitMost));
  target = std::min(RoundUp(target, target >= kHugePagesFrom ? kHugePage : kPage), reserved_);
  if (mprotect(data_ + committed_, target - committed_, PROT_READ | PROT_WRITE) != 0) {
    return ResourceExhausted("the system refused " + std::to_string(target - committed_) +
                             " bytes of memory, with " + std::to_string(committed_) + " in use");
  }
  committed_ = target;
  if (committed_ >= kHugePagesFrom) {
    const size_t whole = committed_ / kHugePage * kHugePage;
    // Only advice: without huge pages everything works, slower.
    (void)madvise(data_ + advised_, whole - advised_, MADV_HUGEPAGE);
    advised_ = whole;
  }
  return Status();
}

void Arena::Populate(Exec& exec, size_t bytes) {
  const size_t end = std::min(RoundUp(bytes, kHugePage), advised_);
  if (end <= populated_) return;
  const size_t first = populated_ / kHugePage;
  exec.ParallelFor(end / kHugePage - first, 1, [&](size_t begin, size_t last) {
    char* const data = data_ + (first + begin) * kHugePage;
    // Page by page, in case the system gives small ones. The smallest write that changes nothing.
    for (size_t b = 0; b < (last - begin) * kHugePage; b += kPage) {
      __atomic_fetch_or(data + b, char{0}, __ATOMIC_RELAXED);
    }
  });
  populated_ = end;
}

void Arena::Clear() {
  populated_ = 0;
  if (committed_ > 0) (void)madvise(data_, committed_, MADV_DONTNEED);
}

}  // namespace dynemb
