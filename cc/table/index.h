// Index: the directories and segments of a table, and their growth. The index stores row ids. The
// caller owns the rows, and supplies the hashes of their keys.
//
// A segment (64 buckets, 4 KiB) holds the keys whose prefix starts with a given bit string. The
// directory maps the top `depth` bits of a prefix to the segment (extendible hashing). A segment
// that would hold more than max_load of its slots is split in two by the next bit of the prefix, so
// an insert pays only for the segments that it fills.
//
// Keys that agree in many bits. A directory has at most about 64 entries per segment. If a split
// would need a larger directory, the segment gets an inner directory instead, which separates its
// keys by the bits of another mix of their hashes (PrefixOf):
//
//   level 0   │ 3 │ 0 │ inner 0 │ 7 │ ...
//                          │
//   level 1            │ 5 │ 5 │ 2 │ 6 │
//
// The hash is a 64-bit bijection, so of the keys that agree in the bits of one level, only a few
// also agree in the bits of the next. Every key therefore finds a place, whatever its hash, and one
// level of inner directories is usually enough. kMostLevels is never reached.
//
// Not thread-safe: the table's lock protects it. Workers of one batch may change different segments
// concurrently.
#ifndef DYNEMB_TABLE_INDEX_H_
#define DYNEMB_TABLE_INDEX_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cc/table/arena.h"
#include "cc/table/bucket.h"
#include "cc/table/exec.h"
#include "cc/table/function_ref.h"
#include "cc/table/owned_items.h"
#include "cc/table/status.h"

namespace dynemb {

class Index {
 public:
  // Gives the index the hashes of the keys in rows, which it needs to split segments.
  class RowHashes {
   public:
    virtual ~RowHashes() = default;
    // hashes[i] = the hash of the key in row rows[i]. Prefetch was called for these rows shortly
    // before.
    virtual void Read(const RowId* rows, size_t n, uint64_t* hashes) const = 0;
    virtual void Prefetch(const RowId* rows, size_t n) const {
      (void)rows;
      (void)n;
    }
  };

  // Prepares room for `expected_keys`. Keys are hashed with `salt`.
  Status Init(uint64_t expected_keys, double max_load, uint64_t salt);
  static constexpr double kMinLoad = 0.05, kMaxLoad = 0.95;  // of max_load

  // Addresses of buckets and directories are valid until the next Grow, MakeSlots or Clear.
  Bucket* buckets() const { return reinterpret_cast<Bucket*>(arena_.data()); }
  Bucket* SegmentBuckets(uint32_t segment) const {
    return buckets() + static_cast<size_t>(segment) * kBucketsPerSegment;
  }
  // The view for the bucket algorithm; `rows` and `stride` are the caller's.
  template <class K>
  TableView<K> View(char* rows, uint64_t stride) const {
    return {buckets(), views_[0], views_.data() + 1, salt_, rows, stride};
  }
  uint64_t HashOf(uint64_t key) const { return HashKey(key, salt_); }
  uint32_t SegmentOf(uint64_t hash) const {
    const uint32_t entry = views_[0].Entry(PrefixOf(hash));
    return entry < Directory::kInner ? entry : InnerSegmentOf(views_.data() + 1, entry, hash);
  }
  uint32_t segments() const { return static_cast<uint32_t>(segment_.size()); }
  uint32_t count(uint32_t segment) const { return segment_[segment].count; }
  uint64_t slots() const { return static_cast<uint64_t>(segments()) * kSlotsPerSegment; }
  // The number of inner directories.
  size_t inner_directories() const { return views_.size() - 1; }
  size_t bytes() const;

  // Makes room for n keys with these hashes, and counts them as held; the caller then claims their
  // slots. segment_of[i] is SegmentOf(hashes[i]), before the call and after it. If the call fails,
  // or throws std::bad_alloc, no key is counted, and every key is still found.
  // `owned` has the items [0, n), and maybe others, by segment_of[i] >> OwnerShift(). The numbers
  // of new segments do not depend on the number of its workers.
  Status Grow(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
              const OwnedItems& owned, uint32_t* segment_of);
  // The number of keys of a segment that will give up their slots.
  using Leaving = std::function<uint32_t(uint32_t segment)>;
  // The same, but the keys are not counted. Afterwards, each segment has slots for all keys that it
  // holds and that do not leave it, and for the new keys that belong to it.
  Status MakeSlots(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                   const OwnedItems& owned, const Leaving& leaving, uint32_t* segment_of);
  // Neighboring segments have one worker, because their counters share cache lines. If there are
  // few segments, each has its own.
  int OwnerShift() const { return segments() < 4096 ? 0 : 4; }
  // A key has given up its slot. Atomic: teams may share a segment.
  void Uncount(uint32_t segment) {
    __atomic_fetch_sub(&segment_[segment].count, uint16_t{1}, __ATOMIC_RELAXED);
  }
  // A key that was not passed to Grow gets a free slot.
  void Count(uint32_t segment) { ++segment_[segment].count; }

  // Restores the state after Init. If it fails, or throws std::bad_alloc, nothing has changed.
  // `before` is called when nothing can fail anymore, and before anything changes.
  Status Clear(FunctionRef<void()> before);

 private:
  struct Segment {
    uint32_t prefix = 0;     // the top `depth` bits of its keys; the others are 0
    uint32_t directory = 0;  // its directory: 0, or 1 + the number of an inner one
    uint16_t count = 0;      // keys that it holds
    uint16_t pending = 0;    // keys of the running Grow; saturates
    uint8_t depth = 0;
  };
  struct Entries {
    std::vector<uint32_t> entries;
    uint32_t segments = 0;  // the number of segments in it
  };
  static constexpr uint32_t kMostLevels = 16;

  // Splits segments until each has at most `limit` keys: the keys that it holds, minus the keys
  // that leave it (null: none), plus the new keys that belong to it. The n new keys of all segments
  // stay pending in their segments; the caller resets `pending`.
  Status SplitUntil(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                    const OwnedItems& owned, uint32_t limit, const Leaving* leaving,
                    uint32_t* segment_of);
  void PresizeRange(uint32_t prefix, uint8_t depth, std::vector<Segment>* out) const;
  Status AddSegments(size_t n);  // does not clear their buckets
  void ClearSegment(uint32_t segment);
  // Sets the directory entries of the segment's prefix.
  void Name(const Segment& segment, uint32_t entry);
  // Ensures that the segment has at least two entries in its directory, so that it can be split.
  // Doubles the directory or, where that would be too large, gives the segment an inner directory.
  Status DoubleDirectory(uint32_t segment);
  Status AddInnerDirectory(uint32_t segment);
  Status SplitAll(Exec& exec, const std::vector<uint32_t>& overfull, const RowHashes& row_hashes);
  void Redistribute(uint32_t from, uint32_t to, const RowHashes& row_hashes);

  Arena arena_;
  std::vector<Entries> directories_;  // [0] is the directory of level 0; inner ones follow
  std::vector<Directory> views_;      // of directories_
  std::vector<Segment> segment_;
  uint32_t limit_ = 0;  // the keys that a segment may hold
  uint64_t expected_keys_ = 0;
  uint64_t salt_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INDEX_H_
