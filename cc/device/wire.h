// Rows on the wire, on a device: Pack, Unpack and WireRows of cc/lookup/wire.h. The results have
// the same bits, with one exception: if the scale of an int8 row is a NaN that Pack did not write,
// the device may produce a different NaN. (Values of a row whose scale is a NaN have the bits of
// the scale.)
//
// Contract:
//
// - Rows, words and outputs are in the device's memory; layouts are in host memory.
// - Rows need only the alignment of their elements, and words the alignment of a word; better
//   alignment is faster.
// - A call is one launch (ReceivedRows: two, if rows are converted), for any number of tables and
//   ranks. No call waits.
// - InvalidArgument, before any work is given, if a launch would have more than 2^32 - 2 rows.
#ifndef DYNEMB_DEVICE_WIRE_H_
#define DYNEMB_DEVICE_WIRE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/device/kernels.h"
#include "cc/device/kernels_wire.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/wire.h"
#include "cc/table/phase.h"
#include "cc/table/status.h"

namespace dynemb::device {

namespace internal_wire {

// Ranges of rows, one part each. The rows are the items of a launch.
template <class Part>
struct RowList {
  std::vector<Part> parts;
  std::vector<uint32_t> begins{0};
  size_t rows = 0;

  void Add(const Part& part, size_t more) {
    rows += more;
    parts.push_back(part);
    begins.push_back(static_cast<uint32_t>(rows));
  }
};

struct SectionList : RowList<WireSection> {
  size_t quads = 0;  // the quads of the widest row

  void Add(const WireTable& table, bool converts, const char* from, char* to, size_t more) {
    WireSection section{from, to, table.dim, table.dtype};
    if (converts) section.wire = table.wire;
    quads = std::max(quads, converts ? QuadsOf(table.dim) : QuadsOfBytes(section.vector_bytes()));
    RowList::Add(section, more);
  }
};

inline size_t VectorBytes(const WireTable& table) {
  return static_cast<size_t>(table.dim) * SizeOf(table.dtype);
}

// Calls fn(t, rank, section) for all sections that have rows, table by table. With 100 tables and
// 4096 ranks, most sections may be empty.
template <class Fn>
void ForSections(const WireLayout& layout, const Fn& fn) {
  for (size_t t = 0; t < layout.tables().size(); ++t) {
    if (layout.num_rows(t) == 0) continue;
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      const WireLayout::Section& section = layout.section(t, rank);
      if (section.rows != 0) fn(t, rank, section);
    }
  }
}

template <class Body, class Session>
Status Launch(Session& session, const SectionList& list) {
  DYNEMB_RETURN_IF_ERROR(CheckTotal(list.rows, "rows"));
  if (list.rows == 0) return session.status();
  session.ForRows(list.rows, list.quads, Body{ToDevice(session, list.parts, list.begins)});
  return session.status();
}

}  // namespace internal_wire

// Packs rows[t], [num_rows(t), dim] of the table's dtype, into words[num_words()]. Skips the tables
// whose rows[t] is null.
template <class Session>
Status Pack(Session& session, const WireLayout& layout, const std::vector<const void*>& rows,
            int32_t* words) {
  namespace internal = internal_wire;
  Phase phase("pack rows");
  internal::SectionList list;
  internal::ForSections(layout, [&](size_t t, uint32_t rank, const WireLayout::Section& s) {
    if (rank == layout.self() || rows[t] == nullptr) return;
    const WireTable& table = layout.tables()[t];
    const auto* const vectors = static_cast<const char*>(rows[t]);
    list.Add(table, !WireLayout::AsTheyAre(table),
             vectors + s.first_row * internal::VectorBytes(table),
             reinterpret_cast<char*>(words + s.word), s.rows);
  });
  return internal::Launch<PackRows>(session, list);
}

// The reverse: unpacks words to rows[t]. own[t] are the rows of `self`, if there is one:
// [section(t, self).rows, dim].
template <class Session>
Status Unpack(Session& session, const WireLayout& layout, const int32_t* words,
              const std::vector<const void*>& own, const std::vector<void*>& rows) {
  namespace internal = internal_wire;
  Phase phase("unpack rows");
  internal::SectionList list;
  internal::ForSections(layout, [&](size_t t, uint32_t rank, const WireLayout::Section& s) {
    const WireTable& table = layout.tables()[t];
    const bool is_own = rank == layout.self();
    const void* const from = is_own ? own[t] : words + s.word;
    list.Add(table, !is_own && !WireLayout::AsTheyAre(table), static_cast<const char*>(from),
             static_cast<char*>(rows[t]) + s.first_row * internal::VectorBytes(table), s.rows);
  });
  return internal::Launch<UnpackRows>(session, list);
}

// The addresses of the rows that Unpack would write, in arrays of the session: (*rows)[t] has
// layout.num_rows(t) of them. A row is in `words` or `own` or, if it had to be converted, in memory
// of the session. The addresses are valid until the session ends, and only as long as `words` and
// `own` are.
template <class Session>
Status ReceivedRows(Session& session, const WireLayout& layout, const int32_t* words,
                    const std::vector<const void*>& own, std::vector<const void* const*>* rows) {
  namespace internal = internal_wire;
  Phase phase("find received rows");
  const size_t num_tables = layout.tables().size();
  size_t n = 0;
  for (size_t t = 0; t < num_tables; ++t) n += layout.num_rows(t);
  DYNEMB_RETURN_IF_ERROR(CheckTotal(n, "rows"));
  auto* const addresses = session.template Take<const void*>(n);
  rows->assign(num_tables, nullptr);
  std::vector<char*> converted(num_tables);  // the address for the table's next converted rows
  size_t begin = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    const WireTable& table = layout.tables()[t];
    if (addresses != nullptr) (*rows)[t] = addresses + begin;
    begin += layout.num_rows(t);
    size_t others = layout.num_rows(t);
    if (layout.self() < layout.ranks()) others -= layout.section(t, layout.self()).rows;
    if (others == 0 || WireLayout::AsTheyAre(table)) continue;
    converted[t] = session.template Take<char>(others * internal::VectorBytes(table));
  }
  DYNEMB_RETURN_IF_ERROR(session.status());
  internal::RowList<RowRange> ranges;
  internal::SectionList list;  // the sections that are converted
  internal::ForSections(layout, [&](size_t t, uint32_t rank, const WireLayout::Section& s) {
    const WireTable& table = layout.tables()[t];
    const bool is_own = rank == layout.self();
    const void* from = is_own ? own[t] : words + s.word;
    if (!is_own && !WireLayout::AsTheyAre(table)) {
      list.Add(table, /*converts=*/true, static_cast<const char*>(from), converted[t], s.rows);
      from = converted[t];
      converted[t] += s.rows * internal::VectorBytes(table);
    }
    ranges.Add({static_cast<const char*>(from), internal::VectorBytes(table)}, s.rows);
  });
  if (n != 0) {
    const Parts<RowRange> parts = ToDevice(session, ranges.parts, ranges.begins);
    session.ForEach(n, ListAddresses{parts, addresses});
  }
  return internal::Launch<UnpackRows>(session, list);
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_WIRE_H_
