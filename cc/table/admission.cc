#include "cc/table/admission.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "cc/table/phase.h"
#include "cc/table/workers.h"

namespace dynemb {
namespace {

constexpr uint32_t kCountBits = 8;
constexpr uint32_t kEntryBits = 22;
constexpr uint32_t kEntries = AdmissionCounters::kEntries;
constexpr uint64_t kEntryMask = (uint64_t{1} << kEntryBits) - 1;
constexpr uint32_t kCountMask = (1u << kCountBits) - 1;
constexpr size_t kGrain = 2048;

static_assert(kEntries * kEntryBits <= 512, "the entries fill a line");
static_assert(AdmissionCounters::kMostCount == kCountMask, "a count fills its bits");

// The entries of a line, unpacked.
struct Entries {
  uint32_t at[kEntries];

  explicit Entries(const uint64_t* line) {
    for (uint32_t e = 0; e < kEntries; ++e) {
      const uint32_t bit = e * kEntryBits, word = bit / 64, shift = bit % 64;
      uint64_t bits = line[word] >> shift;
      if (shift + kEntryBits > 64) bits |= line[word + 1] << (64 - shift);
      at[e] = static_cast<uint32_t>(bits & kEntryMask);
    }
  }
  void Pack(uint64_t* line) const {
    uint64_t words[AdmissionCounters::kLineWords] = {};
    for (uint32_t e = 0; e < kEntries; ++e) {
      const uint32_t bit = e * kEntryBits, word = bit / 64, shift = bit % 64;
      words[word] |= uint64_t{at[e]} << shift;
      if (shift + kEntryBits > 64) words[word + 1] |= uint64_t{at[e]} >> (64 - shift);
    }
    std::memcpy(line, words, sizeof(words));
  }
  // The entry of a fingerprint, or kEntries.
  uint32_t Find(uint32_t fingerprint) const {
    for (uint32_t e = 0; e < kEntries && at[e] != 0; ++e) {
      if (at[e] >> kCountBits == fingerprint) return e;
    }
    return kEntries;
  }
};

// The entries of both lines in turn. Of two entries with one fingerprint, the first.
Entries Merged(const Entries& a, const Entries& b) {
  Entries merged = a;
  std::fill(merged.at, merged.at + kEntries, 0);
  uint32_t size = 0;
  for (uint32_t e = 0; e < 2 * kEntries && size < kEntries; ++e) {
    const uint32_t entry = (e % 2 == 0 ? a : b).at[e / 2];
    if (entry != 0 && merged.Find(entry >> kCountBits) == kEntries) merged.at[size++] = entry;
  }
  return merged;
}

// Whether Count can have left this line.
bool IsLine(const uint64_t* line) {
  constexpr uint32_t kUsed = kEntries * kEntryBits - 448;  // bits of the last word
  if (line[7] >> kUsed != 0) return false;
  const Entries entries(line);
  bool ended = false;
  for (uint32_t e = 0; e < kEntries; ++e) {
    if (ended && entries.at[e] != 0) return false;
    ended |= entries.at[e] == 0;
    if (!ended && (entries.at[e] & kCountMask) == 0) return false;
    if (!ended && entries.Find(entries.at[e] >> kCountBits) != e) return false;
  }
  return true;
}

uint64_t HighProduct(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

}  // namespace

Status AdmissionCounters::Init(int64_t lines, int64_t first, int64_t num) {
  DYNEMB_RETURN_IF_ERROR(memory_.Commit(static_cast<size_t>(num) * kLineBytes));
  lines_ = lines;
  first_ = first;
  num_ = num;
  return Status();
}

Status AdmissionCounters::Load(const uint64_t* saved, int64_t first, int64_t num, bool merge) {
  for (int64_t line = 0; line < num; ++line) {
    if (!IsLine(saved + line * static_cast<int64_t>(kLineWords))) {
      return InvalidArgument("line " + std::to_string(first + line) +
                             " of the admission counters is damaged");
    }
  }
  const int64_t begin = std::max(first, first_);
  const int64_t end = std::min(first + num, first_ + num_);
  if (begin >= end) return Status();
  const uint64_t* const from = saved + (begin - first) * static_cast<int64_t>(kLineWords);
  uint64_t* const to = LineAt(static_cast<uint32_t>(begin - first_));
  for (size_t word = 0; merge && word < (end - begin) * kLineWords; word += kLineWords) {
    Merged(Entries(to + word), Entries(from + word)).Pack(to + word);
  }
  if (!merge) std::memcpy(to, from, static_cast<size_t>(end - begin) * kLineBytes);
  return Status();
}

AdmissionCounters::Place AdmissionCounters::Of(uint64_t key) const {
  const uint64_t line = HighProduct(HashKey(key, kOwnerSalt), static_cast<uint64_t>(lines_));
  // Unsigned: a line before the first one becomes a large number.
  const uint64_t from_first = line - static_cast<uint64_t>(first_);
  const uint64_t num = static_cast<uint64_t>(num_);
  return {static_cast<uint32_t>(from_first < num ? from_first : line % num),
          static_cast<uint32_t>(HashKey(key, kAdmissionSalt) >> (64 - kEntryBits + kCountBits))};
}

uint32_t AdmissionCounters::Count(const Place& at, uint32_t times) {
  uint64_t* const line = LineAt(at.line);
  Entries entries(line);
  const uint32_t found = entries.Find(at.fingerprint);
  const uint32_t had = found < kEntries ? entries.at[found] & kCountMask : 0;
  const uint32_t count = times < kMostCount - had ? had + times : kMostCount;
  const uint32_t last = std::min(found, kEntries - 1);
  std::memmove(entries.at + 1, entries.at, last * sizeof(*entries.at));
  entries.at[0] = at.fingerprint << kCountBits | count;
  entries.Pack(line);
  return count;
}

uint32_t AdmissionCounters::CountOf(const Place& at) const {
  const Entries entries(LineAt(at.line));
  const uint32_t found = entries.Find(at.fingerprint);
  return found < kEntries ? entries.at[found] & kCountMask : 0;
}

void AdmissionCounters::Forget(const Place& at) {
  uint64_t* const line = LineAt(at.line);
  Entries entries(line);
  const uint32_t found = entries.Find(at.fingerprint);
  if (found == kEntries) return;
  std::copy(entries.at + found + 1, entries.at + kEntries, entries.at + found);
  entries.at[kEntries - 1] = 0;
  entries.Pack(line);
}

Status Admission::Check(const AdmissionOptions& o) {
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
    return InvalidArgument("admission_probability=" + std::to_string(o.probability) +
                           ": must be in [0, 1]");
  }
  return Status();
}

Status Admission::Init(const AdmissionOptions& options, uint64_t seed) {
  if (options.rule == Admit::kFrequency) {
    DYNEMB_RETURN_IF_ERROR(counters_.Init(options.lines, options.first_line, options.num_lines));
  }
  options_ = options;
  seed_ = seed;
  return Status();
}

size_t Admission::Decide(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                         uint32_t* lines, bool* admitted) {
  Phase phase("admit");
  return counts() ? DecideByCount(exec, keys, times, n, lines, admitted)
                  : DecideByChance(exec, keys, times, n, admitted);
}

size_t Admission::DecideByCount(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                                uint32_t* lines, bool* admitted) {
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) lines[j] = counters_.Of(keys[j]).line;
  });
  std::atomic<size_t> total{0};
  // Each line belongs to one worker.
  ForWorkers(exec, n, [&](size_t worker, size_t workers) {
    constexpr size_t kAhead = 16;
    size_t count = 0;
    for (size_t j = 0; j < n; ++j) {
      if (j + kAhead < n && Owns(worker, workers, lines[j + kAhead])) {
        counters_.Prefetch(lines[j + kAhead]);
      }
      if (!Owns(worker, workers, lines[j])) continue;
      const AdmissionCounters::Place at = counters_.Of(keys[j]);
      admitted[j] = counters_.Count(at, times[j]) >= options_.times;
      if (!admitted[j]) continue;
      counters_.Forget(at);
      ++count;
    }
    total.fetch_add(count, std::memory_order_relaxed);
  });
  return total.load();
}

size_t Admission::DecideByChance(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                                 bool* admitted) const {
  std::atomic<size_t> total{0};
  const uint64_t of_lookup = Remix(MixKey(seed_ ^ kAdmissionSalt), lookups_ + 1);
  const double refusal = std::log1p(-options_.probability);  // -inf if all are admitted
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    size_t count = 0;
    for (size_t j = begin; j < end; ++j) {
      // Uniform in [0, 1).
      const double drawn = static_cast<double>(HashKey(keys[j], of_lookup) >> 11) * 0x1p-53;
      // 1 - (1 - p)^times. A key with `times` 0 is refused.
      admitted[j] = times[j] != 0 && drawn < -std::expm1(times[j] * refusal);
      count += admitted[j];
    }
    total.fetch_add(count, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace dynemb
