// The kernels that sum the terms of keys (kernels_gradient.h): SumSegments, then AddChunks.
//
// Terms are sorted by key. The terms of a key are cut into *segments* of kChunkIds terms, of which
// the last may be shorter. A key of one segment has the sum of its terms, in their order. A key of
// several is *long*: the sum of each segment is a *chunk*, and the sum of the key is the sum of its
// chunks, in their order.
//
// The terms are divided into windows of equal length. A team has the segments that begin in its
// window, fewer than a window and kChunkIds terms. A team reads several upstream rows at the same
// time across the ends of segments, so that keys of one id, which most keys are, do not each wait
// for a chain of addresses.
//
// Both kernels use a `Sums`, which knows the tasks that keys belong to, and what becomes of the
// sums: KeySums in SumGradients, RowSums in GatherGradient, SteppedSums in ApplyPooled. The keys of
// a task have consecutive numbers. It has
//
//   SortedTerms terms
//   uint32_t num_keys                    terms of this key and later ones are not summed
//   uint32_t TaskOf(key)
//   uint32_t KeysEnd(task)               the number after the last key of the task
//   int64_t dim(task)
//   Target TargetOf(task)
//   bool kSteps                          whether a sum is stored, or steps a row
//   kInFlight                            of whole rows (SumSegments)
//   kLeastBlocks                         of SumSegments of whole rows (cuda_device.cuh)
//
// and, if sums are stored,
//
//   target.SumOf(key)                    the address of the sum of a key of the target's task
//   TermForm FormOf(task, at, *end)      the form of the term `at` of this task; reduces *end so
//                                        that the terms [at, *end) have this form
//
// or, if they step rows, which are all whole,
//
//   target.valid                         an address of dim(task) floats
//   Place PlaceOf(term)                  the row of the key that begins with a term, if it has
//                                        one; no row for any other term
//   Place PlaceOfKey(key)
//   Prefetch(target, place, column)      prepares for Put, if the place is a row
//   Put(target, key, place, sum, column) steps the columns [column, column + kQuad) of a place with
//                                        the same columns of the sum of its key
#ifndef DYNEMB_DEVICE_KERNELS_SEGMENTS_H_
#define DYNEMB_DEVICE_KERNELS_SEGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cc/device/kernels_gradient.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/combiner.h"
#include "cc/table/half.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The maximal number of terms in a segment.
constexpr uint32_t kChunkIds = 256;

// The terms of all ids, from ListTerms.
struct SortedTerms {
  Parts<GradientPart> parts;
  const uint32_t* positions;  // of the terms' ids
  const uint32_t* bag_of;     // by position
  const TermRange* ranges;
  const Term* terms;
  uint32_t n;
};

struct TermForm {
  DType dtype = DType::kFloat32;  // of the upstream rows
  // Terms of max have the columns of the row in which the id is the maximum, and zeros in the
  // others.
  bool max = false;

  DYNEMB_HD bool operator==(const TermForm& o) const { return dtype == o.dtype && max == o.max; }
};

DYNEMB_HD inline TermForm FormOf(const UpstreamTask& task) {
  return {task.dtype, task.combiner == Combiner::kMax};
}
// Whether the terms of a task are not of max, and its upstream rows are whole (row_math.h).
inline bool IsWhole(const UpstreamTask& task) {
  return task.combiner != Combiner::kMax && task.upstream_rows == nullptr &&
         dynemb::IsWhole(task.dtype, task.dim, task.upstream);
}

// The sums of the segments of long keys.
//
// At most two segments of long keys begin within one chunk of kChunkIds terms: the last segment of
// a key, because only that may be shorter, and the first segment of another key. So a segment's
// place follows from its first term.
struct ChunkSums {
  float* sums;
  size_t stride;   // floats of a sum: a multiple of kQuad
  uint32_t* keys;  // per kChunkIds terms: the long key that begins in them, or kNoKey, as at first

  static constexpr uint32_t kNoKey = 0xFFFFFFFFu;
  static constexpr size_t CountOf(size_t terms) { return terms / kChunkIds + 1; }

  // The place of the segment whose first term is `begin`, below 2 * CountOf(terms). `continues`: it
  // is not its key's first.
  static DYNEMB_HD size_t PlaceOf(uint32_t begin, bool continues) {
    return size_t{2} * (begin / kChunkIds) + (continues ? 0 : 1);
  }
  DYNEMB_HD float* SumOf(uint32_t begin, bool continues) const {
    return sums + PlaceOf(begin, continues) * stride;
  }
};

// The initial value of a sum: adding any number to -0 gives that number.
DYNEMB_HD DYNEMB_INLINE Quad<float> NoSum() { return {{-0.0f, -0.0f, -0.0f, -0.0f}}; }

DYNEMB_HD DYNEMB_INLINE void AddQuad(const Quad<float>& quad, Quad<float>* sum) {
  for (int k = 0; k < kQuad; ++k) sum->at[k] += quad.at[k];
}

// Where a team finds the row of its key, if the sums step rows; empty otherwise.
template <class Sums, bool kSteps = Sums::kSteps>
struct PlaceOf {
  using Type = typename Sums::Place;
};
template <class Sums>
struct PlaceOf<Sums, false> {
  struct Type {};
};

// For ForRows. Item w is a window: `length` terms from term w * length on. Puts the sums of the
// keys of one segment, and writes the chunks of long keys. kWhole: every task, and every sum, is
// aligned and consists of full quads (IsWhole, row_math.h).
template <class Sums, bool kWhole>
struct SumSegments {
  using Target = typename Sums::Target;
  using Place = typename PlaceOf<Sums>::Type;
  static constexpr unsigned int kLeastBlocks = kWhole ? Sums::kLeastBlocks : 0;

  Sums sums;
  ChunkSums chunks;
  uint32_t length;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t w) const {
    const SortedTerms& sorted = sums.terms;
    const auto from = static_cast<uint32_t>(w * length);
    const uint32_t to = sorted.n - from < length ? sorted.n : from + length;
    const Segment head(sorted, from), tail(sorted, to - 1);
    if (tail.begin < from) return;
    const uint32_t first = head.begin == from ? from : head.end;
    bool continues = first != head.of_key.begin && first != head.of_key.end;
    for (uint32_t at = first; at < tail.end;) {
      const uint32_t key = sorted.terms[at].key;
      if (key >= sums.num_keys) return;
      const uint32_t t = sums.TaskOf(key), end = EndOfTask(t, at, tail.end);
      const Target target = sums.TargetOf(t);
      // As in ForEachQuad, but threads without columns (width 0) take part in the collectives.
      const int64_t dim = sums.dim(t);
      for (int64_t base = 0; base < dim; base += int64_t{kQuad} * lanes.width()) {
        const int64_t column = base + int64_t{kQuad} * lanes.rank(), left = dim - column;
        const int width = static_cast<int>(left < 0 ? 0 : left < kQuad ? left : kQuad);
        Current current{key, at, continues, Place{}, NoSum()};
        if constexpr (kWhole) {
          AddTerms<DType::kFloat32, false>(lanes, target, at, end, column, width, &current);
        } else {
          for (uint32_t of_form = at; of_form < end;) {
            uint32_t end_of_form = end;
            const TermForm form = sums.FormOf(t, of_form, &end_of_form);
            AddTermsOf(lanes, form, target, of_form, end_of_form, column, width, &current);
            of_form = end_of_form;
          }
        }
        Finish(target, end, column, width, current);
      }
      continues = false;
      at = end;
    }
  }

 private:
  // The segment of a term.
  struct Segment {
    TermRange of_key;
    uint32_t begin, end;

    DYNEMB_HD Segment(const SortedTerms& sorted, uint32_t term)
        : of_key(sorted.ranges[sorted.terms[term].key]) {
      begin = term - (term - of_key.begin) % kChunkIds;
      end = of_key.end - begin < kChunkIds ? of_key.end : begin + kChunkIds;
    }
  };
  // The segment that is being summed, in some columns.
  struct Current {
    uint32_t key;
    uint32_t begin;
    bool continues;  // whether it is not the first of its key
    Place place;     // of its key's sum, if it is the first
    Quad<float> sum;
  };

  // The end of the terms of task t in [at, end). The first is of this task.
  DYNEMB_HD uint32_t EndOfTask(uint32_t t, uint32_t at, uint32_t end) const {
    const Term* const terms = sums.terms.terms;
    const uint32_t keys_end = sums.KeysEnd(t);
    if (terms[end - 1].key < keys_end) return end;
    uint32_t low = at + 1, high = end - 1;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (terms[middle].key < keys_end) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Writes the current segment, whose terms end at `end`.
  DYNEMB_HD DYNEMB_INLINE void Finish(const Target& target, uint32_t end, int64_t column, int width,
                                      const Current& current) const {
    const SortedTerms& sorted = sums.terms;
    const bool is_long = current.continues || (end - current.begin == kChunkIds && end < sorted.n &&
                                               sorted.terms[end].key == current.key);
    float* to = nullptr;
    if (is_long) {
      to = chunks.SumOf(current.begin, current.continues);
      if (!current.continues && column == 0) chunks.keys[current.begin / kChunkIds] = current.key;
    } else if constexpr (Sums::kSteps) {
      if (width != 0) sums.Put(target, current.key, current.place, current.sum, column);
      return;
    } else {
      to = target.SumOf(current.key);
    }
    if (width != 0) StoreQuad<kWhole>(current.sum, width, to + column);
  }

  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE void AddTermsOf(Lanes& lanes, TermForm form, const Target& target,
                                          uint32_t at, uint32_t end, int64_t column, int width,
                                          Current* current) const {
    const auto add_as = [&](auto dtype) {
      constexpr DType kType = decltype(dtype)::value;
      form.max ? AddTerms<kType, true>(lanes, target, at, end, column, width, current)
               : AddTerms<kType, false>(lanes, target, at, end, column, width, current);
    };
    switch (form.dtype) {
      case DType::kFloat32:
        return add_as(std::integral_constant<DType, DType::kFloat32>{});
      case DType::kFloat16:
        return add_as(std::integral_constant<DType, DType::kFloat16>{});
      case DType::kBfloat16:
        return add_as(std::integral_constant<DType, DType::kBfloat16>{});
    }
  }

  // Adds columns of the terms [at, end), and writes the segments that end before their last term.
  //
  // Each thread reads one of width() terms, and passes it on when it is needed: a term that all
  // threads read would take registers for as long as its row is on its way.
  template <DType kType, bool kMax, class Lanes>
  DYNEMB_HD DYNEMB_INLINE void AddTerms(Lanes& lanes, const Target& target, uint32_t at,
                                        uint32_t end, int64_t column, int width,
                                        Current* current) const {
    const uint32_t n = end - at, block = lanes.width();
    const auto load = [&](uint32_t i) {
      return i + lanes.rank() < n ? sums.terms.terms[at + i + lanes.rank()] : Term{};
    };
    const auto place = [&](uint32_t i) {
      if constexpr (Sums::kSteps) {
        if (i + lanes.rank() < n) return sums.PlaceOf(at + i + lanes.rank());
      }
      return Place{};
    };
    Term next = load(0);
    Place next_place = place(0);
    for (uint32_t done = 0; done < n; done += block) {
      const Term term = next;
      const Place of_term = next_place;
      next = load(done + block);
      next_place = place(done + block);
      const uint32_t count = n - done < block ? n - done : block;
      for (uint32_t first = 0; first < count; first += kInFlight) {
        AddSome<kType, kMax>(lanes, target, term, of_term, at + done, first, count, column, width,
                             current);
      }
    }
  }

  // The number of terms whose quads are loaded before the first of them is added: of whole rows,
  // and of others, which take more registers.
  static constexpr uint32_t kInFlight = kWhole ? Sums::kInFlight : 4;

  // Adds the terms first, first + 1, ... of at most kInFlight, but none from `count` on. They begin
  // at `at`, and thread r has the r-th of them.
  template <DType kType, bool kMax, class Lanes>
  DYNEMB_HD DYNEMB_INLINE void AddSome(Lanes& lanes, const Target& target, const Term& term,
                                       const Place& of_term, uint32_t at, uint32_t first,
                                       uint32_t count, int64_t column, int width,
                                       Current* current) const {
    using Element = std::conditional_t<kType == DType::kFloat32, float, uint16_t>;
    Quad<Element> row[kInFlight] = {};
    [[maybe_unused]] uint32_t is_there = ~0u;  // bit j: whether row[j] is the term's row
    [[maybe_unused]] Quad<int32_t> argmax[kInFlight] = {};
    [[maybe_unused]] int32_t position[kInFlight] = {};
    if constexpr (Sums::kSteps) {
      is_there =
          LoadAlways(lanes, target, term, of_term, first, count, width != 0 ? column : 0, row);
    } else {
      DYNEMB_UNROLL
      for (uint32_t j = 0; j < kInFlight; ++j) {
        if (first + j >= count) continue;
        const void* const from = lanes.FromRank(term.row, first + j);
        if (from != nullptr && width != 0) {
          row[j] = LoadQuad<kWhole>(static_cast<const Element*>(from) + column, width);
        }
        if constexpr (kMax) {
          if (width != 0) argmax[j] = LoadArgmax(at + first + j, column, width, &position[j]);
        }
      }
    }
    DYNEMB_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (first + j >= count) continue;
      const uint32_t i = at + first + j, key = lanes.FromRank(term.key, first + j);
      const float scale = lanes.FromRank(term.scale, first + j);
      const bool same_key = key == current->key;
      if (!same_key || i - current->begin == kChunkIds) {
        Finish(target, i, column, width, *current);
        *current = {key, i, same_key, Place{}, NoSum()};
      }
      if constexpr (Sums::kSteps) {
        if (i == current->begin) current->place = lanes.FromRank(of_term, first + j);
      }
      Quad<float> x;
      for (int k = 0; k < kQuad; ++k) {
        if constexpr (kType == DType::kFloat32) {
          x.at[k] = scale * row[j].at[k];
        } else {
          x.at[k] = scale * HalfFormat<kType>::ToFloat(row[j].at[k]);
        }
        if constexpr (kMax) {
          if (argmax[j].at[k] != position[j]) x.at[k] = 0.0f;
        }
        if constexpr (Sums::kSteps) {
          if ((is_there >> j & 1u) == 0) x.at[k] = scale * 0.0f;
        }
      }
      AddQuad(x, &current->sum);
    }
  }

  // Loads the quads of the terms that AddSome adds, and prefetches the places of the keys that
  // begin with them. A row that is null is replaced by another, and a term from `count` on by the
  // first: where a load depends on a condition, the compiler may copy what it has loaded, and the
  // copy waits for the memory. Bit j of the result is whether row[j] is its term's row.
  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE uint32_t LoadAlways(Lanes& lanes, const Target& target, const Term& term,
                                              const Place& of_term, uint32_t first, uint32_t count,
                                              int64_t column, Quad<float>* row) const {
    uint32_t is_there = ~0u;
    DYNEMB_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      const uint32_t rank = first + j < count ? first + j : 0;
      const auto* from = static_cast<const float*>(lanes.FromRank(term.row, rank));
      if (from == nullptr) {
        from = target.valid;
        is_there &= ~(1u << j);
      }
      row[j] = LoadQuad<true>(from + column, kQuad);
    }
    DYNEMB_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      const uint32_t rank = first + j < count ? first + j : 0;
      sums.Prefetch(target, lanes.FromRank(of_term, rank), column);
    }
    return is_there;
  }

  // The argmax of the bag of term i, and the position of its id, both in its part.
  DYNEMB_HD Quad<int32_t> LoadArgmax(uint32_t i, int64_t column, int width,
                                     int32_t* in_part) const {
    const SortedTerms& sorted = sums.terms;
    const uint32_t position = sorted.positions[i], p = sorted.parts.IndexOf(position);
    const GradientPart& part = sorted.parts[p];
    *in_part = static_cast<int32_t>(position - sorted.parts.begin(p));
    const size_t of_bag = sorted.bag_of[position] * static_cast<size_t>(part.task.dim);
    return LoadQuad(part.task.argmax + of_bag + column, width);
  }
};

// For ForRows, after SumSegments. Item i is kChunkIds terms. Puts the sum of the long key that
// begins in them, if there is one.
template <class Sums>
struct AddChunks {
  Sums sums;
  ChunkSums chunks;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t key = chunks.keys[i];
    if (key == ChunkSums::kNoKey) return;
    const uint32_t t = sums.TaskOf(key);
    const TermRange range = sums.terms.ranges[key];
    const uint32_t count = (range.end - range.begin - 1) / kChunkIds + 1;
    const auto target = sums.TargetOf(t);
    ForEachQuad(lanes, sums.dim(t), [&](int64_t column, int width) {
      Quad<float> total = NoSum();
      constexpr uint32_t kInFlight = 8;
      for (uint32_t at = 0; at < count; at += kInFlight) {
        Quad<float> chunk[kInFlight] = {};
        DYNEMB_UNROLL
        for (uint32_t j = 0; j < kInFlight; ++j) {
          if (at + j >= count) continue;
          const uint32_t begin = range.begin + (at + j) * kChunkIds;
          chunk[j] = LoadQuad(chunks.SumOf(begin, begin != range.begin) + column, width);
        }
        DYNEMB_UNROLL
        for (uint32_t j = 0; j < kInFlight; ++j) {
          if (at + j < count) AddQuad(chunk[j], &total);
        }
      }
      if constexpr (Sums::kSteps) {
        sums.Put(target, key, sums.PlaceOfKey(key), total, column);
      } else {
        StoreQuad(total, width, target.SumOf(key) + column);
      }
    });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_SEGMENTS_H_
