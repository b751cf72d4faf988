// The initial vector of a key: a function of (seed, key, column) and of nothing else.
//
// The same key so starts with the same vector on any rank, in any order of arrival, and again after
// it was evicted. The random bits are Philox words (philox.h); everything after them is float32
// additions, multiplications, divisions and square roots, which IEEE fixes to the bit, and no libm.
// Changing a value for given arguments is an incompatible change: initializer_test.cc holds golden
// values.
#ifndef DYNEMB_TABLE_INITIALIZER_H_
#define DYNEMB_TABLE_INITIALIZER_H_

#include <cstdint>
#include <vector>

#include "cc/table/philox.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

enum class InitKind : uint8_t { kConstant, kUniform, kNormal, kTruncatedNormal };

// Distribution of one column.
struct ColumnInit {
  InitKind kind = InitKind::kConstant;
  // kConstant: a is the value. kUniform: [a, b), or a itself if a == b. kNormal: mean a, standard
  // deviation b. kTruncatedNormal: the same, values farther than 2 b from a excluded, as
  // keras.initializers.TruncatedNormal.
  float a = 0.0f;
  float b = 0.0f;
};

// Columns [begin, end), which have one distribution, as initializer_formulas.h reads it: kConstant
// is `offset`. All else is offset + scale * x; x is uniform in [0, 1) for kUniform and standard
// normal for the others. kUniform and kTruncatedNormal are then raised to `low` and lowered to
// `high`: the interval's ends, without `b` of kUniform, which rounding may reach.
struct InitRun {
  InitKind kind;
  int64_t begin, end;
  float offset, scale, low, high;
};

// Immutable after Create; any number of threads may call Fill.
class Initializer {
 public:
  // `columns` has one entry for all columns, or dim entries. InvalidArgument, naming the value, for
  // another size, dim < 1, a number that is not finite, high < low, high - low overflowing, or
  // stddev < 0. On failure *out is unchanged.
  static Status Create(std::vector<ColumnInit> columns, int64_t dim, uint64_t seed,
                       Initializer* out);

  // Writes dim values. Does not allocate.
  void Fill(uint64_t key, float* vector) const;
  // Writes them as they are stored in a row, rounded to nearest. Does not allocate.
  void FillAs(DType dtype, uint64_t key, void* vector) const;

  int64_t dim() const { return dim_; }
  uint64_t seed() const { return schedule_.seed; }
  // In order; together they are the columns [0, dim).
  const std::vector<InitRun>& runs() const { return runs_; }

 private:
  // Columns [begin, end) of at most kChunk; `run` is that of `begin`, then that of `end`.
  void FillChunk(uint64_t key, int64_t begin, int64_t end, size_t* run, float* values) const;

  int64_t dim_ = 0;
  PhiloxSchedule schedule_;
  bool random_ = false;
  std::vector<InitRun> runs_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INITIALIZER_H_
