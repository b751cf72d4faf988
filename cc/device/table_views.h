// The view that kernels have of the tables of a batch. A batch may have the keys of several tables;
// the keys of a table are consecutive. Item i of a launch is a key of the table whose range
// contains i. Between launches the host may change a table; it then creates new views
// (DeviceTable::ViewsOf).
#ifndef DYNEMB_DEVICE_TABLE_VIEWS_H_
#define DYNEMB_DEVICE_TABLE_VIEWS_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/ranges.h"
#include "cc/device/row_math.h"
#include "cc/table/admission.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/catch_up_view.h"
#include "cc/table/expired.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/score.h"
#include "cc/table/types.h"

namespace dynemb::device {

// A table's counters, in device memory.
struct Counters {
  uint32_t high_water;   // all row ids that were ever allocated are below it
  uint32_t free_count;   // the number of these that are free
  uint32_t refused_now;  // keys that the running batch could not insert
  uint32_t unused;
  uint64_t device_hits, host_hits, misses;
  uint64_t inserts, evictions, erased, expired, refused;
  uint64_t dropped_gradients, nonfinite_gradients;
  uint64_t promotions;
  uint64_t unadmitted;

  DYNEMB_HD uint64_t size() const { return high_water - free_count; }
};

// Rows of the host tier that batches have read, and that may be promoted afterwards.
// Each has the slot that its row id selects; if several share a slot, the best stays
// (kernels_tiers.h).
struct Candidates {
  uint64_t* slots = nullptr;  // [count] ~order << 32 | row; 0 (no row of the host tier): none
  uint32_t count = 0;         // 0: none are noted

  DYNEMB_HD void Note(RowId row, uint32_t order) const {
    uint64_t* const slot = slots + (uint64_t{row * 0x9E3779B1u} * count >> 32);
    const uint64_t noted = uint64_t{~order} << 32 | row;
    if (AtomicLoad(slot) < noted) AtomicMax(slot, noted);
  }
  DYNEMB_HD static RowId RowOf(uint64_t noted) { return static_cast<RowId>(noted); }
  DYNEMB_HD static uint32_t OrderOf(uint64_t noted) { return ~static_cast<uint32_t>(noted >> 32); }
};

// The counters of a table after the inserting batch of this number, in host memory that kernels can
// access: the host reads them without waiting. Each word is written atomically.
struct Mailbox {
  uint64_t high_water;  // batch << 32 | the counter
  uint64_t free_count;
};

// The admission of a table (cc/table/admission.h).
struct AdmissionView {
  Admit rule = Admit::kAll;
  RowId absent_row = kNoRow;  // in the result of a lookup, of a key that has no row
  bool absent_is_zero = false;
  // kFrequency: a key with this count is admitted; the counters, and the number of its first line
  // among the lines of all tables of the batch.
  uint32_t times = 0;
  uint64_t* counters = nullptr;  // [lines.num, AdmissionLine::kWords]
  AdmissionLines lines{};
  uint64_t first_number = 0;
  AdmissionDraws draws{};  // kProbability

  DYNEMB_HD uint64_t* LineAt(uint64_t line) const {
    return counters + line * AdmissionLine::kWords;
  }
  // Whether an id with this row id, which belongs to no key, reads as zeros.
  DYNEMB_HD bool IsZero(RowId row) const { return absent_is_zero && IsRefused(row); }
};

// Whether the row in a slot has expired.
DYNEMB_HD inline bool HasExpired(const Expired& expired, const DeviceView& view,
                                 const SlotRef& at) {
  return expired(expired.by_access ? AtomicLoad(&at.bucket->score[at.slot])
                                   : *view.UpdateAt(at.row));
}

// A table, and its share of a batch.
struct TableView : DeviceView {
  InitializerView initial{};
  const float* initial_state = nullptr;  // [state_width]
  Counters* counters = nullptr;
  Candidates candidates{};
  bool promotes_read = false;  // FindKeys lists rows in place of noting candidates
  uint64_t capacity = 0;       // the maximal number of rows
  bool rows_move = false;      // between tiers, or from memory and back
  bool has_cold_rows = false;  // evicted rows become cold
  Rounding rounding{};         // for the vectors that the batch writes; kernels set the key

  // The slot of a key whose row has not expired; no bucket if it has none.
  template <class Lanes>
  DYNEMB_HD SlotRef FindUnexpired(Lanes& lanes, uint64_t key) const {
    const SlotRef at = Find(lanes, key);
    if (at.bucket == nullptr || !expired.any()) return at;
    return HasExpired(expired, *this, at) ? SlotRef{} : at;
  }

  Stamp now = 0;        // the batch's; 0: it is not an access
  StampOrder stamps{};  // the order of the table's stamps
  Touch touch{};        // of the rows that the batch finds
  Score new_score = 0;  // of the rows that the batch creates
  Evictable evictable{};
  Expired expired{};               // the rows that the batch does not find
  uint64_t* num_pinned = nullptr;  // the number of rows that are pinned, if scores are not stamps
  // The steps that the rows lack (null: none), their formula (CatchUpView::FormulaOf), and the step
  // of Rounding with which rows get it.
  const CatchUpView* steps = nullptr;
  uint32_t formula = 0;
  uint64_t bring_step = 0;
  float step_mark = -1;  // of the rows that the batch steps; negative: they have no mark
  Mailbox* mailbox = nullptr;
  uint32_t batch = 0;                // the number of an inserting batch, for the mailbox
  const float* gradients = nullptr;  // [keys of the share, dim], if the batch has gradients
  AdmissionView admission{};
};

struct TableViews {
  TableView one;       // of a batch on a single table; `many` and `begins` are then not used
  uint32_t items = 0;  // of the batch
  uint32_t count = 1;
  const TableView* many = nullptr;   // [count]
  const uint32_t* begins = nullptr;  // [count + 1]

  DYNEMB_HD const TableView& operator[](uint32_t t) const { return count == 1 ? one : many[t]; }
  DYNEMB_HD uint32_t begin(uint32_t t) const { return count == 1 ? 0 : begins[t]; }
  DYNEMB_HD uint32_t end(uint32_t t) const { return count == 1 ? items : begins[t + 1]; }
  // The table of item i.
  DYNEMB_HD uint32_t IndexOf(size_t i) const { return RangeOf(begins, count, i); }
  DYNEMB_HD const TableView& Of(size_t i) const { return (*this)[IndexOf(i)]; }
};

// The keys of a batch, for ElectPositions. Equal keys of different tables are distinct.
struct BatchKeys {
  KeyArray keys;
  TableViews tables;

  DYNEMB_HD uint64_t Hash(size_t i) const { return ElectionHash(keys[i], tables.IndexOf(i)); }
  DYNEMB_HD bool Same(size_t i, size_t j) const {
    const uint32_t t = tables.IndexOf(j);
    return keys[i] == keys[j] && tables.begin(t) <= i && i < tables.end(t);
  }
};

// An item of a counting kernel examines kTallyEach items of a batch. They are kTallyStride apart,
// so that neighboring threads read neighboring items.
constexpr size_t kTallyEach = 16;
constexpr size_t kTallyStride = 32;
inline size_t TallyItems(size_t n) {
  constexpr size_t kBlock = kTallyEach * kTallyStride;
  return (n + kBlock - 1) / kBlock * kTallyStride;
}

// Calls count(i, load(i), table, &tally) for the items i < n that item t of a counting kernel
// examines, and flush(tally, table) at the end and before an item of another table. table_of(i) is
// the table of item i; it does not fall with i. Several calls of load come before their calls of
// count, so that their memory accesses overlap.
template <class Tally, class TableOf, class Load, class Count, class Flush>
DYNEMB_HD void ForTally(size_t t, size_t n, const TableOf& table_of, const Load& load,
                        const Count& count, const Flush& flush) {
  constexpr size_t kAtOnce = 8;
  static_assert(kTallyEach % kAtOnce == 0);
  const size_t first = t / kTallyStride * kTallyStride * kTallyEach + t % kTallyStride;
  Tally tally{};
  uint32_t of = 0;
  bool any = false;
  for (size_t done = 0; done < kTallyEach; done += kAtOnce) {
    const size_t begin = first + done * kTallyStride;
    if (begin >= n) break;
    decltype(load(begin)) loaded[kAtOnce]{};
    for (size_t k = 0; k < kAtOnce; ++k) {
      if (begin + k * kTallyStride < n) loaded[k] = load(begin + k * kTallyStride);
    }
    const size_t last = begin + (kAtOnce - 1) * kTallyStride;
    uint32_t table = table_of(begin);
    const bool one_table = table_of(last < n ? last : n - 1) == table;
    for (size_t k = 0; k < kAtOnce; ++k) {
      const size_t i = begin + k * kTallyStride;
      if (i >= n) break;
      if (!one_table) table = table_of(i);
      if (any && table != of) {
        flush(tally, of);
        tally = Tally{};
      }
      of = table;
      any = true;
      count(i, loaded[k], table, &tally);
    }
  }
  if (any) flush(tally, of);
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_TABLE_VIEWS_H_
