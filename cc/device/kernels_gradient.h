// The kernels of SumGradients (sum_gradients.h). The ids of all tasks are numbered one task after
// the other: an id's *position* is this number, and in its task it is the position less the task's
// begin. What is made of them, in this order:
//
//   ScaleBags                     what the gradients of each bag are multiplied by
//   Elect, FlagFirst, a sum       the unique keys of all tasks, numbered by their first ids
//   ListIds, SortPairs            the ids of each key together, in order
//   ReadBegins                    how many keys each task has, for the host
//   ListTerms                     what each id adds
//   SumKeys                       adds it up, but for keys of many ids
//   SumPieces, AddPieces          these in pieces, by several teams
#ifndef DYNEMB_DEVICE_KERNELS_GRADIENT_H_
#define DYNEMB_DEVICE_KERNELS_GRADIENT_H_

#include <cstdint>
#include <type_traits>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/combiner.h"
#include "cc/table/half.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// A key of more ids than this is summed in pieces of so many.
constexpr uint32_t kPieceIds = 256;

struct GradientPart {
  BackwardTask task;  // but for its bags, which are the host's
  BagsView bags;
  float* scales = nullptr;  // [num_bags]; null: `scale` is that of every bag
  float scale = 1.0f;

  DYNEMB_HD KeyArray keys() const { return {task.keys, SizeOf(task.key_type)}; }
};

struct GradientOutput : BackwardOutput {
  float* pieces = nullptr;  // [of the task's pieces, dim] their sums
};

struct ScaleBags {
  Parts<GradientPart> tasks;  // the items of a part are its bags that have `scales`

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t t = tasks.IndexOf(i);
    const GradientPart& part = tasks[t];
    const size_t bag = i - tasks.begin(t);
    part.scales[bag] = BagScale(part.task.combiner, part.bags, part.task.weights, bag);
  }
};

// The keys of all tasks, for ElectPositions. The same key of two tasks is two keys.
struct TaskKeys {
  Parts<GradientPart> tasks;

  DYNEMB_HD uint64_t Hash(size_t i) const {
    const uint32_t t = tasks.IndexOf(i);
    return MixKey(KeyOf(t, i) ^ MixKey(t));
  }
  DYNEMB_HD bool Same(size_t i, size_t j) const {
    const uint32_t t = tasks.IndexOf(j);
    return tasks.begin(t) <= i && i < tasks.begin(t + 1) && KeyOf(t, i) == KeyOf(t, j);
  }
  DYNEMB_HD uint64_t KeyOf(uint32_t t, size_t i) const {
    return tasks[t].keys()[i - tasks.begin(t)];
  }
};

// Every id, in the order of positions: its key's number and its bag. Item i is a place in the
// task's bag order.
struct ListIds {
  Parts<GradientPart> tasks;
  const uint32_t* places;
  const uint32_t* of;
  const uint32_t* sums;
  uint64_t* uniques;
  uint32_t* positions;
  uint32_t* bag_of;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t t = tasks.IndexOf(i);
    const BagsView& bags = tasks[t].bags;
    const uint32_t begin = tasks.begin(t), place = static_cast<uint32_t>(i) - begin;
    const uint32_t position = begin + bags.position(place);
    uniques[position] = sums[places[of[position]]];
    positions[position] = position;
    bag_of[position] = bags.BagOf(place);
  }
};

// unique_begins[t] = how many keys there are before those of task t.
struct ReadBegins {
  const uint32_t* begins;
  const uint32_t* sums;
  uint32_t* unique_begins;

  DYNEMB_HD void operator()(size_t t) const { unique_begins[t] = sums[begins[t]]; }
};

// What an id adds: scale × the upstream row of its bag, or × 0 if that is kNoBag.
struct alignas(8) Term {
  uint32_t bag;
  float scale;
};
constexpr uint32_t kNoBag = 0xFFFFFFFFu;

// Ids that are sorted by their keys.
struct ListTerms {
  Parts<GradientPart> tasks;
  const uint64_t* uniques;
  const uint32_t* positions;
  const uint32_t* bag_of;
  size_t n;
  uint32_t* begins;  // where the ids of each key begin; one more, where the last's end
  Term* terms;

  DYNEMB_HD void operator()(size_t i) const {
    if (i == 0 || uniques[i - 1] != uniques[i]) begins[uniques[i]] = static_cast<uint32_t>(i);
    if (i + 1 == n) begins[uniques[i] + 1] = static_cast<uint32_t>(n);
    const uint32_t position = positions[i], t = tasks.IndexOf(position);
    const GradientPart& part = tasks[t];
    Term term{bag_of[position], part.scale};
    if (part.scales != nullptr) {
      term.scale = part.scales[term.bag];
      if (term.scale == 0.0f) term.bag = kNoBag;
    }
    if (part.task.weights != nullptr) term.scale *= part.task.weights[position - tasks.begin(t)];
    terms[i] = term;
  }
};

// Quads that are loaded before the first of them is added.
constexpr uint32_t kInFlight = 4;

// The sum of `count` quads, at least one, from the left; the first is taken as it is. Quad i is
// value(found, load(found)) of found = find(i). All that is found is asked for before any of it is
// used, and so is all that is loaded.
template <class Find, class Load, class Value>
DYNEMB_HD DYNEMB_INLINE Quad<float> SumInOrder(uint32_t count, const Find& find, const Load& load,
                                               const Value& value) {
  Quad<float> sum{};
  for (uint32_t i = 0; i < count; i += kInFlight) {
    decltype(find(i)) found[kInFlight]{};
    decltype(load(found[0])) loaded[kInFlight]{};
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j < count) found[j] = find(i + j);
    }
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j < count) loaded[j] = load(found[j]);
    }
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j >= count) break;
      const Quad<float> next = value(found[j], loaded[j]);
      for (int k = 0; k < kQuad; ++k) sum.at[k] = i + j == 0 ? next.at[k] : sum.at[k] + next.at[k];
    }
  }
  return sum;
}

// The terms of all ids, those of a key together.
struct SortedTerms {
  Parts<GradientPart> tasks;
  const uint32_t* positions;
  const uint32_t* begins;  // as ListTerms makes them
  const Term* terms;

  DYNEMB_HD uint32_t count(uint32_t unique) const { return begins[unique + 1] - begins[unique]; }
  DYNEMB_HD uint32_t pieces(uint32_t unique) const {
    return (count(unique) + kPieceIds - 1) / kPieceIds;
  }

  // sum = the terms [first, first + n) of task t, in order.
  template <class Lanes>
  DYNEMB_HD void Sum(Lanes& lanes, uint32_t t, uint32_t first, uint32_t n, float* sum) const {
    const GradientPart& part = tasks[t];
    const bool max = part.task.combiner == Combiner::kMax;
    switch (part.task.dtype) {
      case DType::kFloat32:
        return max ? SumAs<DType::kFloat32, true>(lanes, part, tasks.begin(t), first, n, sum)
                   : SumAs<DType::kFloat32, false>(lanes, part, tasks.begin(t), first, n, sum);
      case DType::kFloat16:
        return max ? SumAs<DType::kFloat16, true>(lanes, part, tasks.begin(t), first, n, sum)
                   : SumAs<DType::kFloat16, false>(lanes, part, tasks.begin(t), first, n, sum);
      case DType::kBfloat16:
        return max ? SumAs<DType::kBfloat16, true>(lanes, part, tasks.begin(t), first, n, sum)
                   : SumAs<DType::kBfloat16, false>(lanes, part, tasks.begin(t), first, n, sum);
    }
  }

 private:
  template <DType kType, bool kMax, class Lanes>
  DYNEMB_HD void SumAs(Lanes& lanes, const GradientPart& part, uint32_t task_begin, uint32_t first,
                       uint32_t n, float* sum) const {
    using Element = std::conditional_t<kType == DType::kFloat32, float, uint16_t>;
    struct Found {
      Term term;
      int32_t position;  // in the task; for max
    };
    struct Loaded {
      Quad<Element> row;
      Quad<int32_t> argmax;  // for max
    };
    // In registers: the compiler cannot know that what is stored is not these.
    const auto dim = static_cast<size_t>(part.task.dim);
    const auto* const upstream = static_cast<const Element*>(part.task.upstream);
    const void* const* const upstream_rows = part.task.upstream_rows;
    const int32_t* const argmax = part.task.argmax;
    ForEachQuad(lanes, part.task.dim, [&](int64_t column, int width) {
      const auto find = [&](uint32_t i) {
        Found found{terms[first + i], 0};
        if constexpr (kMax) {
          found.position = static_cast<int32_t>(positions[first + i] - task_begin);
        }
        return found;
      };
      const auto load = [&](const Found& found) {
        Loaded loaded{};
        if (found.term.bag == kNoBag) return loaded;
        const Element* const row = upstream_rows != nullptr
                                       ? static_cast<const Element*>(upstream_rows[found.term.bag])
                                       : upstream + found.term.bag * dim;
        loaded.row = LoadQuad(row + column, width);
        if constexpr (kMax) loaded.argmax = LoadQuad(argmax + found.term.bag * dim + column, width);
        return loaded;
      };
      const auto value = [](const Found& found, const Loaded& loaded) {
        Quad<float> x;
        for (int k = 0; k < kQuad; ++k) {
          if constexpr (kType == DType::kFloat32) {
            x.at[k] = found.term.scale * loaded.row.at[k];
          } else {
            x.at[k] = found.term.scale * HalfFormat<kType>::ToFloat(loaded.row.at[k]);
          }
          if constexpr (kMax) {
            if (loaded.argmax.at[k] != found.position) x.at[k] = 0.0f;
          }
        }
        return x;
      };
      StoreQuad(SumInOrder(n, find, load, value), width, sum + column);
    });
  }
};

struct Piece {
  uint32_t unique;
  uint32_t index;  // of the key's pieces, which are neighbours
};

// Pieces of keys, those of one task together.
struct PieceList {
  Parts<GradientOutput> room;  // the items of a part are as many pieces as its task may need
  Piece* pieces;               // [of all room]
  uint32_t* counts;            // [tasks] how many there are, 0 at first
};

// Writes all keys, their rows and, or else their pieces are listed, their sums.
struct SumKeys {
  SortedTerms terms;
  Parts<GradientOutput> outputs;  // the items of a part are its unique keys
  PieceList list;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const auto unique = static_cast<uint32_t>(i);
    const uint32_t t = outputs.IndexOf(i), n = terms.count(unique);
    const uint32_t first = terms.begins[unique];
    const GradientPart& part = terms.tasks[t];
    const GradientOutput& out = outputs[t];
    const size_t at = i - outputs.begin(t);
    if (lanes.rank() == 0) {
      const uint32_t position = terms.positions[first] - terms.tasks.begin(t);
      const KeyArray keys = part.keys();
      StoreKey(out.keys, keys.key_size, at, keys[position]);
      if (part.task.rows != nullptr) out.rows[at] = part.task.rows[position];
    }
    if (n <= kPieceIds) {
      terms.Sum(lanes, t, first, n, out.sums + at * static_cast<size_t>(part.task.dim));
      return;
    }
    const uint32_t pieces = terms.pieces(unique);
    uint32_t slot = 0;
    if (lanes.rank() == 0) slot = list.room.begin(t) + AtomicAdd(&list.counts[t], pieces);
    slot = lanes.FromLeader(slot);
    for (uint32_t p = lanes.rank(); p < pieces; p += lanes.width()) {
      list.pieces[slot + p] = {unique, p};
    }
  }
};

// Who works on pieces is launched for all of their room.
struct PieceWork {
  SortedTerms terms;
  PieceList list;

  // fn(t, in_task, piece) if there is a piece in this slot of the room, the in_task-th of task t.
  template <class Fn>
  DYNEMB_HD DYNEMB_INLINE void WithPiece(size_t slot, const Fn& fn) const {
    const uint32_t t = list.room.IndexOf(slot);
    const uint32_t in_task = static_cast<uint32_t>(slot) - list.room.begin(t);
    if (in_task < list.counts[t]) fn(t, in_task, list.pieces[slot]);
  }
  // The sum of the in_task-th piece of task t.
  DYNEMB_HD float* SumOf(uint32_t t, uint32_t in_task) const {
    return list.room[t].pieces + in_task * static_cast<size_t>(terms.tasks[t].task.dim);
  }
};

struct SumPieces {
  PieceWork work;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    work.WithPiece(i, [&](uint32_t t, uint32_t in_task, const Piece& piece) {
      const uint32_t skipped = piece.index * kPieceIds;
      const uint32_t left = work.terms.count(piece.unique) - skipped;
      work.terms.Sum(lanes, t, work.terms.begins[piece.unique] + skipped,
                     left < kPieceIds ? left : kPieceIds, work.SumOf(t, in_task));
    });
  }
};

struct AddPieces {
  PieceWork work;
  const uint32_t* unique_begins;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    work.WithPiece(i, [&](uint32_t t, uint32_t in_task, const Piece& piece) {
      if (piece.index != 0) return;
      const int64_t dim = work.terms.tasks[t].task.dim;
      const size_t at = piece.unique - unique_begins[t];
      float* const sum = work.list.room[t].sums + at * static_cast<size_t>(dim);
      const float* const sums = work.SumOf(t, in_task);
      const uint32_t pieces = work.terms.pieces(piece.unique);
      ForEachQuad(lanes, dim, [&](int64_t column, int width) {
        const auto find = [&](uint32_t p) { return sums + p * static_cast<size_t>(dim) + column; };
        const auto load = [&](const float* columns) { return LoadQuad(columns, width); };
        const auto value = [](const float*, const Quad<float>& quad) { return quad; };
        StoreQuad(SumInOrder(pieces, find, load, value), width, sum + column);
      });
    });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_GRADIENT_H_
