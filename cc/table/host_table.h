// HostTable: the data of a table in host memory, and the operations of Table that do not depend on
// the key width: times, state, exports, cuts. HashTable adds those that look up keys.
#ifndef DYNEMB_TABLE_HOST_TABLE_H_
#define DYNEMB_TABLE_HOST_TABLE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cc/table/admission.h"
#include "cc/table/changes.h"
#include "cc/table/cold_rows.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/expired.h"
#include "cc/table/index.h"
#include "cc/table/initializer.h"
#include "cc/table/row_store.h"
#include "cc/table/score.h"
#include "cc/table/stamps.h"
#include "cc/table/table.h"
#include "cc/table/vector_buffer.h"

namespace dynemb {

// Where the rows are that a limited memory does not hold.
struct HotLimit {
  std::unique_ptr<ColdRows> cold;  // null: memory is not limited
  uint64_t max_bytes = 0;
};

class HostTable : public Table {
 public:
  ~HostTable() override;
  const RowLayout& layout() const final { return rows_.layout(); }
  uint64_t size() const final { return rows_.live() + (cold_ != nullptr ? cold_->size() : 0); }
  Status Error() const final;
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
  Status BeginCut(Exec& exec, Tick watermark, Tick since, bool with_deleted, SavedRows* saved,
                  size_t number) final;
  void EndCut() final;
  const Cut* cut() const final { return changes_.cut(); }
  std::vector<RowId> PlanCut(size_t limit) final;
  bool CutIsRead() const final;
  void ReadCut(Exec& exec, const std::vector<RowId>& plan, void* keys, void* vectors, float* state,
               CutTime* updates, CutTime* scores) final;
  bool tracking() const final { return changes_.tracking(); }
  void Track(Tick tick) final;
  void Explain(Exec& exec, KeySpan keys, KeyState* states) const final;
  void SwapRows(Table* other, Tick tick) final;
  bool has_cold_rows() const final { return cold_ != nullptr; }
  Status Flush(Exec& exec, const std::string& folder, Tick tick, int64_t utc_ns) final;
  Status Restore(Exec& exec, const std::string& folder, FlushInfo* info) final;
  // Moves rows in files until no space has to be given back, in the calling thread. For tests.
  Status CompactFiles();
  Status LoadAdmission(const uint64_t* lines, int64_t first, int64_t num, bool merge) final {
    if (!admission_.counts()) return Table::LoadAdmission(lines, first, num, merge);
    return admission_.counters().Load(lines, first, num, merge);
  }

 protected:
  HostTable();
  Status Init(const TableOptions& options, Exec* exec, HotLimit limit);

  ExportPlan ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const final;
  void CopyRows(Exec& exec, const std::vector<RowId>& rows, void* keys, void* vectors, float* state,
                int64_t* updates, int64_t* scores) const final;
  void CopyColdRows(const ExportPlan& plan, void* keys, void* vectors, float* state,
                    int64_t* updates, int64_t* scores) const final;
  uint64_t BringRows(Exec& exec, uint64_t first, uint64_t num) final;
  void MarkRows(Exec& exec, float mark) final;
  void MarkNewRows(Exec&, float mark) final { initial_state_.back() = mark; }
  // Brings a live row up to date. `unpacked` is a buffer for a vector, if the dtype has 16 bits.
  void BringRow(RowId row, float* unpacked);
  // Whether a sweep that brings rows up to date, cold ones included, is running.
  bool IsBringing() const { return end_of_bringing_ != 0; }
  // BringRow, for a copy of a row's vector and state, or for a row that no cut has.
  void BringContent(uint64_t key, char* content, float* unpacked) const;
  // The state in a content.
  float* StateIn(char* content) const {
    return reinterpret_cast<float*>(content + layout().state_offset - layout().vector_offset);
  }
  // Stores a vector that was computed as float32 in one of the dtype, rounded if that has 16 bits.
  void StoreUpdated(const float* vector, uint64_t key, uint64_t step, void* to) const;
  // (exclusive) BeginBatch, for a batch that may insert: it is a step (expiry.h).
  Stamp BeginInsert(Exec& exec, Tick tick, size_t n);
  // The rows that have expired in a batch at `tick`; 0 as for HorizonAt.
  Expired ExpiredAt(Tick tick) const {
    return Expired(stamps_, HorizonAt(tick), expiry_.since_access());
  }

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
  // A score as Scores returns it.
  int64_t PublicScore(Score score) const {
    return scoring_.by_time() ? static_cast<int64_t>(stamps_.Decode(score)) : int64_t{score};
  }
  // The tick of a last update; 0 for "never".
  Tick TickOf(Stamp updated) const { return updated == 0 ? 0 : stamps_.Decode(updated); }
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
  // Sets *not_held to those of `keys` (bit patterns) that have no row, not even one that has
  // expired.
  Status DropHeld(Exec& exec, const std::vector<uint64_t>& keys,
                  std::vector<uint64_t>* not_held) const;
  uint64_t KeyBits(RowId row) const;
  // Whether a row satisfies the conditions on everything except its score.
  bool Satisfies(RowId row, const RowPredicate& where, const UpdatedAfter& after,
                 std::vector<float>* vector) const;

  // The maximal number of rows in memory.
  uint64_t capacity() const { return rows_.max_rows(); }

  // --- Cold rows (host_table_cold.cc)

  // Cursors of ScanRows from here on are of cold rows.
  static constexpr uint64_t kColdCursor = uint64_t{1} << 62;
  // Takes the cold rows, which are empty, and starts the background thread.
  void StartCold(std::unique_ptr<ColdRows> cold);
  // For ResetState and Clear.
  Status ChangeColdLayout(const RowLayout& changed, const std::vector<float>& initial_state);
  void ClearCold(Tick tick) noexcept;
  void ExplainCold(KeySpan keys, KeyState* states) const;
  void ReadColdCut(const std::vector<RowId>& plan, void* keys, void* vectors, float* state,
                   CutTime* updates, CutTime* scores);
  // Calls fn(i, row) for those of `keys` that have a cold row that has not expired.
  void ForCold(KeySpan keys, ColdRows::RowFn fn) const;
  // Between Reserve and Settle.
  void AddCold(uint64_t key, RowId row, Score score) {
    const Stamp updated = *layout().update(rows_.At(row));
    cold_->Add(key, rows_.At(row), Clamped({updated, score}), TickOf(updated));
  }
  // Times of a row that moves between memory and ColdRows while the stamps are swept.
  RowTimes Clamped(RowTimes times) const {
    return {stamps_.Clamp(times.updated),
            scoring_.by_time() ? stamps_.Clamp(times.score) : times.score};
  }
  bool HasExpired(const Expired& expired, const RowTimes& times) const {
    return expired.any() && expired(expired.by_access ? times.score : times.updated);
  }
  // Keeps the error of a call that cannot return it.
  void KeepError(const Status& status) const;
  // Moves every row of memory to ColdRows. If it fails, it has moved some of them.
  virtual Status MoveAllOut() = 0;
  // The rows that fit the memory, in this layout. InvalidArgument if they are too few.
  Status HotRows(const RowLayout& layout, uint64_t* rows) const;
  ExportPlan ScanCold(uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const;
  // Evicts cold rows with low scores, until the table has at most max_capacity rows.
  Status TrimCold(Tick tick);
  // Asks the background thread to look for space to give back.
  void CompactSoon();
  // ColdRows::Compact.
  Status MoveCold(ColdRows::Compaction* planned);

  std::vector<float> initial_state_;
  Initializer initializer_;
  Index index_;
  RowStore rows_;
  Changes changes_;
  EvictedRows* evicted_ = nullptr;  // for the running batch, if it is InsertAndEvict
  Stamps stamps_;
  Scoring scoring_;
  Admission admission_;
  // The progress of the running sweep: rows and buckets below these have been clamped.
  struct Swept {
    uint64_t rows = 0;
    uint64_t buckets = 0;
  } swept_;
  VectorBuffers buffers_;  // for the running batch on 16-bit rows

  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0}, inserts{0}, evictions{0}, erased{0}, expired{0},
        refused{0}, unadmitted{0}, dropped_gradients{0}, nonfinite_gradients{0}, cold_hits{0};
  };
  mutable Counters counters_;
  uint64_t inserts_reclaimed_ = 0;  // the rows inserted before the last call of Reclaim

  std::shared_ptr<ColdRows> cold_;  // null: all rows are in memory
  uint64_t max_hot_bytes_ = 0;
  uint64_t trim_cursor_ = 0;  // of TrimCold
  // Of the sweep that brings rows up to date (BringRows): the end of the cold rows, as far as it is
  // known; 0: no sweep is running.
  uint64_t end_of_bringing_ = 0;
  mutable std::mutex error_mutex_;
  // Of calls that could not return them, by the thread that made the call: another one must not
  // take it, and leave this one to use what could not be read.
  mutable std::map<std::thread::id, Status> errors_;

 private:
  class Bringing;
  class Compactor;
  std::unique_ptr<Compactor> compactor_;  // with cold_; the last member, so it ends first
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HOST_TABLE_H_
