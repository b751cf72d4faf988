// TableCut: the calls of a table with which snapshot.h reads the table's state at one moment, while
// the table is trained. changes.h explains cuts.
#ifndef DYNEMB_TABLE_TABLE_CUT_H_
#define DYNEMB_TABLE_TABLE_CUT_H_

#include <cstddef>
#include <vector>

#include "cc/table/changes.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

class TableCut {
 public:
  virtual ~TableCut() = default;

  // Whether the table tracks changes.
  // (exclusive) Track begins tracking, unless the table tracks changes already. The table has not
  // changed since `tick`.
  virtual bool tracking() const = 0;
  virtual void Track(Tick tick) = 0;

  // (exclusive) Begins a cut since a tick. Batches copy the rows that they overwrite to `saved`, as
  // rows of table `number`. FailedPrecondition: a cut is running, or the table has forgotten some
  // of the deleted keys.
  virtual Status BeginCut(Exec& exec, Tick watermark, Tick since, CutOf of, SavedRows* saved,
                          size_t number) = 0;
  // (exclusive) Ends the cut, if one is running.
  virtual void EndCut() = 0;
  // The running cut, or null.
  virtual const Cut* cut() const = 0;
  // (shared) The next rows of the cut to read, at most `limit`. A call examines at most a few times
  // `limit` rows, and may find none of the cut among them.
  virtual std::vector<RowId> PlanCut(size_t limit) = 0;
  // (shared) Whether all rows of the cut have been examined.
  virtual bool CutIsRead() const = 0;
  // (shared, under the lock of PlanCut) Copies the planned rows to columns in host memory. Scores
  // that are stamps are converted to times of the cut.
  virtual void ReadCut(Exec& exec, const std::vector<RowId>& plan, const CutColumns& to) = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TABLE_CUT_H_
