#include "benchmarks/cc/minimal_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cc/table/copy_vector.h"
#include "cc/table/hash.h"
#include "cc/table/portability.h"
#include "cc/table/staged.h"

namespace dynemb {
namespace {

constexpr size_t kSlots = 8;
constexpr size_t kKeyGrain = 2048;

// Bit s is set where keys[s] == key.
DYNEMB_INLINE uint32_t Match(const uint64_t* keys, uint64_t key) {
  uint32_t mask = 0;
  for (size_t s = 0; s < kSlots; ++s) mask |= (keys[s] == key ? 1u : 0u) << s;
  return mask;
}

// Calls slot_of(i, bucket) for keys [begin, end) when their home buckets have been fetched. It
// returns a slot, whose vector is fetched, and visit(i, slot) follows when that has arrived.
template <class HomeOf, class SlotOf, class Visit>
DYNEMB_INLINE void ForKeys(const uint64_t* all, const float* vectors, size_t dim, size_t begin,
                           size_t end, const HomeOf& home_of, const SlotOf& slot_of,
                           const Visit& visit) {
  StagedRing<size_t, 3> ring;
  RunStaged(
      end - begin, StagedBlock(dim / 16),
      [&](size_t i) {
        ring[i] = home_of(begin + i);
        PrefetchLine(all + kSlots * ring[i]);
      },
      [&](size_t i) {
        ring[i] = slot_of(begin + i, ring[i]);
        for (size_t c = 0; c < dim; c += 16) PrefetchLine(vectors + ring[i] * dim + c);
      },
      [&](size_t i) { visit(begin + i, ring[i]); });
}

}  // namespace

void* AllocateHugePages(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const memory = std::aligned_alloc(kHugePage, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

MinimalTable::MinimalTable(size_t rows, size_t dim)
    : dim_(dim), buckets_(static_cast<size_t>(static_cast<double>(rows) / 0.6 / kSlots) + 1) {
  const size_t slots = kSlots * buckets_;
  // One more slot, of zeros: the vector of a key that the table does not have.
  keys_ = static_cast<uint64_t*>(AllocateHugePages(slots * sizeof(uint64_t)));
  vectors_ = static_cast<float*>(AllocateHugePages((slots + 1) * dim * sizeof(float)));
  std::fill_n(keys_, slots, kEmpty);
  std::memset(vectors_, 0, (slots + 1) * dim * sizeof(float));
}

MinimalTable::~MinimalTable() {
  std::free(keys_);
  std::free(vectors_);
}

size_t MinimalTable::Home(uint64_t key) const {
  return static_cast<size_t>(static_cast<unsigned __int128>(MixKey(key)) * buckets_ >> 64);
}

DYNEMB_CLONES void MinimalTable::LookupRange(const uint64_t* keys, size_t begin, size_t end,
                                             float* vectors) const {
  const auto slot_of = [&](size_t i, size_t bucket) {
    for (;; bucket = bucket + 1 == buckets_ ? 0 : bucket + 1) {
      const uint64_t* const at = keys_ + kSlots * bucket;
      const uint32_t mask = Match(at, keys[i]);
      if (mask != 0) return kSlots * bucket + static_cast<size_t>(__builtin_ctz(mask));
      if (at[kSlots - 1] == kEmpty) return kSlots * buckets_;
    }
  };
  ForKeys(
      keys_, vectors_, dim_, begin, end, [&](size_t i) { return Home(keys[i]); }, slot_of,
      [&](size_t i, size_t slot) {
        CopyVector(vectors + i * dim_, vectors_ + slot * dim_, dim_ * sizeof(float));
      });
}

DYNEMB_CLONES void MinimalTable::UpsertRange(const uint64_t* keys, size_t begin, size_t end,
                                             const float* vectors) {
  const auto slot_of = [&](size_t i, size_t bucket) {
    for (;; bucket = bucket + 1 == buckets_ ? 0 : bucket + 1) {
      uint64_t* const at = keys_ + kSlots * bucket;
      const uint32_t mask = Match(at, keys[i]);
      if (mask != 0) return kSlots * bucket + static_cast<size_t>(__builtin_ctz(mask));
      // Slots fill from the front. Another thread may take one first.
      for (size_t s = 0; s < kSlots; ++s) {
        uint64_t was = kEmpty;
        if (__atomic_load_n(&at[s], __ATOMIC_RELAXED) == kEmpty &&
            __atomic_compare_exchange_n(&at[s], &was, keys[i], false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
          return kSlots * bucket + s;
        }
      }
    }
  };
  ForKeys(
      keys_, vectors_, dim_, begin, end, [&](size_t i) { return Home(keys[i]); }, slot_of,
      [&](size_t i, size_t slot) {
        CopyVector(vectors_ + slot * dim_, vectors + i * dim_, dim_ * sizeof(float));
      });
}

void MinimalTable::Lookup(Exec& exec, const uint64_t* keys, size_t n, float* vectors) const {
  exec.ParallelFor(n, kKeyGrain,
                   [&](size_t begin, size_t end) { LookupRange(keys, begin, end, vectors); });
}

void MinimalTable::Upsert(Exec& exec, const uint64_t* keys, size_t n, const float* vectors) {
  exec.ParallelFor(n, kKeyGrain,
                   [&](size_t begin, size_t end) { UpsertRange(keys, begin, end, vectors); });
}

}  // namespace dynemb
