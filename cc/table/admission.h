// Admission: which keys get a row when a lookup asks for them. Rare keys then do not fill a table.
//
//   kAll           every key
//   kFrequency     a key that lookups have asked for `times` times, while the counters remember it
//   kProbability   each occurrence of a key admits it with this probability
//
// Only inserting lookups count and admit. Every other call that creates rows creates them for all
// of its keys. A lookup decides once for each distinct key that has no row: it adds the number of
// times that the key occurs in the batch, and a key that is admitted has its row in this batch. A
// key that is refused has no row, and the lookup sets its row ids to AbsentRow().
//
// Counters (kFrequency). A table cannot remember all keys that it has seen: most of them come once.
// AdmissionCounters remembers about the number that the caller asks for: the keys that were counted
// last. A line of 64 bytes (admission_line.h) has 23 entries, each with a count and the fingerprint
// of a key. That is 2.8 bytes for each counted key. Counting a key moves its entry to the front of
// its line, and a new key pushes out the last entry: the line ages. Two keys of a line with the
// same fingerprint share an entry; a key that has not been counted finds such an entry in at most
// 23 of 2^14 cases. It may then be admitted too early, never too late. Counts saturate at 255.
//
// Lines are numbered over all ranks: the line of a key is the fraction of the lines that its
// owner's hash (owners.h) is of 2^64. Each rank therefore needs a range of consecutive lines, and a
// saved line is loaded by whichever ranks own its keys, on any number of ranks. The keys of a
// boundary line may belong to two ranks. Two ranks have then counted in it, and a load merges the
// two lines: it takes entries from both in turn, until the line is full.
//
// A table in a device's memory has its counters there (cc/device/kernels_admission.h). It has an
// AdmissionRule, and makes the same decisions.
//
// Not thread-safe; the table's lock protects it.
#ifndef DYNEMB_TABLE_ADMISSION_H_
#define DYNEMB_TABLE_ADMISSION_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/admission_line.h"
#include "cc/table/arena.h"
#include "cc/table/exec.h"
#include "cc/table/portability.h"
#include "cc/table/scratch.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

enum class Admit : uint8_t { kAll, kFrequency, kProbability };

// The result of a lookup for a key that has no row, in a table with admission.
enum class Unadmitted : uint8_t {
  kZeros,    // a vector of zeros
  kInitial,  // its initial vector
  kSkip,     // the id is absent from its bag; zeros, if there are no bags
};

struct AdmissionOptions {
  Admit rule = Admit::kAll;
  Unadmitted unadmitted = Unadmitted::kZeros;
  int64_t times = 0;         // kFrequency: in [1, 255]
  double probability = 1.0;  // kProbability: in [0, 1]
  // kFrequency: the number of lines of all ranks, and the range of them that this table has.
  int64_t lines = 0;
  int64_t first_line = 0;
  int64_t num_lines = 0;

  bool operator==(const AdmissionOptions& o) const {
    return rule == o.rule && unadmitted == o.unadmitted && times == o.times &&
           probability == o.probability && lines == o.lines && first_line == o.first_line &&
           num_lines == o.num_lines;
  }
};

class AdmissionCounters {
 public:
  using Place = AdmissionLines::Place;
  static constexpr size_t kLineWords = AdmissionLine::kWords;
  static constexpr size_t kLineBytes = kLineWords * sizeof(uint64_t);
  static constexpr uint32_t kMostCount = AdmissionLine::kMostCount;
  static constexpr int64_t kMostLines = 0xFFFFFFFF;

  // Makes lines [first, first + num) of `lines` in all, which count nothing. ResourceExhausted.
  Status Init(int64_t lines, int64_t first, int64_t num);

  // The lines of this object as they are saved: [num_lines(), kLineWords], little-endian.
  const uint64_t* data() const { return reinterpret_cast<const uint64_t*>(memory_.data()); }
  int64_t lines() const { return lines_.lines; }
  int64_t first_line() const { return lines_.first; }
  int64_t num_lines() const { return lines_.num; }
  size_t bytes() const { return static_cast<size_t>(lines_.num) * kLineBytes; }
  // Replaces lines [first, first + num) of the numbering over all ranks, as far as this object has
  // them; or merges them with the lines that it has, if `merge`. InvalidArgument, before anything
  // changes, if a line is none that Count can leave.
  Status Load(const uint64_t* saved, int64_t first, int64_t num, bool merge);
  // Load, of all of the `num` lines at `to`.
  static void LoadLines(const uint64_t* saved, int64_t num, bool merge, uint64_t* to);
  // InvalidArgument if one of the lines, the numbers of which begin with `first`, is none that
  // Count can leave.
  static Status CheckLines(const uint64_t* saved, int64_t first, int64_t num);
  void Clear() { memory_.Clear(); }

  Place Of(uint64_t key) const { return lines_.Of(key); }
  void Prefetch(uint32_t line) const { PrefetchLine(LineAt(line)); }
  // Counts a key `times` times more. Returns its count.
  uint32_t Count(const Place& at, uint32_t times);
  // Counts a key, and forgets it if its count is at least `enough`. Returns whether it is.
  bool CountUntil(const Place& at, uint32_t times, uint32_t enough);
  // The count of a key; 0 if it is not remembered.
  uint32_t CountOf(const Place& at) const;
  void Forget(const Place& at);

 private:
  uint64_t* LineAt(uint32_t line) const {
    return reinterpret_cast<uint64_t*>(memory_.data()) + line * kLineWords;
  }

  Arena memory_;
  AdmissionLines lines_;
};

// The rule of one table, and the number of its lookups.
class AdmissionRule {
 public:
  // InvalidArgument names the option.
  static Status Check(const AdmissionOptions& options);
  // `options` must pass Check.
  void Configure(const AdmissionOptions& options, uint64_t seed) {
    options_ = options;
    seed_ = seed;
  }
  void set_seed(uint64_t seed) { seed_ = seed; }

  // Whether keys may be refused.
  bool enabled() const { return options_.rule != Admit::kAll; }
  bool counts() const { return options_.rule == Admit::kFrequency; }
  // The row id of a key that has no row, in the result of a lookup.
  RowId AbsentRow() const {
    if (!enabled()) return kNoRow;
    return options_.unadmitted == Unadmitted::kSkip ? kSkippedRow : kUnadmittedRow;
  }
  // Whether a key that has no row reads as zeros, not as its initial vector.
  bool AbsentIsZero() const { return enabled() && options_.unadmitted != Unadmitted::kInitial; }

  // Announces an inserting lookup. Lookups with one tick are one.
  void BeginLookup(Tick tick) {
    lookups_ += tick != last_tick_;
    last_tick_ = tick;
  }
  // kFrequency: a key with this count is admitted.
  uint32_t times() const { return static_cast<uint32_t>(options_.times); }
  // kProbability: the draws of the last lookup that was announced.
  AdmissionDraws Draws() const;

 private:
  AdmissionOptions options_;
  uint64_t seed_ = 0;
  uint64_t lookups_ = 0;
  Tick last_tick_ = 0;
};

// The admission of one table in host memory.
class Admission : public AdmissionRule {
 public:
  // `options` must pass Check. ResourceExhausted.
  Status Init(const AdmissionOptions& options, uint64_t seed);

  // Decides for distinct keys[j] without rows, which occur times[j] times: admitted[j]. The keys of
  // a line are counted in their order, so the result does not depend on the number of threads.
  // `places` has room for n. Returns the number of keys admitted.
  size_t Decide(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                AdmissionCounters::Place* places, bool* admitted);

  AdmissionCounters& counters() { return counters_; }
  const AdmissionCounters& counters() const { return counters_; }

 private:
  size_t DecideByCount(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                       AdmissionCounters::Place* places, bool* admitted);
  size_t DecideByChance(Exec& exec, const uint64_t* keys, const uint32_t* times, size_t n,
                        bool* admitted) const;

  AdmissionCounters counters_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ADMISSION_H_
