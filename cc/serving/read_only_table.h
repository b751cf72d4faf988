// ReadOnlyTable: a Table without the calls that change it. A subclass implements the lookups; its
// inserting lookups insert nothing.
//
// A call that changes a table or begins a cut returns an error, or does nothing if it cannot return
// one. Scores, Explain and exports behave as if the table had no rows. Changed says that every
// vector may have changed. The operators that change or export tables fail before they make such a
// call: they accept no table of an exported model (Resolve in cc/tf/served_resource.cc).
#ifndef DYNEMB_SERVING_READ_ONLY_TABLE_H_
#define DYNEMB_SERVING_READ_ONLY_TABLE_H_

#include <vector>

#include "cc/table/table.h"

namespace dynemb {

class ReadOnlyTable : public Table {
 public:
  bool read_only() const final { return true; }

  Stamp BeginBatch(Exec&, Tick, size_t) final { return 0; }
  Stamp BeginLookup(Exec&, Tick, size_t) final { return 0; }
  void Scores(Exec&, KeySpan keys, int64_t* scores) const final {
    std::fill_n(scores, keys.size(), -1);
  }
  void Explain(Exec&, KeySpan keys, KeyState* states) const final {
    std::fill_n(states, keys.size(), KeyState());
  }
  void Changed(Exec&, const RowId*, const RowId*, size_t n, Tick, Tick,
               bool* changed) const override {
    std::fill_n(changed, n, true);
  }

  Status InsertAndEvict(Exec&, KeySpan, Tick, RowId*, EvictedRows*) final { return Refused(); }
  Status Upsert(Exec&, KeySpan, const void*, Tick) final { return Refused(); }
  Status Accumulate(Exec&, KeySpan, const float*, Tick) final { return Refused(); }
  Status WriteRows(Exec&, KeySpan, const float*, const float*, bool, uint64_t, Tick) final {
    return Refused();
  }
  void ApplyRange(Exec&, const RowOptimizer&, KeySpan, const RowId*, const float*, size_t, size_t,
                  uint64_t, Tick) final {}
  size_t Erase(Exec&, KeySpan, Tick, Removal) final { return 0; }
  Status SetScores(Exec&, KeySpan, const Score*) final { return Refused(); }
  Status AddCounts(Exec&, KeySpan, const uint32_t*) final { return Refused(); }
  Status LoadRows(Exec&, const LoadedRows&, Tick) final { return Refused(); }

  bool tracking() const final { return false; }
  void Track(Tick) final {}
  Status BeginCut(Exec&, Tick, Tick, CutOf, SavedRows*, size_t) final { return Refused(); }
  void EndCut() final {}
  const Cut* cut() const final { return nullptr; }
  std::vector<RowId> PlanCut(size_t) final { return {}; }
  bool CutIsRead() const final { return true; }
  void ReadCut(Exec&, const std::vector<RowId>&, const CutColumns&) final {}

  Status ResetState(Exec&, const StateSpec&) final { return Refused(); }
  Status AdvanceEpoch(Exec&) final { return Refused(); }
  Status Clear(Exec&, Tick) final { return Refused(); }
  void BringKeys(Exec&, KeySpan) final {}
  void SwapRows(Table*, Tick) final {}
  void CheckInvariants() const final {}

 protected:
  void CopyRows(Exec&, const std::vector<RowId>&, const TickColumns&) const final {}
  uint64_t BringRows(Exec&, uint64_t, uint64_t) final { return 0; }
  void MarkRows(Exec&, float) final {}
  void MarkNewRows(Exec&, float) final {}
  ExportPlan ScanRows(Exec&, uint64_t, uint64_t, uint64_t, const RowPredicate&) const final {
    return {};
  }
  Status Refused() const {
    return FailedPrecondition("table '" + options_.name + "' of an exported model is read-only");
  }
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_READ_ONLY_TABLE_H_
