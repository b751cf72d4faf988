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

bool SlotIndex::Place(Partition* p, const Entry& entry, bool anywhere) {
  Entry* const last = p->entries.get() + p->slots - 1;  // always a gap, so that searches end
  Entry* const home = p->entries.get() + HomeOf(*p, entry.fingerprint);
  Entry* const furthest = anywhere ? last : std::min(last, home + kMostDistance);
  uint32_t equal = 0;
  Entry* at = home;
  for (; at->place != kNoPlace && at->fingerprint <= entry.fingerprint; ++at) {
    equal += at->fingerprint == entry.fingerprint;
    if (at >= furthest) return false;
  }
  if (equal >= kMostEqual && !anywhere) return false;
  Entry* gap = at;
  while (gap->place != kNoPlace && gap < furthest) ++gap;
  if (gap >= furthest) return false;
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
  // In the worst case all are crowded. Memory that is never written costs nothing.
  if (crowded_.capacity() < crowded_.size() + n) crowded_.reserve(crowded_.size() + 2 * n);
  added_.reserve(n);
  ReserveEvenly(n);
}

void SlotIndex::ReserveEvenly(size_t n) {
  // A partition gets its share of n keys within a few standard deviations.
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

void SlotIndex::AddEntry(uint64_t hash, const Entry& entry, bool anywhere) {
  Partition& p = partitions_[PartitionOf(hash)];
  const bool has_room = !anywhere && added_.size() < added_.capacity() &&
                        crowded_.size() + added_.size() < crowded_.capacity();
  const auto grow = [&](uint32_t capacity, uint32_t room) {
    try {
      Grow(&p, capacity, room);
      return true;
    } catch (const std::bad_alloc&) {
      if (!has_room) throw;
      return false;
    }
  };
  // The room that Reserve has made stays. Without memory to grow, there may be a gap.
  if (static_cast<double>(p.size + 1) > kMostLoad * p.capacity) {
    (void)grow(CapacityFor(p, p.size + 1), p.slots - std::max(p.capacity, p.end));
  }
  bool placed = p.capacity != 0 && Place(&p, entry, anywhere);
  const auto is_full = [&p] { return p.end + 1 >= p.slots; };  // at its end
  while (!placed && is_full() && grow(p.capacity, 2 * kLeastRoom)) {
    placed = Place(&p, entry, anywhere);
  }
  if (placed) {
    ++p.size;
  } else {
    if (!has_room) {
      const size_t n = added_.size() + 1;
      if (crowded_.capacity() < crowded_.size() + n) crowded_.reserve(crowded_.size() * 2 + n);
    }
    added_.push_back({hash, entry});
  }
  ++size_;
}

void SlotIndex::EndAdding() noexcept {
  if (added_.empty()) return;
  if (gone_ > crowded_.size() / 2) {
    const auto is_gone = [](const Crowded& c) { return c.entry.place == kNoPlace; };
    crowded_.erase(std::remove_if(crowded_.begin(), crowded_.end(), is_gone), crowded_.end());
    gone_ = 0;
  }
  std::sort(added_.begin(), added_.end(),
            [](const Crowded& a, const Crowded& b) { return a.hash < b.hash; });
  // From the end, without other memory.
  size_t left = crowded_.size(), more = added_.size();
  crowded_.resize(left + more);
  while (more != 0) {
    const bool is_added = left == 0 || crowded_[left - 1].hash <= added_[more - 1].hash;
    crowded_[left + more - 1] = is_added ? added_[more - 1] : crowded_[left - 1];
    --(is_added ? more : left);
  }
  added_.clear();
}

bool SlotIndex::Remove(uint64_t hash, ColdPlace place) {
  if (!crowded_.empty()) {
    for (auto c = CrowdedFrom(hash); c != crowded_.end() && c->hash == hash; ++c) {
      if (c->entry.place != place) continue;
      c->entry.place = kNoPlace;
      ++gone_;
      --size_;
      return true;
    }
  }
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
  crowded_ = {};
  added_ = {};
  gone_ = 0;
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
  Require(added_.empty(), "crowded entries that are not found");
  size_t gone = 0;
  for (size_t c = 0; c < crowded_.size(); ++c) {
    gone += crowded_[c].entry.place == kNoPlace;
    Require(c == 0 || crowded_[c - 1].hash <= crowded_[c].hash, "crowded entries out of order");
  }
  Require(gone == gone_, "wrong number of removed entries");
  size += crowded();
  Require(size == size_ && bytes == bytes_, "wrong totals");
}

}  // namespace dynemb
