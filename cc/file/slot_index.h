// SlotIndex: the memory of a file tier about each of its rows: a fingerprint of the key, the place
// of the row, its last update and its score. 16 bytes an entry; the key itself is in the file.
//
// An index has 1024 partitions, by 10 bits of a key's hash. A partition is an array that is sorted
// by fingerprint, the next 32 bits of the hash, with gaps: an entry is at or after its *home*, the
// position that its fingerprint has in proportion to the size of the array, and there is no gap
// between its home and the entry ("linear probing, sorted"). Consequences:
//
// - A search begins at the home of the fingerprint, and ends at the first gap or greater
//   fingerprint.
// - The array can grow by any factor, without the keys: the fingerprints suffice. It grows by 15%
//   when it is 0.9 full, so an entry takes 18 to 21 bytes, besides a few positions at the end of
//   each array. One partition at a time is copied.
// - A key that has no row has an entry with its fingerprint by chance only: one in 2^32 divided by
//   the entries of a partition. So it costs no disk read.
//
// Chosen keys. A user who knows a table's name and seed can choose keys whose hashes are close to
// each other, or equal in the 42 bits of partition and fingerprint: every search would then pass
// all of them, and read the rows of all that are equal. So a partition has at most kMostEqual
// entries of a fingerprint, and none further than about kMostDistance from its home. Entries beyond
// that are *crowded*: they are in one array, sorted by the whole hash, in which each key has its
// own entry. If the keys were not chosen for their hashes, there are none, and a search only sees
// that the array is empty.
//
// Memory. Large arrays are separate mappings, whose pages go back to the system at once. In the
// heap, an array that grows leaves a hole that is too small for the next one, and the holes of all
// partitions together are as large as the index. Arrays are large in a table of about a million
// entries or more, and at most 16 such tables have them outside the heap. When the last array of an
// index leaves the heap, the system gets the holes.
//
// Not thread-safe.
#ifndef DYNEMB_FILE_SLOT_INDEX_H_
#define DYNEMB_FILE_SLOT_INDEX_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/table/cold_rows.h"
#include "cc/table/function_ref.h"
#include "cc/table/portability.h"

namespace dynemb {

class SlotIndex {
 public:
  struct Entry {
    uint32_t fingerprint;
    ColdPlace place;  // kNoPlace: a gap
    RowTimes times;
  };
  static constexpr size_t kPartitions = 1024;

  uint64_t size() const { return size_; }
  size_t bytes() const { return bytes_ + crowded_.size() * sizeof(Crowded); }

  // Makes room for n more entries of any keys. Throws std::bad_alloc, and has changed nothing.
  void Reserve(size_t n);
  // Adds an entry of a key that has none. After Reserve, n calls do not fail. Otherwise they throw
  // std::bad_alloc, and have changed nothing. Calls of Add are followed by EndAdding, before which
  // nothing is found.
  void Add(uint64_t hash, ColdPlace place, RowTimes times) {
    AddEntry(hash, {FingerprintOf(hash), place, times}, /*anywhere=*/false);
  }
  void EndAdding() noexcept;
  // Makes room as far as hashes are spread evenly, for AddAgain.
  void ReserveEvenly(size_t n);
  // Adds an entry with a hash of ForHashes. Throws std::bad_alloc, and has changed nothing.
  void AddAgain(uint64_t hash, ColdPlace place, RowTimes times) {
    AddEntry(hash, {FingerprintOf(hash), place, times}, IsPosition(hash));
  }
  // Prefetches the entries with this hash, for a call that comes soon.
  void Prefetch(uint64_t hash) const {
    const Partition& p = partitions_[PartitionOf(hash)];
    if (p.size == 0) return;
    const Entry* const home = p.entries.get() + HomeOf(p, FingerprintOf(hash));
    PrefetchLine(home);
    PrefetchLine(home + 4);  // the next cache line
  }
  // Calls fn(entry) for each entry that may be of a key with this hash. `fn` may change its times
  // and its place.
  template <class Fn>
  void ForEach(uint64_t hash, const Fn& fn) const;
  // Removes the entry with this hash and place. Returns whether there was one.
  bool Remove(uint64_t hash, ColdPlace place);
  void Clear();

  // The entries have an order, by partition and fingerprint, in which positions are numbers in
  // [0, kEnd). Entries may have equal positions.
  static constexpr uint64_t kEnd = uint64_t{1} << 42;
  static uint64_t PositionOf(uint64_t hash) { return hash >> 22; }
  // A hash with this position, of which the other bits are not known.
  static uint64_t HashAt(uint64_t position) { return position << 22; }
  // Calls fn(position, entry) for the entries at or after a position, in order, until it returns
  // false.
  template <class Fn>
  void ForFrom(uint64_t position, const Fn& fn) const;
  // The same, of all entries, with fn(hash, entry), for AddAgain.
  template <class Fn>
  void ForHashes(const Fn& fn) const;
  // The entries that are crowded.
  size_t crowded() const { return crowded_.size() - gone_; }

  // For tests: aborts if an invariant does not hold.
  void CheckInvariants() const;

 private:
  struct FreeEntries {
    FreeEntries() : mapped(0) {}
    explicit FreeEntries(size_t bytes) : mapped(bytes) {}
    void operator()(Entry* entries) const;

    size_t mapped;  // bytes of the mapping; 0: in the heap
  };
  using Entries = std::unique_ptr<Entry[], FreeEntries>;
  // Arrays from this size on are mapped. A process can have 65,530 mappings; at most this number of
  // them are arrays of indexes.
  static constexpr size_t kMappedBytes = size_t{16} << 10;
  static constexpr int64_t kMostMappings = 16384;
  // Throws std::bad_alloc.
  static Entries Allocate(size_t slots);

  struct Partition {
    Entries entries;
    uint32_t capacity = 0;  // the number of homes
    uint32_t slots = 0;     // the length of the array; the last position is a gap
    uint32_t end = 0;       // positions from here on are gaps
    uint32_t size = 0;
  };
  struct Crowded {
    uint64_t hash;
    mutable Entry entry;  // of place kNoPlace: removed
  };
  static constexpr uint32_t kMostEqual = 4, kMostDistance = 1024;
  static constexpr uint64_t kPositionBits = 42,
                            kUnknown = (uint64_t{1} << (64 - kPositionBits)) - 1;
  // Whether only the position of a hash is known. (One of 2^22 hashes looks like that. Its entry
  // has any place in its partition, from which it is found all the same.)
  static bool IsPosition(uint64_t hash) { return (hash & kUnknown) == 0; }
  using CrowdedEntries = std::vector<Crowded>;
  // The crowded entries from a hash on.
  CrowdedEntries::const_iterator CrowdedFrom(uint64_t hash) const {
    return std::lower_bound(crowded_.begin(), crowded_.end(), hash,
                            [](const Crowded& c, uint64_t h) { return c.hash < h; });
  }
  // Calls fn(position, crowded or null, entry), as ForFrom.
  template <class Fn>
  void ForAll(uint64_t position, const Fn& fn) const;

  static constexpr double kMostLoad = 0.9, kGrowth = 1.15;
  static constexpr uint32_t kLeastCapacity = 16, kLeastRoom = 8;

  static size_t PartitionOf(uint64_t hash) { return hash >> 54; }
  static uint32_t FingerprintOf(uint64_t hash) { return static_cast<uint32_t>(hash >> 22); }
  static uint32_t HomeOf(const Partition& p, uint32_t fingerprint) {
    return static_cast<uint32_t>((uint64_t{fingerprint} * p.capacity) >> 32);
  }
  // The capacity that a partition needs for this number of entries.
  static uint32_t CapacityFor(const Partition& p, uint64_t entries);
  // Moves a partition to an array of this capacity, with this number of positions behind the end:
  // an added entry moves the end by at most one.
  void Grow(Partition* p, uint32_t capacity, uint32_t room);
  // An entry that may be `anywhere` is never crowded: its hash is not known.
  void AddEntry(uint64_t hash, const Entry& entry, bool anywhere);
  // Places an entry; false if there is no gap at or after its home, or, unless `anywhere`, if it
  // would be crowded.
  static bool Place(Partition* p, const Entry& entry, bool anywhere);

  std::vector<Partition> partitions_ = std::vector<Partition>(kPartitions);
  CrowdedEntries crowded_;  // in order; has room for `added_`, too
  CrowdedEntries added_;    // since EndAdding
  size_t gone_ = 0;         // of crowded_: removed
  uint64_t size_ = 0;
  size_t bytes_ = 0;
  size_t in_heap_ = 0;  // the arrays that are no mappings
};

template <class Fn>
void SlotIndex::ForEach(uint64_t hash, const Fn& fn) const {
  if (!crowded_.empty()) {
    for (auto c = CrowdedFrom(hash); c != crowded_.end() && c->hash == hash; ++c) {
      if (c->entry.place != kNoPlace) fn(&c->entry);
    }
  }
  const Partition& p = partitions_[PartitionOf(hash)];
  if (p.size == 0) return;
  const uint32_t fingerprint = FingerprintOf(hash);
  for (Entry* e = p.entries.get() + HomeOf(p, fingerprint); e->place != kNoPlace; ++e) {
    if (e->fingerprint > fingerprint) return;
    if (e->fingerprint == fingerprint) fn(e);
  }
}

template <class Fn>
void SlotIndex::ForAll(uint64_t position, const Fn& fn) const {
  auto crowded = CrowdedFrom(HashAt(position));
  // Passes the crowded entries up to a position to fn.
  const auto pass_crowded = [&](uint64_t last) {
    for (; crowded != crowded_.end() && PositionOf(crowded->hash) <= last; ++crowded) {
      if (crowded->entry.place == kNoPlace) continue;
      if (!fn(PositionOf(crowded->hash), &*crowded, &crowded->entry)) return false;
    }
    return true;
  };
  for (size_t number = position >> 32; number < kPartitions; ++number, position = 0) {
    const Partition& p = partitions_[number];
    if (p.size == 0) continue;
    const auto least = static_cast<uint32_t>(position);
    for (uint32_t i = HomeOf(p, least); i < p.end; ++i) {
      Entry* const entry = &p.entries[i];
      if (entry->place == kNoPlace || entry->fingerprint < least) continue;
      const uint64_t at = uint64_t{number} << 32 | entry->fingerprint;
      if (!pass_crowded(at) || !fn(at, nullptr, entry)) return;
    }
  }
  (void)pass_crowded(kEnd);
}

template <class Fn>
void SlotIndex::ForFrom(uint64_t position, const Fn& fn) const {
  ForAll(position,
         [&](uint64_t at, const Crowded*, Entry* entry) -> bool { return fn(at, entry); });
}

template <class Fn>
void SlotIndex::ForHashes(const Fn& fn) const {
  ForAll(0, [&](uint64_t at, const Crowded* crowded, Entry* entry) -> bool {
    return fn(crowded != nullptr ? crowded->hash : HashAt(at), entry);
  });
}

}  // namespace dynemb

#endif  // DYNEMB_FILE_SLOT_INDEX_H_
