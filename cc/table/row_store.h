// RowStore: the rows of a table, by row id, in one arena; which ids are free.
//
// Ids below high_water() were handed out at least once; a freed id is handed out again before a
// fresh one. A row is live iff its last update is not 0. Addresses of rows are good until the next
// Allocate, Presize or ChangeLayout: the arena may move. Not thread-safe: the table's lock covers
// it, except that workers may write different rows.
#ifndef DYNEMB_TABLE_ROW_STORE_H_
#define DYNEMB_TABLE_ROW_STORE_H_

#include <cstdint>
#include <vector>

#include "cc/table/arena.h"
#include "cc/table/exec.h"
#include "cc/table/row.h"
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
  // Bytes of memory in use by rows and the free list.
  size_t bytes() const { return high_water_ * layout_.stride + free_.capacity() * sizeof(RowId); }

  // Hands out n ids, ids[0..n), in an order that depends only on the history of calls. On failure
  // nothing changes.
  Status Allocate(size_t n, RowId* ids);
  // Takes back what the last Allocate handed out, none of which was used. Never fails.
  void Unallocate(size_t n, const RowId* ids);
  // Makes room for the ids of n rows, so that as many calls of Free do not allocate memory.
  void ReserveFree(size_t n);
  // Faults in the memory of the first `rows` rows ahead of their use; not if that is more than half
  // of the memory the process may use, or refused. Only for speed.
  void Presize(Exec& exec, uint64_t rows);
  // Faults in the memory of the rows handed out, with all threads. Only for speed.
  void Prefault(Exec& exec) { arena_.Prefault(exec, high_water_ * layout_.stride); }
  // Takes back an id, for which ReserveFree has made room. Its row must no longer be live.
  void Free(RowId row) { free_.push_back(row); }
  void Clear();

  // Moves every row to another layout with the same key, dtype and dim: the state is dropped, every
  // live row gets `initial_state` (layout.state_width floats). Row ids stay. Rows move inside the
  // arena, so that there is never a second copy of the table. On failure nothing changes.
  Status ChangeLayout(Exec& exec, const RowLayout& layout, const float* initial_state);

 private:
  RowLayout layout_;
  Arena arena_;
  uint64_t max_rows_ = 0;
  uint64_t presized_ = 0;
  uint64_t high_water_ = 0;
  size_t reused_ = 0;  // ids of the last Allocate that had been free
  std::vector<RowId> free_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_STORE_H_
