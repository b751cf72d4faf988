// ColdTable: the base of HostTable and DeviceTable. It has the work that does not depend on where
// the hot rows of a table are: times, cuts, flushes, and everything about cold rows (cold_rows.h)
// except their moves to memory and back. The hot rows of a HostTable are in host memory. The hot
// rows of a DeviceTable are in device memory and, in its host tier, in host memory.
//
// Contents of cold rows have the layout of a row in host memory, in every table: a flush of a table
// in a GPU's memory can be restored to a table in host memory, and the other way round.
//
// Tables whose rows are all hot have this base, too. Their `cold_` is null, and they have no files
// and no background work.
#ifndef DYNEMB_TABLE_COLD_TABLE_H_
#define DYNEMB_TABLE_COLD_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cc/table/changes.h"
#include "cc/table/cold_rows.h"
#include "cc/table/deletion_log.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/expired.h"
#include "cc/table/flush_history.h"
#include "cc/table/score.h"
#include "cc/table/stamps.h"
#include "cc/table/table.h"
#include "cc/table/vector_buffer.h"
#include "cc/table/warning.h"

namespace dynemb {

class ColdTable : public Table {
 public:
  ~ColdTable() override;
  bool has_cold_rows() const final { return cold_ != nullptr; }
  void ReadAhead(Exec& exec, KeySpan keys) final;
  Status Flush(Exec& exec, const std::string& folder, Tick tick, int64_t utc_ns) final;
  Status KeepFlush(const std::string& folder) final;
  Status Restore(Exec& exec, const std::string& folder, FlushInfo* info) final;
  // Moves rows in files until no space has to be given back, in the calling thread. For tests.
  Status CompactFiles();

  bool tracking() const final { return changes_.tracking(); }
  void Track(Tick tick) final;
  Status BeginCut(Exec& exec, Tick watermark, Tick since, CutOf of, SavedRows* saved,
                  size_t number) final;
  void EndCut() final;
  const Cut* cut() const final { return changes_.cut(); }
  std::vector<RowId> PlanCut(size_t limit) final;
  bool CutIsRead() const final;
  void ReadCut(Exec& exec, const std::vector<RowId>& plan, const CutColumns& to) final;

 protected:
  ColdTable();

  // --- What the table has to provide

  // changes_.Start.
  virtual void StartChanges(Tick tick, Tick known_since) = 0;
  // Sets *lost to whether the table has ever lost a key that had a row in memory.
  virtual Status HasLostHot(bool* lost) const = 0;
  // has[i] = whether keys[i], bit patterns in host memory, has a row in memory, perhaps one that
  // has expired.
  virtual Status HaveHot(Exec& exec, const std::vector<uint64_t>& keys,
                         std::vector<char>* has) const = 0;
  // Sets `todo` and `most_rows` of a cut whose other members are set, of the rows in memory, and
  // gives it to changes_. If it fails or throws std::bad_alloc, nothing has changed.
  virtual Status StartCut(Exec& exec, std::unique_ptr<Cut> cut) = 0;
  // PlanCut, of the rows in memory. Once there are no more, it returns none, and the cursor of the
  // cut is at the end of `todo`.
  virtual std::vector<RowId> PlanHotCut(size_t limit) = 0;
  // Copies rows in memory to columns in host memory, as they are stored.
  virtual Status ReadStored(Exec& exec, const std::vector<RowId>& rows,
                            const RowColumns<Stamp>& to) const = 0;
  // Calls `add` for each row of memory (ColdRows::Flush), as a row of content_layout().
  virtual Status AddHotRows(Exec& exec, const ColdRows::AddHotFn& add) = 0;
  // (shared) Appends the bit patterns of the `keys` that have no row in memory, not even an expired
  // one. They may repeat.
  virtual Status ListMissing(Exec& exec, KeySpan keys, std::vector<uint64_t>* missing) const = 0;
  // The counters of admission, and the number of their first line; none if keys are not counted.
  virtual Status CopyAdmission(Exec& exec, std::vector<uint64_t>* words, int64_t* first_line) = 0;

  // --- Times and scores

  // The rows that have expired in a batch at `tick`; 0 as for HorizonAt.
  Expired ExpiredAt(Tick tick) const {
    return Expired(stamps_, HorizonAt(tick), expiry_.since_access());
  }
  bool HasExpired(const Expired& expired, const RowTimes& times) const {
    return expired.any() && expired(expired.by_access ? times.score : times.updated);
  }
  // A score as Scores returns it.
  int64_t PublicScore(Score score) const {
    return scoring_.by_time() ? static_cast<int64_t>(stamps_.Decode(score)) : int64_t{score};
  }
  // The tick of a last update; 0 for "never".
  Tick TickOf(Stamp updated) const { return updated == 0 ? 0 : stamps_.Decode(updated); }
  // Times of a row that moves between memory and ColdRows while the stamps are swept.
  RowTimes Clamped(RowTimes times) const {
    return {stamps_.Clamp(times.updated),
            scoring_.by_time() ? stamps_.Clamp(times.score) : times.score};
  }
  // Tracks changes from now on. The table has not changed since `tick`, and has lost no key since.
  void RestartChanges(Tick tick) { StartChanges(tick, tick); }
  DeletionLog& deletions() { return changes_.deletions(); }
  // Export, of rows in memory.
  void CopyRows(Exec& exec, const std::vector<RowId>& rows, const TickColumns& to) const final;
  // Rebases the scores of cold rows, at the beginning of an epoch.
  void RebaseCold();

  // --- Contents

  // The layout of a row in host memory, whose contents cold rows have. The table sets it whenever
  // its state changes.
  const RowLayout& content_layout() const { return content_layout_; }
  void SetContentLayout(const RowLayout& layout) { content_layout_ = layout; }
  // The state in a content.
  float* StateIn(char* content) const {
    return reinterpret_cast<float*>(content + content_layout_.state_offset -
                                    content_layout_.vector_offset);
  }
  const float* StateIn(const char* content) const { return StateIn(const_cast<char*>(content)); }
  // Brings a content up to date, of a row that no cut has. `unpacked` is a buffer for a vector, if
  // the dtype has 16 bits.
  void BringContent(uint64_t key, char* content, float* unpacked) const;
  // Stores a vector that was computed as float32 in one of the dtype, rounded if that has 16 bits.
  void StoreUpdated(const float* vector, uint64_t key, uint64_t step, void* to) const;

  // --- Cold rows

  // Cursors of ScanRows, and rows of BringRows, from here on are of cold rows.
  static constexpr uint64_t kColdCursor = uint64_t{1} << 62;
  // Takes the cold rows, which are empty. Their files are compacted in the background.
  void StartCold(std::unique_ptr<ColdRows> cold);
  // Whether rows are wiped in flushes, too.
  bool has_flushes() const { return flushes_.any(); }
  // Whether there are cold rows now.
  bool any_cold() const { return cold_ != nullptr && cold_->size() != 0; }
  uint64_t num_cold() const { return cold_ != nullptr ? cold_->size() : 0; }
  // Adds the statistics of the cold rows to *stats, which has the statistics of the hot rows.
  void AddColdStats(TableStats* stats) const;
  // Whether the table has lost cold rows.
  bool HasLostCold() const { return lost_.evicted != 0 || lost_.erased != 0 || lost_.expired != 0; }
  // Keeps the error of a call that cannot return it, for KeptError on the same thread, which
  // returns it once.
  void KeepError(const Status& status) const;
  Status KeptError() const;
  // Calls fn(i, row) for each keys[i] that has a cold row which has not expired. `keys` are in host
  // memory. Keeps the error.
  void ForCold(KeySpan keys, ColdRows::RowFn fn) const;
  void ExplainCold(KeySpan keys, KeyState* states) const;
  ExportPlan ScanCold(uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const;
  void CopyColdRows(const ExportPlan& plan, const TickColumns& to) const final;
  // For BringRows: what follows after rows of memory have been brought up to date, where
  // `next` is the next of these (0: none), and `num` more rows may be.
  uint64_t BringCold(Exec& exec, uint64_t next, uint64_t num);
  uint64_t BringColdFrom(Exec& exec, uint64_t first, uint64_t num);
  // Whether a sweep that brings rows up to date, cold ones included, is running.
  bool IsBringing() const { return end_of_bringing_ != 0; }
  void MarkCold(Exec& exec, float mark);

  // Cold rows on their way to memory, in the order of their keys.
  struct Moved {
    std::vector<uint64_t> keys;
    std::vector<ColdPlace> places;
    std::vector<RowTimes> times;
    std::vector<uint32_t> content_of;  // the number of each row in `contents`
    std::vector<char> contents;

    const char* ContentOf(size_t i, const RowLayout& layout) const {
      return contents.data() + content_of[i] * layout.content_bytes();
    }
  };
  // Finds the cold rows of distinct keys, and removes those that have expired at `tick` (0: none).
  Status TakeCold(const std::vector<uint64_t>& keys, Tick tick, Moved* moved);
  // After the rows are in memory: they are cold no longer.
  void RemoveMoved(const Moved& moved);
  // Erase, of cold rows; adds their number to *erased. `keys` are in host memory. If it fails,
  // nothing has changed, except that a file may still have to be rewritten: then that is the call's
  // kept error, and the next flush tries again.
  Status EraseCold(KeySpan keys, Tick tick, Removal how, size_t* erased);
  void ClearCold(Tick tick) noexcept;
  // Evicts cold rows with low scores, until the table has at most max_capacity rows; `hot` of them
  // are in memory.
  Status TrimCold(Tick tick, uint64_t hot);
  // Asks the background to look for space to give back.
  void CompactSoon();
  // For SwapRows: swaps the times, the cold rows, and what Table::SwapBase swaps.
  void SwapColdBase(ColdTable* other);

  Stamps stamps_;
  Scoring scoring_;
  Changes changes_;
  EvictedRows* evicted_ = nullptr;  // for the running batch, if it is InsertAndEvict
  std::shared_ptr<ColdRows> cold_;  // null: all rows are in memory
  VectorBuffers buffers_;           // for the running batch on 16-bit rows

 private:
  class Bringing;
  class Compactor;

  void BeginColdCut(const Cut& cut);
  void ReadColdCut(const std::vector<RowId>& plan, const CutColumns& to);
  // Appends to *gone the `keys`, bit patterns, that have no row, not even an expired one.
  Status ListGone(Exec& exec, const std::vector<uint64_t>& keys, std::vector<uint64_t>* gone) const;
  // Forgets the oldest losses once there are too many for a table of `rows` rows.
  void TrimLosses(uint64_t rows);
  // ColdRows::Compact.
  Status MoveCold(ColdRows::Compaction* planned);
  // Rewrites condemned files.
  Status RewriteCondemned();

  RowLayout content_layout_;
  // Cold rows that the table has lost; those that were moved to memory.
  struct Lost {
    std::atomic<uint64_t> evicted{0}, erased{0}, expired{0};
  } lost_;
  std::atomic<uint64_t> moved_in_{0};
  uint64_t trim_cursor_ = 0;  // of TrimCold
  // The end of the cold rows that the current BringRows sweep has still to visit; the largest
  // number until that end is known, and 0 when no sweep runs.
  uint64_t end_of_bringing_ = 0;
  FlushHistory flushes_;
  BackgroundErrors background_errors_;
  mutable std::mutex error_mutex_;
  // Errors of calls that return void, keyed by calling thread, so that each thread receives only
  // its own.
  mutable std::map<std::thread::id, Status> errors_;
  std::unique_ptr<Compactor> compactor_;  // with cold_; see ~ColdTable
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_COLD_TABLE_H_
