// Wire: rows of many tables, in one message to each rank.
//
// The message to (or from) a rank has a *section* for each table: the rows for the rank, in the
// order of the request (route.h). A message consists of 32-bit words, and every section begins at a
// whole word. The wire type determines the contents of a section:
//
//   same                rows × dim elements of the table's dtype
//   float16, bfloat16   rows × dim elements, rounded to nearest
//   int8                rows × float32 scale, then rows × dim int8: x ≈ scale × q,
//                       scale = max|x| / 127
//
// The error of int8 is at most half the scale. A row that is not finite arrives as NaN, so it does
// not go unnoticed. A row whose scale is below 2^-125 arrives as zeros. If a table's own type is as
// narrow as the wire type, its rows are sent unchanged. Rows that a rank sends to itself are in
// no message: they are copied exactly.
//
// Contract. Two ranks derive the sections of the messages between them from their counts of the
// rows, which must agree. Pack, Unpack and WireRows use all threads.
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
    size_t word;       // the first word, in all messages; not used for `self`
    size_t first_row;  // in the table's rows
    size_t rows;
  };

  // counts[t * ranks + r] rows of table t are sent to, or received from, rank r. The rows of `self`
  // are not sent; if it is kNoRank, all rows are. InvalidArgument for counts that no message can
  // hold.
  Status Init(const std::vector<WireTable>& tables, const int64_t* counts, uint32_t ranks,
              uint32_t self = kNoRank);

  const std::vector<WireTable>& tables() const { return tables_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t self() const { return self_; }
  size_t num_words() const { return words_.back(); }
  // The number of words in the message to a rank.
  size_t num_words(uint32_t rank) const { return words_[rank + 1] - words_[rank]; }
  size_t num_rows(size_t table) const { return num_rows_[table]; }
  const Section& section(size_t table, uint32_t rank) const {
    return sections_[table * ranks_ + rank];
  }
  // The number of words in a section of `rows` rows.
  static size_t Words(const WireTable& table, size_t rows);
  // Whether rows are sent in the table's own type. A section is then an array of vectors.
  static bool AsTheyAre(const WireTable& table);

 private:
  std::vector<WireTable> tables_;
  uint32_t ranks_ = 0;
  uint32_t self_ = kNoRank;
  std::vector<Section> sections_;  // [tables, ranks]
  std::vector<size_t> words_;      // [ranks + 1]
  std::vector<size_t> num_rows_;   // [tables]
};

// Convert rows[t], [num_rows(t), dim] of the table's dtype, to words[num_words()] and back. own[t],
// [section(t, self).rows, dim], are the rows of `self`, if there is one. Pack skips the tables
// whose rows[t] is null.
void Pack(Exec& exec, const WireLayout& layout, const std::vector<const void*>& rows,
          int32_t* words);
void Unpack(Exec& exec, const WireLayout& layout, const int32_t* words,
            const std::vector<const void*>& own, const std::vector<void*>& rows);

// The addresses of the rows that Unpack would write. The rows stay where they were received, unless
// they have to be converted. The addresses are valid as long as `words` and `own` are. Reusable
// scratch.
class WireRows {
 public:
  void Init(Exec& exec, const WireLayout& layout, const int32_t* words,
            const std::vector<const void*>& own);
  // [num_rows(table)]
  const void* const* of(size_t table) const { return tables_[table].addresses.get(); }
  // Frees memory that only a huge batch needs. The addresses are then no longer valid.
  void Shrink();

 private:
  struct TableRows {
    Buffer<const void*> addresses;
    Buffer<char> converted;
  };
  std::vector<TableRows> tables_;  // only grows
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_WIRE_H_
