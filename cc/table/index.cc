#include "cc/table/index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"
#include "cc/table/memory_limit.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr size_t kSegmentBytes = sizeof(Bucket) * kBucketsPerSegment;
// The maximal number of entries in a directory: kEntriesAtLeast + kEntriesPerSegment * segments.
// Segments of random keys differ in depth by two or three (the spiral's factor of two, and chance),
// so they need far fewer.
constexpr uint64_t kEntriesPerSegment = 64;
constexpr uint64_t kEntriesAtLeast = 4096;

// The share of keys whose prefix is below y: the inverse of Spiral, as fractions.
double KeysBelow(double y) {
  constexpr double a = 0.6565;
  return (std::sqrt(a * a + 4 * (1 - a) * y) - a) / (2 * (1 - a));
}

}  // namespace

Status Index::Init(uint64_t expected_keys, double max_load, uint64_t salt) {
  limit_ = std::max(1u, static_cast<uint32_t>(max_load * kSlotsPerSegment));
  expected_keys_ = expected_keys;
  salt_ = salt;
  return Clear([] {});
}

Status Index::Clear(FunctionRef<void()> before) {
  const uint64_t bytes = (expected_keys_ / limit_ + 1) * kSegmentBytes;
  if (bytes > PhysicalMemory()) {
    return ResourceExhausted("an index of " + std::to_string(expected_keys_) + " keys needs " +
                             std::to_string(bytes) + " bytes, more than the process may use");
  }
  std::vector<Segment> wanted;
  PresizeRange(0, 0, &wanted);
  uint32_t depth = 0;
  for (const Segment& s : wanted) depth = std::max<uint32_t>(depth, s.depth);
  std::vector<Entries> directories(1);
  directories[0].entries.resize(size_t{1} << depth);
  directories[0].segments = static_cast<uint32_t>(wanted.size());
  std::vector<Directory> views{{directories[0].entries.data(), depth, 0}};
  DYNEMB_RETURN_IF_ERROR(arena_.Commit(wanted.size() * kSegmentBytes));

  before();
  arena_.Clear();
  segment_ = std::move(wanted);
  directories_ = std::move(directories);
  views_ = std::move(views);
  for (uint32_t s = 0; s < segments(); ++s) {
    ClearSegment(s);
    Name(segment_[s], s);
  }
  return Status();
}

size_t Index::bytes() const {
  size_t entries = 0;
  for (const Entries& d : directories_) entries += d.entries.size();
  return segments() * (kSegmentBytes + sizeof(Segment)) + entries * sizeof(uint32_t);
}

// The segments that `expected_keys_` random keys would have split into.
void Index::PresizeRange(uint32_t prefix, uint8_t depth, std::vector<Segment>* out) const {
  const double low = std::ldexp(static_cast<double>(prefix), -32);
  const double keys = static_cast<double>(expected_keys_) *
                      (KeysBelow(low + std::ldexp(1.0, -depth)) - KeysBelow(low));
  if (keys + 2 * std::sqrt(keys) > limit_ && depth < 32) {
    const auto next = static_cast<uint8_t>(depth + 1);
    PresizeRange(prefix, next, out);
    PresizeRange(prefix | (1u << (31 - depth)), next, out);
    return;
  }
  Segment segment;
  segment.prefix = prefix;
  segment.depth = depth;
  out->push_back(segment);
}

Status Index::AddSegments(size_t n) {
  const size_t had = segment_.size();
  if (had + n > Directory::kInner) return ResourceExhausted("the index cannot have more segments");
  DYNEMB_RETURN_IF_ERROR(arena_.Commit((had + n) * kSegmentBytes));
  segment_.resize(had + n);
  return Status();
}

void Index::ClearSegment(uint32_t segment) {
  Bucket* buckets = SegmentBuckets(segment);
  for (uint32_t b = 0; b < kBucketsPerSegment; ++b) ClearBucket(&buckets[b]);
}

void Index::Name(const Segment& segment, uint32_t entry) {
  const uint32_t depth = views_[segment.directory].depth;
  const size_t first = static_cast<uint64_t>(segment.prefix) >> (32 - depth);
  std::fill_n(directories_[segment.directory].entries.begin() + static_cast<ptrdiff_t>(first),
              size_t{1} << (depth - segment.depth), entry);
}

Status Index::DoubleDirectory(uint32_t s) {
  Segment& segment = segment_[s];
  Entries& directory = directories_[segment.directory];
  Directory& view = views_[segment.directory];
  if (segment.depth < view.depth) return Status();
  const size_t most = kEntriesAtLeast + kEntriesPerSegment * directory.segments;
  if (view.depth == 32 || 2 * directory.entries.size() > most) return AddInnerDirectory(s);
  std::vector<uint32_t> twice(directory.entries.size() * 2);
  for (size_t i = 0; i < twice.size(); ++i) twice[i] = directory.entries[i / 2];
  directory.entries = std::move(twice);
  view.entries = directory.entries.data();
  ++view.depth;
  return Status();
}

Status Index::AddInnerDirectory(uint32_t s) {
  Segment& segment = segment_[s];
  const uint32_t level = views_[segment.directory].level + 1;
  if (level >= kMostLevels) return Internal("the index has too many levels");
  // Both entries name the segment, so it can be split without doubling this directory.
  Entries directory{std::vector<uint32_t>(2, s), 1};
  const auto number = static_cast<uint32_t>(directories_.size());
  directories_.reserve(number + 1);
  views_.reserve(number + 1);
  views_.push_back({directory.entries.data(), 1, level});
  directories_.push_back(std::move(directory));

  Name(segment, Directory::kInner + number - 1);
  --directories_[segment.directory].segments;
  segment.directory = number;
  segment.prefix = 0;
  segment.depth = 0;
  return Status();
}

Status Index::Grow(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                   const OwnedItems& owned, uint32_t* segment_of) {
  Phase phase("grow the index");
  DYNEMB_RETURN_IF_ERROR(
      SplitUntil(exec, hashes, n, row_hashes, owned, limit_, nullptr, segment_of));
  owned.ForWorkers(exec, n, [&](size_t, const uint32_t* i, const uint32_t* end) {
    for (; i != end; ++i) {
      Segment& segment = segment_[segment_of[*i]];
      segment.pending = 0;
      ++segment.count;
    }
  });
  return Status();
}

Status Index::MakeSlots(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                        const OwnedItems& owned, const Leaving& leaving, uint32_t* segment_of) {
  DYNEMB_RETURN_IF_ERROR(
      SplitUntil(exec, hashes, n, row_hashes, owned, kSlotsPerSegment, &leaving, segment_of));
  owned.ForWorkers(exec, n, [&](size_t, const uint32_t* i, const uint32_t* end) {
    for (; i != end; ++i) segment_[segment_of[*i]].pending = 0;
  });
  return Status();
}

Status Index::SplitUntil(Exec& exec, const uint64_t* hashes, size_t n, const RowHashes& row_hashes,
                         const OwnedItems& owned, uint32_t limit, const Leaving* leaving,
                         uint32_t* segment_of) {
  // Resets `pending` if this fails.
  struct Pending {
    std::vector<Segment>& segment;
    const uint32_t* of;
    size_t n;
    ~Pending() {
      for (size_t i = 0; i < n; ++i) segment[of[i]].pending = 0;
    }
  } pending{segment_, segment_of, n};
  // A worker's segments. Those that split off one of them are its segments, too.
  struct Work {
    std::vector<uint32_t> overfull;
    std::vector<uint32_t> displaced;  // the keys whose segments were split in the previous round
  };
  std::vector<Work> work(owned.num_workers());
  const auto add_pending = [&](uint32_t i, Work* w) {
    const uint32_t s = segment_of[i];
    Segment& segment = segment_[s];
    if (segment.pending == UINT16_MAX) return;  // far overfull already
    ++segment.pending;
    const uint32_t keys = segment.count + uint32_t{segment.pending};
    if (keys <= limit) return;
    // Once per segment, even if it already holds more than the limit.
    if (keys == limit + 1 || segment.pending == 1) w->overfull.push_back(s);
  };
  const auto fits = [&](uint32_t s) {
    const Segment& segment = segment_[s];
    if (leaving == nullptr || segment.pending == UINT16_MAX) return false;
    const uint32_t left = (*leaving)(s);
    return segment.count + (segment.pending > left ? segment.pending - left : 0u) <= limit;
  };
  owned.ForWorkers(exec, n, [&](size_t w, const uint32_t* i, const uint32_t* end) {
    for (; i != end; ++i) add_pending(*i, &work[w]);
  });
  for (bool first_round = true;; first_round = false) {
    std::vector<uint32_t> overfull;
    for (Work& w : work) {
      overfull.insert(overfull.end(), w.overfull.begin(), w.overfull.end());
      w.overfull.clear();
    }
    // In this order for any number of workers: it determines the numbers of new segments.
    std::sort(overfull.begin(), overfull.end());
    overfull.erase(std::remove_if(overfull.begin(), overfull.end(), fits), overfull.end());
    if (overfull.empty()) {
      pending.n = 0;
      return Status();
    }
    std::vector<bool> split(segments());
    for (uint32_t s : overfull) split[s] = true;
    DYNEMB_RETURN_IF_ERROR(SplitAll(exec, overfull, row_hashes));
    for (uint32_t s : overfull) segment_[s].pending = 0;
    owned.ForWorkers(exec, n, [&](size_t w, const uint32_t* i, const uint32_t* end) {
      std::vector<uint32_t>& displaced = work[w].displaced;
      const auto stays = [&](uint32_t j) { return !split[segment_of[j]]; };
      if (first_round) {
        std::remove_copy_if(i, end, std::back_inserter(displaced), stays);
      } else {
        displaced.erase(std::remove_if(displaced.begin(), displaced.end(), stays), displaced.end());
      }
      for (uint32_t j : displaced) segment_of[j] = SegmentOf(hashes[j]);
      for (uint32_t j : displaced) add_pending(j, &work[w]);
    });
  }
}

Status Index::SplitAll(Exec& exec, const std::vector<uint32_t>& overfull,
                       const RowHashes& row_hashes) {
  const uint32_t first = segments();
  DYNEMB_RETURN_IF_ERROR(AddSegments(overfull.size()));
  struct Added {
    std::vector<Segment>* segment;
    size_t had;
    bool kept = false;
    ~Added() {
      if (!kept) segment->resize(had);
    }
  } added{&segment_, first};
  // If a later one fails, a directory that is larger than necessary does no harm.
  for (uint32_t s : overfull) DYNEMB_RETURN_IF_ERROR(DoubleDirectory(s));
  added.kept = true;
  {
    Phase phase("fault in memory");
    arena_.Prefault(exec, segments() * kSegmentBytes);
  }

  for (size_t j = 0; j < overfull.size(); ++j) {
    Segment& from = segment_[overfull[j]];
    Segment& to = segment_[first + j];
    to.prefix = from.prefix | (1u << (31 - from.depth));
    to.directory = from.directory;
    to.depth = ++from.depth;
    ++directories_[to.directory].segments;
    Name(to, static_cast<uint32_t>(first + j));
  }
  Phase phase("split segments");
  exec.ParallelFor(overfull.size(), 4, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      Redistribute(overfull[j], static_cast<uint32_t>(first + j), row_hashes);
    }
  });
  return Status();
}

// Moves the keys of `from` that now belong to `to`, and rebuilds both segments.
void Index::Redistribute(uint32_t from, uint32_t to, const RowHashes& row_hashes) {
  RowId rows[kSlotsPerSegment];
  Score scores[kSlotsPerSegment];
  // The keys are scattered in memory, so the keys of the next chunks are prefetched while one chunk
  // is placed.
  constexpr size_t kChunk = 16;
  constexpr size_t kChunksAhead = 2;
  uint64_t hashes[kChunk];
  size_t n = 0;
  Bucket* stay = SegmentBuckets(from);
  Bucket* go = SegmentBuckets(to);
  ClearSegment(to);
  for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      if (stay[b].row[s] == kNoRow) continue;
      rows[n] = stay[b].row[s];
      scores[n] = stay[b].score[s];
      ++n;
    }
    ClearBucket(&stay[b]);
  }
  OneLane lane;
  const uint32_t bit = 1u << (32 - segment_[to].depth);
  const uint32_t level = views_[segment_[to].directory].level;
  uint16_t moved = 0;
  const auto prefetch = [&](size_t i) {
    if (i < n) row_hashes.Prefetch(rows + i, std::min(kChunk, n - i));
  };
  for (size_t ahead = 0; ahead < kChunksAhead; ++ahead) prefetch(ahead * kChunk);
  for (size_t i = 0; i < n; i += kChunk) {
    prefetch(i + kChunksAhead * kChunk);
    const size_t m = std::min(kChunk, n - i);
    row_hashes.Read(rows + i, m, hashes);
    for (size_t c = 0; c < m; ++c) {
      const bool goes = (PrefixOf(hashes[c], level) & bit) != 0;
      moved += goes;
      Claim(lane, goes ? go : stay, MakeProbe(hashes[c]), rows[i + c], scores[i + c]);
    }
  }
  segment_[to].count = moved;
  segment_[from].count = static_cast<uint16_t>(n - moved);
}

}  // namespace dynemb
