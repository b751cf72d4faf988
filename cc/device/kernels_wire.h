// The kernels of wire.h: bodies (kernels.h) for a launch over the rows of all sections that have
// any, each section being a part (parts.h). What they write has the bits that the host writes
// (cc/lookup/wire.h); as row_math.h, that needs code without contraction.
//
// A team has a row. It deals a row's columns by quads, or its bytes where it copies; all elements
// of a message may be at any address that their own size divides.
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
  const char* from = nullptr;  // the rows, or what is in the message
  char* to = nullptr;          // the other
  int64_t dim = 0;
  DType dtype = DType::kFloat32;    // of the table
  WireType wire = WireType::kSame;  // kSame if the rows are copied, whatever the table's is

  DYNEMB_HD size_t vector_bytes() const { return static_cast<size_t>(dim) * SizeOf(dtype); }
  // The type on the wire of what is neither copied nor int8; `dtype` is then kFloat32.
  DYNEMB_HD DType half() const {
    return wire == WireType::kFloat16 ? DType::kFloat16 : DType::kBfloat16;
  }
  // Of all elements of a row in a message, but for the scale.
  DYNEMB_HD size_t wire_bytes() const {
    if (wire == WireType::kSame) return vector_bytes();
    return static_cast<size_t>(dim) * (wire == WireType::kInt8 ? 1 : SizeOf(half()));
  }
};

namespace internal_kernels_wire {

// The row of a section that item i of a launch is.
struct RowOf {
  WireSection section;  // in registers: the compiler cannot know that what is stored is not this
  size_t row;
  size_t rows;  // of the section

  DYNEMB_HD RowOf(const Parts<WireSection>& sections, size_t i) {
    const uint32_t s = sections.IndexOf(i);
    section = sections[s];
    row = i - sections.begin(s);
    rows = sections.begin(s + 1) - sections.begin(s);
  }
};

// The greatest Magnitude of this thread's columns. Halves are compared as they are: they have the
// order of what they stand for.
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

// ForRows. From rows to their sections.
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
    // The section's last word may be only partly used; what is sent must be defined.
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

// ForRows. From sections to rows.
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

// Rows that lie one after the other.
struct RowStretch {
  const char* rows = nullptr;
  size_t vector_bytes = 0;
};

// ForEach. addresses[i] = where the row of item i lies.
struct ListAddresses {
  Parts<RowStretch> stretches;
  const void** addresses;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t s = stretches.IndexOf(i);
    const RowStretch stretch = stretches[s];
    addresses[i] = stretch.rows + (i - stretches.begin(s)) * stretch.vector_bytes;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_WIRE_H_
