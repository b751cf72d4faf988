// The initial vector of a key: a function of (seed, key, column) only.
//
// The same key therefore starts with the same vector on any rank, in any order of arrival, and
// again after eviction. The random bits are Philox words (philox.h). They go through float32
// additions, multiplications, divisions and square roots only, which IEEE defines to the bit; libm
// is not used. A change of the value for given arguments is incompatible: initializer_test.cc has
// golden values.
#ifndef DYNEMB_TABLE_INITIALIZER_H_
#define DYNEMB_TABLE_INITIALIZER_H_

#include <cstdint>
#include <vector>

#include "cc/table/philox.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

enum class InitKind : uint8_t { kConstant, kUniform, kNormal, kTruncatedNormal };

// The distribution of one column.
struct ColumnInit {
  InitKind kind = InitKind::kConstant;
  // - kConstant: a is the value.
  // - kUniform: [a, b), or a itself if a == b.
  // - kNormal: mean a, standard deviation b.
  // - kTruncatedNormal: the same without values farther than 2 b from a, like
  //   keras.initializers.TruncatedNormal.
  float a = 0.0f;
  float b = 0.0f;
};

// Columns [begin, end) of one distribution, for initializer_formulas.h. The value of kConstant is
// `offset`. The value of the other kinds is offset + scale * x, where x is uniform in [0, 1) for
// kUniform, and standard normal otherwise. Values of kUniform and kTruncatedNormal are then clamped
// to [low, high]. For kUniform, `high` is below b, which rounding might otherwise reach.
struct InitRun {
  InitKind kind;
  int64_t begin, end;
  float offset, scale, low, high;
};

// Immutable after Create; any number of threads may call Fill.
class Initializer {
 public:
  // `columns` has one entry for all columns, or dim entries. InvalidArgument, naming the value, if
  //
  // - `columns` has another size, or dim < 1,
  // - a number is not finite, or a value could overflow float32,
  // - kUniform has b < a, or b - a overflows,
  // - a standard deviation is negative.
  //
  // On failure *out is unchanged.
  static Status Create(std::vector<ColumnInit> columns, int64_t dim, uint64_t seed,
                       Initializer* out);

  // Writes the dim values of `key`. Does not allocate.
  void Fill(uint64_t key, float* vector) const;
  // The same in the dtype of a row, rounded to nearest. Does not allocate.
  void FillAs(DType dtype, uint64_t key, void* vector) const;

  int64_t dim() const { return dim_; }
  uint64_t seed() const { return schedule_.seed; }
  void set_seed(uint64_t seed) { schedule_ = PhiloxSchedule(seed); }
  // In order; together they cover the columns [0, dim).
  const std::vector<InitRun>& runs() const { return runs_; }

 private:
  // Writes columns [begin, end), at most kChunk of them. *run is the run of `begin`, and becomes
  // the run of `end`.
  void FillChunk(uint64_t key, int64_t begin, int64_t end, size_t* run, float* values) const;

  int64_t dim_ = 0;
  PhiloxSchedule schedule_;
  bool random_ = false;
  std::vector<InitRun> runs_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_INITIALIZER_H_
