// GatherGradient (cc/lookup/gather.h) on a device: the gradient of each row of a request, for many
// tables in one call.
//
// This is SumGradients (sum_gradients.h) with an id's index in place of its key, so no election is
// needed, and no call waits. The ids of a row, and therefore its terms, are ordered feature after
// feature. If a row has at most 256 ids, its sum has the same bits as on the host, except for the
// bits of a NaN. If it has more, they are summed in chunks of 256, and then the sums of the chunks
// are added from the first to the last.
//
// If an index is not below the number of rows, its gradient is ignored; the host returns an error.
// A caller that needs the error must check the indices itself.
//
// The number of launches does not depend on the number of tasks, features or chunks; there is one
// more if a task has more than 256 ids.
#ifndef DYNEMB_DEVICE_GATHER_GRADIENT_H_
#define DYNEMB_DEVICE_GATHER_GRADIENT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/kernels_gradient.h"
#include "cc/device/kernels_segments.h"
#include "cc/device/parts.h"
#include "cc/device/ranges.h"
#include "cc/device/row_math.h"
#include "cc/device/sum_gradients.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/gather.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb::device {

// Each part (parts.h) of the ids is a feature, whose keys are its index. Rows are numbered across
// all tasks, task after task.

// The row number of an id; `no_row`, which follows all row numbers, if its index is not a row.
struct RowNumbers {
  struct Rows {
    uint32_t begin;
    uint32_t n;
  };
  Parts<GradientPart> features;
  const Rows* rows;  // [features] the rows of the feature's task
  uint32_t no_row;

  DYNEMB_HD uint32_t operator()(uint32_t f, uint32_t position) const {
    const auto index = static_cast<uint32_t>(features[f].keys()[position - features.begin(f)]);
    return index < rows[f].n ? rows[f].begin + index : no_row;
  }
};

// The features and the arrays of sums that belong to a task.
struct GatheredTable {
  uint32_t first_feature = 0;
  uint32_t num_features = 0;
  uint32_t first_array = 0;
  uint32_t num_arrays = 0;
  int64_t dim = 0;
  TermForm form;  // of all features, unless they differ
  bool forms_differ = false;
};

// Sums (kernels_segments.h) of GatherGradient: a key is a row.
struct RowSums {
  static constexpr bool kSteps = false;
  static constexpr uint32_t kInFlight = 8;
  static constexpr unsigned int kLeastBlocks = KeySums::kLeastBlocks;

  struct Target {
    Parts<float*> arrays;  // of the task
    size_t dim;

    DYNEMB_HD float* SumOf(uint32_t row) const {
      const uint32_t a = arrays.IndexOf(row);
      return arrays[a] + (row - arrays.begin(a)) * dim;
    }
  };
  SortedTerms terms;
  Parts<GatheredTable> tables;  // the items of a part are its rows
  Parts<float*> arrays;         // of all tasks; the items of a part are the rows of the array
  uint32_t num_keys;

  DYNEMB_HD uint32_t TaskOf(uint32_t row) const { return tables.IndexOf(row); }
  DYNEMB_HD uint32_t KeysEnd(uint32_t t) const { return tables.end(t); }
  DYNEMB_HD int64_t dim(uint32_t t) const { return tables[t].dim; }
  DYNEMB_HD Target TargetOf(uint32_t t) const {
    const GatheredTable& table = tables[t];
    return {{arrays.parts + table.first_array, arrays.begins + table.first_array, table.num_arrays},
            static_cast<size_t>(table.dim)};
  }
  DYNEMB_HD TermForm FormOf(uint32_t t, uint32_t at, uint32_t* end) const {
    const GatheredTable& table = tables[t];
    if (!table.forms_differ) return table.form;
    const TermForm form = FormOf(table, at);
    uint32_t next = at + 1;
    while (next < *end && FormOf(table, next) == form) ++next;
    *end = next;
    return form;
  }

 private:
  DYNEMB_HD TermForm FormOf(const GatheredTable& table, uint32_t term) const {
    const uint32_t f = RangeOf(terms.parts.begins + table.first_feature, table.num_features,
                               terms.positions[term]);
    return device::FormOf(terms.parts[table.first_feature + f].task);
  }
};

// For ForRows. Writes zeros for a row without ids.
struct ClearUnused {
  RowSums sums;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const auto row = static_cast<uint32_t>(i);
    if (sums.terms.ranges[row].end != 0) return;
    const uint32_t t = sums.TaskOf(row);
    float* const sum = sums.TargetOf(t).SumOf(row);
    ForEachQuad(lanes, sums.dim(t),
                [&](int64_t column, int width) { StoreQuad(Quad<float>{}, width, sum + column); });
  }
};

// For ListTerms: the rows of a request have no keys to write.
struct NoKeys {
  DYNEMB_HD void operator()(uint32_t, uint32_t, uint32_t) const {}
};

namespace internal_gather_gradient {

// The tasks in the form that the functions of SumGradients take, and the data that only
// GatherGradient needs. All `begins` are in host memory.
struct Flat {
  std::vector<BackwardTask> features;
  std::vector<uint32_t> id_begins{0};  // of features
  std::vector<RowNumbers::Rows> rows_of;
  std::vector<GatheredTable> tables;
  std::vector<uint32_t> row_begins{0};  // of tables
  std::vector<float*> arrays;
  std::vector<uint32_t> array_begins{0};
  internal_sum_gradients::SumOptions options;

  size_t num_rows() const { return row_begins.back(); }
};

inline Status Flatten(const std::vector<dynemb::GatherGradient::Task>& tasks, Flat* flat) {
  size_t num_ids = 0, num_rows = 0;
  for (const dynemb::GatherGradient::Task& task : tasks) {
    const auto row_begin = static_cast<uint32_t>(num_rows);
    const size_t ids_before = num_ids;
    num_rows += task.n;
    DYNEMB_RETURN_IF_ERROR(CheckTotal(num_rows, "rows"));
    GatheredTable table;
    table.first_feature = static_cast<uint32_t>(flat->features.size());
    table.num_features = static_cast<uint32_t>(task.features.size());
    table.first_array = static_cast<uint32_t>(flat->arrays.size());
    table.dim = task.dim;
    const auto add_array = [&](size_t rows, float* sums) {
      flat->arrays.push_back(sums);
      flat->array_begins.push_back(flat->array_begins.back() + static_cast<uint32_t>(rows));
      flat->options.whole &= IsAligned(sums);
    };
    if (task.outputs.empty()) add_array(task.n, task.sums);
    for (const dynemb::GatherGradient::Output& output : task.outputs) {
      add_array(output.rows, output.sums);
    }
    for (const dynemb::GatherGradient::Feature& feature : task.features) {
      num_ids += feature.bags->nnz();
      DYNEMB_RETURN_IF_ERROR(CheckTotal(num_ids, "ids"));
      const TermForm form = FormOf(feature);
      if (&feature == &task.features.front()) table.form = form;
      table.forms_differ |= !(form == table.form);
      flat->options.whole &= IsWhole(feature);
      BackwardTask as_keys;
      static_cast<UpstreamTask&>(as_keys) = feature;
      as_keys.key_type = KeyType::kInt32;
      as_keys.keys = feature.index;
      flat->features.push_back(as_keys);
      flat->id_begins.push_back(static_cast<uint32_t>(num_ids));
      flat->rows_of.push_back({row_begin, static_cast<uint32_t>(task.n)});
    }
    table.num_arrays = static_cast<uint32_t>(flat->arrays.size()) - table.first_array;
    flat->tables.push_back(table);
    flat->row_begins.push_back(static_cast<uint32_t>(num_rows));
    // In the worst case all ids belong to one row.
    flat->options.Add(num_ids - ids_before, 1, task.dim);
  }
  return Status();
}

}  // namespace internal_gather_gradient

// All arrays of tasks are in the device's memory, except bags. Fails like
// dynemb::GatherGradient::Check, or if all tasks together have more than 2^32 - 2 ids, bags or
// rows, before any work is given.
template <class Session>
Status GatherGradient(Session& session, const std::vector<dynemb::GatherGradient::Task>& tasks) {
  namespace internal = internal_sum_gradients;
  Phase phase("sum gradients");
  DYNEMB_RETURN_IF_ERROR(dynemb::GatherGradient::Check(tasks));
  internal_gather_gradient::Flat flat;
  DYNEMB_RETURN_IF_ERROR(internal_gather_gradient::Flatten(tasks, &flat));
  const size_t num_rows = flat.num_rows();
  if (num_rows == 0) return session.status();
  internal::Ids ids;
  DYNEMB_RETURN_IF_ERROR(internal::BringIds(session, flat.features, flat.id_begins, &ids));
  const RowNumbers numbers{ids.parts, ToDevice(session, flat.rows_of.data(), flat.rows_of.size()),
                           static_cast<uint32_t>(num_rows)};
  session.ForEach(ids.n,
                  ListIds<RowNumbers>{ids.parts, numbers, ids.uniques, ids.positions, ids.bag_of});
  // Ids without a row are sorted after all others.
  const size_t num_ranges = num_rows + 1;
  auto* const ranges = session.template Take<TermRange>(num_ranges);
  session.Fill(ranges, 0, num_ranges * sizeof(TermRange));
  RowSums sums{};
  DYNEMB_RETURN_IF_ERROR(
      internal::SortTerms(session, ids, num_ranges, NoKeys{}, ranges, &sums.terms));
  sums.num_keys = static_cast<uint32_t>(num_rows);
  sums.tables = ToDevice(session, flat.tables, flat.row_begins);
  sums.arrays = ToDevice(session, flat.arrays, flat.array_begins);
  const ChunkSums chunks = internal::TakeChunks(session, ids.n, flat.options);
  DYNEMB_RETURN_IF_ERROR(session.status());
  DYNEMB_RETURN_IF_ERROR(internal::SumTerms(session, sums, chunks, flat.options));
  session.ForRows(num_rows, flat.options.quads, ClearUnused{sums});
  return session.status();
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_GATHER_GRADIENT_H_
