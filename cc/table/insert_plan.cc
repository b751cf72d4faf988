#include "cc/table/insert_plan.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr uint32_t kFree = 0xFFFFFFFFu;
// The keys of a worker may agree in the mixes that directories use, which have lower numbers.
constexpr uint64_t kFirstMix = 64;

// The number of slots of a set of n keys, at most half of which are taken.
size_t SetSlots(size_t n) {
  size_t slots = 16;
  while (slots < 2 * n) slots *= 2;
  return slots;
}

}  // namespace

void InsertPlan::Reserve(const Exec& exec, size_t n) {
  positions.Resize(n);
  hashes.Resize(n);
  segment_of.Resize(n);
  rows.Resize(n);
  first_.Resize(n);
  repeats_.reserve(n);
  const size_t workers = NumWorkers(exec, n);
  if (workers_.size() < workers) workers_.resize(workers);
  for (Worker& worker : workers_) {
    worker.owned.Resize(n);
    worker.seen.Resize(SetSlots(n));
  }
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

// Fills first_ for the worker's keys. Returns whether any key repeats.
bool InsertPlan::FindRepeats(Worker* worker) {
  const size_t slots = SetSlots(worker->num_owned);
  worker->seen.Resize(slots);
  // Only few of the distinct hashes that collide in the slots of one mix also collide in the slots
  // of the next. Two 64-bit hashes that differ cannot agree in all mixes that this tries.
  bool repeated = false;
  for (uint64_t mix = 0; !TryFindRepeats(worker, slots, mix, &repeated); ++mix) {
  }
  return repeated;
}

bool InsertPlan::TryFindRepeats(Worker* worker, size_t slots, uint64_t mix, bool* repeated) {
  constexpr uint64_t kLastMix = 8;
  // At most half of the slots are taken, so random hashes need less than one extra step per key.
  size_t steps_left = mix == kLastMix ? SIZE_MAX : 8 * worker->num_owned + 64;
  uint32_t* const seen = worker->seen.get();
  std::memset(seen, 0xFF, slots * sizeof(*seen));
  bool any = false;
  for (size_t o = 0; o < worker->num_owned; ++o) {
    const uint32_t j = worker->owned[o];
    const uint64_t hash = hashes[j];
    size_t at = hash;
    if (mix != 0) at = Remix(hash, kFirstMix + mix);
    at &= slots - 1;
    while (seen[at] != kFree && hashes[seen[at]] != hash) {
      at = (at + 1) & (slots - 1);
      if (--steps_left == 0) return false;
    }
    any |= seen[at] != kFree;
    if (seen[at] == kFree) seen[at] = j;
    first_[j] = seen[at];
  }
  *repeated = any;
  return true;
}

template <class Keeps>
void InsertPlan::Compact(const Keeps& keeps) {
  // first_[j] becomes the new number of key j.
  size_t kept = 0;
  for (size_t j = 0; j < size_; ++j) {
    if (!keeps(j)) {
      first_[j] = kFree;
      continue;
    }
    first_[j] = static_cast<uint32_t>(kept);
    positions[kept] = positions[j];
    hashes[kept] = hashes[j];
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

void InsertPlan::RemoveRepeats() {
  Compact([this](size_t j) {
    if (first_[j] == j) return true;
    // The number of a repeated key's first occurrence is final already.
    repeats_.push_back({positions[j], positions[first_[first_[j]]]});
    return false;
  });
}

void InsertPlan::Keep(const bool* kept) {
  // Before the positions move.
  size_t left = 0;
  for (const Repeat& r : repeats_) {
    if (kept[NumberAt(r.first)]) repeats_[left++] = r;
  }
  repeats_.resize(left);
  Compact([kept](size_t j) { return kept[j]; });
}

void InsertPlan::Shrink() {
  positions.Shrink();
  hashes.Shrink();
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
