// RowPredicate: the conditions by which calls on whole tables select rows.
#ifndef DYNEMB_TABLE_ROW_PREDICATE_H_
#define DYNEMB_TABLE_ROW_PREDICATE_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

// A row is selected if it satisfies all conditions. By default, every live row is.
struct RowPredicate {
  Tick updated_after = 0;                                 // its last update is later than this,
  Tick updated_until = std::numeric_limits<Tick>::max();  // and not later than this
  // Its score, as Table::Scores returns it, is in [score_from, score_to].
  int64_t score_from = std::numeric_limits<int64_t>::min();
  int64_t score_to = std::numeric_limits<int64_t>::max();
  // Its key, as a number of the table's key type, is in [key_from, key_to]. Bit patterns of 64
  // bits; 32-bit keys are sign-extended.
  uint64_t key_from = 0, key_to = 0;
  bool has_keys = false;  // false: any key
  // The Euclidean norm of its vector is in [norm_from, norm_below). If norm_below is infinity, an
  // infinite norm is below it. A norm that is not a number is in no interval.
  double norm_from = -1, norm_below = std::numeric_limits<double>::infinity();
  bool has_norms = false;  // false: any norm

  // Leaves out the rows that were last used at `horizon` or before; 0: none.
  void LeaveOutExpired(Tick horizon, bool since_access) {
    if (horizon == 0) return;
    if (since_access) {
      const auto first = static_cast<int64_t>(horizon) + 1;
      score_from = score_from > first ? score_from : first;
    } else {
      updated_after = updated_after > horizon ? updated_after : horizon;
    }
  }
  // Only rows that have expired.
  void TakeExpired(Tick horizon, bool since_access) {
    if (since_access) {
      score_to = static_cast<int64_t>(horizon);
    } else {
      updated_until = horizon;
    }
  }

  DYNEMB_HD bool has_scores() const {
    return score_from != std::numeric_limits<int64_t>::min() ||
           score_to != std::numeric_limits<int64_t>::max();
  }
  // `key` is a bit pattern, zero-extended.
  DYNEMB_HD bool AllowsKey(KeyType type, uint64_t key) const {
    if (!has_keys) return true;
    if (type == KeyType::kUint64) return key_from <= key && key <= key_to;
    const auto number = type == KeyType::kInt32
                            ? static_cast<int64_t>(static_cast<int32_t>(static_cast<uint32_t>(key)))
                            : static_cast<int64_t>(key);
    return static_cast<int64_t>(key_from) <= number && number <= static_cast<int64_t>(key_to);
  }
  DYNEMB_HD bool AllowsScore(int64_t score) const {
    return score_from <= score && score <= score_to;
  }
  bool AllowsNorm(const float* vector, size_t dim) const {
    double square = 0;
    for (size_t c = 0; c < dim; ++c) square += static_cast<double>(vector[c]) * vector[c];
    return AllowsSquare(square);
  }
  DYNEMB_HD bool AllowsSquare(double square_of_norm) const {
    if (!has_norms) return true;
    const bool enough = norm_from <= 0 || square_of_norm >= norm_from * norm_from;
    const bool below = norm_below == std::numeric_limits<double>::infinity()
                           ? square_of_norm == square_of_norm
                           : square_of_norm < norm_below * norm_below;
    return enough && below;
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_PREDICATE_H_
