// Index: the directories and the segments of a table, and how they grow. Row ids go in and out;
// rows themselves are the caller's, who supplies the hashes of their keys.
//
// A segment (64 buckets, 4 KiB) holds the keys whose prefix starts with a given bit string; the
// directory maps the top `depth` bits of a prefix to the segment (extendible hashing). A segment
// that would hold more than max_load of its slots is split in two on the next bit of the prefix; so
// no insert ever pays for more than the segments it fills.
//
// Keys that agree in many bits. A directory has at most some 64 entries for each of its segments.
// A segment that could only be split by a larger one gets a directory of its own instead, an inner
// one, which tells its keys apart by the bits of another mix of their hashes (PrefixOf):
//
//   level 0   │ 3 │ 0 │ inner 0 │ 7 │ ...
//                          │
//   level 1            │ 5 │ 5 │ 2 │ 6 │
//
// A hash is 64 bits of a bijection, so keys that agree in the bits that a level uses cannot agree
// in those of the next as well, but for a few. So every key finds a place, whatever its hash, after
// one directory in the usual case; kMostLevels is never reached.
//
// Not thread-safe: the table's lock covers it. Workers of one batch may change different segments
// at the same time.
#ifndef DYNEMB_TABLE_INDEX_H_
#define DYNEMB_TABLE_INDEX_H_

#include <cstdint>
#include <functional>
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
    // hashes[i] = the hash of the key in row rows[i]. The rows were announced to Prefetch shortly
    // before.
    virtual void Read(const RowId* rows, size_t n, uint64_t* hashes) const = 0;
    virtual void Prefetch(const RowId* rows, size_t n) const {
      (void)rows;
      (void)n;
    }
  };

  // Prepares room for `expected_keys`. 0 < max_load <= kMaxLoad. Keys are hashed with `salt`.
  Status Init(uint64_t expected_keys, double max_load, uint64_t salt);
  static constexpr double kMaxLoad = 0.95;

  // Addresses of buckets and directories are good until the next Grow or Clear.
  Bucket* buckets() const { return reinterpret_cast<Bucket*>(arena_.data()); }
  Bucket* SegmentBuckets(uint32_t segment) const {
    return buckets() + static_cast<size_t>(segment) * kBucketsPerSegment;
  }
  // The index as the bucket algorithm sees it; the rest is the caller's.
  template <class K>
  TableView<K> View(char* rows, uint64_t stride, StampOrder order = {}) const {
    return {buckets(), views_[0], views_.data() + 1, salt_, rows, stride, order};
  }
  uint64_t HashOf(uint64_t key) const { return HashKey(key, salt_); }
  uint32_t SegmentOf(uint64_t hash) const {
    const uint32_t entry = views_[0].Entry(PrefixOf(hash));
    return entry < Directory::kInner ? entry : InnerSegmentOf(views_.data() + 1, entry, hash);
  }
  uint32_t segments() const { return static_cast<uint32_t>(segment_.size()); }
  uint32_t count(uint32_t segment) const { return segment_[segment].count; }
  uint64_t slots() const { return static_cast<uint64_t>(segments()) * kSlotsPerSegment; }
  // Directories inside others.
  size_t inner_directories() const { return views_.size() - 1; }
  size_t bytes() const;

  // Makes room for n keys with these hashes, which the caller will claim slots for, and counts them
  // as held. segment_of[i] is SegmentOf(hashes[i]) before and after. If it fails, or throws for
  // want of memory, nothing is counted, and every key is still found.
  Status Grow(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
              uint32_t* segment_of);
  // How many of the keys that a segment holds will give their slots up.
  using Leaving = std::function<uint32_t(uint32_t segment)>;
  // The same for keys that are not counted: afterwards each of their segments has slots for those
  // of them that belong to it, beside the keys that it holds and that do not leave it.
  Status MakeSlots(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                   const Leaving& leaving, uint32_t* segment_of);
  // A key gave its slot up. Atomic: teams may share a segment.
  void Uncount(uint32_t segment) {
    __atomic_fetch_sub(&segment_[segment].count, uint16_t{1}, __ATOMIC_RELAXED);
  }
  // A key that Grow was not asked about gets one of the slots that are free.
  void Count(uint32_t segment) { ++segment_[segment].count; }

  // Back to the state after Init. If it fails, or throws for want of memory, nothing has changed.
  Status Clear();

 private:
  struct Segment {
    uint32_t prefix = 0;     // the bits it stands for, at the top
    uint32_t directory = 0;  // that names it: 0, or 1 + an inner one's number
    uint16_t count = 0;      // keys it holds
    uint16_t pending = 0;    // of the running Grow; saturates
    uint8_t depth = 0;       // how many bits
  };
  struct Entries {
    std::vector<uint32_t> entries;
    uint32_t segments = 0;  // that it names
  };
  static constexpr uint32_t kMostLevels = 16;

  // Splits segments until each has at most `limit` keys: those that it holds and those of the n,
  // less those that leave it (null: none). The n stay pending in their segments: the caller resets.
  Status SplitUntil(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                    uint32_t limit, const Leaving* leaving, uint32_t* segment_of);
  void PresizeRange(uint32_t prefix, uint8_t depth, std::vector<Segment>* out) const;
  Status AddSegments(size_t n);  // whose buckets are still to be cleared
  void ClearSegment(uint32_t segment);
  // Sets the entries that stand for the segment's bits.
  void Name(const Segment& segment, uint32_t entry);
  // Makes its directory tell the keys of a segment apart by one bit more; or gives it a directory
  // of its own.
  Status DoubleDirectory(uint32_t segment);
  Status AddInnerDirectory(uint32_t segment);
  Status SplitAll(Exec& exec, const std::vector<uint32_t>& overfull, const RowHashes& row_hashes);
  void Redistribute(uint32_t from, uint32_t to, const RowHashes& row_hashes);

  Arena arena_;
  std::vector<Entries> directories_;  // [0] is that of level 0, then the inner ones
  std::vector<Directory> views_;      // of directories_
  std::vector<Segment> segment_;
  uint32_t limit_ = 0;  // keys a segment may hold
  uint64_t expected_keys_ = 0;
  uint64_t salt_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INDEX_H_
