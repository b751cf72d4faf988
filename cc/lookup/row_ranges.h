// RowRanges: divides the ids of a batch by their rows into ranges with about equally many ids.
//
// A thread that works on the rows of one range stays in one part of the table's memory. Compared
// with rows in random order, the translations of its addresses are in the caches more often.
//
// The ranges are found from a sample of about kSample ids per range. The sampled rows are counted
// in kBins bins of equal width, from the first to the last of them, and a range is a number of
// consecutive bins. A bin with more ids than a range should have gets several ranges, among which
// its keys are divided by a hash.
#ifndef DYNEMB_LOOKUP_ROW_RANGES_H_
#define DYNEMB_LOOKUP_ROW_RANGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/lookup/distinct.h"
#include "cc/table/hash.h"
#include "cc/table/types.h"

namespace dynemb {

class RowRanges {
 public:
  // n is in [1, 2^32), num_ranges in [1, 2^15]. The ranges are a function of rows[n].
  RowRanges(const RowId* rows, size_t n, size_t num_ranges) {
    const size_t samples = std::min(n, kSample * num_ranges);
    // Calls fn(row) for the rows of the sampled ids. They are scattered, because ids at equal
    // distances may be of one kind.
    const auto for_sample = [&](const auto& fn) {
      for (size_t s = 0; s < samples; ++s) {
        const uint64_t at = ScatterInteger(static_cast<uint32_t>(s)) >> 32;
        const RowId row = rows[at * n >> 32];
        if (IsRow(row)) fn(row);
      }
    };
    RowId first = kNoRow, last = 0;
    for_sample([&](RowId row) {
      first = std::min(first, row);
      last = std::max(last, row);
    });
    first_ = std::min(first, last);  // the order differs if there is no row
    span_ = uint64_t{last} - first_ + 1;
    while ((last - first_) >> shift_ >= kBins) ++shift_;
    uint32_t counts[kBins] = {};
    size_t found = 0;
    for_sample([&](RowId row) {
      ++counts[BinOf(row)];
      ++found;
    });
    size_t ids = 0, range = 0;
    for (size_t bin = 0; bin < kBins; ++bin) {
      const size_t begin = range;
      if (counts[bin] != 0) {
        ids += counts[bin];
        range = std::min(ids * num_ranges / found, num_ranges - 1);
      }
      bins_[bin] = {static_cast<uint16_t>(begin),
                    static_cast<uint16_t>(std::max<size_t>(1, range - begin))};
    }
  }

  // The number of row ids from the first to the last one of the sample.
  uint64_t span() const { return span_; }

  // The number of the range of a key and its row. Equal rows may have several ranges, but only if
  // their keys differ.
  size_t Of(uint64_t key, RowId row) const {
    const Bin& bin = bins_[BinOf(row)];
    return bin.begin + ((DistinctHash()(key) >> 32) * bin.num_ranges >> 32);
  }

 private:
  static constexpr size_t kSample = 16;
  static constexpr uint32_t kBins = 4096;
  struct Bin {
    uint16_t begin, num_ranges;
  };

  // Rows that were not sampled may be beyond the first and last bin.
  uint32_t BinOf(RowId row) const {
    return row < first_ ? 0 : std::min((row - first_) >> shift_, kBins - 1);
  }

  RowId first_ = 0;
  uint64_t span_ = 0;
  int shift_ = 0;
  Bin bins_[kBins];
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_ROW_RANGES_H_
