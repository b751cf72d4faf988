// DeviceTable: a Table whose index is in a device's memory. Its rows are there too (kHbm), or only
// its first max_hbm_bytes of rows (kHybrid); the others are in host memory that the device can
// access (flat_index.h), or cold, if that is limited (device_table_cold.h). Device is a device of
// device.h.
//
// The arrays that calls take and fill (keys, vectors, rows, ...) are in the device's memory. The
// exceptions are the calls that read or write whole tables, Export, ReadCut and LoadRows: their
// arrays are in host memory. Exec gives the stream.
//
// Waits. Calls only give work to the stream. The host keeps upper bounds of the device's
// counters (Bounds), which are enough to make room ahead of a batch. They follow the counters that
// the device posts after each inserting batch (Mailbox), one or two batches late. The host waits
// only
//
// - where a bound reaches a limit and the exact number is needed,
// - where a call returns a number, or delivers to the host,
// - where a batch may have to be refused,
// - while a cut is read,
// - where a table has cold rows, and a batch reads or evicts some.
//
// Failure. A call fails if memory for its work runs out, or if the GPU fails. A call that returns a
// Status has then changed nothing, or reports that the table is inconsistent; such a table refuses
// every later change. A failure in a call that returns no Status is reported by the next call that
// returns one.
//
// Inserting: see kernels_insert.h, and for admission kernels_admission.h. Row ids are allocated in
// the order of the batch. Two choices depend on how the GPU's threads interleave: which slot of a
// bucket a key gets, and which of several equally old rows is evicted.
//
// Growing. Memory is committed in place, ahead of the rows that a batch may need. The index is
// rebuilt, kGrowth times larger, when the bound on the number of keys exceeds max_load_factor of
// its slots. With the default max_load_factor the load is between 0.62 and 0.88, and at most
// kFullLoad in a full table whose keys leave. Metadata is at most 32 bytes per row.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/device_batch.h"
#include "cc/device/device_steps.h"
#include "cc/device/kernels.h"
#include "cc/device/kernels_cold.h"
#include "cc/device/kernels_insert.h"
#include "cc/device/kernels_rows.h"
#include "cc/device/kernels_tiers.h"
#include "cc/device/leaving_rows.h"
#include "cc/table/admission.h"
#include "cc/table/changes.h"
#include "cc/table/cold_table.h"
#include "cc/table/deletion_log.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/initializer.h"
#include "cc/table/row_store.h"
#include "cc/table/score.h"
#include "cc/table/stamps.h"
#include "cc/table/table.h"

namespace dynemb {

template <class Device>
class DeviceLookups;

template <class Device>
class DeviceTable final : public ColdTable {
 public:
  // options.tier says where rows may be: kHbm, or kHybrid with options.max_hbm_bytes. If `cold` is
  // not null, host memory holds at most options.max_dram_bytes of rows, and `cold` gets the others.
  static Status Make(const TableOptions& options, Device* device, std::unique_ptr<Table>* table,
                     std::unique_ptr<ColdRows> cold = nullptr);
  ~DeviceTable() override = default;

  const RowLayout& layout() const override { return store_.layout; }
  Status Error() const override;
  uint64_t size() const override;
  TableStats stats() const override;
  Status ResetState(Exec& exec, const StateSpec& spec) override;
  Status Clear(Exec& exec, Tick tick) override;
  Stamp BeginBatch(Exec& exec, Tick tick, size_t n) override;
  Stamp BeginLookup(Exec& exec, Tick tick, size_t n) override;
  Status AdvanceEpoch(Exec& exec) override;

  void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  void Contains(Exec& exec, KeySpan keys, bool* found) const override;
  void Scores(Exec& exec, KeySpan keys, int64_t* scores) const override;
  void Explain(Exec& exec, KeySpan keys, KeyState* states) const override;
  Status SetScores(Exec& exec, KeySpan keys, const Score* scores) override;
  Status AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) override;
  void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector, void* vectors,
              RowId* rows) override;
  void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state, bool* found) const override;
  void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n, Tick since,
               Tick now, bool* changed) const override;
  Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  Status InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                        EvictedRows* evicted) override;
  Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors, RowId* rows) override {
    return LookupCounted(exec, keys, nullptr, tick, vectors, rows);
  }
  Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times, Tick tick, void* vectors,
                       RowId* rows) override;
  Status Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) override;
  Status Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) override;
  Status WriteRows(Exec& exec, KeySpan keys, const float* vectors, const float* state, bool insert,
                   uint64_t rounding, Tick tick) override;
  size_t Erase(Exec& exec, KeySpan keys, Tick tick, Removal how) override;
  void ApplyRange(Exec& exec, const RowOptimizer& optimizer, KeySpan keys, const RowId* rows,
                  const float* gradients, size_t begin, size_t end, uint64_t rounding,
                  Tick tick) override;

  void BringKeys(Exec& exec, KeySpan keys) override;
  Status LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) override;
  void SwapRows(Table* other, Tick tick) override;
  Status LoadAdmission(const uint64_t* saved, int64_t first, int64_t num, bool merge) override;
  void CheckInvariants() const override;

  bool PromotionIsDue() const override { return reads_ >= kPromoteEvery && tiered(); }
  // (exclusive) Compares rows of the host tier that were read since the last call with rows of the
  // device tier, and swaps each pair in which the row of the host tier is read more often
  // (kernels_tiers.h). Does nothing if all rows are in one tier.
  Status Promote(Exec& exec, Tick tick) override;
  // The same for several tables, which are named once each.
  static Status Promote(Exec& exec, const std::vector<DeviceTable*>& tables, Tick tick);

 protected:
  void TakeSeed(uint64_t seed) override {
    Table::TakeSeed(seed);
    initializer_.set_seed(seed);
    admission_.set_seed(seed);
  }
  ExportPlan ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                      const RowPredicate& where) const override;
  Status RemoveKeys(Exec& exec, KeySpan keys, Tick tick, Removal how, uint64_t* removed) override;
  uint64_t RowsHeld() const override { return bounds_.live + num_cold(); }
  uint64_t BringRows(Exec& exec, uint64_t first, uint64_t num) override;
  void MarkRows(Exec& exec, float mark) override;
  void MarkNewRows(Exec& exec, float mark) override;
  Status CopySteps(Exec& exec, const CatchUp& steps) override;
  void StartChanges(Tick tick, Tick known_since) override { changes_.Start(tick, known_since, 0); }
  Status HasLostHot(bool* lost) const override;
  Status HaveHot(Exec& exec, const std::vector<uint64_t>& keys,
                 std::vector<char>* has) const override;
  Status StartCut(Exec& exec, std::unique_ptr<Cut> cut) override;
  std::vector<RowId> PlanHotCut(size_t limit) override;
  Status ReadStored(Exec& exec, const std::vector<RowId>& rows,
                    const RowColumns<Stamp>& to) const override;
  Status AddHotRows(Exec& exec, const ColdRows::AddHotFn& add) override;
  Status ListMissing(Exec& exec, KeySpan keys, std::vector<uint64_t>* missing) const override;
  Status CopyAdmission(Exec& exec, std::vector<uint64_t>* words, int64_t* first_line) override;

 private:
  friend class DeviceLookups<Device>;

  using Range = typename Device::Range;
  using HostRange = typename Device::HostRange;
  using Stream = typename Device::Stream;

  // The memory of a table's rows and index.
  struct Store {
    RowLayout layout;
    uint64_t split = 0;
    uint64_t capacity = 0;
    Range index, heads, device_rows;
    HostRange host_rows;
    FlatRing ring;
  };
  // Upper bounds of the device's counters after the work given so far.
  struct Bounds {
    uint64_t high_water = 0;
    uint64_t live = 0;
  };
  // A session whose work follows all earlier work on its tables (device_table_work.h).
  class Work;
  using Batch = DeviceBatch<Device>;
  // Whether a call's keys may repeat.
  enum class Keys { kDistinct, kMayRepeat };

  // Records the failure that Error returns.
  void Fail(const Status& status, bool inconsistent) const;

  explicit DeviceTable(Device* device) : device_(device) {}
  Status Init(const TableOptions& options, std::unique_ptr<ColdRows> cold);
  // Reserves memory for rows of this layout, and commits it for init_capacity of them.
  Status Reserve(const RowLayout& layout, Store* store) const;
  // Creates an empty index for init_capacity keys.
  Status MakeIndex(Work& work, Store* store) const;
  // The maximal load of an index for this number of keys, of a table that can have `capacity`.
  double MaxLoad(uint64_t keys, uint64_t capacity) const;
  Status BringInitialState(Work& work, const std::vector<float>& state, Range* made) const;
  static Status CommitRows(Store* store, uint64_t rows);
  Status LoadPart(Exec& exec, const LoadedRows& loaded, Tick tick);
  uint64_t capacity() const { return store_.capacity; }
  uint64_t BucketLimit(uint64_t buckets) const;  // the keys that they may hold
  uint64_t SplitOf(const RowLayout& layout) const;
  RowLayout LayoutOf(int64_t state_width) const;

  DeviceView View() const {
    return {store_.ring,
            reinterpret_cast<RowHead*>(store_.heads.data()),
            {store_.device_rows.data(), store_.host_rows.data(), store_.split,
             store_.layout.content_bytes()},
            store_.layout};
  }
  device::Counters* counters() const { return reinterpret_cast<device::Counters*>(own_.data()); }
  device::TierState* tier_state() const {
    return reinterpret_cast<device::TierState*>(counters() + 1);
  }
  device::Mailbox* mailbox() const { return reinterpret_cast<device::Mailbox*>(mail_.data()); }
  uint64_t* noted() const { return reinterpret_cast<uint64_t*>(tier_state() + 1); }
  uint32_t num_noted() const { return kSlotsPerMove * promote_most_; }
  InitializerView initial() const;
  KeyArray KeysAt(const void* keys) const { return {keys, store_.layout.key_size}; }
  KeyArray KeysAt(KeySpan keys) const {
    keys.CheckWidth(store_.layout.key_size);
    return KeysAt(keys.data());
  }
  // For ForRows: the quads of a vector that is copied without conversion.
  size_t vector_quads() const { return device::QuadsOfBytes(layout().vector_bytes()); }
  bool tiered() const { return store_.split < capacity(); }
  // Whether a key's row may get another id.
  bool rows_move() const { return tiered() || cold_ != nullptr; }
  Rounding RoundingAt(uint64_t step) const {
    return {options_.stochastic_rounding, options_.seed, 0, step};
  }

  // Waits, and returns the counters; zeros if work.status() has a failure.
  device::Counters Read(Work& work) const;
  // Waits, and makes the bounds exact.
  Status Refresh(Work& work);
  // Tightens the bounds to the counters that the device has posted. Does not wait.
  void ReadMail();
  // Makes room in all tables for the new rows and slots of a batch. Waits, once, if the bounds of
  // some tables do not show that there is enough room. sums[i] is the number of new keys before
  // item i.
  static Status MakeRoom(Work& work, Batch& batch, const uint32_t* sums);
  // Whether the bounds show that there is enough room for n new keys.
  bool HasRoom(size_t n) const;
  // Makes room for a batch of n keys, given the room of this table. Waits only to free an index
  // that has become too small.
  Status MakeRoom(Work& work, const device::Room& room, size_t n);
  // Records deletions in the tables t of a batch with tracked[t]. rows[i] is the row that was
  // evicted for item i of the batch, or kNoRow.
  static void NoteEvicted(Work& work, Batch& batch, const RowId* rows,
                          const std::vector<bool>& tracked);
  // The number of rows after n more.
  uint64_t After(uint64_t rows, size_t n) const { return std::min<uint64_t>(rows + n, capacity()); }
  Status GrowIndex(Work& work, uint64_t keys);

  // The number of places of the device tier that a promotion may examine.
  uint32_t PromotionWindow() const;
  // Whether there are rows in the host tier, and rows may move now.
  bool HasTwoTiers() const;
  // A table in a promotion: the time, and the numbers of its candidates and places; for
  // Promotes::kRead also the position of its first id in the batch.
  struct Promotion {
    DeviceTable* table;
    Stamp now;
    uint32_t candidates, places, first_id;
  };
  // `read`: of the batch, for Promotes::kRead.
  static Status Promote(Work& work, const std::vector<Promotion>& promotions,
                        device::Promotes which, const RowId* read);
  // (exclusive) Whether the rows that a lookup finds may be promoted.
  bool PromotesRead() const { return cold_ == nullptr && scoring_.by_time() && HasTwoTiers(); }
  // (exclusive) The same, of the lookup of this batch.
  bool Promotes(const Batch& batch) const { return batch.read != nullptr && PromotesRead(); }
  // (exclusive) FindRows of an inserting lookup, for PromoteRead.
  static Status FindToPromote(Work& work, Batch& batch);
  // (exclusive) Promotes the rows of the host tier that FindToPromote has found (Promotes::kRead);
  // they get other ids. Without memory for it, rows stay where they are.
  static Status PromoteRead(Work& work, Batch& batch);

  // The view of this table for a batch.
  device::TableView ViewAt(Stamp now, bool inserts = false) const;
  device::TableViews ViewsAt(Stamp now, size_t n) const;
  // The current views of a batch's tables. After a change to a table (GrowIndex), the caller sets
  // `viewed` to false.
  static const device::TableViews& ViewsOf(Work& work, Batch& batch);
  Batch BatchOf(KeyArray keys, size_t n, Stamp now, RowId* rows) {
    Batch batch;
    batch.tables = {this};
    batch.begins = {0, static_cast<uint32_t>(n)};
    batch.now = {now};
    batch.keys = keys;
    batch.rows = rows;
    return batch;
  }
  // Begins a batch once: checks its size and Error(), begins the batch, and sets *now.
  enum class Kind {
    kWrite,   // BeginBatch
    kInsert,  // it may insert: a step (expiry.h)
    kLookup,  // BeginLookup
  };
  Status Begin(Exec& exec, size_t n, Tick tick, Stamp* now, Kind kind);
  Stamp BeginInsert(Exec& exec, Tick tick, size_t n);

  // Finds the rows of a batch; `counts`: whether stats() counts these finds. Fails only if cold
  // rows cannot be moved to memory.
  static Status FindRows(Work& work, Batch& batch, bool counts);
  // Creates rows for the keys whose row is kNoRow; `fill` as in FillRows. `election`: over all
  // keys, or null. If it returns ResourceExhausted, nothing has changed.
  template <class Fill>
  static Status Insert(Work& work, Batch& batch, Keys repeat, const Fill& fill,
                       const Election* election = nullptr);
  Status CheckCapacity(Work& work, const uint32_t* from, const uint32_t* to, Stamp now);

  // --- Cold rows (device_table_cold.h)

  // The rows of host memory, of this layout. InvalidArgument if all memory holds too few.
  Status HostRows(const RowLayout& layout, uint64_t split, uint64_t* rows) const;
  static bool AnyCold(const Batch& batch);
  // Like KeepError, unless the session already reports the error.
  void KeepErrorBeside(const Work& work, const Status& status) const;
  // FindRows, which is no access.
  static Status FindQuietly(Work& work, Batch& batch);
  // Whether a batch of n keys may exceed max_capacity, in a table that evicts nothing.
  bool MayExceed(size_t n) const;
  // Lists the keys i of a batch with absent[i] == kNoRow, each once, in host memory: `ends` are the
  // ends of the tables' shares.
  static Status ListAbsent(Work& work, Batch& batch, const RowId* absent,
                           std::vector<uint64_t>* keys, std::vector<uint32_t>* ends);
  // Moves cold rows to memory, and sets batch.rows[i] to them: the rows of the keys i with
  // batch.rows[i] == kNoRow; if `found` is not null, only where found[i] was a row.
  static Status BringIn(Work& work, Batch& batch, const RowId* found);
  // Gives n rows to memory without evicting rows that the batch has found. moved[t] has the rows of
  // table t.
  static Status MoveIn(Work& work, const std::vector<Moved>& moved, size_t n, Batch* from);
  // Sets batch.rows to the current rows of keys whose rows an earlier call found. All of them are
  // in memory then, if the tables have cold rows.
  static Status HoldFound(Work& work, Batch& batch, const RowId* found);
  // For tables with cold rows: finds out how many rows a batch evicts from those that may have to
  // evict, refuses it if it must not, and prepares for them. sums[i] is the number of new keys
  // before item i.
  static Status PlanLeaving(Work& work, Batch& batch, const std::vector<bool>& evicts,
                            const uint32_t* sums, std::vector<LeavingRows>* leaving);
  // The memory for n rows; room for them in ColdRows.
  Status TakeLeaving(Work& work, size_t n, LeavingRows* leaving) const;
  Status ReserveLeaving(LeavingRows* leaving);
  // Gives rows to ColdRows: (*leaving)[t] has the rows of tables[t]. `rows` and `scores` belong to
  // the new keys.
  static void Leave(Work& work, const std::vector<DeviceTable*>& tables,
                    std::vector<LeavingRows>* leaving, const RowId* rows, const Score* scores);
  void AddCold(const LeavingRows& leaving, size_t num);
  // TrimCold, after a batch at `now`.
  Status Trim(Work& work, Stamp now);
  // Moves every row of memory to ColdRows. If it fails, it has moved some of them.
  Status MoveAllOut(Work& work);
  std::vector<char> KeysToHost(Work& work, KeySpan keys) const;
  // Pins the rows that a batch has found, in its tables that may have to evict rows and whose
  // scores are not stamps. `evicts`: the tables of the batch that may have to evict rows.
  static Status PinFound(Work& work, Batch& batch, const std::vector<bool>& evicts);
  Status Refuse(uint64_t keys, uint64_t size, const std::string& why);
  // One step of an optimizer on a batch with gradients. Sets batch.rows to the current rows of its
  // keys; `found` has the rows that an earlier call found. `nonfinite` is workspace for one word
  // per key.
  static void Apply(Work& work, Batch& batch, const RowId* found, uint32_t* nonfinite,
                    const RowOptimizer& optimizer);
  static Status CheckBatch(size_t n);
  // Erase, of keys in the device's memory: those whose rows have expired, or all if `expired` is
  // nothing. `on_host`: the same keys in host memory, whose cold rows are erased, too.
  size_t Remove(Work& work, KeyArray keys, size_t n, Tick tick, Removal how,
                const Expired& expired = Expired(), KeySpan on_host = KeySpan());
  // Brings the rows of a batch (kNoRow: none) up to date. Keys may repeat.
  static void Bring(Work& work, Batch& batch);
  // ReadRows, of cold rows.
  void ReadColdRows(Work& work, KeySpan keys, float* vectors, float* state, bool* found) const;
  // Brings copies of rows up to date: their vectors, as float32, and their state.
  void BringCopies(Work& work, const RowId* rows, size_t n, float* vectors, float* state) const;
  // Copies the vectors of rows [begin, begin + *n), as float32 and up to date, to the device's
  // memory. Lowers *n if these are too many. Null if memory runs out.
  const float* CopyBrought(Work& work, uint64_t begin, uint64_t* n) const;
  // Calls fn(rows, n) for rows [first, first + num), a range at a time; kNoRow replaces rows that
  // are not live. `rows` is in the device's memory. Returns the row after them; 0 at the end of the
  // rows, and if memory runs out.
  template <class Fn>
  uint64_t ForLiveRows(Work& work, uint64_t first, uint64_t num, const Fn& fn);
  // Allocates the counters.
  Status InitAdmission(Work& work, const AdmissionOptions& options);
  size_t CounterBytes() const {
    return static_cast<size_t>(admission_lines_.num) * AdmissionCounters::kLineBytes;
  }
  device::AdmissionView AdmissionAt() const;
  // Whether a table of the batch may refuse keys.
  static bool AnyAdmission(const Batch& batch);
  // Decides which new keys of a batch get rows, and sets in->sums accordingly. If it fails, keys
  // may have been counted.
  static Status Admit(Work& work, Batch& batch, InsertArrays* in);
  // The counts of keys in the device's memory; waits.
  std::vector<uint32_t> CountsOf(Work& work, KeyArray keys, size_t n) const;
  Status ForgetCounts(Work& work, KeyArray keys, size_t n);
  // Removes the expired rows of a batch's keys.
  static Status RemoveExpiredRows(Work& work, Batch& batch);

  // Waits until the reader of the running cut has taken enough of the saved rows. Call it before
  // the batch opens a session: the reader needs one too.
  void WaitForReader();
  // Call before rows[i] change, are freed or are given to other keys. Saves the rows that belong to
  // the running cut. `scores` are their scores; null: the scores in their slots.
  void BeforeWrite(Work& work, const RowId* rows, size_t n, const Score* scores = nullptr);
  // The same for the rows of those tables t of a batch with where(t). Waits once for the rows of
  // all of them. If the scores are not stamps, it also waits for the scores of each table.
  template <class Where>
  static void BeforeWrite(Work& work, const Batch& batch, const Where& where);
  // Rows that belong to the running cut of a table, and their scores, if these are not stamps.
  struct ToSave {
    DeviceTable* table;
    std::vector<RowId> rows;
    std::vector<Score> scores;
  };
  // Returns which of the n rows (in host memory) the running cut still has to save.
  ToSave TakeOfCut(Work& work, const RowId* rows, size_t n, const Score* scores);
  static void Save(Work& work, const std::vector<ToSave>& all);
  // Saves copies of rows first to first + num - 1.
  void Push(const ToSave& of, size_t first, size_t num, const char* rows);
  // Call before the keys of the n rows (kNoRow: none), which had these scores (null: unknown), are
  // lost at `tick`.
  void BeforeLoss(Work& work, const RowId* rows, const Score* scores, size_t n, Tick tick,
                  Removal how);
  // BeforeLoss of a batch that returns the rows that it evicts: `total` of the n rows. sums[i] is
  // the number of them before rows[i].
  void CopyEvicted(Work& work, const RowId* rows, const Score* scores, const uint32_t* sums,
                   size_t n, uint32_t total, Tick tick);
  // Copies n rows to columns in host memory. The caller waits.
  void CopyColumns(Work& work, const RowId* rows, uint32_t n, const TickColumns& to);
  // Forgets the oldest deletions, if there are many for the size of the table.
  void TrimDeletions();
  // Waits for the work so far, and returns a copy of a device array of n elements.
  template <class T>
  static std::vector<T> ToHost(Work& work, const T* array, size_t n);
  // The live rows in [begin, end) that satisfy the predicate, at most `most` of them. *next is the
  // position after the last row that was examined.
  std::vector<RowId> ListRows(Work& work, uint64_t begin, uint64_t end, const RowPredicate& where,
                              uint64_t most, uint64_t* next) const;
  // Calls fn(rows, n) for the ids of all live rows, a range at a time. `rows` is in the device's
  // memory.
  template <class Fn>
  void ForRowsInChunks(Work& work, const Fn& fn) const;
  // BeforeWrite for all live rows.
  void SaveAll(Work& work);
  // HaveHot and ReadStored, as part of other work.
  void HaveHot(Work& work, const std::vector<uint64_t>& keys, std::vector<char>* has) const;
  void ReadToHost(Work& work, const std::vector<RowId>& rows, const RowColumns<Stamp>& to) const;

  static constexpr double kGrowth = 1.4;
  // In a full table, a new key often passes over a bucket from which a key leaves later, and stays
  // where it is. With this load, a search for an absent key reads two buckets, and eight with a
  // load of 0.85 (bucket_ops_test.cc).
  static constexpr double kFullLoad = 0.7;
  // If a batch has at most one key per kFewBatches keys of the table, MakeRoom makes room for
  // another such batch.
  static constexpr uint64_t kFewBatches = 16;
  static constexpr size_t kRowAlignment = 16;
  // home + step (OnPath) must fit in 32 bits.
  static constexpr uint64_t kMostBuckets = uint64_t{1} << 31;
  // The least number of rows that Reclaim examines, if the table has that number.
  static constexpr uint64_t kScanLeast = uint64_t{1} << 20;
  static constexpr uint32_t kPromoteEvery = 8;  // batches that read
  // Promote moves at most an eighth of the device tier, clamped to these limits.
  static constexpr uint64_t kPromoteLeast = 1024;
  static constexpr uint64_t kPromoteMost = uint64_t{1} << 17;
  static constexpr uint32_t kSlotsPerMove = 4;  // for candidates
  // The most candidates or places of the tables of a group: each takes 24 bytes of workspace.
  static constexpr uint64_t kPromotionEntries = uint64_t{4} << 20;

  Device* const device_;
  Store store_;
  Initializer initializer_;
  Range runs_;              // the initializer's
  Range initial_state_of_;  // the memory of initial_state_
  const float* initial_state_ = nullptr;
  uint32_t promote_most_ = 0;
  std::atomic<uint32_t> reads_{0};  // batches that read rows since the last Promote
  Range own_;  // Counters, TierState and, in a table of two tiers, candidates for Promote
  Bounds bounds_;
  HostRange mail_;           // a Mailbox
  uint32_t batch_ = 0;       // the number of the last inserting batch
  uint32_t first_mail_ = 1;  // posts of earlier batches do not apply to the current rows
  // given_[b % kBatches]: the number of keys in all inserting batches up to batch b.
  static constexpr uint32_t kBatches = 64;
  uint64_t given_[kBatches] = {};
  DeviceSteps<Device> steps_;  // of catch_up_
  uint64_t examined_due_ = 0;  // rows that Reclaim must examine
  // For the running batch, if it has to pin rows.
  uint32_t* pins_ = nullptr;
  uint64_t* num_pinned_ = nullptr;
  AdmissionRule admission_;
  AdmissionLines admission_lines_;  // of its counters
  Range admission_counters_;        // [admission_lines_.num, AdmissionLine::kWords]
  std::atomic<uint64_t> refused_{0};
  // The stream of the last session, perhaps destroyed since.
  mutable Stream stream_{};
  mutable std::mutex error_mutex_;
  mutable Status unreported_, inconsistent_;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_H_
