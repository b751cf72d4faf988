#include "cc/table/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "cc/table/memory_limit.h"

namespace dynemb {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// Below this, huge pages would waste more than they save: many tables are small.
constexpr size_t kHugePagesFrom = 2 * kHugePage;
// A commit adds at least this fraction of the committed memory (up to kCommitMost), so that a
// growing table makes few system calls.
constexpr size_t kCommitFraction = 8;
constexpr size_t kCommitMost = size_t{256} << 20;
constexpr int kMapping = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// The unit in which an arena of `bytes` bytes grows.
size_t UnitOf(size_t bytes) { return bytes >= kHugePagesFrom ? kHugePage : kPage; }

// An address range of `bytes` bytes; null if the system refuses. The range of a large arena begins
// at the boundary of a huge page.
char* Map(size_t bytes, int protection) {
  const size_t slack = UnitOf(bytes) == kHugePage ? kHugePage : 0;
  void* const p = mmap(nullptr, bytes + slack, protection, kMapping, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(p);
  if (slack == 0) return begin;
  char* const data =
      reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(begin), kHugePage));
  const size_t before = static_cast<size_t>(data - begin);
  if (before != 0) (void)munmap(begin, before);
  if (before != slack) (void)munmap(data + bytes, slack - before);
  return data;
}

}  // namespace

Arena::~Arena() { Release(); }

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  fixed_ = std::exchange(other.fixed_, false);
  reserved_ = std::exchange(other.reserved_, 0);
  committed_ = std::exchange(other.committed_, 0);
  advised_ = std::exchange(other.advised_, 0);
  prefaulted_ = std::exchange(other.prefaulted_, 0);
  return *this;
}

void Arena::Release() {
  if (data_ != nullptr) (void)munmap(data_, reserved_);
  DischargeMemory(committed_);
  data_ = nullptr;
  committed_ = 0;
}

Status Arena::Reserve(size_t bytes, size_t at_least) {
  bytes = RoundUp(std::max<size_t>(bytes, kPage), kPage);
  for (size_t size = bytes;; size = RoundUp(size / 2, kPage)) {
    data_ = Map(size, PROT_NONE);
    if (data_ != nullptr) {
      fixed_ = true;
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
  if (fixed_ && bytes > reserved_) {
    return ResourceExhausted("needs " + std::to_string(bytes) + " bytes, more than the " +
                             std::to_string(reserved_) + " reserved for it");
  }
  const size_t ahead =
      std::max(bytes, committed_ + std::min(committed_ / kCommitFraction, kCommitMost));
  const size_t needed = RoundUp(bytes, kPage);
  const Status status = CommitTo(RoundUp(ahead, UnitOf(ahead)));
  return status.ok() || ahead == needed ? status : CommitTo(needed);
}

Status Arena::CommitTo(size_t target) {
  if (fixed_) target = std::min(target, reserved_);
  const size_t more = target - committed_;
  if (!ChargeMemory(more)) {
    return ResourceExhausted("there is no memory for " + std::to_string(more) +
                             " more bytes: tables have " + std::to_string(ChargedMemory()) +
                             " bytes, the process may use " + std::to_string(PhysicalMemory()));
  }
  Status status;
  if (fixed_) {
    if (mprotect(data_ + committed_, more, PROT_READ | PROT_WRITE) != 0) {
      status =
          ResourceExhausted("the system refused " + std::to_string(more) +
                            " bytes of memory, with " + std::to_string(committed_) + " in use");
    }
  } else if (target > reserved_) {
    status = Extend(target);
  }
  if (!status.ok()) {
    DischargeMemory(more);
    return status;
  }
  committed_ = target;
  AdviseHugePages(fixed_ ? committed_ : reserved_);
  return Status();
}

Status Arena::Extend(size_t bytes) {
  const size_t twice = std::max(bytes, 2 * reserved_);
  if (MoveTo(RoundUp(twice, UnitOf(twice))) || MoveTo(RoundUp(bytes, kPage))) return Status();
  return ResourceExhausted("the system refused " + std::to_string(bytes) +
                           " bytes of address space, with " + std::to_string(reserved_) +
                           " in use");
}

bool Arena::MoveTo(size_t bytes) {
  char* const target = Map(bytes, data_ == nullptr ? PROT_READ | PROT_WRITE : PROT_NONE);
  if (data_ == nullptr) {
    data_ = target;
    reserved_ = target == nullptr ? 0 : bytes;
    return target != nullptr;
  }
  // If there are not enough addresses for both ranges, the system chooses the address itself; huge
  // pages may then be split.
  void* const moved = target != nullptr
                          ? mremap(data_, reserved_, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target)
                          : mremap(data_, reserved_, bytes, MREMAP_MAYMOVE);
  if (moved == MAP_FAILED) {
    if (target != nullptr) (void)munmap(target, bytes);
    return false;
  }
  data_ = static_cast<char*>(moved);
  reserved_ = bytes;
  return true;
}

void Arena::AdviseHugePages(size_t bytes) {
  if (bytes < kHugePagesFrom) return;
  const size_t whole = bytes / kHugePage * kHugePage;
  // Only advice: without huge pages everything works, but more slowly.
  if (whole > advised_) (void)madvise(data_ + advised_, whole - advised_, MADV_HUGEPAGE);
  advised_ = std::max(advised_, whole);
}

void Arena::Prefault(Exec& exec, size_t bytes) {
  const size_t end = std::min({RoundUp(bytes, kHugePage), advised_, committed_}) / kHugePage;
  const size_t first = prefaulted_ / kHugePage;
  if (end <= first) return;
  exec.ParallelFor(end - first, 1, [&](size_t begin, size_t last) {
    char* const data = data_ + (first + begin) * kHugePage;
    // Page by page, in case the system has mapped small pages. Each is faulted in by a write that
    // changes nothing.
    for (size_t b = 0; b < (last - begin) * kHugePage; b += kPage) {
      __atomic_fetch_or(data + b, char{0}, __ATOMIC_RELAXED);
    }
  });
  prefaulted_ = end * kHugePage;
}

void Arena::Discard(size_t bytes) {
  const size_t from = std::min(RoundUp(bytes, kPage), committed_);
  prefaulted_ = std::min(prefaulted_, from / kHugePage * kHugePage);
  if (bytes < from) std::memset(data_ + bytes, 0, from - bytes);
  if (from < committed_) (void)madvise(data_ + from, committed_ - from, MADV_DONTNEED);
}

}  // namespace dynemb
