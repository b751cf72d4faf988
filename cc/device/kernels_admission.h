// The kernels that decide which new keys of a batch are admitted (cc/table/admission.h). They run
// between the numbering of the new keys and the allocation of rows (kernels_insert.h):
//
//   CountOccurrences         counts how often each new key j occurs in the batch
//   ListLines, SortPairs     bring the first positions of the keys of a line together, in the order
//                            of the batch. ListLines decides for the keys that are not counted.
//   CountLines               counts the keys of a line and decides for them, one thread per line
//   CountUnadmitted          counts the occurrences of refused keys, for stats()
//   a sum                    numbers the admitted keys
//
// The decisions and the counters have the same bits as on the host, for any schedule of threads:
// sums of integers do not depend on their order, and the keys of a line are counted in theirs.
#ifndef DYNEMB_DEVICE_KERNELS_ADMISSION_H_
#define DYNEMB_DEVICE_KERNELS_ADMISSION_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/table_views.h"
#include "cc/table/admission_line.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The number of a line across the tables of a batch; kNoLine: the key is not counted.
constexpr uint64_t kNoLine = ~uint64_t{0};

// The new keys of a batch before admission. `sums` are the sums of FlagFirst's flags.
struct AskedKeys {
  TableViews tables;
  KeyArray keys;
  const RowId* rows;
  const uint32_t* places;  // of ElectPositions
  const uint32_t* of;
  const uint32_t* sums;
  uint64_t* times;  // [j] how often key j occurs

  // Whether position i is the first one of a new key.
  DYNEMB_HD bool IsFirst(size_t i) const { return sums[i] != sums[i + 1]; }
  // How often the key of a first position occurs: at most 2^32 - 1, as on the host.
  DYNEMB_HD uint32_t TimesOf(size_t i) const {
    constexpr uint32_t kMost = 0xFFFFFFFFu;
    const uint64_t n = times[sums[i]];
    return n < kMost ? static_cast<uint32_t>(n) : kMost;
  }
};

// `times` are zeros at first.
struct CountOccurrences {
  AskedKeys asked;
  const uint32_t* given;  // how often each position counts; null: once

  DYNEMB_HD void operator()(size_t i) const {
    if (asked.rows[i] != kNoRow) return;
    const uint32_t j = asked.sums[asked.places[asked.of[i]]];
    AtomicAdd(&asked.times[j], given != nullptr ? uint64_t{given[i]} : uint64_t{1});
  }
};

// flags[i] = 1 if i is the first position of a new key that is admitted without being counted,
// otherwise 0; flags[n] = 0. Entry j of `lines` and `positions` belongs to new key j: its line, or
// kNoLine if it is not counted, and its first position. The caller fills `lines` with kNoLine.
struct ListLines {
  AskedKeys asked;
  size_t n;
  uint32_t* flags;
  uint64_t* lines;
  uint32_t* positions;

  DYNEMB_HD void operator()(size_t i) const {
    if (i == n || !asked.IsFirst(i)) {
      flags[i] = 0;
      return;
    }
    const AdmissionView& admission = asked.tables.Of(i).admission;
    const uint64_t key = asked.keys[i];
    const uint32_t j = asked.sums[i];
    positions[j] = static_cast<uint32_t>(i);
    flags[i] = admission.rule == Admit::kAll ? 1 : 0;
    if (admission.rule == Admit::kFrequency) {
      lines[j] = admission.first_number + admission.lines.Of(key).line;
    } else if (admission.rule == Admit::kProbability) {
      flags[i] = admission.draws.Admits(key, asked.TimesOf(i)) ? 1 : 0;
    }
  }
};

// Calls fn(entries, position) for the keys of a sorted line, in order, and stores the line. Item p
// does so if it is the first of its line.
template <class PlaceOf, class Fn>
DYNEMB_HD void ForLine(size_t p, size_t n, const uint64_t* lines, const uint32_t* positions,
                       const PlaceOf& line_at, const Fn& fn) {
  const uint64_t number = lines[p];
  if (number == kNoLine || (p != 0 && lines[p - 1] == number)) return;
  uint64_t* const line = line_at(positions[p], number);
  AdmissionLine entries(line);
  for (; p < n && lines[p] == number; ++p) fn(&entries, positions[p]);
  entries.Store(line);
}

// flags[i] = 1 for the first positions of the counted keys that are admitted. Admitted keys are
// forgotten: their next count begins if they lose their row.
struct CountLines {
  AskedKeys asked;
  size_t n;
  const uint64_t* lines;  // sorted
  const uint32_t* positions;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t p) const {
    const auto line_at = [&](uint32_t i, uint64_t number) {
      const AdmissionView& admission = asked.tables.Of(i).admission;
      return admission.LineAt(number - admission.first_number);
    };
    ForLine(p, n, lines, positions, line_at, [&](AdmissionLine* entries, uint32_t i) {
      const AdmissionView& admission = asked.tables.Of(i).admission;
      const uint32_t fingerprint = admission.lines.Of(asked.keys[i]).fingerprint;
      if (entries->CountUntil(fingerprint, asked.TimesOf(i), admission.times)) flags[i] = 1;
    });
  }
};

// Items as in ForTally. `flags` are the flags that CountLines has set.
struct CountUnadmitted {
  AskedKeys asked;
  const uint32_t* flags;

  DYNEMB_HD void operator()(size_t t) const {
    ForTally<uint64_t>(
        t, asked.tables.items, [&](size_t i) { return asked.tables.IndexOf(i); },
        [&](size_t i) {
          return asked.IsFirst(i) && flags[i] == 0 ? uint64_t{asked.TimesOf(i)} : uint64_t{0};
        },
        [](size_t, uint64_t times, uint32_t, uint64_t* unadmitted) { *unadmitted += times; },
        [&](uint64_t unadmitted, uint32_t table) {
          if (unadmitted != 0) AtomicAdd(&asked.tables[table].counters->unadmitted, unadmitted);
        });
  }
};

// rows[i] = what a lookup returns for a key that has no row, where rows[i] is kNoRow.
struct MarkAbsent {
  TableViews tables;
  RowId* rows;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] == kNoRow) rows[i] = tables.Of(i).admission.absent_row;
  }
};

// --- Keys of one table, outside of lookups -------------------------------------------------------

// counts[i] = the count of keys[i].
struct ReadCounts {
  AdmissionView admission;
  KeyArray keys;
  uint32_t* counts;

  DYNEMB_HD void operator()(size_t i) const {
    const AdmissionLines::Place at = admission.lines.Of(keys[i]);
    counts[i] = AdmissionLine(admission.LineAt(at.line)).CountOf(at.fingerprint);
  }
};

// Lists the lines of keys, for ForgetCounts.
struct ListLinesOfKeys {
  AdmissionView admission;
  KeyArray keys;
  uint64_t* lines;
  uint32_t* positions;

  DYNEMB_HD void operator()(size_t i) const {
    lines[i] = admission.lines.Of(keys[i]).line;
    positions[i] = static_cast<uint32_t>(i);
  }
};

// Forgets the counts of keys whose lines are sorted.
struct ForgetCounts {
  AdmissionView admission;
  KeyArray keys;
  size_t n;
  const uint64_t* lines;
  const uint32_t* positions;

  DYNEMB_HD void operator()(size_t p) const {
    const auto line_at = [&](uint32_t, uint64_t number) { return admission.LineAt(number); };
    ForLine(p, n, lines, positions, line_at, [&](AdmissionLine* entries, uint32_t i) {
      entries->Forget(admission.lines.Of(keys[i]).fingerprint);
    });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_ADMISSION_H_
