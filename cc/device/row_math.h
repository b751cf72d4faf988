// Row math: the arithmetic of initializer.h, optimizer.h and codec.h, by a team of threads on one
// row of a device table. For device code, and for host code that emulates it.
//
// Contract. `lanes` are the threads of the team. Of the concept in lanes.h they need rank(),
// width() and, only for RowwiseAdagrad, FromLeader(). All threads of a team call a function with
// the same arguments. Columns are divided into quads of four neighboring columns. In every
// function, thread r has the quads r, r + width, ..., and no other thread accesses these columns of
// the row. A team therefore need not synchronize between two calls.
//
// The results have the same bits as the results of the host's functions, except for the bits of a
// NaN, and for powf (Ftrl<false>), which also differs between hosts. Device code must be built with
// nvcc --fmad=false (its square roots, divisions and denormals conform to IEEE by default).
//
// Pointers are aligned to their element type. A quad that is aligned to its own size is one access.
// This holds for all quads if the row's vector, its state and the gradients begin at multiples of
// 16 bytes, and dim is a multiple of 4. If the elements are also float32, the rows are *whole*. A
// caller that knows this passes true as the template argument kWhole. The code then tests neither
// the type nor the alignment of each quad, which would take more instructions than the rest.
#ifndef DYNEMB_DEVICE_ROW_MATH_H_
#define DYNEMB_DEVICE_ROW_MATH_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cc/table/catch_up_view.h"
#include "cc/table/float_bits.h"
#include "cc/table/half.h"
#include "cc/table/initializer.h"
#include "cc/table/initializer_formulas.h"
#include "cc/table/key.h"
#include "cc/table/optimizer.h"
#include "cc/table/optimizer_formulas.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"
#include "cc/table/row.h"
#include "cc/table/types.h"

namespace dynemb {

// Four neighboring elements. Elements after the last column of a row are zero when loaded, and are
// not stored.
constexpr int kQuad = 4;
template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T at[kQuad];
};

// The number of quads of a row of `dim` columns.
constexpr size_t QuadsOf(int64_t dim) { return (static_cast<size_t>(dim) + kQuad - 1) / kQuad; }

DYNEMB_HD inline bool IsAligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Quad<float>) == 0;
}
// Whether the rows of an array [n, dim], or of a table, are whole.
DYNEMB_HD inline bool IsWhole(DType dtype, int64_t dim, const void* array) {
  return dtype == DType::kFloat32 && dim % kQuad == 0 && IsAligned(array);
}
DYNEMB_HD inline bool IsWhole(const RowLayout& l) {
  return IsWhole(l.dtype, l.dim, nullptr) &&
         (l.vector_offset | l.state_offset | l.stride) % sizeof(Quad<float>) == 0;
}

// The rounding of float32 to 16-bit elements: to nearest, or stochastic with the words of Philox
// selected by (seed, key, step, column), as in codec.h. float32 elements are never rounded.
struct Rounding {
  bool stochastic = false;
  uint64_t seed = 0;
  uint64_t key = 0;
  uint64_t step = 0;
};

// The view of an Initializer for kernels. `runs` is in memory that kernels can access.
struct InitializerView {
  uint64_t seed;
  int64_t dim;
  const InitRun* runs;
  uint32_t num_runs;
};
static_assert(std::is_trivially_copyable_v<InitRun>, "runs are copied to the device");

namespace internal_row_math {

template <class T>
DYNEMB_HD DYNEMB_INLINE bool IsWholeQuad(const T* p, int n) {
  return n == kQuad && reinterpret_cast<uintptr_t>(p) % sizeof(Quad<T>) == 0;
}

// `dtype` is a 16-bit type in these three functions.
DYNEMB_HD DYNEMB_INLINE float FromHalf(DType dtype, uint16_t half) {
  return dtype == DType::kFloat16 ? HalfFormat<DType::kFloat16>::ToFloat(half)
                                  : HalfFormat<DType::kBfloat16>::ToFloat(half);
}

DYNEMB_HD DYNEMB_INLINE uint16_t NearestHalf(DType dtype, float value) {
  return dtype == DType::kFloat16 ? HalfFormat<DType::kFloat16>::ToNearest(value)
                                  : HalfFormat<DType::kBfloat16>::ToNearest(value);
}

DYNEMB_HD DYNEMB_INLINE uint16_t StochasticHalf(DType dtype, float value, uint32_t bits) {
  return dtype == DType::kFloat16 ? HalfFormat<DType::kFloat16>::Stochastic(value, bits)
                                  : HalfFormat<DType::kBfloat16>::Stochastic(value, bits);
}

// The random bits for the four columns of a quad.
DYNEMB_HD DYNEMB_INLINE Philox4 RoundingWords(const Rounding& rounding, int64_t first) {
  return PhiloxBlock(MixKey(MixKey(rounding.seed) + rounding.step), rounding.key,
                     PhiloxStream::kRounding, static_cast<uint32_t>(first / kQuad));
}

// The run that contains `column`.
DYNEMB_HD DYNEMB_INLINE const InitRun* FindRun(const InitializerView& init, int64_t column) {
  uint32_t low = 0, high = init.num_runs - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (init.runs[middle].end <= column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return init.runs + low;
}

DYNEMB_HD DYNEMB_INLINE float Decayed(const OptimizerCoefficients& c, float v) {
  return c.decay != 0.0f ? formulas::DecayedWeight(c, v) : v;
}

}  // namespace internal_row_math

// --- One quad ---

template <bool kWhole = false, class T>
DYNEMB_HD DYNEMB_INLINE Quad<T> LoadQuad(const T* from, int n) {
  if constexpr (kWhole) {
    return *reinterpret_cast<const Quad<T>*>(from);
  } else {
    if (internal_row_math::IsWholeQuad(from, n)) return *reinterpret_cast<const Quad<T>*>(from);
    Quad<T> quad{};
    for (int j = 0; j < kQuad; ++j) {
      if (j < n) quad.at[j] = from[j];
    }
    return quad;
  }
}

template <bool kWhole = false, class T>
DYNEMB_HD DYNEMB_INLINE void StoreQuad(const Quad<T>& quad, int n, T* to) {
  if constexpr (kWhole) {
    *reinterpret_cast<Quad<T>*>(to) = quad;
  } else {
    if (internal_row_math::IsWholeQuad(to, n)) {
      *reinterpret_cast<Quad<T>*>(to) = quad;
      return;
    }
    for (int j = 0; j < kQuad; ++j) {
      if (j < n) to[j] = quad.at[j];
    }
  }
}

// Calls fn(first, n) for each quad of this thread, columns [first, first + n).
template <class Lanes, class Fn>
DYNEMB_HD DYNEMB_INLINE void ForEachQuad(Lanes& lanes, int64_t dim, const Fn& fn) {
  const int64_t step = int64_t{kQuad} * lanes.width();
  for (int64_t first = int64_t{kQuad} * lanes.rank(); first < dim; first += step) {
    fn(first, static_cast<int>(dim - first < kQuad ? dim - first : kQuad));
  }
}

// Converts elements of type `dtype` to float32.
DYNEMB_HD DYNEMB_INLINE Quad<float> ToFloats(DType, const Quad<float>& quad) { return quad; }
DYNEMB_HD DYNEMB_INLINE Quad<float> ToFloats(DType dtype, const Quad<uint16_t>& half) {
  Quad<float> quad;
  for (int j = 0; j < kQuad; ++j) quad.at[j] = internal_row_math::FromHalf(dtype, half.at[j]);
  return quad;
}

// Columns [first, first + n) of a row's vector, n <= 4 and first a multiple of 4, as float32.
template <bool kWhole = false>
DYNEMB_HD DYNEMB_INLINE Quad<float> LoadColumns(DType dtype, const void* vector, int64_t first,
                                                int n) {
  if constexpr (kWhole) {
    return LoadQuad<true>(static_cast<const float*>(vector) + first, n);
  } else {
    if (dtype == DType::kFloat32) return LoadQuad(static_cast<const float*>(vector) + first, n);
    return ToFloats(dtype, LoadQuad(static_cast<const uint16_t*>(vector) + first, n));
  }
}

template <bool kWhole = false>
DYNEMB_HD DYNEMB_INLINE void StoreColumns(DType dtype, const Quad<float>& quad, int64_t first,
                                          int n, const Rounding& rounding, void* vector) {
  if constexpr (kWhole) {
    StoreQuad<true>(quad, n, static_cast<float*>(vector) + first);
  } else if (dtype == DType::kFloat32) {
    StoreQuad(quad, n, static_cast<float*>(vector) + first);
  } else {
    Quad<uint16_t> half;
    if (rounding.stochastic) {
      const Philox4 words = internal_row_math::RoundingWords(rounding, first);
      for (int j = 0; j < kQuad; ++j) {
        half.at[j] = internal_row_math::StochasticHalf(dtype, quad.at[j], words.word[j]);
      }
    } else {
      for (int j = 0; j < kQuad; ++j) {
        half.at[j] = internal_row_math::NearestHalf(dtype, quad.at[j]);
      }
    }
    StoreQuad(half, n, static_cast<uint16_t*>(vector) + first);
  }
}

// Columns [first, first + n) of the initial vector of `key` (Initializer::Fill).
DYNEMB_HD DYNEMB_INLINE Quad<float> InitialColumns(const InitializerView& init, uint64_t key,
                                                   int64_t first, int n) {
  const InitRun* at = internal_row_math::FindRun(init, first);
  InitRun run = *at;
  Philox4 words{};
  if (run.kind != InitKind::kConstant || run.end < first + n) {
    words = PhiloxBlock(init.seed, key, PhiloxStream::kInitialVector,
                        static_cast<uint32_t>(first / kQuad));
  }
  Quad<float> quad{};
  for (int j = 0; j < kQuad; ++j) {
    if (j >= n) break;
    if (run.end <= first + j) run = *++at;
    quad.at[j] = formulas::InitialValue(run, words.word[j]);
  }
  return quad;
}

// The same, rounded to nearest as they would be in a row of `dtype`.
DYNEMB_HD DYNEMB_INLINE Quad<float> InitialColumns(const InitializerView& init, uint64_t key,
                                                   DType dtype, int64_t first, int n) {
  Quad<float> quad = InitialColumns(init, key, first, n);
  if (dtype == DType::kFloat32) return quad;
  for (int j = 0; j < kQuad; ++j) {
    const uint16_t half = internal_row_math::NearestHalf(dtype, quad.at[j]);
    quad.at[j] = internal_row_math::FromHalf(dtype, half);
  }
  return quad;
}

// --- A whole row, by a team ---

// LoadVector of codec.h: from a row's vector to float32.
template <class Lanes>
DYNEMB_HD void LoadVector(Lanes& lanes, DType dtype, const void* row, int64_t dim, float* vector) {
  ForEachQuad(lanes, dim, [&](int64_t first, int n) {
    StoreQuad(LoadColumns(dtype, row, first, n), n, vector + first);
  });
}

// StoreVector or StoreVectorStochastic of codec.h.
template <class Lanes>
DYNEMB_HD void StoreVector(Lanes& lanes, DType dtype, const float* vector, int64_t dim,
                           const Rounding& rounding, void* row) {
  ForEachQuad(lanes, dim, [&](int64_t first, int n) {
    StoreColumns(dtype, LoadQuad(vector + first, n), first, n, rounding, row);
  });
}

// Writes the initial vector of `key` (Initializer::FillAs).
template <class Lanes>
DYNEMB_HD void FillInitialVector(Lanes& lanes, const InitializerView& init, uint64_t key,
                                 DType dtype, void* vector) {
  ForEachQuad(lanes, init.dim, [&](int64_t first, int n) {
    StoreColumns(dtype, InitialColumns(init, key, first, n), first, n, Rounding{}, vector);
  });
}

// Updates a row's vector in float32: loads each quad of this thread, calls fn(first, n, &quad), and
// stores the result.
template <bool kWhole = false, class Lanes, class Fn>
DYNEMB_HD DYNEMB_INLINE void UpdateVector(Lanes& lanes, DType dtype, int64_t dim, void* vector,
                                          const Rounding& rounding, const Fn& fn) {
  ForEachQuad(lanes, dim, [&](int64_t first, int n) {
    Quad<float> quad = LoadColumns<kWhole>(dtype, vector, first, n);
    fn(first, n, &quad);
    StoreColumns<kWhole>(dtype, quad, first, n, rounding, vector);
  });
}

// Columns [first, first + n) of a row's vector, a quad, and of the state of a formula of single
// columns. The formula of column j has state k at s[k * kQuad + j].
template <class Formula>
struct RowQuad {
  Quad<float> v;
  float s[kQuad * (Formula::kStates + 1)];  // + 1, because an array must not be empty

  template <bool kWhole>
  DYNEMB_HD DYNEMB_INLINE void Load(DType dtype, int64_t dim, const void* vector,
                                    const float* state, int64_t first, int n) {
    v = LoadColumns<kWhole>(dtype, vector, first, n);
    for (int k = 0; k < Formula::kStates; ++k) {
      const Quad<float> of = LoadQuad<kWhole>(state + k * dim + first, n);
      for (int j = 0; j < kQuad; ++j) s[k * kQuad + j] = of.at[j];
    }
  }
  // A step with the gradient g.
  DYNEMB_HD DYNEMB_INLINE void Step(const OptimizerCoefficients& c, const Quad<float>& g) {
    for (int j = 0; j < kQuad; ++j) {
      const float weight = internal_row_math::Decayed(c, v.at[j]);
      v.at[j] = Formula::Update(c, weight, g.at[j], s + j, kQuad);
    }
  }
  template <bool kWhole>
  DYNEMB_HD DYNEMB_INLINE void Store(DType dtype, int64_t dim, void* vector, float* state,
                                     const Rounding& rounding, int64_t first, int n) const {
    for (int k = 0; k < Formula::kStates; ++k) {
      Quad<float> of;
      for (int j = 0; j < kQuad; ++j) of.at[j] = s[k * kQuad + j];
      StoreQuad<kWhole>(of, n, state + k * dim + first);
    }
    StoreColumns<kWhole>(dtype, v, first, n, rounding, vector);
  }
};

// Updates the quads of this thread: fn(first, n, &quad), a RowQuad.
template <class Formula, bool kWhole = false, class Lanes, class Fn>
DYNEMB_HD DYNEMB_INLINE void UpdateColumns(Lanes& lanes, DType dtype, int64_t dim, void* vector,
                                           float* state, const Rounding& rounding, const Fn& fn) {
  ForEachQuad(lanes, dim, [&](int64_t first, int n) {
    RowQuad<Formula> quad{};
    quad.template Load<kWhole>(dtype, dim, vector, state, first, n);
    fn(first, n, &quad);
    quad.template Store<kWhole>(dtype, dim, vector, state, rounding, first, n);
  });
}

DYNEMB_HD DYNEMB_INLINE bool IsFinite(const Quad<float>& quad) {
  bool finite = true;
  for (int j = 0; j < kQuad; ++j) finite &= formulas::IsFinite(quad.at[j]);
  return finite;
}

// One step on one row with the formula that WithFormula selected: RowOptimizer::Apply to the state
// and the vector in float32, which is then rounded. Collective for RowwiseAdagrad, whose
// accumulator only the leader accesses. Returns whether none of this thread's columns of the
// gradient is NaN or infinite; the step is done in any case.
template <class Formula, bool kWhole = false, class Lanes>
DYNEMB_HD DYNEMB_INLINE bool ApplyToRow(Lanes& lanes, const OptimizerCoefficients& c, DType dtype,
                                        int64_t dim, void* vector, float* state,
                                        const float* gradient, const Rounding& rounding) {
  bool finite = true;
  const auto load = [&](int64_t first, int n) {
    const Quad<float> g = LoadQuad<kWhole>(gradient + first, n);
    finite &= IsFinite(g);
    return g;
  };
  if constexpr (formulas::kIsRowwise<Formula>) {
    uint32_t bits = 0;
    if (lanes.rank() == 0) bits = FloatBits(Formula::Multiplier(c, gradient, dim, state));
    const float multiplier = BitsToFloat(lanes.FromLeader(bits));
    const auto update = [&](int64_t first, int n, Quad<float>* v) {
      const Quad<float> g = load(first, n);
      for (int j = 0; j < kQuad; ++j) {
        const float weight = internal_row_math::Decayed(c, v->at[j]);
        v->at[j] = Formula::Update(multiplier, weight, g.at[j]);
      }
    };
    UpdateVector<kWhole>(lanes, dtype, dim, vector, rounding, update);
  } else {
    UpdateColumns<Formula, kWhole>(
        lanes, dtype, dim, vector, state, rounding,
        [&](int64_t first, int n, RowQuad<Formula>* quad) { quad->Step(c, load(first, n)); });
  }
  return finite;
}

// CatchUp::Bring: gives a row the `missed` > 0 steps that it lacks, except its mark. `Formula` is
// the formula of the steps.
template <class Formula, class Lanes>
DYNEMB_HD void BringColumns(Lanes& lanes, const CatchUpView& steps, uint64_t missed, DType dtype,
                            int64_t dim, void* vector, float* state, const Rounding& rounding) {
  const CatchUpView::Tail tail = steps.TailOf(missed);
  const auto decay = [&](Quad<float>* v) {
    if (tail.decay == 1.0f) return;
    for (int j = 0; j < kQuad; ++j) v->at[j] *= tail.decay;
  };
  if constexpr (formulas::kIsRowwise<Formula>) {
    UpdateVector(lanes, dtype, dim, vector, rounding,
                 [&](int64_t, int, Quad<float>* v) { decay(v); });
  } else {
    UpdateColumns<Formula>(
        lanes, dtype, dim, vector, state, rounding, [&](int64_t, int, RowQuad<Formula>* quad) {
          steps.ForSingleSteps(
              missed, [&](const OptimizerCoefficients& c) { quad->Step(c, Quad<float>{}); });
          decay(&quad->v);
          for (int k = 0; k < Formula::kStates; ++k) {
            for (int j = 0; j < kQuad; ++j) quad->s[k * kQuad + j] *= tail.factors[k];
          }
        });
  }
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_ROW_MATH_H_
