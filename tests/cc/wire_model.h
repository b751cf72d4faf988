// Random rows of several tables, packed and unpacked. For the tests of the wire.
#ifndef DYNEMB_TESTS_CC_WIRE_MODEL_H_
#define DYNEMB_TESTS_CC_WIRE_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cc/lookup/wire.h"
#include "tests/cc/execs.h"

namespace dynemb {

struct Rows {
  std::vector<WireTable> tables;
  uint32_t ranks = 1;
  uint32_t self = kNoRank;
  std::vector<int64_t> counts;             // [tables, ranks]
  std::vector<std::vector<char>> vectors;  // of each table
};

// Rows of random bits.
inline Rows MakeRows(const std::vector<WireTable>& tables, const std::vector<int64_t>& counts,
                     std::mt19937_64* random) {
  Rows rows;
  rows.tables = tables;
  rows.ranks = static_cast<uint32_t>(counts.size() / tables.size());
  rows.counts = counts;
  for (size_t t = 0; t < tables.size(); ++t) {
    int64_t n = 0;
    for (uint32_t r = 0; r < rows.ranks; ++r) n += counts[t * rows.ranks + r];
    rows.vectors.emplace_back(static_cast<size_t>(n * tables[t].dim) * SizeOf(tables[t].dtype));
    for (char& byte : rows.vectors[t]) byte = static_cast<char>((*random)());
  }
  return rows;
}

inline Rows RandomRows(size_t tables, uint32_t ranks, uint64_t most, std::mt19937_64* random) {
  std::vector<WireTable> of_table(tables);
  std::vector<int64_t> counts;
  for (WireTable& table : of_table) {
    table.dtype = static_cast<DType>((*random)() % 3);
    table.wire = static_cast<WireType>((*random)() % 4);
    table.dim = 1 + static_cast<int64_t>((*random)() % 40);
    for (uint32_t r = 0; r < ranks; ++r) {
      counts.push_back((*random)() % 3 == 0 ? 0 : static_cast<int64_t>((*random)() % most));
    }
  }
  Rows rows;
  if (tables > 0) rows = MakeRows(of_table, counts, random);
  rows.ranks = ranks;
  if ((*random)() % 3 > 0) rows.self = static_cast<uint32_t>((*random)() % ranks);
  return rows;
}

// Packs and unpacks the rows with every Exec. All must give the same bits, and write every word and
// element. The arrays have no spare room, so sanitizers detect accesses outside them. `words` may
// be null.
inline void PackAndUnpack(const Rows& rows, std::vector<int32_t>* words,
                          std::vector<std::vector<char>>* unpacked) {
  WireLayout layout;
  ASSERT_TRUE(layout.Init(rows.tables, rows.counts.data(), rows.ranks, rows.self).ok());
  std::vector<const void*> from, own;
  for (size_t t = 0; t < rows.tables.size(); ++t) {
    ASSERT_EQ(rows.vectors[t].size(), layout.num_rows(t) * static_cast<size_t>(rows.tables[t].dim) *
                                          SizeOf(rows.tables[t].dtype));
    from.push_back(rows.vectors[t].data());
    if (rows.self == kNoRank) continue;
    const size_t row_bytes = static_cast<size_t>(rows.tables[t].dim) * SizeOf(rows.tables[t].dtype);
    own.push_back(rows.vectors[t].data() + layout.section(t, rows.self).first_row * row_bytes);
  }
  std::vector<int32_t> first;
  ForEachExec([&](Exec& exec) {
    // The previous contents of the memory differ between Execs.
    const size_t threads = exec.parallelism();
    const auto fill = static_cast<char>(0xA0 + threads);
    const size_t n = layout.num_words();
    std::unique_ptr<int32_t[]> message(new int32_t[n]);
    std::memset(message.get(), fill, 4 * n);
    Pack(exec, layout, from, message.get());
    std::vector<std::vector<char>> arrived;
    std::vector<void*> to;
    for (const std::vector<char>& vectors : rows.vectors) {
      arrived.emplace_back(vectors.size(), fill);
    }
    for (std::vector<char>& vectors : arrived) to.push_back(vectors.data());
    Unpack(exec, layout, message.get(), own, to);
    WireRows found;  // the same rows, by their addresses
    found.Init(exec, layout, message.get(), own);
    for (size_t t = 0; t < rows.tables.size(); ++t) {
      const size_t bytes = static_cast<size_t>(rows.tables[t].dim) * SizeOf(rows.tables[t].dtype);
      for (size_t row = 0; row < layout.num_rows(t); ++row) {
        ASSERT_EQ(std::memcmp(found.of(t)[row], arrived[t].data() + row * bytes, bytes), 0);
      }
    }
    const std::vector<int32_t> packed(message.get(), message.get() + n);
    if (threads == 1) {
      first = packed;
      *unpacked = arrived;
    }
    ASSERT_EQ(packed, first);
    ASSERT_EQ(arrived, *unpacked);
  });
  if (words != nullptr) *words = first;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_WIRE_MODEL_H_
