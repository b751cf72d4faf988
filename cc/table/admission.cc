#include "cc/table/admission.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "cc/table/number_text.h"
#include "cc/table/owned_items.h"
#include "cc/table/phase.h"
#include "cc/table/scratch.h"
#include "cc/table/staged.h"

namespace dynemb {
namespace {

constexpr size_t kGrain = 2048;

}  // namespace

AdmissionLine AdmissionLine::Merged(const AdmissionLine& a, const AdmissionLine& b) {
  constexpr uint64_t kNothing[kWords] = {};
  AdmissionLine merged(kNothing);
  // Count puts the entry in front, so the last one comes first.
  uint32_t kept[kEntries];
  uint32_t size = 0;
  for (uint32_t e = 0; e < 2 * kEntries && size < kEntries; ++e) {
    const uint32_t entry = (e % 2 == 0 ? a : b).At(e / 2);
    const auto is_same = [entry](uint32_t other) {
      return other >> kCountBits == entry >> kCountBits;
    };
    if (entry != 0 && std::none_of(kept, kept + size, is_same)) kept[size++] = entry;
  }
  while (size-- > 0) merged.Count(kept[size] >> kCountBits, kept[size] & kMostCount);
  return merged;
}

bool AdmissionLine::IsValid(const uint64_t* line) {
  if (line[kWords - 1] >> kUsedOfLastWord != 0) return false;
  const AdmissionLine entries(line);
  bool ended = false;
  for (uint32_t e = 0; e < kEntries; ++e) {
    const uint32_t entry = entries.At(e);
    if (ended && entry != 0) return false;
    ended |= entry == 0;
    if (!ended && (entry & kMostCount) == 0) return false;
    for (uint32_t other = 0; !ended && other < e; ++other) {
      if (entries.At(other) >> kCountBits == entry >> kCountBits) return false;
    }
  }
  return true;
}

Status AdmissionCounters::Init(int64_t lines, int64_t first, int64_t num) {
  DYNEMB_RETURN_IF_ERROR(memory_.Commit(static_cast<size_t>(num) * kLineBytes));
  lines_ = {lines, first, num};
  return Status();
}

Status AdmissionCounters::CheckLines(const uint64_t* saved, int64_t first, int64_t num) {
  for (int64_t line = 0; line < num; ++line) {
    if (!AdmissionLine::IsValid(saved + line * static_cast<int64_t>(kLineWords))) {
      return InvalidArgument("line " + std::to_string(first + line) +
                             " of the admission counters is damaged");
    }
  }
  return Status();
}

void AdmissionCounters::LoadLines(const uint64_t* saved, int64_t num, bool merge, uint64_t* to) {
  const size_t words = static_cast<size_t>(num) * kLineWords;
  if (!merge) std::memcpy(to, saved, words * sizeof(uint64_t));
  for (size_t word = 0; merge && word < words; word += kLineWords) {
    AdmissionLine::Merged(AdmissionLine(to + word), AdmissionLine(saved + word)).Store(to + word);
  }
}

Status AdmissionCounters::Load(const uint64_t* saved, int64_t first, int64_t num, bool merge) {
  DYNEMB_RETURN_IF_ERROR(CheckLines(saved, first, num));
  const int64_t begin = std::max(first, first_line());
  const int64_t end = std::min(first + num, first_line() + num_lines());
  if (begin >= end) return Status();
  LoadLines(saved + (begin - first) * static_cast<int64_t>(kLineWords), end - begin, merge,
            LineAt(static_cast<uint32_t>(begin - first_line())));
  return Status();
}

uint32_t AdmissionCounters::Count(const Place& at, uint32_t times) {
  uint64_t* const line = LineAt(at.line);
  AdmissionLine entries(line);
  const uint32_t count = entries.Count(at.fingerprint, times);
  entries.Store(line);
  return count;
}

bool AdmissionCounters::CountUntil(const Place& at, uint32_t times, uint32_t enough) {
  uint64_t* const line = LineAt(at.line);
  AdmissionLine entries(line);
  const bool reached = entries.CountUntil(at.fingerprint, times, enough);
  entries.Store(line);
  return reached;
}

uint32_t AdmissionCounters::CountOf(const Place& at) const {
  return AdmissionLine(LineAt(at.line)).CountOf(at.fingerprint);
}

void AdmissionCounters::Forget(const Place& at) {
  uint64_t* const line = LineAt(at.line);
  AdmissionLine entries(line);
  if (entries.Forget(at.fingerprint)) entries.Store(line);
}

Status AdmissionRule::Check(const AdmissionOptions& o) {
  if (o.rule == Admit::kFrequency) {
    if (o.times < 1 || o.times > AdmissionCounters::kMostCount) {
      return InvalidArgument("admission_times=" + std::to_string(o.times) +
                             ": must be in [1, 255]");
    }
    if (o.lines < 1 || o.lines > AdmissionCounters::kMostLines) {
      return InvalidArgument("admission_lines=" + std::to_string(o.lines) +
                             ": must be in [1, 2^32)");
    }
    if (o.first_line < 0 || o.num_lines < 1 || o.first_line > o.lines - o.num_lines) {
      return InvalidArgument("admission_first_line=" + std::to_string(o.first_line) +
                             ", admission_num_lines=" + std::to_string(o.num_lines) +
                             ": must be lines of " + std::to_string(o.lines));
    }
  }
  if (o.rule == Admit::kProbability && !(o.probability >= 0 && o.probability <= 1)) {
    return InvalidArgument("admission_probability=" + NumberText(o.probability) +
                           ": must be in [0, 1]");
  }
  return Status();
}

AdmissionDraws AdmissionRule::Draws() const {
  return {Remix(MixKey(seed_ ^ kAdmissionSalt), lookups_ + 1), 1.0 - options_.probability};
}

Status Admission::Init(const AdmissionOptions& options, uint64_t seed) {
  if (options.rule == Admit::kFrequency) {
    DYNEMB_RETURN_IF_ERROR(counters_.Init(options.lines, options.first_line, options.num_lines));
  }
  Configure(options, seed);
  return Status();
}

size_t Admission::Decide(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                         AdmissionCounters::Place* places, bool* admitted) {
  Phase phase("admit");
  return counts() ? DecideByCount(exec, keys, times, n, places, admitted)
                  : DecideByChance(exec, keys, times, n, admitted);
}

size_t Admission::DecideByCount(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                                AdmissionCounters::Place* places, bool* admitted) {
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) places[j] = counters_.Of(keys[j]);
  });
  std::atomic<size_t> total{0};
  // Each line belongs to one worker.
  const SharedScratch<OwnedItems> owned;
  owned->Build(exec, n, [places](size_t j) { return places[j].line; });
  owned->ForWorkers(exec, n, [&](size_t, const uint32_t* j, const uint32_t* end) {
    size_t count = 0;
    RunStaged(
        static_cast<size_t>(end - j), StagedBlock(1),
        [&](size_t i) { counters_.Prefetch(places[j[i]].line); },
        [&](size_t i) {
          admitted[j[i]] = counters_.CountUntil(places[j[i]], times[j[i]], this->times());
          count += admitted[j[i]];
        });
    total.fetch_add(count, std::memory_order_relaxed);
  });
  return total.load();
}

size_t Admission::DecideByChance(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                                 bool* admitted) const {
  std::atomic<size_t> total{0};
  const AdmissionDraws draws = Draws();
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    size_t count = 0;
    for (size_t j = begin; j < end; ++j) {
      admitted[j] = draws.Admits(keys[j], times[j]);
      count += admitted[j];
    }
    total.fetch_add(count, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace dynemb
