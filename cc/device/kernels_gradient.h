// The kernels of SumGradients (sum_gradients.h). GatherGradient (gather_gradient.h) uses some of
// them too; there, a key is a row, and a part of the ids is a feature of a task. The ids of all
// parts are numbered part after part. An id's *position* is this number; within its part, it is the
// position minus the part's begin. The steps, in this order:
//
//   ScaleBags                     computes the factor of the gradients of each bag
//   Elect, FlagFirst, a sum       number the unique keys of all tasks by their first ids
//   ListIds, SortPairs            bring the ids of each key together, in order
//   ReadBegins                    counts the keys of each task, for the host
//   ListTerms                     lists the term that each id adds
//   SumKeys                       sums the terms of each key, except for keys of many ids
//   SumChunks, AddChunks          sum those in chunks, by several teams
//
// The last three use a `Sums`, which knows the terms of a key and the address of its sum: KeySums
// in SumGradients, RowSums in GatherGradient. It has
//
//   SortedTerms terms
//   uint32_t TaskOf(key)                 the task of the key with this number
//   int64_t dim(task)
//   float* SumOf(task, key)              the address of the key's sum
//   void Begin(lanes, task, key, first)  called once per key, with its first term
//   void Sum(lanes, task, first, n, sum) sum = the terms [first, first + n) of one key, in order
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

// The maximal number of terms in a chunk. A key of more ids is summed in chunks: ranges of
// kChunkIds terms, of which the last may be shorter.
constexpr uint32_t kChunkIds = 256;

struct GradientPart {
  BackwardTask task;  // task.bags is in host memory, and not used
  BagsView bags;
  float* scales = nullptr;  // [num_bags]; null: all bags have `scale`
  float scale = 1.0f;

  DYNEMB_HD KeyArray keys() const { return {task.keys, SizeOf(task.key_type)}; }
};

struct ScaleBags {
  Parts<GradientPart> parts;  // the items of a part are its bags if it has `scales`

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const GradientPart& part = parts[p];
    const size_t bag = i - parts.begin(p);
    part.scales[bag] = BagScale(part.task.combiner, part.bags, part.task.weights, bag,
                                CountedRows{part.task.rows});
  }
};

// The keys of all tasks, for ElectPositions. Equal keys of different tasks are distinct.
struct TaskKeys {
  Parts<GradientPart> tasks;

  DYNEMB_HD uint64_t Hash(size_t i) const {
    const uint32_t t = tasks.IndexOf(i);
    return ElectionHash(KeyOf(t, i), t);
  }
  DYNEMB_HD bool Same(size_t i, size_t j) const {
    const uint32_t t = tasks.IndexOf(j);
    return tasks.begin(t) <= i && i < tasks.begin(t + 1) && KeyOf(t, i) == KeyOf(t, j);
  }
  DYNEMB_HD uint64_t KeyOf(uint32_t t, size_t i) const {
    return tasks[t].keys()[i - tasks.begin(t)];
  }
};

// The number of an id's key, from the sums of FlagFirst's flags.
struct ElectedNumbers {
  const uint32_t* places;
  const uint32_t* of;
  const uint32_t* sums;

  DYNEMB_HD uint32_t operator()(uint32_t, uint32_t position) const {
    return sums[places[of[position]]];
  }
};

// Lists for each position the number of its key, numbers(part, position), and its bag. Item i is a
// place in the bag order of its part.
template <class Numbers>
struct ListIds {
  Parts<GradientPart> parts;
  Numbers numbers;
  uint32_t* uniques;
  uint32_t* positions;
  uint32_t* bag_of;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const BagsView& bags = parts[p].bags;
    const uint32_t begin = parts.begin(p), place = static_cast<uint32_t>(i) - begin;
    const uint32_t position = begin + bags.position(place);
    uniques[position] = numbers(p, position);
    positions[position] = position;
    bag_of[position] = bags.BagOf(place);
  }
};

// unique_begins[t] = the number of keys before those of task t.
struct ReadBegins {
  const uint32_t* begins;
  const uint32_t* sums;
  uint32_t* unique_begins;

  DYNEMB_HD void operator()(size_t t) const { unique_begins[t] = sums[begins[t]]; }
};

// The term that an id adds: scale × the upstream row of its bag. With kNoBag, the row is zeros.
struct alignas(8) Term {
  uint32_t bag;
  float scale;
};
constexpr uint32_t kNoBag = 0xFFFFFFFFu;

// The terms [begin, end).
struct alignas(8) TermRange {
  uint32_t begin;
  uint32_t end;

  DYNEMB_HD uint32_t count() const { return end - begin; }
  DYNEMB_HD uint32_t chunks() const { return (count() + kChunkIds - 1) / kChunkIds; }
};

// Lists the terms of ids that are sorted by key, and the range of each key's terms. Ranges of keys
// without ids are not written.
struct ListTerms {
  Parts<GradientPart> parts;
  const uint32_t* uniques;
  const uint32_t* positions;
  const uint32_t* bag_of;
  size_t n;
  TermRange* ranges;  // per key
  Term* terms;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t unique = uniques[i];
    if (i == 0 || uniques[i - 1] != unique) ranges[unique].begin = static_cast<uint32_t>(i);
    if (i + 1 == n || uniques[i + 1] != unique) ranges[unique].end = static_cast<uint32_t>(i) + 1;
    const uint32_t position = positions[i], p = parts.IndexOf(position);
    const GradientPart& part = parts[p];
    Term term{bag_of[position], part.scale};
    if (part.scales != nullptr) {
      term.scale = part.scales[term.bag];
      if (term.scale == 0.0f) term.bag = kNoBag;
    }
    const uint32_t in_part = position - parts.begin(p);
    if (part.task.weights != nullptr) term.scale *= part.task.weights[in_part];
    // The key of a refused id gets no gradient.
    if (part.task.rows != nullptr && IsRefused(part.task.rows[in_part])) term = {kNoBag, 0.0f};
    terms[i] = term;
  }
};

// The number of terms that are loaded before the first of them is added.
constexpr uint32_t kTermsInFlight = 4;

// The initial value of a sum: adding any number to -0 gives that number.
DYNEMB_HD DYNEMB_INLINE Quad<float> NoSum() { return {{-0.0f, -0.0f, -0.0f, -0.0f}}; }

// Adds `count` quads to `sum`, one after the other. Quad i is value(found, load(found)), where
// found = find(i). In each group of kInFlight quads, all calls of find come first, then all of
// load, then all of value, so that memory accesses overlap.
template <uint32_t kInFlight, class Find, class Load, class Value>
DYNEMB_HD DYNEMB_INLINE Quad<float> SumInOrder(Quad<float> sum, uint32_t count, const Find& find,
                                               const Load& load, const Value& value) {
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
      for (int k = 0; k < kQuad; ++k) sum.at[k] += next.at[k];
    }
  }
  return sum;
}

// The terms of all ids. The terms of a key are consecutive.
struct SortedTerms {
  Parts<GradientPart> parts;
  const uint32_t* positions;
  const TermRange* ranges;  // from ListTerms
  const Term* terms;

  // sum = the sum of the terms [first, first + n) of part p, in order. `some_before`: adds them to
  // the value in `sum`. kMaximaInFlight applies to terms of max, which have two quads each.
  template <uint32_t kMaximaInFlight, class Lanes>
  DYNEMB_HD DYNEMB_INLINE void Sum(Lanes& lanes, uint32_t p, uint32_t first, uint32_t n,
                                   bool some_before, float* sum) const {
    const GradientPart& part = parts[p];
    const bool max = part.task.combiner == Combiner::kMax;
    const auto sum_as = [&](auto dtype, auto is_max) {
      constexpr bool kIsMax = decltype(is_max)::value;
      SumAs<decltype(dtype)::value, kIsMax, kIsMax ? kMaximaInFlight : kTermsInFlight>(
          lanes, part, parts.begin(p), first, n, some_before, sum);
    };
    const auto sum_of = [&](auto dtype) {
      max ? sum_as(dtype, std::true_type{}) : sum_as(dtype, std::false_type{});
    };
    switch (part.task.dtype) {
      case DType::kFloat32:
        return sum_of(std::integral_constant<DType, DType::kFloat32>{});
      case DType::kFloat16:
        return sum_of(std::integral_constant<DType, DType::kFloat16>{});
      case DType::kBfloat16:
        return sum_of(std::integral_constant<DType, DType::kBfloat16>{});
    }
  }

 private:
  template <DType kType, bool kMax, uint32_t kInFlight, class Lanes>
  DYNEMB_HD void SumAs(Lanes& lanes, const GradientPart& part, uint32_t part_begin, uint32_t first,
                       uint32_t n, bool some_before, float* sum) const {
    using Element = std::conditional_t<kType == DType::kFloat32, float, uint16_t>;
    struct Found {
      Term term;
      int32_t position;  // in the part; for max
    };
    struct Loaded {
      Quad<Element> row;
      Quad<int32_t> argmax;  // for max
    };
    // Copied to registers: the compiler cannot know that stores do not change them.
    const auto dim = static_cast<size_t>(part.task.dim);
    const auto* const upstream = static_cast<const Element*>(part.task.upstream);
    const void* const* const upstream_rows = part.task.upstream_rows;
    const int32_t* const argmax = part.task.argmax;
    ForEachQuad(lanes, part.task.dim, [&](int64_t column, int width) {
      const auto find = [&](uint32_t i) {
        Found found{terms[first + i], 0};
        if constexpr (kMax) {
          found.position = static_cast<int32_t>(positions[first + i] - part_begin);
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
      const Quad<float> before = some_before ? LoadQuad(sum + column, width) : NoSum();
      StoreQuad(SumInOrder<kInFlight>(before, n, find, load, value), width, sum + column);
    });
  }
};

// The `Sums` of SumGradients: all terms of a key belong to its task. Also writes the keys and their
// rows.
struct KeySums {
  SortedTerms terms;
  Parts<BackwardOutput> outputs;  // the items of a part are its unique keys

  DYNEMB_HD uint32_t TaskOf(uint32_t key) const { return outputs.IndexOf(key); }
  DYNEMB_HD int64_t dim(uint32_t t) const { return terms.parts[t].task.dim; }
  DYNEMB_HD float* SumOf(uint32_t t, uint32_t key) const {
    return outputs[t].sums + (key - outputs.begin(t)) * static_cast<size_t>(dim(t));
  }
  template <class Lanes>
  DYNEMB_HD void Begin(Lanes& lanes, uint32_t t, uint32_t key, uint32_t first) const {
    if (lanes.rank() != 0) return;
    const GradientPart& part = terms.parts[t];
    const BackwardOutput& out = outputs[t];
    const size_t at = key - outputs.begin(t);
    const uint32_t position = terms.positions[first] - terms.parts.begin(t);
    const KeyArray keys = part.keys();
    StoreKey(out.keys, keys.key_size, at, keys[position]);
    if (part.task.rows != nullptr) out.rows[at] = part.task.rows[position];
  }
  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE void Sum(Lanes& lanes, uint32_t t, uint32_t first, uint32_t n,
                                   float* sum) const {
    terms.template Sum<kTermsInFlight>(lanes, t, first, n, /*some_before=*/false, sum);
  }
};

struct Chunk {
  uint32_t key;
  uint32_t index;  // among the key's chunks, which are consecutive in the list
};

// The list of chunks of keys. The chunks of a task are together.
struct ChunkList {
  // Per task, room for the sums of its chunks: [items of the part, dim]. The items are the maximal
  // number of chunks.
  Parts<float*> room;
  Chunk* chunks;     // [all items of `room`]
  uint32_t* counts;  // [tasks] the number of chunks, 0 at first
};

// Writes the sums of all keys, or lists their chunks.
template <class Sums>
struct SumKeys {
  Sums sums;
  ChunkList list;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const auto key = static_cast<uint32_t>(i);
    const uint32_t t = sums.TaskOf(key);
    const TermRange range = sums.terms.ranges[key];
    sums.Begin(lanes, t, key, range.begin);
    if (range.count() <= kChunkIds) {
      sums.Sum(lanes, t, range.begin, range.count(), sums.SumOf(t, key));
      return;
    }
    const uint32_t chunks = range.chunks();
    uint32_t slot = 0;
    if (lanes.rank() == 0) slot = list.room.begin(t) + AtomicAdd(&list.counts[t], chunks);
    slot = lanes.FromLeader(slot);
    for (uint32_t p = lanes.rank(); p < chunks; p += lanes.width()) {
      list.chunks[slot + p] = {key, p};
    }
  }
};

// For kernels over chunks, which are launched for all items of `room`.
template <class Sums>
struct ChunkWork {
  Sums sums;
  ChunkList list;

  // Calls fn(t, in_task, chunk) if this item of `room` has a chunk, the in_task-th of task t.
  template <class Fn>
  DYNEMB_HD DYNEMB_INLINE void WithChunk(size_t slot, const Fn& fn) const {
    const uint32_t t = list.room.IndexOf(slot);
    const uint32_t in_task = static_cast<uint32_t>(slot) - list.room.begin(t);
    if (in_task < list.counts[t]) fn(t, in_task, list.chunks[slot]);
  }
  // The sum of the in_task-th chunk of task t.
  DYNEMB_HD float* SumOf(uint32_t t, uint32_t in_task) const {
    return list.room[t] + in_task * static_cast<size_t>(sums.dim(t));
  }
};

template <class Sums>
struct SumChunks {
  ChunkWork<Sums> work;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    work.WithChunk(i, [&](uint32_t t, uint32_t in_task, const Chunk& chunk) {
      const TermRange range = work.sums.terms.ranges[chunk.key];
      const uint32_t skipped = chunk.index * kChunkIds, left = range.count() - skipped;
      work.sums.Sum(lanes, t, range.begin + skipped, left < kChunkIds ? left : kChunkIds,
                    work.SumOf(t, in_task));
    });
  }
};

template <class Sums>
struct AddChunks {
  ChunkWork<Sums> work;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    work.WithChunk(i, [&](uint32_t t, uint32_t in_task, const Chunk& chunk) {
      if (chunk.index != 0) return;
      const int64_t dim = work.sums.dim(t);
      float* const sum = work.sums.SumOf(t, chunk.key);
      const float* const sums = work.SumOf(t, in_task);
      const uint32_t chunks = work.sums.terms.ranges[chunk.key].chunks();
      ForEachQuad(lanes, dim, [&](int64_t column, int width) {
        const auto find = [&](uint32_t p) { return sums + p * static_cast<size_t>(dim) + column; };
        const auto load = [&](const float* columns) { return LoadQuad(columns, width); };
        const auto value = [](const float*, const Quad<float>& quad) { return quad; };
        StoreQuad(SumInOrder<kTermsInFlight>(NoSum(), chunks, find, load, value), width,
                  sum + column);
      });
    });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_GRADIENT_H_
