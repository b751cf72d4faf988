#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"

namespace dynemb {

template <class K>
void HashTable<K>::CheckInvariants() const {
  const auto require = [](bool holds, const char* what, uint64_t where) {
    if (holds) return;
    std::fprintf(stderr, "invariant broken: %s (%llu)\n", what,
                 static_cast<unsigned long long>(where));
    std::abort();
  };
  const TableView<K> view = View();
  std::vector<bool> seen(rows_.high_water());
  uint64_t held = 0;
  for (uint32_t segment = 0; segment < index_.segments(); ++segment) {
    Bucket* buckets = view.SegmentBuckets(segment);
    uint32_t passes[kBucketsPerSegment] = {};
    uint32_t count = 0;
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = buckets[b].row[s];
        require((row == kNoRow) == (buckets[b].digest[s] == 0), "empty iff no digest", segment);
        if (row == kNoRow) continue;
        ++count;
        const uint64_t number = uint64_t{segment} * kBucketsPerSegment + b;
        const Score score = buckets[b].score[s];
        require(!scoring_.by_time() || number >= swept_.buckets ||
                    stamps_.Decode(score) >= stamps_.floor(),
                "a slot that was swept is not below the floor", row);
        require(scoring_.by_time() || score <= scoring_.Last(), "a score is possible", row);
        require(row < rows_.high_water(), "row id was handed out", row);
        require(!seen[row], "a row belongs to one slot", row);
        seen[row] = true;
        require(*layout().update(rows_.At(row)) != 0, "a held row is live", row);
        const K key = view.KeyAt(row);
        const uint64_t hash = view.HashOf(key);
        const Probe probe = MakeProbe(hash);
        require(view.SegmentOf(hash) == segment, "a key is in its segment", row);
        require(probe.digest == buckets[b].digest[s], "a slot has its key's digest", row);
        for (uint32_t i = probe.home; i != b; i = (i + 1) % kBucketsPerSegment) ++passes[i];
        OneLane lane;
        const SlotRef at = dynemb::Find(lane, view, buckets, probe, key);
        require(at.bucket == &buckets[b] && at.slot == s, "a key is found, and once", row);
      }
    }
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      require(buckets[b].overflow == kOverflowSticky || buckets[b].overflow == passes[b],
              "overflow counts the keys that passed", segment);
    }
    require(index_.count(segment) == count, "a segment's count", segment);
    held += count;
  }
  require(held == rows_.live(), "as many slots as live rows", held);
  for (uint64_t r = 0; r < rows_.high_water(); ++r) {
    const Stamp update = *layout().update(rows_.At(static_cast<RowId>(r)));
    require(seen[r] == (update != 0), "a live row is in the index", r);
    require(r >= swept_.rows || update == 0 || stamps_.Decode(update) >= stamps_.floor(),
            "a row that was swept is not below the floor", r);
  }
}

template void HashTable<uint64_t>::CheckInvariants() const;
template void HashTable<uint32_t>::CheckInvariants() const;

}  // namespace dynemb
