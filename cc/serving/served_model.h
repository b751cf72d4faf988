// ServedModel: the tables of an exported model, as of one snapshot, and the snapshots that follow.
//
//   ServedModel
//    ├─ options of each table that operators opened (Attach)
//    └─ state ──> ServedState, immutable: the last snapshot, and a ServedTable for each of them
//
// A state is replaced as a whole, under a mutex that is held for the copy of a pointer. (A state of
// the same snapshot, in which a table was attached or detached, takes the place of the one before.)
// A step (a request) reads all tables as of one snapshot: the model remembers which steps have used
// a state that it has replaced, for kMemory after that and for the last kStates states. The memory
// of a state is freed with its last reference.
//
// Apply prepares the next state without holding that mutex. Calls of Apply wait for each other.
// Which snapshot is newer follows from the chain, never from a clock (docs/file_format.md, "The
// state of a reader"); tf_dynemb/serving/reader.py has the same rule.
//
// Dense weights. A state has those of its last snapshot that has some; if none of a new base and
// the deltas after it has, those of the state that it replaces. They must have the names, dtypes
// and shapes of the weights of the state before, because the graph is of these.
//
// Thread. A model that follows a path, or has replaced a state, has a thread that polls the path
// and forgets replaced states. A child of a fork does not have the thread, which may hold a mutex
// or be changing the model at that moment. The child therefore opens models itself, and leaves
// its parent's models alone, also when it ends.
//
// Models by descriptor. While a model is used, Open returns it to the operators of its other
// tables, so that all of them have one state. It also returns it to those who load the model again,
// unless the snapshots are others than when it was opened: a model that is exported again has
// dense weights that go with these. Models share the memory of mapped files (mapped_file.h).
#ifndef DYNEMB_SERVING_SERVED_MODEL_H_
#define DYNEMB_SERVING_SERVED_MODEL_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "cc/io/manifest.h"
#include "cc/serving/dense_weights.h"
#include "cc/serving/descriptor.h"
#include "cc/serving/recent_steps.h"
#include "cc/serving/served_table.h"
#include "cc/serving/table_rows.h"
#include "cc/table/exec.h"
#include "cc/table/monotonic.h"
#include "cc/table/status.h"

namespace dynemb {

struct ServedState {
  Manifest last;  // the last snapshot, without its tables
  std::map<std::string, std::shared_ptr<const TableRows>> rows;
  std::shared_ptr<const Manifest>
      dense_source;  // the last snapshot that has dense weights, or null
  // Set when the state becomes visible:
  std::vector<std::shared_ptr<ServedTable>> tables;  // by the numbers of Attach; null: detached
  std::shared_ptr<const DenseWeights> dense;         // null: the model does not read them
};

class ServedModel {
 public:
  // Opens the model of a descriptor for one of its tables: the last base at its path, and the
  // deltas after it. Errors name the file.
  static Status Open(Exec& exec, const std::string& descriptor, const std::string& table,
                     std::shared_ptr<ServedModel>* model);
  ~ServedModel();
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;

  // Adds a table to the states; returns its number in *number. DataLoss if the snapshots have no
  // such table, or one of other types.
  Status Attach(const ServedOptions& options, size_t* number);

  // Removes a table from the newest state, and from later ones.
  void Detach(size_t number);

  // The newest state.
  std::shared_ptr<const ServedState> state() const;
  // The state that a step uses: the one that it has used before, otherwise the newest. `step` is a
  // number of the step that no other step of the process has, or 0 for a call on its own.
  std::shared_ptr<const ServedState> StateOf(uint64_t step);

  // Applies the snapshots at a path, or the snapshot that the path is, that are newer than the
  // state; *count is their number. Each delta becomes visible in all tables at once; a base that
  // replaces the state, together with the deltas after it. If a snapshot is damaged, or does not
  // continue the state, neither it nor any after it is applied: DataLoss names it. So does
  // FailedPrecondition a base of other tables, and a snapshot of a model of another structure.
  Status Apply(Exec& exec, const std::string& path, uint64_t* count);

  // How many snapshots were applied, and how many errors Apply has returned; the same error again,
  // as of each poll, is one.
  uint64_t applied() const { return applied_.load(std::memory_order_relaxed); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

  // The error of the last poll of the path that the model follows; ok if there is none.
  Status follow_error() const;

 private:
  // A state, and the steps that have used it.
  struct Used {
    std::shared_ptr<const ServedState> state;
    RecentSteps steps;
    std::chrono::steady_clock::time_point replaced;
  };
  static constexpr std::chrono::seconds kMemory{10};
  static constexpr size_t kStates = 64;

  // The ids of the snapshots that a state contains.
  struct Lineage {
    std::unordered_set<std::string> applied;  // the base, what it continues, and the deltas
    std::unordered_set<std::string> after;    // older ones, of which the base is a later state
    bool Has(const std::string& id) const { return applied.count(id) + after.count(id) != 0; }
  };

  explicit ServedModel(Descriptor options);
  // FailedPrecondition if a base is of other tables than a state, and the model does not take such.
  Status CheckRelated(const Manifest& base, const ServedState& now) const;
  // Whether a base is an earlier state of snapshots that were applied.
  bool IsEarlier(const Manifest& base, const ServedState& now) const;
  // Sets *next to the state of a base, which replaces `now`; that may be null.
  Status OfBase(Exec& exec, const std::shared_ptr<const ServedState>& now, Manifest base,
                std::shared_ptr<const ServedState>* next) const;
  // Sets *next to the state after a delta; to `now`, if that has its changes. `now` may be null.
  Status AfterDelta(Exec& exec, const std::shared_ptr<const ServedState>& now, Manifest delta,
                    const Lineage& lineage, std::shared_ptr<const ServedState>* next) const;
  Status ApplyAt(Exec& exec, const std::string& path, uint64_t* count);
  // Applies the chain of these directories.
  Status ApplyChain(Exec& exec, const std::vector<std::string>& directories, uint64_t* count);
  // Makes `next` the state, with a table for each that is attached, and with dense weights.
  Status Publish(Exec& exec, const ServedState& next);
  // Sets *dense to the weights of a state that follows `now`, which may be null.
  Status ReadDense(Exec& exec, const ServedState& next, const ServedState* now,
                   std::shared_ptr<const DenseWeights>* dense) const;
  void StartThread();
  void RunThread();
  // Moves the states that are not remembered any more to *forgotten. Holds mutex_.
  void Forget(std::chrono::steady_clock::time_point time, std::vector<Used>* forgotten);

  const Descriptor options_;
  std::atomic<uint64_t> applied_{0}, refused_{0};
  const pid_t pid_;  // of the process that has the thread
  std::mutex applying_;
  // Under applying_:
  std::vector<std::shared_ptr<ServedTable>> attached_;  // without rows; null: detached
  Lineage lineage_;                                     // of the state
  Status last_error_;                                   // of Apply; ok if the last call was
  std::thread thread_;                                  // started on demand

  mutable std::mutex mutex_;  // of the members below
  Used now_;
  std::deque<Used> before_;  // the newest first
  Status follow_error_;
  uint64_t publications_ = 0;
  bool stopping_ = false;
  MonotonicCondition changed_;  // publications_ or stopping_
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_SERVED_MODEL_H_
