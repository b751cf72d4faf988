#include "cc/table/row_store.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dynemb {
namespace {

// A table without max_capacity reserves address space for this many times the machine's memory, so
// that neither row size nor later memory (hot-plug, swap) is the limit. Thread sanitizer keeps
// shadow for reserved space, so less there.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kReserveAtMost = size_t{1} << 30;
#else
constexpr size_t kReserveAtMost = size_t{1} << 40;
#endif
constexpr size_t kReserveTimesMemory = 4;
constexpr size_t kReserveAtLeast = size_t{1} << 28;

}  // namespace

size_t MostRowBytes() { return std::min(kReserveAtMost, kReserveTimesMemory * PhysicalMemory()); }

Status RowStore::Init(const RowLayout& layout, uint64_t max_rows) {
  layout_ = layout;
  const size_t wanted =
      std::min<uint64_t>(max_rows, MostRowBytes() / layout.stride + 1) * layout.stride;
  DYNEMB_RETURN_IF_ERROR(arena_.Reserve(wanted, std::min(wanted, kReserveAtLeast)));
  max_rows_ = std::min<uint64_t>(max_rows, arena_.reserved() / layout.stride);
  return Status();
}

void RowStore::Presize(Exec& exec, uint64_t rows) {
  presized_ = rows;
  const size_t bytes = std::min(rows, max_rows_) * layout_.stride;
  if (bytes <= PhysicalMemory() / 2 && arena_.Commit(bytes).ok()) arena_.Populate(exec, bytes);
}

Status RowStore::Allocate(size_t n, RowId* ids) {
  const size_t reused = std::min(n, free_.size());
  const size_t fresh = n - reused;
  if (high_water_ + fresh > max_rows_) {
    return ResourceExhausted("no room for " + std::to_string(n) + " more rows beside " +
                             std::to_string(live()) + " (at most " + std::to_string(max_rows_) +
                             ")");
  }
  DYNEMB_RETURN_IF_ERROR(arena_.Commit((high_water_ + fresh) * layout_.stride));
  for (size_t i = 0; i < reused; ++i) {
    ids[i] = free_.back();
    free_.pop_back();
  }
  for (size_t i = reused; i < n; ++i) ids[i] = static_cast<RowId>(high_water_++);
  return Status();
}

void RowStore::Clear() {
  arena_.Clear();
  high_water_ = 0;
  free_.clear();
}

Status RowStore::ChangeLayout(Exec& exec, const RowLayout& layout, const float* initial_state) {
  RowStore moved;
  DYNEMB_RETURN_IF_ERROR(moved.Init(layout, max_rows_));
  if (high_water_ > moved.max_rows_) {
    return ResourceExhausted("no address space for " + std::to_string(high_water_) + " rows of " +
                             std::to_string(layout.stride) + " bytes");
  }
  DYNEMB_RETURN_IF_ERROR(moved.arena_.Commit(high_water_ * layout.stride));
  moved.Presize(exec, presized_);
  const size_t kept = layout.vector_offset + layout.vector_bytes();
  exec.ParallelFor(high_water_, 4096, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      char* to = moved.arena_.data() + r * layout.stride;
      memcpy(to, At(static_cast<RowId>(r)), kept);
      if (layout.state_bytes() != 0) {
        memcpy(to + layout.state_offset, initial_state, layout.state_bytes());
      }
    }
  });
  moved.high_water_ = high_water_;
  moved.free_ = std::move(free_);
  *this = std::move(moved);
  return Status();
}

}  // namespace dynemb
