#include "cc/table/insert_plan.h"

#include <atomic>
#include <cstring>

#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr uint32_t kFree = 0xFFFFFFFFu;

}  // namespace

void InsertPlan::FindMissing(const RowId* rows_found, size_t n) {
  positions.Resize(n);
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {  // no branch: it could not be predicted
    positions[count] = static_cast<uint32_t>(i);
    count += rows_found[i] == kNoRow;
  }
  size_ = count;
}

void InsertPlan::BuildOne(uint32_t position, uint64_t hash, const Index& index) {
  SerialExec exec;
  size_ = 1;
  positions.Resize(1)[0] = position;
  hashes.Resize(1)[0] = hash;
  prefixes.Resize(1)[0] = MakeProbe(hash).prefix;
  segment_of.Resize(1)[0] = index.SegmentOf(prefixes[0]);
  Assign(exec);
  rows.Resize(1);
}

void InsertPlan::Assign(Exec& exec) {
  Phase phase("find repeated keys");
  repeats_.clear();
  num_workers_ = NumWorkers(exec, size_);
  if (workers_.size() < num_workers_) workers_.resize(num_workers_);
  first_.Resize(size_);
  std::atomic<bool> repeated{false};
  exec.ParallelFor(num_workers_, 1, [&](size_t begin, size_t end) {
    for (size_t w = begin; w < end; ++w) {
      Worker& worker = workers_[w];
      worker.num_owned = OwnedBy(
          w, num_workers_, size_, [this](size_t j) { return segment_of[j]; },
          worker.owned.Resize(size_));
      if (FindRepeats(&worker)) repeated.store(true, std::memory_order_relaxed);
    }
  });
  if (repeated.load()) RemoveRepeats();
}

// Fills first_ for the worker's keys. Returns whether any repeats.
bool InsertPlan::FindRepeats(Worker* worker) {
  size_t slots = 16;
  while (slots < 2 * worker->num_owned) slots *= 2;
  uint32_t* const seen = worker->seen.Resize(slots);
  std::memset(seen, 0xFF, slots * sizeof(*seen));
  bool repeated = false;
  for (size_t o = 0; o < worker->num_owned; ++o) {
    const uint32_t j = worker->owned[o];
    size_t at = hashes[j] & (slots - 1);
    while (seen[at] != kFree && hashes[seen[at]] != hashes[j]) at = (at + 1) & (slots - 1);
    repeated |= seen[at] != kFree;
    if (seen[at] == kFree) seen[at] = j;
    first_[j] = seen[at];
  }
  return repeated;
}

void InsertPlan::RemoveRepeats() {
  // Everything about distinct keys moves up; first_[j] becomes where j has gone to.
  size_t kept = 0;
  for (size_t j = 0; j < size_; ++j) {
    if (first_[j] != j) {
      repeats_.push_back({positions[j], positions[first_[first_[j]]]});
      first_[j] = kFree;
      continue;
    }
    first_[j] = static_cast<uint32_t>(kept);
    positions[kept] = positions[j];
    hashes[kept] = hashes[j];
    prefixes[kept] = prefixes[j];
    segment_of[kept++] = segment_of[j];
  }
  size_ = kept;
  for (size_t w = 0; w < num_workers_; ++w) {
    Worker& worker = workers_[w];
    size_t owned = 0;
    for (size_t o = 0; o < worker.num_owned; ++o) {
      worker.owned[owned] = first_[worker.owned[o]];
      owned += worker.owned[owned] != kFree;
    }
    worker.num_owned = owned;
  }
}

void InsertPlan::Shrink() {
  positions.Shrink();
  hashes.Shrink();
  prefixes.Shrink();
  segment_of.Shrink();
  rows.Shrink();
  first_.Shrink();
  for (Worker& worker : workers_) {
    worker.owned.Shrink();
    worker.seen.Shrink();
  }
  if (repeats_.capacity() * sizeof(Repeat) > kKeptBytes) std::vector<Repeat>().swap(repeats_);
}

}  // namespace dynemb
