#include "cc/file/slot_index.h"

#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "cc/table/require.h"

namespace dynemb {
namespace {

constexpr SlotIndex::Entry kGap{0, kNoPlace, {0, 0}};

std::atomic<int64_t> mappings{0};  // of all indexes

// Gives free memory of the heap back to the system.
void TrimHeap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

SlotIndex::Entries SlotIndex::Allocate(size_t slots) {
  const size_t bytes = slots * sizeof(Entry);
  if (bytes >= kMappedBytes) {
    if (mappings.fetch_add(1, std::memory_order_relaxed) < kMostMappings) {
      void* const mapped =
          mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped != MAP_FAILED) return Entries(static_cast<Entry*>(mapped), FreeEntries(bytes));
    }
    mappings.fetch_sub(1, std::memory_order_relaxed);
  }
  return Entries(new Entry[slots]);
}

void SlotIndex::FreeEntries::operator()(Entry* entries) const {
  if (mapped == 0) {
    delete[] entries;
    return;
  }
  munmap(entries, mapped);
  mappings.fetch_sub(1, std::memory_order_relaxed);
}

uint32_t SlotIndex::CapacityFor(const Partition& p, uint64_t entries) {
  double capacity = std::max(p.capacity, kLeastCapacity);
  while (static_cast<double>(entries) > kMostLoad * capacity) capacity *= kGrowth;
  return static_cast<uint32_t>(std::ceil(capacity));
}

bool SlotIndex::Place(Partition* p, const Entry& entry) {
  Entry* const last = p->entries.get() + p->slots - 1;  // always a gap, so that searches end
  Entry* at = p->entries.get() + HomeOf(*p, entry.fingerprint);
  while (at->place != kNoPlace && at->fingerprint <= entry.fingerprint) ++at;
  Entry* gap = at;
  while (gap->place != kNoPlace) ++gap;
  if (gap >= last) return false;
  std::move_backward(at, gap, gap + 1);
  *at = entry;
  p->end = std::max(p->end, static_cast<uint32_t>(gap - p->entries.get()) + 1);
  return true;
}

void SlotIndex::Grow(Partition* p, uint32_t capacity, uint32_t room) {
  Partition grown;
  grown.capacity = capacity;
  grown.size = p->size;
  // In the order of the fingerprints, each entry goes to its home or right behind its predecessor.
  const auto for_moves = [&](const auto& fn) {
    uint32_t next = 0;
    for (uint32_t i = 0; i < p->end; ++i) {
      const Entry& entry = p->entries[i];
      if (entry.place == kNoPlace) continue;
      next = std::max(next, HomeOf(grown, entry.fingerprint));
      fn(entry, next++);
    }
    return next;
  };
  grown.end = for_moves([](const Entry&, uint32_t) {});
  grown.slots = std::max(capacity, grown.end) + std::max(room, kLeastRoom) + 1;
  grown.entries = Allocate(grown.slots);
  std::fill_n(grown.entries.get(), grown.slots, kGap);
  for_moves([&](const Entry& entry, uint32_t to) { grown.entries[to] = entry; });
  bytes_ += grown.slots * sizeof(Entry);
  bytes_ -= p->slots * sizeof(Entry);
  const auto in_heap = [](const Partition& partition) {
    return partition.entries != nullptr && partition.entries.get_deleter().mapped == 0;
  };
  const size_t were_in_heap = in_heap_;
  in_heap_ += in_heap(grown);
  in_heap_ -= in_heap(*p);
  *p = std::move(grown);
  // The system does not get the holes that the small arrays leave by itself.
  if (were_in_heap != 0 && in_heap_ == 0) TrimHeap();
}

void SlotIndex::Reserve(size_t n) {
  // Of n keys, a partition gets its share within a few standard deviations.
  const double mean = static_cast<double>(n) / kPartitions;
  const auto most = std::min<uint64_t>(n, static_cast<uint64_t>(mean + 8 * std::sqrt(mean)) + 8);
  for (Partition& p : partitions_) {
    // Entries that come now and then must not grow every partition ahead of need. So a partition
    // may become a little fuller, if Add then has no memory to let it grow.
    const uint32_t more = std::min<uint32_t>(p.capacity / 32, 16);
    const bool is_crowded = static_cast<double>(p.size + most) > kMostLoad * p.capacity + more;
    if (!is_crowded && std::max(p.capacity, p.end) + most < p.slots) continue;
    Grow(&p, is_crowded ? CapacityFor(p, p.size + most) : p.capacity, static_cast<uint32_t>(most));
  }
}

void SlotIndex::Add(uint64_t hash, ColdPlace place, RowTimes times) {
  Partition& p = partitions_[PartitionOf(hash)];
  const Entry entry{FingerprintOf(hash), place, times};
  if (static_cast<double>(p.size + 1) > kMostLoad * p.capacity) {
    try {
      // The room that Reserve has made stays.
      Grow(&p, CapacityFor(p, p.size + 1), p.slots - std::max(p.capacity, p.end));
    } catch (const std::bad_alloc&) {
      if (p.capacity == 0) throw;  // otherwise there may be a gap
    }
  }
  while (!Place(&p, entry)) Grow(&p, p.capacity, 2 * kLeastRoom);
  ++p.size;
  ++size_;
}

bool SlotIndex::Remove(uint64_t hash, ColdPlace place) {
  Partition& p = partitions_[PartitionOf(hash)];
  if (p.size == 0) return false;
  const uint32_t fingerprint = FingerprintOf(hash);
  Entry* at = p.entries.get() + HomeOf(p, fingerprint);
  while (at->place != kNoPlace && (at->fingerprint != fingerprint || at->place != place)) {
    if (at->fingerprint > fingerprint) return false;
    ++at;
  }
  if (at->place == kNoPlace) return false;
  // The entries behind it move up, as far as they are not at their homes.
  Entry* end = at + 1;
  while (end->place != kNoPlace && end > p.entries.get() + HomeOf(p, end->fingerprint)) ++end;
  std::move(at + 1, end, at);
  *(end - 1) = kGap;
  if (end == p.entries.get() + p.end) --p.end;
  --p.size;
  --size_;
  return true;
}

void SlotIndex::Clear() {
  for (Partition& p : partitions_) p = Partition();
  size_ = bytes_ = in_heap_ = 0;
}

void SlotIndex::CheckInvariants() const {
  uint64_t size = 0;
  size_t bytes = 0;
  for (const Partition& p : partitions_) {
    uint32_t held = 0;
    bool after_gap = true;
    uint32_t before = 0;
    for (uint32_t i = 0; i < p.slots; ++i) {
      const Entry& e = p.entries[i];
      if (e.place == kNoPlace) {
        after_gap = true;
        continue;
      }
      const uint32_t home = HomeOf(p, e.fingerprint);
      Require(home <= i, "an entry is before its home");
      Require(home == i || !after_gap, "a gap between an entry and its home");
      Require(held == 0 || before <= e.fingerprint, "fingerprints out of order");
      Require(i < p.end, "an entry behind the end");
      before = e.fingerprint;
      after_gap = false;
      ++held;
    }
    Require(held == p.size, "wrong size of a partition");
    Require(p.capacity == 0 || after_gap, "no gap at the end");
    size += held;
    bytes += p.slots * sizeof(Entry);
  }
  Require(size == size_ && bytes == bytes_, "wrong totals");
}

}  // namespace dynemb
