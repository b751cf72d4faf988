#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"
#include "cc/table/require.h"

namespace dynemb {

template <class K>
void HashTable<K>::CheckInvariants() const {
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
        Require((row == kNoRow) == (buckets[b].digests()[s] == 0), "empty iff no digest", segment);
        if (row == kNoRow) continue;
        ++count;
        const uint64_t number = uint64_t{segment} * kBucketsPerSegment + b;
        const Score score = buckets[b].score[s];
        Require(!scoring_.by_time() || number >= swept_.buckets ||
                    stamps_.Decode(score) >= stamps_.floor(),
                "a slot that was swept is not below the floor", row);
        Require(scoring_.by_time() || score <= scoring_.Last(), "a score is possible", row);
        Require(row < rows_.high_water(), "row id was handed out", row);
        Require(!seen[row], "a row belongs to one slot", row);
        seen[row] = true;
        Require(*layout().update(rows_.At(row)) != 0, "a held row is live", row);
        const K key = view.KeyAt(row);
        const uint64_t hash = view.HashOf(key);
        const Probe probe = MakeProbe(hash);
        Require(view.SegmentOf(hash) == segment, "a key is in its segment", row);
        Require(probe.digest == buckets[b].digests()[s], "a slot has its key's digest", row);
        for (uint32_t i = probe.home; i != b; i = (i + 1) % kBucketsPerSegment) ++passes[i];
        OneLane lane;
        const SlotRef at = dynemb::Find(lane, view, buckets, probe, key);
        Require(at.bucket == &buckets[b] && at.slot == s, "a key is found, and once", row);
      }
    }
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      Require(buckets[b].overflow() == kOverflowSticky || buckets[b].overflow() == passes[b],
              "overflow counts the keys that passed", segment);
    }
    Require(index_.count(segment) == count, "a segment's count", segment);
    held += count;
  }
  Require(held == rows_.live(), "as many slots as live rows", held);
  for (uint64_t r = 0; r < rows_.high_water(); ++r) {
    const Stamp update = *layout().update(rows_.At(static_cast<RowId>(r)));
    Require(seen[r] == (update != 0), "a live row is in the index", r);
    Require(r >= swept_.rows || update == 0 || stamps_.Decode(update) >= stamps_.floor(),
            "a row that was swept is not below the floor", r);
  }
  if (cold_ == nullptr) return;
  cold_->CheckInvariants();
  std::vector<uint64_t> hot;
  for (uint64_t r = 0; r < rows_.high_water(); ++r) {
    if (seen[r]) hot.push_back(KeyBits(static_cast<RowId>(r)));
  }
  // Files that cannot be read are no broken invariant.
  (void)cold_->Find(hot.data(), hot.size(), [&](size_t i, const ColdRow&) {
    Require(false, "a key has its row in one place", hot[i]);
  });
}

template void HashTable<uint64_t>::CheckInvariants() const;
template void HashTable<uint32_t>::CheckInvariants() const;

}  // namespace dynemb
