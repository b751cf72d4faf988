#include "cc/lookup/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cc/lookup/tasks.h"
#include "cc/lookup/wire_formulas.h"
#include "cc/table/codec.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"
#include "cc/table/vector_buffer.h"

DYNEMB_NO_CONTRACTION

namespace dynemb {
namespace {

constexpr size_t kWord = sizeof(int32_t);
constexpr size_t kMaxWords = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxRows = 0xFFFFFFFE;  // the most rows that a request has
// Bytes of rows per range of work.
constexpr size_t kGrainBytes = 64 << 10;

// The type of the elements of a section, unless it is int8.
DType WireDType(const WireTable& t) {
  const bool narrow = SizeOf(t.dtype) == 2;
  if (t.wire == WireType::kSame || narrow) return t.dtype;
  return t.wire == WireType::kFloat16 ? DType::kFloat16 : DType::kBfloat16;
}

// The bytes of one row in a section.
size_t RowBytes(const WireTable& t) {
  const auto dim = static_cast<size_t>(t.dim);
  return t.wire == WireType::kInt8 ? sizeof(float) + dim : dim * SizeOf(WireDType(t));
}

Status TooLarge(uint32_t rank) {
  return InvalidArgument("the rows for rank " + std::to_string(rank) +
                         " exceed the 2^33 bytes of a message: use smaller batches");
}

DYNEMB_CLONES void PackInt8(const float* x, int64_t dim, float* scale, int8_t* q) {
  uint32_t largest = 0;
  for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, formulas::Magnitude(x[c]));
  const formulas::Int8Scale of_row = formulas::ScaleOf(largest);
  *scale = of_row.scale;
  for (int64_t c = 0; c < dim; ++c) q[c] = formulas::ToInt8(of_row, x[c]);
}

DYNEMB_CLONES void UnpackInt8(const int8_t* q, float scale, int64_t dim, float* x) {
  for (int64_t c = 0; c < dim; ++c) x[c] = formulas::FromInt8(scale, q[c]);
}

// Packs rows [begin, end) of a section of `rows` rows: `at` is the section, `vectors` its rows.
void PackRows(const WireTable& t, const char* vectors, size_t rows, size_t begin, size_t end,
              char* at) {
  const size_t vector_bytes = static_cast<size_t>(t.dim) * SizeOf(t.dtype);
  VectorBuffer loaded(t.dim);
  if (t.wire == WireType::kInt8) {
    auto* const scales = reinterpret_cast<float*>(at);
    auto* const elements = reinterpret_cast<int8_t*>(at + rows * sizeof(float));
    for (size_t r = begin; r < end; ++r) {
      LoadVector(t.dtype, vectors + r * vector_bytes, t.dim, loaded.get());
      PackInt8(loaded.get(), t.dim, &scales[r], elements + r * static_cast<size_t>(t.dim));
    }
    return;
  }
  const DType to = WireDType(t);
  if (to == t.dtype) {
    memcpy(at + begin * vector_bytes, vectors + begin * vector_bytes, (end - begin) * vector_bytes);
    return;
  }
  // Only float32 is rounded to another type.
  const size_t wire_bytes = static_cast<size_t>(t.dim) * SizeOf(to);
  for (size_t r = begin; r < end; ++r) {
    StoreVector(to, reinterpret_cast<const float*>(vectors + r * vector_bytes), t.dim,
                at + r * wire_bytes);
  }
}

void UnpackRows(const WireTable& t, const char* at, size_t rows, size_t begin, size_t end,
                char* vectors) {
  const size_t vector_bytes = static_cast<size_t>(t.dim) * SizeOf(t.dtype);
  VectorBuffer loaded(t.dim);
  if (t.wire == WireType::kInt8) {
    const auto* const scales = reinterpret_cast<const float*>(at);
    const auto* const elements = reinterpret_cast<const int8_t*>(at + rows * sizeof(float));
    for (size_t r = begin; r < end; ++r) {
      UnpackInt8(elements + r * static_cast<size_t>(t.dim), scales[r], t.dim, loaded.get());
      StoreVector(t.dtype, loaded.get(), t.dim, vectors + r * vector_bytes);
    }
    return;
  }
  const DType from = WireDType(t);
  if (from == t.dtype) {
    memcpy(vectors + begin * vector_bytes, at + begin * vector_bytes, (end - begin) * vector_bytes);
    return;
  }
  const size_t wire_bytes = static_cast<size_t>(t.dim) * SizeOf(from);
  for (size_t r = begin; r < end; ++r) {
    LoadVector(from, at + r * wire_bytes, t.dim,
               reinterpret_cast<float*>(vectors + r * vector_bytes));
  }
}

// Calls fn(table, rank, begin, end) on ranges that cover all rows of all sections.
template <class Fn>
void ForRows(Exec& exec, const WireLayout& layout, const Fn& fn) {
  std::vector<size_t> sizes, grains;
  for (size_t t = 0; t < layout.tables().size(); ++t) {
    const WireTable& table = layout.tables()[t];
    const size_t bytes = std::max<size_t>(1, static_cast<size_t>(table.dim) * SizeOf(table.dtype));
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      sizes.push_back(layout.section(t, rank).rows);
      grains.push_back(std::max<size_t>(1, kGrainBytes / bytes));
    }
  }
  ParallelForTasks(exec, sizes, grains, [&](size_t i, size_t begin, size_t end) {
    fn(i / layout.ranks(), static_cast<uint32_t>(i % layout.ranks()), begin, end);
  });
}

}  // namespace

Status ParseWireType(const std::string& name, WireType* type) {
  if (name == "same") {
    *type = WireType::kSame;
  } else if (name == "float16") {
    *type = WireType::kFloat16;
  } else if (name == "bfloat16") {
    *type = WireType::kBfloat16;
  } else if (name == "int8") {
    *type = WireType::kInt8;
  } else {
    return InvalidArgument("wire must be same, float16, bfloat16 or int8, got '" + name + "'");
  }
  return {};
}

size_t WireLayout::Words(const WireTable& t, size_t rows) {
  return (rows * RowBytes(t) + kWord - 1) / kWord;
}

bool WireLayout::AsTheyAre(const WireTable& t) {
  return t.wire != WireType::kInt8 && WireDType(t) == t.dtype;
}

Status WireLayout::Init(const std::vector<WireTable>& tables, const int64_t* counts, uint32_t ranks,
                        uint32_t self) {
  tables_ = tables;
  ranks_ = ranks;
  self_ = self;
  sections_.resize(tables.size() * ranks);
  num_rows_.assign(tables.size(), 0);
  words_.assign(ranks + 1, 0);
  for (const WireTable& t : tables) {
    if (t.dim <= 0) return InvalidArgument("dim must be positive, got " + std::to_string(t.dim));
  }
  size_t word = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t count = counts[t * ranks + rank];
      if (count < 0) return InvalidArgument("counts must not be negative");
      const auto rows = static_cast<size_t>(count);
      // Checked before anything is multiplied, because the counts may come from another rank.
      if (rank != self && rows > kMaxWords * kWord / RowBytes(tables[t])) return TooLarge(rank);
      if (rows > kMaxRows) {
        return InvalidArgument("counts hold " + std::to_string(rows) + ", the maximum is " +
                               std::to_string(kMaxRows));
      }
      sections_[t * ranks + rank] = {word, num_rows_[t], rows};
      num_rows_[t] += rows;
      if (rank != self) word += Words(tables[t], rows);
    }
    words_[rank + 1] = word;
    if (num_words(rank) > kMaxWords) return TooLarge(rank);
  }
  return {};
}

void Pack(Exec& exec, const WireLayout& layout, const std::vector<const void*>& rows,
          int32_t* words) {
  Phase phase("pack rows");
  // The last word of a section may be only partly used, but all of it is sent and must be defined.
  for (size_t t = 0; t < layout.tables().size(); ++t) {
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      const WireLayout::Section& s = layout.section(t, rank);
      if (rank == layout.self() || rows[t] == nullptr || s.rows == 0) continue;
      words[s.word + WireLayout::Words(layout.tables()[t], s.rows) - 1] = 0;
    }
  }
  ForRows(exec, layout, [&](size_t t, uint32_t rank, size_t begin, size_t end) {
    if (rank == layout.self() || rows[t] == nullptr) return;
    const WireLayout::Section& s = layout.section(t, rank);
    const WireTable& table = layout.tables()[t];
    const size_t vector_bytes = static_cast<size_t>(table.dim) * SizeOf(table.dtype);
    PackRows(table, static_cast<const char*>(rows[t]) + s.first_row * vector_bytes, s.rows, begin,
             end, reinterpret_cast<char*>(words + s.word));
  });
}

void Unpack(Exec& exec, const WireLayout& layout, const int32_t* words,
            const std::vector<const void*>& own, const std::vector<void*>& rows) {
  Phase phase("unpack rows");
  ForRows(exec, layout, [&](size_t t, uint32_t rank, size_t begin, size_t end) {
    const WireLayout::Section& s = layout.section(t, rank);
    const WireTable& table = layout.tables()[t];
    const size_t vector_bytes = static_cast<size_t>(table.dim) * SizeOf(table.dtype);
    char* const to = static_cast<char*>(rows[t]) + s.first_row * vector_bytes;
    if (rank == layout.self()) {
      memcpy(to + begin * vector_bytes, static_cast<const char*>(own[t]) + begin * vector_bytes,
             (end - begin) * vector_bytes);
    } else {
      UnpackRows(table, reinterpret_cast<const char*>(words + s.word), s.rows, begin, end, to);
    }
  });
}

void WireRows::Init(Exec& exec, const WireLayout& layout, const int32_t* words,
                    const std::vector<const void*>& own) {
  Phase phase("find received rows");
  const size_t num_tables = layout.tables().size();
  if (tables_.size() < num_tables) tables_.resize(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    const WireTable& table = layout.tables()[t];
    const size_t n = layout.num_rows(t);
    const size_t bytes = n * static_cast<size_t>(table.dim) * SizeOf(table.dtype);
    tables_[t].addresses.Resize(n);
    if (!WireLayout::AsTheyAre(table)) tables_[t].converted.Resize(bytes);
  }
  ForRows(exec, layout, [&](size_t t, uint32_t rank, size_t begin, size_t end) {
    const WireLayout::Section& s = layout.section(t, rank);
    const WireTable& table = layout.tables()[t];
    const size_t vector_bytes = static_cast<size_t>(table.dim) * SizeOf(table.dtype);
    const char* from = reinterpret_cast<const char*>(words + s.word);
    if (rank == layout.self()) {
      from = static_cast<const char*>(own[t]);
    } else if (!WireLayout::AsTheyAre(table)) {
      char* const to = tables_[t].converted.get() + s.first_row * vector_bytes;
      UnpackRows(table, from, s.rows, begin, end, to);
      from = to;
    }
    const void** const addresses = tables_[t].addresses.get() + s.first_row;
    for (size_t r = begin; r < end; ++r) addresses[r] = from + r * vector_bytes;
  });
}

void WireRows::Shrink() {
  for (TableRows& table : tables_) {
    table.addresses.Shrink();
    table.converted.Shrink();
  }
}

}  // namespace dynemb
