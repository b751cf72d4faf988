// HostTable's part of catch-up (catch_up.h).
#include <algorithm>
#include <limits>

#include "cc/table/batch_scratch.h"
#include "cc/table/codec.h"
#include "cc/table/host_table.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/scratch.h"
#include "cc/table/staged.h"

namespace dynemb {

void HostTable::BringRow(RowId row, float* unpacked) {
  const RowLayout& l = layout();
  char* const at = rows_.At(row);
  if (!catch_up_.IsBehind(l.state(at))) return;
  BeforeWrite(row, *l.update(at));
  BringContent(KeyBits(row), at + l.vector_offset, unpacked);
}

void HostTable::BringKeys(Exec& exec, KeySpan keys) {
  if (!catch_up_.active()) return;
  Phase phase("catch up rows");
  const size_t n = keys.size();
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  FindQuietly(exec, keys, Expired(), rows);
  // Keys may repeat, and a row must have one thread.
  static_assert(kNoRow == OwnedItems::kNone, "a key without a row belongs to no worker");
  scratch->owned.Build(exec, n, [rows](size_t i) { return rows[i]; });
  scratch->owned.ForWorkers(exec, n, [&](size_t, const uint32_t* i, const uint32_t* end) {
    const RowLayout& l = layout();
    const RowPrefetch prefetch(rows_.base(), l.stride, l.bytes());
    VectorBuffer unpacked(l.dim);
    RunStaged(
        static_cast<size_t>(end - i), StagedBlock(prefetch.lines()),
        [&](size_t j) { prefetch(rows_.At(rows[i[j]])); },
        [&](size_t j) { BringRow(rows[i[j]], unpacked.get()); });
  });
}

uint64_t HostTable::BringRows(Exec& exec, uint64_t first, uint64_t num) {
  constexpr size_t kGrain = 256;
  if (first >= kColdCursor) return BringColdFrom(exec, first, num);
  const uint64_t all = rows_.high_water();
  const uint64_t n = first < all ? std::min(num, all - first) : 0;
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    VectorBuffer unpacked(layout().dim);
    for (size_t i = begin; i < end; ++i) {
      const auto row = static_cast<RowId>(first + i);
      if (*layout().update(rows_.At(row)) != 0) BringRow(row, unpacked.get());
    }
  });
  return BringCold(exec, first + n < all ? first + n : 0, num - n);
}

void HostTable::MarkRows(Exec& exec, float mark) {
  constexpr size_t kGrain = 4096;
  exec.ParallelFor(rows_.high_water(), kGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const auto row = static_cast<RowId>(i);
      char* const at = rows_.At(row);
      if (*layout().update(at) == 0) continue;
      BeforeWrite(row, *layout().update(at));
      layout().state(at)[layout().state_width - 1] = mark;
    }
  });
  MarkCold(exec, mark);
}

}  // namespace dynemb
