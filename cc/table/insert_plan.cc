#include "cc/table/insert_plan.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr uint32_t kFree = OwnedItems::kNone;
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
  chosen_.Resize((n + kSelectPart - 1) / kSelectPart);
  owned_.Reserve(exec, n);
  if (seen_.size() < NumWorkers(exec, n)) seen_.resize(NumWorkers(exec, n));
  for (Seen& seen : seen_) seen.Resize(SetSlots(n));
}

void InsertPlan::Assign(Exec& exec, const Index& index) {
  Phase phase("find repeated keys");
  repeats_.clear();
  const int shift = index.OwnerShift();
  owned_.Build(exec, size_, [&](size_t j) { return segment_of[j] >> shift; });
  if (seen_.size() < owned_.num_workers()) seen_.resize(owned_.num_workers());
  first_.Resize(size_);
  std::atomic<bool> repeated{false};
  owned_.ForWorkers(exec, size_, [&](size_t worker, const uint32_t*, const uint32_t*) {
    if (FindRepeats(worker)) repeated.store(true, std::memory_order_relaxed);
  });
  if (repeated.load()) RemoveRepeats();
}

// Fills first_ for the worker's keys. Returns whether any key repeats.
bool InsertPlan::FindRepeats(size_t worker) {
  const size_t slots = SetSlots(static_cast<size_t>(owned_.end(worker) - owned_.begin(worker)));
  seen_[worker].Resize(slots);
  // Only few of the distinct hashes that collide in the slots of one mix also collide in the slots
  // of the next. Two 64-bit hashes that differ cannot agree in all mixes that this tries.
  bool repeated = false;
  for (uint64_t mix = 0; !TryFindRepeats(worker, slots, mix, &repeated); ++mix) {
  }
  return repeated;
}

bool InsertPlan::TryFindRepeats(size_t worker, size_t slots, uint64_t mix, bool* repeated) {
  constexpr uint64_t kLastMix = 8;
  // At most half of the slots are taken, so random hashes need less than one extra step per key.
  size_t steps_left = mix == kLastMix ? SIZE_MAX : 4 * slots + 64;
  uint32_t* const seen = seen_[worker].get();
  std::memset(seen, 0xFF, slots * sizeof(*seen));
  bool any = false;
  for (const uint32_t* owned = owned_.begin(worker); owned != owned_.end(worker); ++owned) {
    const uint32_t j = *owned;
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
  owned_.Renumber(first_.get());
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
  owned_.Shrink();
  for (Seen& seen : seen_) seen.Shrink();
  if (repeats_.capacity() * sizeof(Repeat) > kKeptBytes) std::vector<Repeat>().swap(repeats_);
}

}  // namespace dynemb
