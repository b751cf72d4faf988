// Index: the directory and the segments of a table, and how they grow. Row ids go in and out; rows
// themselves are the caller's, who supplies the hashes of their keys.
//
// A segment (64 buckets, 4 KiB) holds the keys whose prefix starts with a given bit string; the
// directory maps the top `depth` bits of a prefix to the segment (extendible hashing). A segment
// that would hold more than max_load of its slots is split in two on the next bit of the prefix; so
// no insert ever pays for more than the segments it fills.
//
// Not thread-safe: the table's lock covers it. Workers of one batch may change different segments
// at the same time.
#ifndef DYNEMB_TABLE_INDEX_H_
#define DYNEMB_TABLE_INDEX_H_

#include <cstdint>
#include <vector>

#include "cc/table/arena.h"
#include "cc/table/bucket.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

class Index {
 public:
  // Where the keys of rows are, for segments that split: their hashes are needed again.
  class RowHashes {
   public:
    virtual ~RowHashes() = default;
    // hashes[i] = MixKey of the key in row rows[i]. The rows were announced to Prefetch shortly
    // before.
    virtual void Read(const RowId* rows, size_t n, uint64_t* hashes) const = 0;
    virtual void Prefetch(const RowId* rows, size_t n) const {
      (void)rows;
      (void)n;
    }
  };

  // Prepares room for `expected_keys`, and address space for up to `max_keys`. 0 < max_load <=
  // kMaxLoad.
  Status Init(uint64_t expected_keys, uint64_t max_keys, double max_load);
  static constexpr double kMaxLoad = 0.95;

  Bucket* buckets() const { return reinterpret_cast<Bucket*>(arena_.data()); }
  Bucket* SegmentBuckets(uint32_t segment) const {
    return buckets() + static_cast<size_t>(segment) * kBucketsPerSegment;
  }
  const uint32_t* directory() const { return directory_.data(); }
  uint32_t depth() const { return depth_; }
  uint32_t SegmentOf(uint32_t prefix) const {
    return directory_[static_cast<uint64_t>(prefix) >> (32 - depth_)];
  }
  uint32_t segments() const { return static_cast<uint32_t>(segment_.size()); }
  uint32_t count(uint32_t segment) const { return segment_[segment].count; }
  uint64_t slots() const { return static_cast<uint64_t>(segments()) * kSlotsPerSegment; }
  size_t bytes() const;

  // Makes room for n keys with these prefixes, which the caller will claim slots for, and counts
  // them as held. segment_of[i] is SegmentOf(prefixes[i]) before and, on success, after. On failure
  // (no memory, or keys whose hashes agree in so many bits that they cannot be parted) nothing is
  // counted, and every key is still found.
  Status Grow(Exec& exec, const uint32_t* prefixes, size_t n, const RowHashes& row_hashes,
              uint32_t* segment_of);

  // A key was counted but found no slot of its own, or gave it up. Atomic: teams may share a
  // segment.
  void Uncount(uint32_t segment) {
    __atomic_fetch_sub(&segment_[segment].count, uint16_t{1}, __ATOMIC_RELAXED);
  }

  // Back to the state after Init.
  Status Clear();

 private:
  struct Segment {
    uint32_t prefix = 0;  // the bits it stands for, at the top
    uint16_t count = 0;   // keys it holds
    uint16_t pending =
        0;              // of the running Grow (saturates; never past a segment's slots otherwise)
    uint8_t depth = 0;  // how many bits
  };

  Status Presize();
  void PresizeRange(uint32_t prefix, uint8_t depth, std::vector<Segment>* out) const;
  Status AddSegments(size_t n);  // whose buckets are still to be cleared
  void ClearSegment(uint32_t segment);
  Status DeepenDirectory(uint32_t depth);
  Status SplitAll(Exec& exec, const std::vector<uint32_t>& overfull, const RowHashes& row_hashes);
  void Redistribute(uint32_t from, uint32_t to, const RowHashes& row_hashes);

  Arena arena_;
  std::vector<uint32_t> directory_;
  std::vector<Segment> segment_;
  uint32_t depth_ = 0;
  uint32_t limit_ = 0;  // keys a segment may hold
  uint64_t expected_keys_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INDEX_H_
