// ServedTable: a Table with the rows of a snapshot (table_rows.h), for the operators that look up
// keys. It never changes, so that any number of threads may use it without a lock, and no lookup
// waits.
//
// A lookup that would give a key a row in a trained table reads it as a lookup without insertion:
// as the default vector if the table has one, otherwise as what admission says, otherwise as the
// key's initial vector. These have the bits of the trained table. Row ids are 0 for keys that have
// a row; nothing can use them, because there are no steps.
//
// If its options name a place, the table also has its rows there: placed() (served_place.h).
// Operators on that device call placed(), and nothing reads the rows on the host.
#ifndef DYNEMB_SERVING_SERVED_TABLE_H_
#define DYNEMB_SERVING_SERVED_TABLE_H_

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "cc/serving/read_only_table.h"
#include "cc/serving/served_place.h"
#include "cc/serving/table_rows.h"
#include "cc/table/initializer.h"

namespace dynemb {

// The options that a table was exported with.
struct ServedOptions {
  std::string name;  // in the snapshots
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  uint64_t seed = 0;
  std::vector<ColumnInit> initializer;
  // The vectors of keys without a row: these numbers [dim] if there are any, otherwise `absent`
  // decides. A table without admission has kInitial.
  std::vector<float> default_vector;
  Unadmitted absent = Unadmitted::kInitial;
  // Null: the host. Otherwise the device has at most max_device_bytes of vectors in its memory, and
  // the others in host memory that it can access.
  ServedPlace* place = nullptr;
  uint64_t max_device_bytes = 0;
};

class ServedTable final : public ReadOnlyTable {
 public:
  // Numbers of all states of a table together.
  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0};
    std::atomic<uint64_t> lookup_ns{0};  // of all threads together
  };

  // InvalidArgument names the option and its value.
  static Status Create(const ServedOptions& options, std::shared_ptr<ServedTable>* table);
  // This table with the rows of a snapshot, of any formats. `before` is this table with earlier
  // rows or null; in a place, both share the memory of what did not change. DataLoss if the trained
  // table had other types; ResourceExhausted if the place lacks memory.
  Status WithRows(std::shared_ptr<const TableRows> rows, const ServedTable* before,
                  std::shared_ptr<ServedTable>* table) const;

  const ServedOptions& served() const { return served_; }
  const TableRows& rows() const { return *rows_; }
  const Initializer& initializer() const { return initializer_; }
  // In the table's dtype; empty: there is none.
  const std::vector<char>& default_vector() const { return default_; }
  // The table in served().place, which lives as long as this one; null if that is null.
  const std::shared_ptr<Table>& placed() const { return placed_; }

  const RowLayout& layout() const override { return layout_; }
  uint64_t size() const override { return rows_->size(); }
  TableStats stats() const override;
  Status Error() const override { return damaged_ ? rows_->damage() : Status(); }

  void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  void Contains(Exec& exec, KeySpan keys, bool* found) const override;
  void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector, void* vectors,
              RowId* rows) override;
  void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state, bool* found) const override;
  Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors, RowId* rows) override;
  Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t*, Tick tick, void* vectors,
                       RowId* rows) override {
    return LookupOrInsert(exec, keys, tick, vectors, rows);
  }

  // As TableRows::ForEach. Sets the table's error if a file is damaged.
  template <class K, class KeyAt, class Visit>
  void ForEach(const KeyAt& key_at, size_t begin, size_t end, bool reads, const Visit& visit) const;
  // The row id and the vector of a key without a row. Skips: such an id is left out of its bag.
  RowId AbsentRow() const { return absent_row_; }
  bool Skips() const { return absent_row_ == kSkippedRow; }
  void AbsentVector(uint64_t key, void* vector) const;
  // The vector of a key that has a row, in the table's dtype.
  void ReadVector(Place place, void* vector) const;
  // Counts keys that were looked up since `began`.
  void Count(uint64_t hits, uint64_t misses, std::chrono::steady_clock::time_point began) const;
  uint64_t lookup_ns() const { return counters_->lookup_ns.load(std::memory_order_relaxed); }

 private:
  ServedTable() = default;

  ServedOptions served_;
  RowLayout layout_;
  Initializer initializer_;
  std::vector<char> default_;  // the default vector in the table's dtype
  RowId absent_row_ = kNoRow;
  std::shared_ptr<const TableRows> rows_;
  std::shared_ptr<Table> placed_;
  std::shared_ptr<Counters> counters_;
  mutable std::atomic<bool> damaged_{false};
};

template <class K, class KeyAt, class Visit>
void ServedTable::ForEach(const KeyAt& key_at, size_t begin, size_t end, bool reads,
                          const Visit& visit) const {
  if (!rows_->ForEach<K>(key_at, begin, end, reads, visit)) damaged_ = true;
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_SERVED_TABLE_H_
