#include <algorithm>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"
#include "cc/table/staged.h"

namespace dynemb {

template <class K>
template <class Fn>
void HashTable<K>::ForSlots(Exec& exec, const RowId* rows, size_t n, const Fn& fn) const {
  const TableView<K> view = View();
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    struct Path {
      Bucket* segment;
      uint32_t home;
    };
    StagedRing<Path, 3> ring;
    const auto fetch_key = [&](size_t j) { PrefetchLine(view.RowAt(rows[begin + j])); };
    const auto fetch_bucket = [&](size_t j) {
      const uint64_t hash = view.HashOf(view.KeyAt(rows[begin + j]));
      ring[j] = {view.SegmentBuckets(view.SegmentOf(hash)), MakeProbe(hash).home};
      PrefetchLine(ring[j].segment + ring[j].home);
    };
    const auto visit = [&](size_t j) {
      // By row id: no need to compare keys.
      for (uint32_t step = 0; step < kBucketsPerSegment; ++step) {
        Bucket* bucket = OnPath(ring[j].segment, ring[j].home, step);
        const RowId* at = std::find(bucket->row, bucket->row + kSlotsPerBucket, rows[begin + j]);
        if (at == bucket->row + kSlotsPerBucket) continue;
        fn(begin + j, &bucket->score[at - bucket->row]);
        break;
      }
    };
    RunStaged(end - begin, kMostStaged, fetch_key, fetch_bucket, visit);
  });
}

template <class K>
void HashTable<K>::ReadScores(Exec& exec, const RowId* rows, size_t n, Score* scores) const {
  // Other threads may be touching the slots at the same time (Find).
  ForSlots(exec, rows, n, [scores](size_t i, const Score* score) {
    scores[i] = __atomic_load_n(score, __ATOMIC_RELAXED);
  });
}

template <class K>
Score HashTable<K>::ScoreOf(RowId row) const {
  SerialExec exec;
  Score score = 0;
  ReadScores(exec, &row, 1, &score);
  return score;
}

template <class K>
void HashTable<K>::WriteScores(Exec& exec, const RowId* rows, size_t n,
                               FunctionRef<Score(size_t i)> score) {
  ForSlots(exec, rows, n, [&](size_t i, Score* at) { *at = score(i); });
}

template <class K>
void HashTable<K>::FindQuietly(Exec& exec, KeySpan keys, const Expired& expired,
                               RowId* rows) const {
  FindRows(exec, keys.As<K>(), keys.size(), Touch{}, expired, Counts::kNothing, rows);
}

template <class K>
size_t HashTable<K>::FindHeld(Exec& exec, KeySpan keys, BatchScratch* scratch) const {
  const size_t n = keys.size();
  RowId* const rows = scratch->rows.Resize(n);
  FindQuietly(exec, keys, ExpiredAt(0), rows);
  uint32_t* const positions = scratch->positions.Resize(n);
  size_t held = 0;
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] == kNoRow) continue;
    positions[held] = static_cast<uint32_t>(i);
    rows[held++] = rows[i];
  }
  return held;
}

template <class K>
void HashTable<K>::Scores(Exec& exec, KeySpan keys, int64_t* scores) const {
  const ScratchLease scratch;
  const size_t held = FindHeld(exec, keys, scratch.get());
  std::fill_n(scores, keys.size(), -1);
  ForSlots(exec, scratch->rows.get(), held, [&](size_t h, const Score* score) {
    scores[scratch->positions[h]] = PublicScore(__atomic_load_n(score, __ATOMIC_RELAXED));
  });
  ForCold(keys, [&](size_t i, const ColdRow& row) { scores[i] = PublicScore(row.times.score); });
}

template <class K>
Status HashTable<K>::SetScores(Exec& exec, KeySpan keys, const Score* scores) {
  const size_t n = keys.size();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(CheckScores(scoring_, scores, n));
  DYNEMB_RETURN_IF_ERROR(WarmRows(exec, keys));
  const ScratchLease scratch;
  const size_t held = FindHeld(exec, keys, scratch.get());
  // In the order of the batch, by one thread, so that the last of repeated keys wins.
  SerialExec serial;
  WriteScores(serial, scratch->rows.get(), held,
              [&](size_t h) { return scores[scratch->positions[h]]; });
  return Status();
}

template <class K>
Status HashTable<K>::AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) {
  DYNEMB_RETURN_IF_ERROR(CheckBatch(keys.size()));
  const Touch touch = scoring_.Lookup(0, true);
  if (touch.kind != Touch::Kind::kCount) return Status();
  DYNEMB_RETURN_IF_ERROR(WarmRows(exec, keys));
  const ScratchLease scratch;
  const size_t held = FindHeld(exec, keys, scratch.get());
  ForSlots(exec, scratch->rows.get(), held,
           [&](size_t h, Score* score) { CountSlot(touch, counts[scratch->positions[h]], score); });
  return Status();
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                                            \
  template void HashTable<K>::Scores(Exec&, KeySpan, int64_t*) const;                    \
  template Status HashTable<K>::SetScores(Exec&, KeySpan, const Score*);                 \
  template Status HashTable<K>::AddCounts(Exec&, KeySpan, const uint32_t*);              \
  template void HashTable<K>::ReadScores(Exec&, const RowId*, size_t, Score*) const;     \
  template void HashTable<K>::FindQuietly(Exec&, KeySpan, const Expired&, RowId*) const; \
  template Score HashTable<K>::ScoreOf(RowId) const;                                     \
  template void HashTable<K>::WriteScores(Exec&, const RowId*, size_t, FunctionRef<Score(size_t)>)
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
