// ColdTable's part of catch-up (catch_up.h): the contents of cold rows.
#include <cstdint>
#include <limits>

#include "cc/table/codec.h"
#include "cc/table/cold_table.h"
#include "cc/table/rounding.h"

namespace dynemb {

void ColdTable::StoreUpdated(const float* vector, uint64_t key, uint64_t step, void* to) const {
  if (options_.stochastic_rounding) {
    StoreVectorStochastic(options_.dtype, vector, options_.dim, to, options_.seed, key, step);
  } else {
    StoreVector(options_.dtype, vector, options_.dim, to);
  }
}

void ColdTable::BringContent(uint64_t key, char* content, float* unpacked) const {
  float* const state = StateIn(content);
  if (!catch_up_.IsBehind(state)) return;
  if (options_.dtype == DType::kFloat32) {
    catch_up_.Bring(reinterpret_cast<float*>(content), state);
    return;
  }
  LoadVector(options_.dtype, content, options_.dim, unpacked);
  catch_up_.Bring(unpacked, state);
  StoreUpdated(unpacked, key, RoundingStep(Update::kCatchUp, catch_up_.step()), content);
}

// Brings cold rows up to date.
class ColdTable::Bringing final : public ContentChange {
 public:
  // For this number of threads.
  Bringing(ColdTable* table, size_t threads) : table_(table) {
    if (table->options_.dtype != DType::kFloat32) {
      table->buffers_.Prepare(threads, table->options_.dim);
    }
  }
  bool Applies(const char* content) const override {
    return table_->catch_up_.IsBehind(table_->StateIn(content));
  }
  void Apply(uint64_t key, char* content) const override {
    VectorBuffers::Lease unpacked(&table_->buffers_);
    table_->BringContent(key, content, unpacked.get());
  }

 private:
  ColdTable* const table_;
};

uint64_t ColdTable::BringCold(Exec& exec, uint64_t next, uint64_t num) {
  if (cold_ == nullptr) return next;
  if (next != 0) {
    end_of_bringing_ = std::numeric_limits<uint64_t>::max();
    return next;
  }
  // Rows that leave memory from now on are up to date, those included that were moved to it.
  end_of_bringing_ = cold_->EndOfRows();
  return BringColdFrom(exec, kColdCursor, num);
}

uint64_t ColdTable::BringColdFrom(Exec& exec, uint64_t first, uint64_t num) {
  uint64_t position = first - kColdCursor;
  const Bringing bringing(this, exec.parallelism());
  const Status status = cold_->ChangeContents(exec, bringing, num, end_of_bringing_, &position);
  KeepError(status);
  if (!status.ok() || position < end_of_bringing_) return kColdCursor + position;
  end_of_bringing_ = 0;
  return 0;
}

Status ColdTable::MoveCold(ColdRows::Compaction* planned) {
  if (!IsBringing()) return cold_->Compact(planned, nullptr);
  const Bringing bringing(this, 1);
  return cold_->Compact(planned, &bringing);
}

void ColdTable::MarkCold(Exec& exec, float mark) {
  if (cold_ == nullptr) return;
  struct Marking final : ContentChange {
    Marking(const ColdTable& t, float m) : table(t), mark(m) {}
    const float* MarkIn(const char* content) const {
      return table.StateIn(content) + table.content_layout_.state_width - 1;
    }
    bool Applies(const char* content) const override { return *MarkIn(content) != mark; }
    void Apply(uint64_t, char* content) const override {
      *const_cast<float*>(MarkIn(content)) = mark;
    }

    const ColdTable& table;
    const float mark;
  };
  uint64_t position = 0;
  KeepError(cold_->ChangeContents(exec, Marking(*this, mark), std::numeric_limits<uint64_t>::max(),
                                  cold_->EndOfRows(), &position));
}

}  // namespace dynemb
