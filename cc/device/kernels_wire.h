// The kernels of wire.h (kernels.h defines kernels). A launch is over the rows of all nonempty
// sections; each section is a part (parts.h). The output has the same bits as on the host
// (cc/lookup/wire.h); like row_math.h, this needs code without contraction.
//
// A team handles a row. It divides the row's columns into quads or, where it copies, the row's
// bytes. Each element of a message needs only the alignment of its size.
#ifndef DYNEMB_DEVICE_KERNELS_WIRE_H_
#define DYNEMB_DEVICE_KERNELS_WIRE_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/kernels.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/wire.h"
#include "cc/lookup/wire_formulas.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The rows of one table for, or from, one rank.
struct WireSection {
  const char* from = nullptr;  // the rows, or the section of the message
  char* to = nullptr;          // the other of the two
  int64_t dim = 0;
  DType dtype = DType::kFloat32;    // of the table
  WireType wire = WireType::kSame;  // kSame if rows are copied, whatever the table's wire type is

  DYNEMB_HD size_t vector_bytes() const { return static_cast<size_t>(dim) * SizeOf(dtype); }
  // The wire type of rows that are neither copied nor int8; `dtype` is then kFloat32.
  DYNEMB_HD DType half() const {
    return wire == WireType::kFloat16 ? DType::kFloat16 : DType::kBfloat16;
  }
  // The bytes of a row in a message, without the scale.
  DYNEMB_HD size_t wire_bytes() const {
    if (wire == WireType::kSame) return vector_bytes();
    return static_cast<size_t>(dim) * (wire == WireType::kInt8 ? 1 : SizeOf(half()));
  }
};

namespace internal_kernels_wire {

// The row that item i of a launch handles, and its section.
struct RowOf {
  WireSection section;  // in registers: the compiler cannot know that stores do not change it
  size_t row;
  size_t rows;  // of the section

  DYNEMB_HD RowOf(const Parts<WireSection>& sections, size_t i) {
    const uint32_t s = sections.IndexOf(i);
    section = sections[s];
    row = i - sections.begin(s);
    rows = sections.begin(s + 1) - sections.begin(s);
  }
};

// The greatest Magnitude of this thread's columns. 16-bit values are compared as bit patterns,
// which have the order of the magnitudes.
template <class Lanes>
DYNEMB_HD uint32_t LargestOfColumns(Lanes& lanes, DType dtype, const char* vector, int64_t dim) {
  uint32_t largest = 0;
  if (dtype == DType::kFloat32) {
    ForEachQuad(lanes, dim, [&](int64_t first, int n) {
      const Quad<float> quad = LoadQuad(reinterpret_cast<const float*>(vector) + first, n);
      for (int j = 0; j < kQuad; ++j) {
        const uint32_t magnitude = formulas::Magnitude(quad.at[j]);
        largest = magnitude > largest ? magnitude : largest;
      }
    });
    return largest;
  }
  ForEachQuad(lanes, dim, [&](int64_t first, int n) {
    const Quad<uint16_t> quad = LoadQuad(reinterpret_cast<const uint16_t*>(vector) + first, n);
    for (int j = 0; j < kQuad; ++j) {
      const uint32_t magnitude = quad.at[j] & 0x7FFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
  });
  return formulas::Magnitude(internal_row_math::FromHalf(dtype, static_cast<uint16_t>(largest)));
}

}  // namespace internal_kernels_wire

// For ForRows. From rows to their sections.
struct PackRows {
  Parts<WireSection> sections;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const internal_kernels_wire::RowOf at(sections, i);
    const WireSection& section = at.section;
    const char* const from = section.from + at.row * section.vector_bytes();
    const size_t scales = section.wire == WireType::kInt8 ? at.rows * sizeof(float) : 0;
    char* const to = section.to + scales + at.row * section.wire_bytes();
    if (section.wire == WireType::kSame) {
      CopyBytes(lanes, to, from, section.vector_bytes());
    } else if (section.wire == WireType::kInt8) {
      PackInt8(lanes, section, from, reinterpret_cast<float*>(section.to) + at.row,
               reinterpret_cast<int8_t*>(to));
    } else {
      const auto* const floats = reinterpret_cast<const float*>(from);
      ForEachQuad(lanes, section.dim, [&](int64_t first, int n) {
        StoreColumns(section.half(), LoadQuad(floats + first, n), first, n, Rounding{}, to);
      });
    }
    if (at.row + 1 < at.rows || lanes.rank() != 0) return;
    // The section's last word may be used only partly; all bytes that are sent must be defined.
    char* end = to + section.wire_bytes();
    while (reinterpret_cast<uintptr_t>(end) % sizeof(int32_t) != 0) *end++ = 0;
  }

 private:
  template <class Lanes>
  static DYNEMB_HD void PackInt8(Lanes& lanes, const WireSection& section, const char* from,
                                 float* scale, int8_t* q) {
    const uint32_t mine =
        internal_kernels_wire::LargestOfColumns(lanes, section.dtype, from, section.dim);
    const formulas::Int8Scale of_row = formulas::ScaleOf(lanes.Max(mine));
    if (lanes.rank() == 0) *scale = of_row.scale;
    ForEachQuad(lanes, section.dim, [&](int64_t first, int n) {
      const Quad<float> x = LoadColumns(section.dtype, from, first, n);
      Quad<int8_t> quad;
      for (int j = 0; j < kQuad; ++j) quad.at[j] = formulas::ToInt8(of_row, x.at[j]);
      StoreQuad(quad, n, q + first);
    });
  }
};

// For ForRows. From sections to rows.
struct UnpackRows {
  Parts<WireSection> sections;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const internal_kernels_wire::RowOf at(sections, i);
    const WireSection& section = at.section;
    const size_t scales = section.wire == WireType::kInt8 ? at.rows * sizeof(float) : 0;
    const char* const from = section.from + scales + at.row * section.wire_bytes();
    char* const to = section.to + at.row * section.vector_bytes();
    if (section.wire == WireType::kSame) {
      CopyBytes(lanes, to, from, section.vector_bytes());
    } else if (section.wire == WireType::kInt8) {
      const float scale = reinterpret_cast<const float*>(section.from)[at.row];
      const auto* const q = reinterpret_cast<const int8_t*>(from);
      ForEachQuad(lanes, section.dim, [&](int64_t first, int n) {
        const Quad<int8_t> quad = LoadQuad(q + first, n);
        Quad<float> x;
        for (int j = 0; j < kQuad; ++j) x.at[j] = formulas::FromInt8(scale, quad.at[j]);
        StoreColumns(section.dtype, x, first, n, Rounding{}, to);
      });
    } else {
      auto* const floats = reinterpret_cast<float*>(to);
      ForEachQuad(lanes, section.dim, [&](int64_t first, int n) {
        StoreQuad(LoadColumns(section.half(), from, first, n), n, floats + first);
      });
    }
  }
};

// A range of contiguous rows.
struct RowRange {
  const char* rows = nullptr;
  size_t vector_bytes = 0;
};

// For ForEach. addresses[i] = the address of the row of item i.
struct ListAddresses {
  Parts<RowRange> ranges;
  const void** addresses;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t r = ranges.IndexOf(i);
    const RowRange range = ranges[r];
    addresses[i] = range.rows + (i - ranges.begin(r)) * range.vector_bytes;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_WIRE_H_
