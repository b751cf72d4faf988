// The kernels of SumGradients (sum_gradients.h) before the sum itself, which is in
// kernels_segments.h. GatherGradient (gather_gradient.h) uses some of them too; there, a key is a
// row, and a part of the ids is a feature of a task. The ids of all parts are numbered part after
// part. An id's *position* is this number; within its part, it is the position minus the part's
// begin. The steps, in this order:
//
//   ScaleBags                     computes the factor of the gradients of each bag
//   Elect, FlagFirst, a sum       number the unique keys of all tasks by their first ids
//   ListIds, SortPairs            bring the ids of each key together, in order
//   ReadBegins                    counts the keys of each task, for the host
//   ListTerms                     lists the term that each id adds
//   SumSegments, AddChunks        sum the terms of each key
#ifndef DYNEMB_DEVICE_KERNELS_GRADIENT_H_
#define DYNEMB_DEVICE_KERNELS_GRADIENT_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/parts.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/combiner.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

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

// unique_begins[t] = the number of keys before the keys of task t.
struct ReadBegins {
  const uint32_t* begins;
  const uint32_t* sums;
  uint32_t* unique_begins;

  DYNEMB_HD void operator()(size_t t) const { unique_begins[t] = sums[begins[t]]; }
};

// The term that an id adds to the sum of its key: scale × the upstream row of its bag.
struct alignas(16) Term {
  const void* row;  // null: zeros
  float scale;
  uint32_t key;  // the number of the key
};

// The terms [begin, end).
struct alignas(8) TermRange {
  uint32_t begin;
  uint32_t end;
};

// Lists the terms of ids that are sorted by key, and the range of each key's terms. Ranges of keys
// without ids are not written. Calls first(part, key, position in the part) for the first id of
// each key.
template <class First>
struct ListTerms {
  Parts<GradientPart> parts;
  const uint32_t* keys;
  const uint32_t* positions;
  const uint32_t* bag_of;
  uint32_t n;
  First first;
  TermRange* ranges;  // per key
  Term* terms;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t key = keys[i], position = positions[i], p = parts.IndexOf(position);
    const uint32_t in_part = position - parts.begin(p);
    if (i == 0 || keys[i - 1] != key) {
      ranges[key].begin = static_cast<uint32_t>(i);
      first(p, key, in_part);
    }
    if (i + 1 == n || keys[i + 1] != key) ranges[key].end = static_cast<uint32_t>(i) + 1;
    terms[i] = TermOf(parts[p], key, bag_of[position], in_part);
  }

 private:
  DYNEMB_HD static Term TermOf(const GradientPart& part, uint32_t key, uint32_t bag,
                               uint32_t in_part) {
    // The key of a refused id gets no gradient.
    if (part.task.rows != nullptr && IsRefused(part.task.rows[in_part])) {
      return {nullptr, 0.0f, key};
    }
    Term term{nullptr, part.scale, key};
    if (part.scales != nullptr) term.scale = part.scales[bag];
    if (part.scales == nullptr || term.scale != 0.0f) {
      const size_t row_bytes = static_cast<size_t>(part.task.dim) * SizeOf(part.task.dtype);
      term.row = part.task.upstream_rows != nullptr
                     ? part.task.upstream_rows[bag]
                     : static_cast<const char*>(part.task.upstream) + bag * row_bytes;
    }
    if (part.task.weights != nullptr) term.scale *= part.task.weights[in_part];
    return term;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_GRADIENT_H_
