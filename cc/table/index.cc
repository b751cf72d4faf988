#include "cc/table/index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr size_t kSegmentBytes = sizeof(Bucket) * kBucketsPerSegment;
// Keys whose hashes share more leading bits than chance explains would deepen the directory without
// end. Segments differ in depth by two or three at most (the spiral's factor of two, and chance),
// so this bound is far from any real keys.
constexpr uint64_t kDirectoryPerSegment = 256;

// The share of keys whose prefix is below y: the inverse of Spiral, as fractions.
double KeysBelow(double y) {
  constexpr double a = 0.6565;
  return (std::sqrt(a * a + 4 * (1 - a) * y) - a) / (2 * (1 - a));
}

}  // namespace

Status Index::Init(uint64_t expected_keys, uint64_t max_keys, double max_load) {
  limit_ = std::max(1u, static_cast<uint32_t>(max_load * kSlotsPerSegment));
  expected_keys_ = expected_keys;
  // Right after a split a segment is half full, and chance adds a little: four segments where one
  // would do is enough.
  const uint64_t most_segments = 64 + 4 * (max_keys / limit_ + 1);
  DYNEMB_RETURN_IF_ERROR(arena_.Reserve(most_segments * kSegmentBytes, kSegmentBytes));
  return Presize();
}

Status Index::Clear() {
  arena_.Clear();
  return Presize();
}

size_t Index::bytes() const {
  return segments() * (kSegmentBytes + sizeof(Segment)) + directory_.size() * sizeof(uint32_t);
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

Status Index::Presize() {
  const uint64_t bytes = (expected_keys_ / limit_ + 1) * kSegmentBytes;
  if (bytes > std::min(arena_.reserved(), PhysicalMemory())) {
    return ResourceExhausted("an index of " + std::to_string(expected_keys_) + " keys needs " +
                             std::to_string(bytes) + " bytes, more than there is");
  }
  std::vector<Segment> wanted;
  PresizeRange(0, 0, &wanted);
  segment_.clear();
  DYNEMB_RETURN_IF_ERROR(AddSegments(wanted.size()));
  segment_ = std::move(wanted);
  for (uint32_t s = 0; s < segments(); ++s) ClearSegment(s);
  depth_ = 0;
  for (const Segment& s : segment_) depth_ = std::max<uint32_t>(depth_, s.depth);
  directory_.assign(size_t{1} << depth_, 0);
  for (uint32_t s = 0; s < segments(); ++s) {
    const size_t first = static_cast<uint64_t>(segment_[s].prefix) >> (32 - depth_);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(first),
                size_t{1} << (depth_ - segment_[s].depth), s);
  }
  return Status();
}

Status Index::AddSegments(size_t n) {
  const size_t had = segment_.size();
  DYNEMB_RETURN_IF_ERROR(arena_.Commit((had + n) * kSegmentBytes));
  segment_.resize(had + n);
  return Status();
}

void Index::ClearSegment(uint32_t segment) {
  Bucket* buckets = SegmentBuckets(segment);
  for (uint32_t b = 0; b < kBucketsPerSegment; ++b) ClearBucket(&buckets[b]);
}

Status Index::DeepenDirectory(uint32_t depth) {
  if (depth > 32 || (uint64_t{1} << depth) > 4096 + kDirectoryPerSegment * segments()) {
    return ResourceExhausted("the hashes of over " + std::to_string(limit_) +
                             " keys agree in their first " + std::to_string(depth) +
                             " bits: the keys cannot be spread over the index");
  }
  while (depth_ < depth) {
    std::vector<uint32_t> twice(directory_.size() * 2);
    for (size_t i = 0; i < directory_.size(); ++i) twice[2 * i] = twice[2 * i + 1] = directory_[i];
    directory_ = std::move(twice);
    ++depth_;
  }
  return Status();
}

Status Index::Grow(Exec& exec, const uint32_t* prefixes, size_t n, const RowHashes& row_hashes,
                   uint32_t* segment_of) {
  Phase phase("grow the index");
  std::vector<uint32_t> overfull;
  const auto add_pending = [&](size_t i) {
    const uint32_t s = segment_of[i];
    Segment& segment = segment_[s];
    if (segment.pending == UINT16_MAX) return;  // far overfull already
    ++segment.pending;
    if (segment.count + segment.pending == limit_ + 1) overfull.push_back(s);
  };
  for (size_t i = 0; i < n; ++i) add_pending(i);

  std::vector<size_t> displaced;  // the keys whose segments were split in the last round
  bool first_round = true;
  Status status;
  while (!overfull.empty()) {
    status = SplitAll(exec, overfull, row_hashes);
    if (!status.ok()) break;
    for (uint32_t s : overfull) segment_[s].pending = 0;
    std::vector<bool> split(segments());
    for (uint32_t s : overfull) split[s] = true;
    overfull.clear();
    if (first_round) {
      for (size_t i = 0; i < n; ++i) {
        if (split[segment_of[i]]) displaced.push_back(i);
      }
      first_round = false;
    } else {
      displaced.erase(std::remove_if(displaced.begin(), displaced.end(),
                                     [&](size_t i) { return !split[segment_of[i]]; }),
                      displaced.end());
    }
    for (size_t i : displaced) {
      segment_of[i] = SegmentOf(prefixes[i]);
      add_pending(i);
    }
  }
  // Either way nothing stays pending.
  for (size_t i = 0; i < n; ++i) {
    Segment& segment = segment_[segment_of[i]];
    segment.pending = 0;
    if (status.ok()) ++segment.count;
  }
  return status;
}

Status Index::SplitAll(Exec& exec, const std::vector<uint32_t>& overfull,
                       const RowHashes& row_hashes) {
  uint32_t deepest = 0;
  for (uint32_t s : overfull) deepest = std::max<uint32_t>(deepest, segment_[s].depth + 1u);
  if (deepest > depth_) DYNEMB_RETURN_IF_ERROR(DeepenDirectory(deepest));
  const uint32_t first = segments();
  DYNEMB_RETURN_IF_ERROR(AddSegments(overfull.size()));
  {
    Phase phase("fault in memory");
    arena_.Populate(exec, segments() * kSegmentBytes);
  }

  for (size_t j = 0; j < overfull.size(); ++j) {
    Segment& from = segment_[overfull[j]];
    Segment& to = segment_[first + j];
    to.prefix = from.prefix | (1u << (31 - from.depth));
    to.depth = ++from.depth;
    const size_t entry = static_cast<uint64_t>(to.prefix) >> (32 - depth_);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(entry),
                size_t{1} << (depth_ - to.depth), static_cast<uint32_t>(first + j));
  }
  Phase phase("split segments");
  exec.ParallelFor(overfull.size(), 4, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      Redistribute(overfull[j], static_cast<uint32_t>(first + j), row_hashes);
    }
  });
  return Status();
}

// Moves the keys of `from` that now belong to `to`, and rebuilds both.
void Index::Redistribute(uint32_t from, uint32_t to, const RowHashes& row_hashes) {
  RowId rows[kSlotsPerSegment];
  Stamp access[kSlotsPerSegment];
  // The keys are all over the memory; those of the next chunks come while one is placed.
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
      access[n] = stay[b].access[s];
      ++n;
    }
    ClearBucket(&stay[b]);
  }
  OneLane lane;
  const uint32_t bit = 1u << (32 - segment_[to].depth);
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
      const Probe probe = MakeProbe(hashes[c]);
      const bool goes = (probe.prefix & bit) != 0;
      moved += goes;
      Claim(lane, goes ? go : stay, probe, rows[i + c], access[i + c]);
    }
  }
  segment_[to].count = moved;
  segment_[from].count = static_cast<uint16_t>(n - moved);
}

}  // namespace dynemb
