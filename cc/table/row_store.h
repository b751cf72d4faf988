// RowStore: the rows of a table in one arena, by row id, and the list of free ids.
//
// All ids below high_water() have been allocated at least once. A freed id is allocated again
// before a new one. A row is live iff its last update is not 0. Addresses of rows are valid until
// the next Allocate, Presize or ChangeLayout, because the arena may move. Not thread-safe: the
// table's lock protects it. Workers may write different rows concurrently.
#ifndef DYNEMB_TABLE_ROW_STORE_H_
#define DYNEMB_TABLE_ROW_STORE_H_

#include <cstdint>

#include "cc/table/arena.h"
#include "cc/table/exec.h"
#include "cc/table/row.h"
#include "cc/table/row_id_stack.h"
#include "cc/table/status.h"

namespace dynemb {

class RowStore {
 public:
  void Init(const RowLayout& layout, uint64_t max_rows);

  const RowLayout& layout() const { return layout_; }
  char* base() const { return arena_.data(); }
  char* At(RowId row) const { return arena_.data() + row * layout_.stride; }
  uint64_t high_water() const { return high_water_; }
  uint64_t live() const { return high_water_ - free_.size(); }
  uint64_t max_rows() const { return max_rows_; }
  // Row ids in use are below the new maximum.
  void SetMaxRows(uint64_t rows) { max_rows_ = rows; }
  // The bytes of memory that rows and the free list use.
  size_t bytes() const { return high_water_ * layout_.stride + free_.bytes(); }

  // Allocates n ids, ids[0..n). Their order depends only on the history of calls. On failure
  // nothing changes.
  Status Allocate(size_t n, RowId* ids);
  // Undoes the last Allocate, none of whose ids has been used. Never fails.
  void Unallocate(size_t n, const RowId* ids);
  // Makes room in the free list, so that n calls of Free do not allocate memory.
  void ReserveFree(size_t n) { free_.Reserve(n); }
  // Faults in the memory of the first `rows` rows ahead of their use. Does nothing if that is more
  // than half of the memory that the process may use, or if it is refused. Only for speed.
  void Presize(Exec& exec, uint64_t rows);
  // Faults in the memory of all allocated rows, with all threads (Arena::Prefault). Only for
  // speed.
  void Prefault(Exec& exec) { arena_.Prefault(exec, high_water_ * layout_.stride); }
  // Frees an id, for which ReserveFree has made room. Its row must no longer be live.
  void Free(RowId row) { free_.Push(row); }
  void Clear();

  // Moves all rows to another layout with the same key, dtype and dim. Their state is replaced by
  // `initial_state` (layout.state_width floats); row ids do not change. Rows move inside the arena,
  // so there is never a second copy of the table. On failure nothing changes.
  Status ChangeLayout(Exec& exec, const RowLayout& layout, const float* initial_state);

 private:
  RowLayout layout_;
  Arena arena_;
  uint64_t max_rows_ = 0;
  uint64_t presized_ = 0;
  uint64_t high_water_ = 0;
  size_t reused_ = 0;  // ids that the last Allocate took from the free list
  RowIdStack free_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_STORE_H_
