#include "cc/table/row_store.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cc/table/memory_limit.h"

namespace dynemb {

void RowStore::Init(const RowLayout& layout, uint64_t max_rows) {
  layout_ = layout;
  max_rows_ = max_rows;
}

void RowStore::Presize(Exec& exec, uint64_t rows) {
  presized_ = rows;
  const size_t bytes = std::min(rows, max_rows_) * layout_.stride;
  if (bytes <= PhysicalMemory() / 2 && arena_.Commit(bytes).ok()) arena_.Prefault(exec, bytes);
}

Status RowStore::Allocate(size_t n, RowId* ids) {
  const size_t reused = std::min(n, free_.size());
  const size_t fresh = n - reused;
  if (high_water_ + fresh > max_rows_) {
    return ResourceExhausted("no room for " + std::to_string(n) + " more rows: there are " +
                             std::to_string(live()) + " of at most " + std::to_string(max_rows_));
  }
  DYNEMB_RETURN_IF_ERROR(arena_.Commit((high_water_ + fresh) * layout_.stride));
  for (size_t i = 0; i < reused; ++i) ids[i] = free_.Pop();
  for (size_t i = reused; i < n; ++i) ids[i] = static_cast<RowId>(high_water_++);
  reused_ = reused;
  return Status();
}

void RowStore::Unallocate(size_t n, const RowId* ids) {
  high_water_ -= n - reused_;
  // The free list has room for them: they were taken from it.
  for (size_t i = reused_; i-- > 0;) free_.Push(ids[i]);
  reused_ = 0;
}

void RowStore::Clear() {
  arena_.Clear();
  high_water_ = 0;
  free_.Clear();
}

Status RowStore::ChangeLayout(Exec& exec, const RowLayout& layout, const float* initial_state) {
  constexpr size_t kGrain = 4096;
  DYNEMB_RETURN_IF_ERROR(arena_.Commit(high_water_ * layout.stride));
  const size_t before = layout_.stride;
  const size_t after = layout.stride;
  const size_t kept = layout.vector_offset + layout.vector_bytes();
  const auto move = [&](size_t r) {
    char* const to = arena_.data() + r * after;
    memmove(to, arena_.data() + r * before, kept);
    if (layout.state_bytes() != 0) {
      memcpy(to + layout.state_offset, initial_state, layout.state_bytes());
    }
  };
  const auto move_in_parallel = [&](size_t first, size_t last) {
    exec.ParallelFor(last - first, kGrain, [&](size_t begin, size_t end) {
      for (size_t r = first + begin; r < first + end; ++r) move(r);
    });
  };
  // Rows can move in parallel if none of their new addresses overlaps the old address of a row that
  // has not moved.
  if (after > before) {
    for (size_t left = high_water_; left > 0;) {
      const size_t bound = (left * before + after - 1) / after;
      if (bound < left) {
        move_in_parallel(bound, left);
        left = bound;
      } else {
        move(--left);
      }
    }
  } else {
    for (size_t done = 0; done < high_water_;) {
      const size_t bound =
          after == before ? high_water_ : std::min<size_t>(high_water_, done * before / after);
      if (bound > done) {
        move_in_parallel(done, bound);
        done = bound;
      } else {
        move(done++);
      }
    }
    arena_.Discard(high_water_ * after);
  }
  layout_ = layout;
  Presize(exec, presized_);
  return Status();
}

}  // namespace dynemb
