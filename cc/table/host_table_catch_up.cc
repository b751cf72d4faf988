// HostTable's part of catch-up (catch_up.h).
#include <algorithm>
#include <limits>

#include "cc/table/batch_scratch.h"
#include "cc/table/codec.h"
#include "cc/table/find_pass.h"
#include "cc/table/host_table.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"
#include "cc/table/scratch.h"
#include "cc/table/workers.h"

namespace dynemb {

void HostTable::StoreUpdated(const float* vector, uint64_t key, uint64_t step, void* to) const {
  if (options_.stochastic_rounding) {
    StoreVectorStochastic(options_.dtype, vector, options_.dim, to, options_.seed, key, step);
  } else {
    StoreVector(options_.dtype, vector, options_.dim, to);
  }
}

void HostTable::BringRow(RowId row, float* unpacked) {
  const RowLayout& l = layout();
  char* const at = rows_.At(row);
  if (!catch_up_.IsBehind(l.state(at))) return;
  BeforeWrite(row, *l.update(at));
  BringContent(KeyBits(row), at + l.vector_offset, unpacked);
}

void HostTable::BringContent(uint64_t key, char* content, float* unpacked) const {
  const RowLayout& l = layout();
  float* const state = StateIn(content);
  if (!catch_up_.IsBehind(state)) return;
  if (l.dtype == DType::kFloat32) {
    catch_up_.Bring(reinterpret_cast<float*>(content), state);
    return;
  }
  LoadVector(l.dtype, content, l.dim, unpacked);
  catch_up_.Bring(unpacked, state);
  StoreUpdated(unpacked, key, RoundingStep(Update::kCatchUp, catch_up_.step()), content);
}

// Brings cold rows up to date.
class HostTable::Bringing final : public ContentChange {
 public:
  // For this number of threads.
  Bringing(HostTable* table, size_t threads) : table_(table) {
    if (table->layout().dtype != DType::kFloat32) {
      table->buffers_.Prepare(threads, table->layout().dim);
    }
  }
  bool Applies(const char* content) const override {
    return table_->catch_up_.IsBehind(table_->StateIn(const_cast<char*>(content)));
  }
  void Apply(uint64_t key, char* content) const override {
    VectorBuffers::Lease unpacked(&table_->buffers_);
    table_->BringContent(key, content, unpacked.get());
  }

 private:
  HostTable* const table_;
};

void HostTable::BringKeys(Exec& exec, KeySpan keys) {
  if (!catch_up_.active()) return;
  Phase phase("catch up rows");
  const size_t n = keys.size();
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  FindQuietly(exec, keys, Expired(), rows);
  // Keys may repeat, and a row must have one thread.
  ForWorkers(exec, n, [&](size_t worker, size_t workers) {
    constexpr size_t kAhead = 8;
    const RowLayout& l = layout();
    const size_t row_bytes = std::min(l.stride, kPrefetchMost);
    VectorBuffer unpacked(l.dim);
    const auto is_own = [&](size_t i) {
      return rows[i] != kNoRow && Owns(worker, workers, rows[i]);
    };
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n && is_own(i + kAhead)) {
        PrefetchBytes(rows_.At(rows[i + kAhead]), row_bytes);
      }
      if (is_own(i)) BringRow(rows[i], unpacked.get());
    }
  });
}

uint64_t HostTable::BringRows(Exec& exec, uint64_t first, uint64_t num) {
  constexpr size_t kGrain = 256;
  if (first < kColdCursor) {
    const uint64_t all = rows_.high_water();
    const uint64_t n = first < all ? std::min(num, all - first) : 0;
    exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
      VectorBuffer unpacked(layout().dim);
      for (size_t i = begin; i < end; ++i) {
        const auto row = static_cast<RowId>(first + i);
        if (*layout().update(rows_.At(row)) != 0) BringRow(row, unpacked.get());
      }
    });
    if (cold_ == nullptr) return first + n < all ? first + n : 0;
    if (first + n < all) {
      end_of_bringing_ = std::numeric_limits<uint64_t>::max();
      return first + n;
    }
    // Rows that leave memory from now on are up to date, those included that MoveIn has brought.
    end_of_bringing_ = cold_->EndOfRows();
    first = kColdCursor;
    num -= n;
  }
  uint64_t position = first - kColdCursor;
  const Bringing bringing(this, exec.parallelism());
  const Status status = cold_->ChangeContents(exec, bringing, num, end_of_bringing_, &position);
  KeepError(status);
  if (!status.ok() || position < end_of_bringing_) return kColdCursor + position;
  end_of_bringing_ = 0;
  return 0;
}

Status HostTable::MoveCold(ColdRows::Compaction* planned) {
  if (!IsBringing()) return cold_->Compact(planned, nullptr);
  const Bringing bringing(this, 1);
  return cold_->Compact(planned, &bringing);
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
  if (cold_ == nullptr) return;
  struct Marking final : ContentChange {
    Marking(const HostTable& t, float m) : table(t), mark(m) {}
    float* MarkIn(const char* content) const {
      return table.StateIn(const_cast<char*>(content)) + table.layout().state_width - 1;
    }
    bool Applies(const char* content) const override { return *MarkIn(content) != mark; }
    void Apply(uint64_t, char* content) const override { *MarkIn(content) = mark; }

    const HostTable& table;
    const float mark;
  };
  uint64_t position = 0;
  KeepError(cold_->ChangeContents(exec, Marking(*this, mark), std::numeric_limits<uint64_t>::max(),
                                  cold_->EndOfRows(), &position));
}

}  // namespace dynemb
