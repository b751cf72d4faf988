// Wire: rows of many tables in one message to each rank.
//
// The message to (or from) a rank is, table after table, a *section* of the rows that are for it,
// in the order of the request (route.h); in 32-bit words, so sections begin at whole words:
//
//   as they are   rows × dim elements of the table's dtype
//   float16, bfloat16   the same, rounded to nearest
//   int8          rows × float32 scale, then rows × dim int8: x ≈ scale × q, scale = max|x| / 127
//
// int8 errs by at most half a scale. A row that is not finite arrives as NaN, so it is not lost;
// one whose scale is below 2^-125, as zeros. A table whose own type is as narrow as the wire's
// travels as it is. Rows of this rank for itself are in no message: they are copied, exactly.
//
// Contract. Two ranks agree on the sections between them by their counts of these rows. Pack,
// Unpack and WireRows use all threads.
#ifndef DYNEMB_LOOKUP_WIRE_H_
#define DYNEMB_LOOKUP_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/lookup/owners.h"
#include "cc/table/exec.h"
#include "cc/table/scratch.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

enum class WireType : uint8_t { kSame, kFloat16, kBfloat16, kInt8 };

// "same", "float16", "bfloat16" or "int8".
Status ParseWireType(const std::string& name, WireType* type);

// The rows of one table.
struct WireTable {
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  WireType wire = WireType::kSame;
};

class WireLayout {
 public:
  struct Section {
    size_t word;       // where it begins, among all messages; nowhere for `self`
    size_t first_row;  // among the table's rows
    size_t rows;
  };

  // counts[t * ranks + r] rows of table t go to or come from rank r; those of `self` do not travel
  // (kNoRank: all do). InvalidArgument for counts that no message holds.
  Status Init(const std::vector<WireTable>& tables, const int64_t* counts, uint32_t ranks,
              uint32_t self = kNoRank);

  const std::vector<WireTable>& tables() const { return tables_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t self() const { return self_; }
  size_t num_words() const { return words_.back(); }
  // Of the message to a rank.
  size_t num_words(uint32_t rank) const { return words_[rank + 1] - words_[rank]; }
  size_t num_rows(size_t table) const { return num_rows_[table]; }
  const Section& section(size_t table, uint32_t rank) const {
    return sections_[table * ranks_ + rank];
  }
  // Words of a section of so many rows.
  static size_t Words(const WireTable& table, size_t rows);
  // Whether rows travel in the table's own type: then a section is an array of them.
  static bool AsTheyAre(const WireTable& table);

 private:
  std::vector<WireTable> tables_;
  uint32_t ranks_ = 0;
  uint32_t self_ = kNoRank;
  std::vector<Section> sections_;  // [tables, ranks]
  std::vector<size_t> words_;      // [ranks + 1]
  std::vector<size_t> num_rows_;   // [tables]
};

// rows[t]: [num_rows(t), dim] of the table's dtype, to words[num_words()] and back. own[t] are the
// rows of `self`, if there is one: [section(t, self).rows, dim]. Pack leaves out the tables whose
// rows[t] is null.
void Pack(Exec& exec, const WireLayout& layout, const std::vector<const void*>& rows,
          int32_t* words);
void Unpack(Exec& exec, const WireLayout& layout, const int32_t* words,
            const std::vector<const void*>& own, const std::vector<void*>& rows);

// The rows that Unpack would write, by their addresses: where they came to lie, unless they have to
// be converted. Valid as long as words and own are. Reusable scratch.
class WireRows {
 public:
  void Init(Exec& exec, const WireLayout& layout, const int32_t* words,
            const std::vector<const void*>& own);
  // [num_rows(table)]
  const void* const* of(size_t table) const { return tables_[table].addresses.get(); }
  // Gives back what only a huge batch needs; the rows are then gone.
  void Shrink();

 private:
  struct OfTable {
    Buffer<const void*> addresses;
    Buffer<char> converted;
  };
  std::vector<OfTable> tables_;  // only grows
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_WIRE_H_
