// DeviceTable: a Table whose index is in a device's memory, and its rows there or, beyond the first
// `max_hbm` bytes, in host memory that the device reaches (flat_index.h). Device is a device.h
// device; with SimulatedDevice all of this runs, and is tested, on a CPU.
//
// Arrays of keys, vectors, rows and so on that calls take and give are in the device's memory,
// except where whole tables are read or written: those of Export, ReadCut and LoadRows, which are
// in the host's. Exec gives the stream.
//
// Without waiting. Calls only give work to the stream; the host keeps upper bounds of what the
// device's counters may have become (Bounds), enough to make room ahead of a batch. They follow the
// counters that the device posts after each inserting batch (Mailbox), which are a batch or two
// late. The host waits only where a bound reaches a limit and the exact number is needed, where a
// call returns a number or delivers to the host, where a batch may have to be refused, and while a
// cut is read.
//
// Failure. What can fail is memory for the work of a call, and the GPU. Calls that return a Status
// have then changed nothing, or say that the table is in disorder and refuse all that follows; what
// failed in a call that returns nothing, the next one that can tells.
//
// Inserting: kernels_insert.h. Rows are dealt in the order of the batch; which slot of a bucket a
// key gets, and which of several equally old rows is evicted, depends on how the GPU's threads
// meet.
//
// Growing. Memory is committed in place, ahead of the rows that a batch may need. The index is
// built anew, kGrowth larger, when the keys that there may be pass max_load_factor of its slots: so
// the load is between 0.6 and 0.85 by default, and metadata at most 32 bytes a row.
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

#include "cc/device/kernels.h"
#include "cc/device/kernels_insert.h"
#include "cc/device/kernels_tiers.h"
#include "cc/table/changes.h"
#include "cc/table/deletion_log.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/initializer.h"
#include "cc/table/row_store.h"
#include "cc/table/stamps.h"
#include "cc/table/table.h"

namespace dynemb {

template <class Device>
class DeviceLookups;

template <class Device>
class DeviceTable final : public Table {
 public:
  // options.tier says where rows may be: kHbm, or kHybrid with options.max_hbm_bytes.
  static Status Make(const TableOptions& options, Device* device, std::unique_ptr<Table>* table);
  ~DeviceTable() override = default;

  const RowLayout& layout() const override { return store_.layout; }
  Status Error() const override;
  uint64_t size() const override;
  TableStats stats() const override;
  Status ResetState(Exec& exec, const StateSpec& spec) override;
  Status Clear(Exec& exec, Tick tick) override;
  Stamp BeginBatch(Exec& exec, Tick tick, size_t n) override;

  void Find(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) override;
  void Contains(Exec& exec, const void* keys, size_t n, bool* found) const override;
  void Lookup(Exec& exec, const void* keys, size_t n, Tick tick, const void* default_vector,
              void* vectors, RowId* rows) override;
  void ReadRows(Exec& exec, const void* keys, size_t n, float* vectors, float* state,
                bool* found) const override;
  void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n, Tick since,
               Tick now, bool* changed) const override;
  Status FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) override;
  Status InsertAndEvict(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows,
                        EvictedRows* evicted) override;
  Status LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, void* vectors,
                        RowId* rows) override;
  Status Upsert(Exec& exec, const void* keys, size_t n, const void* vectors, Tick tick) override;
  Status Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                    Tick tick) override;
  Status WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors, const float* state,
                   bool insert, uint64_t step, Tick tick) override;
  size_t Erase(Exec& exec, const void* keys, size_t n, Tick tick, bool wipe) override;
  void ApplyRange(Exec& exec, const RowOptimizer& optimizer, const void* keys, const RowId* rows,
                  const float* gradients, size_t begin, size_t end, uint64_t step,
                  Tick tick) override;

  ExportPlan PlanExport(Exec& exec, uint64_t cursor, uint64_t limit, Tick since) const override;
  void Export(Exec& exec, const ExportPlan& plan, void* keys, void* vectors, float* state,
              int64_t* updates) const override;
  Status BeginCut(Exec& exec, Tick watermark, Tick since, bool with_deleted, SavedRows* saved,
                  size_t number) override;
  void EndCut() override { cut_.reset(); }
  const Cut* cut() const override { return cut_.get(); }
  std::vector<RowId> PlanCut(size_t limit) override;
  bool CutIsRead() const override;
  void ReadCut(Exec& exec, const std::vector<RowId>& plan, void* keys, void* vectors, float* state,
               CutTime* updates, CutTime* accesses) override;
  bool tracking() const override { return tracking_; }
  void Track(Tick tick) override;
  Status LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) override;
  void Adopt(Table* other, Tick tick) override;
  void CheckInvariants() const override;

  bool PromotionIsDue() const override { return reads_ >= kPromoteEvery && tiered(); }
  // (exclusive) Moves the rows of the host tier that were read since the last call, and that are
  // read more often than the rows of the device tier they are compared with, to the device tier,
  // and those to the host tier (kernels_tiers.h). Nothing to do where all rows are in one tier.
  Status Promote(Exec& exec, Tick tick) override;

 private:
  friend class DeviceLookups<Device>;

  using Range = typename Device::Range;
  using HostRange = typename Device::HostRange;
  using Stream = typename Device::Stream;

  // What the rows and the index of a table take.
  struct Store {
    RowLayout layout;
    uint64_t split = 0;
    uint64_t capacity = 0;
    Range index, device_rows;
    HostRange host_rows;
    FlatRing ring;
  };
  // At least what the device's counters are once the work given so far is done.
  struct Bounds {
    uint64_t high_water = 0;
    uint64_t live = 0;
  };
  // A session in line behind everything that its tables were used for before, on any stream.
  class Work : public Device::Session {
   public:
    // Whether the call tells what fails; else the next one that can does.
    enum class Reports { kNo, kYes };
    Work(const DeviceTable& table, Exec* exec, Reports reports = Reports::kNo)
        : Work(std::vector<const DeviceTable*>{&table}, exec, reports) {}
    // Tables of one device, at least one.
    Work(std::vector<const DeviceTable*> tables, Exec* exec, Reports reports);
    ~Work();
    // From here on the tables are in disorder if work fails, until they are in order again.
    void Changes() { changes_ = true; }
    void Settled() { changes_ = !this->status().ok(); }

   private:
    static Stream StreamFor(Exec* exec) {
      return exec != nullptr ? Device::StreamOf(*exec) : Stream{};
    }

    const std::vector<const DeviceTable*> tables_;
    const Stream stream_;
    const Reports reports_;
    bool changes_ = false;
  };
  // The keys of a call. Those of tables[t], each of which is there once, are the positions
  // [begins[t], begins[t + 1]).
  struct Batch {
    std::vector<DeviceTable*> tables;
    std::vector<uint32_t> begins;
    std::vector<Stamp> now;
    std::vector<const float*> gradients;  // of each table; none: empty
    KeyArray keys;
    RowId* rows = nullptr;
    uint64_t step = 0;  // that vectors are rounded by, if it brings gradients
    // ViewsOf: of the tables as they are now, if they have been brought to the device.
    device::TableViews views{};
    bool viewed = false;

    size_t size() const { return begins.back(); }
    size_t size(size_t t) const { return begins[t + 1] - begins[t]; }
    // For ForRows: of the widest vectors.
    size_t quads() const {
      size_t most = 0;
      for (const DeviceTable* table : tables) most = std::max(most, QuadsOf(table->options_.dim));
      return most;
    }
  };
  // How a batch inserts; addresses of the session's arrays.
  struct Inserting {
    const uint32_t* places = nullptr;
    uint32_t* of = nullptr;
    uint32_t* sums = nullptr;
    device::Dealt* dealt = nullptr;
    uint32_t* positions = nullptr;
    RowId* new_rows = nullptr;
  };
  // Whether a call's keys may repeat.
  enum class Keys { kDistinct, kMayRepeat };

  // What Error tells.
  void Fail(const Status& status, bool disorder) const;

  explicit DeviceTable(Device* device) : device_(device) {}
  Status Init(const TableOptions& options);
  // Room for rows of this layout, at first for init_capacity of them.
  Status Reserve(const RowLayout& layout, Store* store) const;
  // An empty index for as many.
  Status MakeIndex(Work& work, Store* store) const;
  Status SetInitialState(Work& work, const std::vector<float>& state);
  static Status CommitRows(Store* store, uint64_t rows);
  uint64_t capacity() const { return store_.capacity; }
  uint64_t BucketLimit(uint64_t buckets) const;  // keys they may hold
  uint64_t SplitOf(const RowLayout& layout) const;
  RowLayout LayoutOf(int64_t state_width) const;

  DeviceView View() const {
    return {
        store_.ring,
        {store_.device_rows.data(), store_.host_rows.data(), store_.split, store_.layout.stride},
        store_.layout,
        stamps_.order()};
  }
  device::Counters* counters() const { return reinterpret_cast<device::Counters*>(own_.data()); }
  device::TierState* tier_state() const {
    return reinterpret_cast<device::TierState*>(counters() + 1);
  }
  device::Mailbox* mailbox() const { return reinterpret_cast<device::Mailbox*>(mail_.data()); }
  uint64_t* noted() const { return reinterpret_cast<uint64_t*>(tier_state() + 1); }
  InitializerView initial() const;
  KeyArray KeysAt(const void* keys) const { return {keys, store_.layout.key_size}; }
  // For ForRows: of a vector that is copied as it is.
  size_t vector_quads() const { return device::QuadsOfBytes(layout().vector_bytes()); }
  bool tiered() const { return store_.split < capacity(); }
  Rounding RoundingAt(uint64_t step) const {
    return {options_.stochastic_rounding, options_.seed, 0, step};
  }

  // Waits, and reads the counters: zeros if work.status() says that something has failed.
  device::Counters Read(Work& work) const;
  // The bounds become exact; waits.
  Status Refresh(Work& work);
  // The bounds become as good as what the device has posted; does not wait.
  void ReadMail();
  // Room for the rows of a batch of n keys, of which *to - *from in the device's memory have none,
  // and for their slots. Waits where bounds are not enough to tell.
  Status MakeRoom(Work& work, const uint32_t* from, const uint32_t* to, size_t n);
  Status GrowIndex(Work& work, uint64_t keys);

  // This table, as a batch sees it.
  device::TableView ViewAt(Stamp now) const;
  device::TableViews ViewsAt(Stamp now, size_t n) const;
  // The tables of a batch, as they are now. What changes one (GrowIndex) has `viewed` be false.
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
  // What batches begin with, once: nothing else has failed, and they are not too large.
  Status Begin(Exec& exec, size_t n, Tick tick, Stamp* now);

  // Finds the rows of a batch; `counts` in stats.
  static void FindRows(Work& work, Batch& batch, bool counts);
  // Rows for every key whose row is kNoRow; fill as in FillRows. ResourceExhausted: nothing has
  // changed.
  template <class Fill>
  static Status Insert(Work& work, Batch& batch, Keys repeat, const Fill& fill);
  Status CheckCapacity(Work& work, const uint32_t* from, const uint32_t* to, Stamp now);
  Status Refuse(uint64_t keys, uint64_t size, const std::string& why);
  // One step of an optimizer on a batch that brings gradients. Its rows are filled in: those that
  // were found, or where they are by now. `nonfinite` is workspace for as many.
  static void Apply(Work& work, Batch& batch, const RowId* found, uint32_t* nonfinite,
                    const RowOptimizer& optimizer);
  static Status CheckBatch(size_t n);

  // Waits until the reader of the running cut has taken enough of what was saved. Before a batch
  // has a session: whoever reads needs one too.
  void WaitForReader();
  // To be called before rows[i] change, are freed or are given to other keys. What the running cut
  // has of them is saved.
  void BeforeWrite(Work& work, const RowId* rows, size_t n);
  // To be called before the keys of the n rows (none: kNoRow) are lost at `tick`.
  void BeforeLoss(Work& work, const RowId* rows, size_t n, Tick tick);
  // [n] of the host: an array of the device, once the work so far is done.
  template <class T>
  static std::vector<T> ToHost(Work& work, const T* array, size_t n);
  // The rows among [begin, end) that are live and were updated after `after`, at most `most`; next
  // is the position behind the last row that was looked at.
  std::vector<RowId> ListRows(Work& work, uint64_t begin, uint64_t end, UpdatedAfter after,
                              uint64_t most, uint64_t* next) const;
  // fn(rows, n) for all live rows updated after `after`, some at a time; rows are in the device's
  // memory.
  template <class Fn>
  void ForRowsInPieces(Work& work, const Fn& fn) const;
  // fn(row, bytes) for each row, with a copy of it.
  template <class Fn>
  void ForCopies(Work& work, const std::vector<RowId>& rows, const Fn& fn) const;
  // BeforeWrite for all rows.
  void SaveAll(Work& work);
  // Delivers columns of rows to the host; null skips one.
  void ReadToHost(Work& work, const std::vector<RowId>& rows, void* keys, void* vectors,
                  float* state, Stamp* updates, Stamp* accesses) const;
  // Those of `keys` (bit patterns) that have no row.
  void DropHeld(Work& work, const std::vector<uint64_t>& keys,
                std::vector<uint64_t>* not_held) const;

  static constexpr double kGrowth = 1.4;
  // A table of this many batches' keys has room for a batch more than it needs.
  static constexpr uint64_t kFewBatches = 16;
  static constexpr size_t kRowAlignment = 16;
  // A step along the ring must not leave 32 bits.
  static constexpr uint64_t kMostBuckets = uint64_t{1} << 31;
  static constexpr uint32_t kPromoteEvery = 8;  // batches that read
  // Rows that Promote moves at most: an eighth of the device tier, but not too few or too many.
  // Twice as many are noted for it.
  static constexpr uint64_t kPromoteLeast = 1024;
  static constexpr uint64_t kPromoteMost = uint64_t{1} << 17;

  Device* const device_;
  Store store_;
  Initializer initializer_;
  Range runs_;              // of the initializer
  Range initial_state_of_;  // rows, as initial_state_
  const float* initial_state_ = nullptr;
  uint32_t promote_most_ = 0;
  std::atomic<uint32_t> reads_{0};  // batches that read rows since the last Promote
  Range own_;  // Counters, TierState and, where there are two tiers, candidates for Promote
  Bounds bounds_;
  HostRange mail_;           // a Mailbox
  uint32_t batch_ = 0;       // of the last inserting batch
  uint32_t first_mail_ = 1;  // posts of earlier batches are not of these rows
  // Keys given by all inserting batches up to b: given_[b % kBatches].
  static constexpr uint32_t kBatches = 64;
  uint64_t given_[kBatches] = {};
  Stamps stamps_;
  EvictedRows* evicted_ = nullptr;
  std::atomic<uint64_t> refused_{0};
  mutable std::atomic<Stream> stream_{};
  mutable std::mutex error_mutex_;
  mutable Status untold_, disorder_;

  bool tracking_ = false;
  DeletionLog deletions_;
  std::unique_ptr<Cut> cut_;
};

}  // namespace dynemb

#include "cc/device/device_table_batch.h"
#include "cc/device/device_table_check.h"
#include "cc/device/device_table_insert.h"
#include "cc/device/device_table_state.h"
#include "cc/device/device_table_tiers.h"

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_H_
