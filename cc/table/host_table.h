// HostTable: the data of a table in host memory, and the calls that are the same for both key
// widths: state, times, catch-up, scans, and the hot rows of cuts. Its subclass HashTable has the
// calls that look up keys; HostTable reaches them through virtual functions (FindQuietly). Its base
// ColdTable has cuts, flushes, and the calls on cold rows.
#ifndef DYNEMB_TABLE_HOST_TABLE_H_
#define DYNEMB_TABLE_HOST_TABLE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/table/admission.h"
#include "cc/table/changes.h"
#include "cc/table/cold_table.h"
#include "cc/table/index.h"
#include "cc/table/initializer.h"
#include "cc/table/row_store.h"
#include "cc/table/vector_buffer.h"

namespace dynemb {

// Where the rows are that a limited memory does not hold.
struct HotLimit {
  std::unique_ptr<ColdRows> cold;  // null: memory is not limited
  uint64_t max_bytes = 0;
};

class HostTable : public ColdTable {
 public:
  const RowLayout& layout() const final { return rows_.layout(); }
  uint64_t size() const final { return rows_.live() + num_cold(); }
  Status Error() const final { return KeptError(); }
  TableStats stats() const final;
  Status ResetState(Exec& exec, const StateSpec& spec) final;
  Status Clear(Exec& exec, Tick tick) final;
  Stamp BeginBatch(Exec& exec, Tick tick, size_t n) final;
  Stamp BeginLookup(Exec& exec, Tick tick, size_t n) final;
  Status AdvanceEpoch(Exec& exec) final;
  void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n, Tick since,
               Tick now, bool* changed) const final;
  Status InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                        EvictedRows* evicted) final;
  void BringKeys(Exec& exec, KeySpan keys) final;
  void Explain(Exec& exec, KeySpan keys, KeyState* states) const final;
  void SwapRows(Table* other, Tick tick) final;
  Status LoadAdmission(const uint64_t* lines, int64_t first, int64_t num, bool merge) final {
    if (!admission_.counts()) return Table::LoadAdmission(lines, first, num, merge);
    return admission_.counters().Load(lines, first, num, merge);
  }

 protected:
  HostTable() = default;
  Status Init(const TableOptions& options, Exec* exec, HotLimit limit);

  ExportPlan ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const final;
  uint64_t BringRows(Exec& exec, uint64_t first, uint64_t num) final;
  void MarkRows(Exec& exec, float mark) final;
  void MarkNewRows(Exec&, float mark) final { initial_state_.back() = mark; }
  // Brings a live row up to date. `unpacked` is a buffer for a vector, if the dtype has 16 bits.
  void BringRow(RowId row, float* unpacked);
  // (exclusive) BeginBatch, for a batch that may insert: it counts as a step of TtlClock::kSteps.
  Stamp BeginInsert(Exec& exec, Tick tick, size_t n);
  // rows[i] = the row of keys[i], or kNoRow if it has none, or one that has expired. Not an access.
  virtual void FindQuietly(Exec& exec, KeySpan keys, const Expired& expired, RowId* rows) const = 0;
  // scores[i] = the score of rows[i]. All of them are live.
  virtual void ReadScores(Exec& exec, const RowId* rows, size_t n, Score* scores) const = 0;
  // The score of a live row.
  virtual Score ScoreOf(RowId row) const = 0;
  // counts[i] = how often keys[i] was counted towards its admission.
  virtual void AdmissionCounts(KeySpan keys, uint32_t* counts) const = 0;

  // Call before a row changes or gets another key. `updated` is its last update, which the caller
  // may already have overwritten in the row.
  void BeforeWrite(RowId row, Stamp updated) {
    if (!changes_.tracking()) return;
    changes_.BeforeWrite(row, rows_.At(row), TickOf(updated), [&](const Cut& cut) {
      return scoring_.by_time() ? cut.Time(cut.watermark) : ScoreOf(row);
    });
  }
  // The same for a row whose slot the caller has given to another key, or is about to. `score` was
  // its score.
  void BeforeLoss(RowId row, Score score) {
    if (!changes_.tracking()) return;
    changes_.BeforeWrite(
        row, rows_.At(row), TickOf(*layout().update(rows_.At(row))),
        [&](const Cut& cut) { return scoring_.by_time() ? cut.Time(cut.watermark) : score; });
  }
  // BeforeWrite for all rows.
  void BeforeWriteAll();
  // Call before the row of `key`, which had this score, is given to another key, or freed, to make
  // room.
  void BeforeEviction(uint64_t key, RowId row, Score score, Stamp now) {
    BeforeLoss(row, score);
    if (cold_ != nullptr) {
      AddCold(key, row, score);
      return;
    }
    if (changes_.tracking()) changes_.Deleted(stamps_.Decode(now), key, Removal::kEvict);
    if (evicted_ == nullptr) return;
    if (catch_up_.active()) BringRow(row, VectorBuffer(options_.dim).get());
    evicted_->Add(key, rows_.At(row), PublicScore(score));
  }
  // Continues the running sweep until `share` of the rows and slots are clamped to the floor of the
  // stamps.
  void Sweep(Exec& exec, double share);
  // Frees a row that is no longer in a slot.
  void FreeRow(RowId row) {
    Stamp* updated = layout().update(rows_.At(row));
    BeforeWrite(row, *updated);
    *updated = 0;
    rows_.Free(row);
  }
  uint64_t KeyBits(RowId row) const;
  // Whether a row satisfies the conditions on everything except its score.
  bool Satisfies(RowId row, const RowPredicate& where, const UpdatedAfter& after,
                 std::vector<float>* vector) const;

  // The maximal number of rows in memory.
  uint64_t capacity() const { return rows_.max_rows(); }

  // --- For Table and ColdTable, which call these functions

  void TakeSeed(uint64_t seed) final {
    Table::TakeSeed(seed);
    initializer_.set_seed(seed);
    admission_.set_seed(seed);
  }
  void StartChanges(Tick tick, Tick known_since) final {
    changes_.Start(tick, known_since, rows_.high_water());
  }
  Status HasLostHot(bool* lost) const final {
    *lost = counters_.erased != 0 || counters_.evictions != 0 || counters_.expired != 0;
    return Status();
  }
  Status HaveHot(Exec& exec, const std::vector<uint64_t>& keys, std::vector<char>* has) const final;
  Status StartCut(Exec& exec, std::unique_ptr<Cut> cut) final;
  std::vector<RowId> PlanHotCut(size_t limit) final;
  Status ReadStored(Exec& exec, const std::vector<RowId>& rows,
                    const RowColumns<Stamp>& to) const final;
  Status AddHotRows(Exec& exec, const ColdRows::AddHotFn& add) final;
  Status CopyAdmission(Exec& exec, std::vector<uint64_t>* words, int64_t* first_line) final;

  // --- Cold rows (cold_table.h)

  // Call between ColdRows::Reserve and ColdRows::Settle.
  void AddCold(uint64_t key, RowId row, Score score) {
    const Stamp updated = *layout().update(rows_.At(row));
    cold_->Add(key, rows_.At(row), Clamped({updated, score}), TickOf(updated));
  }
  // For ResetState.
  Status ChangeColdLayout(const RowLayout& changed, const std::vector<float>& initial_state);
  // Moves every row of memory to ColdRows. If it fails, it has moved some of them.
  virtual Status MoveAllOut() = 0;
  // The rows that fit the memory, in this layout. InvalidArgument if they are too few.
  Status HotRows(const RowLayout& layout, uint64_t* rows) const;

  std::vector<float> initial_state_;
  Initializer initializer_;
  Index index_;
  RowStore rows_;
  Admission admission_;
  // The progress of the running sweep: rows and buckets below these have been clamped.
  struct Swept {
    uint64_t rows = 0;
    uint64_t buckets = 0;
  } swept_;

  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0}, inserts{0}, evictions{0}, erased{0}, expired{0},
        refused{0}, unadmitted{0}, dropped_gradients{0}, nonfinite_gradients{0};
  };
  mutable Counters counters_;
  uint64_t inserts_reclaimed_ = 0;  // the rows inserted before the last call of Reclaim
  uint64_t max_hot_bytes_ = 0;      // if rows may be cold
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HOST_TABLE_H_
