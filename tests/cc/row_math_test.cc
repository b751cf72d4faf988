// A team's arithmetic on a row gives the same bits as the host's, for any width of the team,
// alignment of the row, dim and element type.
#include "cc/device/row_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cc/table/codec.h"
#include "cc/table/lanes.h"
#include "tests/simulated/lanes_lockstep.h"

namespace dynemb {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr int64_t kDims[] = {1, 3, 4, 7, 8, 16, 33, 128};
constexpr uint32_t kWidths[] = {1, 4, 8, 32};
constexpr unsigned char kGuard = 0xA5;
// Offsets from the alignment of a device row: 0, and one that rows of the host and gradients may
// have.
constexpr size_t kShifts[] = {0, 4};

// A lane of a team whose lanes run one after another, and therefore have no collectives.
class Member {
 public:
  Member(uint32_t rank, uint32_t width) : rank_(rank), width_(width) {}
  uint32_t rank() const { return rank_; }
  uint32_t width() const { return width_; }

 private:
  uint32_t rank_, width_;
};

float LoadElement(DType dtype, const void* vector, int64_t column) {
  const int64_t first = column / kQuad * kQuad;
  const auto at = static_cast<int>(column - first);
  return LoadColumns(dtype, vector, first, at + 1).at[at];
}

// Whether a step with this gradient finds no NaN and no infinity in the thread's columns.
template <class Lanes>
bool IsFiniteTo(Lanes& lanes, const std::vector<float>& gradient) {
  std::vector<float> vector(gradient.size());
  return ApplyToRow<formulas::Sgd>(lanes, OptimizerCoefficients{}, DType::kFloat32,
                                   static_cast<int64_t>(gradient.size()), vector.data(), nullptr,
                                   gradient.data(), Rounding{});
}

// A vector and state between guard bytes, each at `shift` bytes from 16-byte alignment.
class Row {
 public:
  Row(DType dtype, int64_t dim, int64_t state_width, size_t shift)
      : dtype_(dtype),
        dim_(static_cast<size_t>(dim)),
        state_width_(static_cast<size_t>(state_width)),
        vector_offset_(16 + shift),
        state_offset_(16 + (dim_ * SizeOf(dtype) + 15) / 16 * 16 + shift),
        quads_((state_offset_ + state_width_ * sizeof(float)) / 16 + 2) {
    memset(quads_.data(), kGuard, quads_.size() * sizeof(quads_[0]));
  }
  void* vector() { return bytes() + vector_offset_; }
  float* state() { return reinterpret_cast<float*>(bytes() + state_offset_); }

  // All bytes, with the guards. Every NaN is replaced by one, because their bits may differ.
  std::vector<unsigned char> Bytes() {
    std::vector<unsigned char> all(bytes(), bytes() + quads_.size() * sizeof(quads_[0]));
    for (size_t c = 0; c < dim_; ++c) {
      if (std::isnan(LoadElement(dtype_, vector(), static_cast<int64_t>(c)))) {
        memset(&all[vector_offset_ + c * SizeOf(dtype_)], 0xFF, SizeOf(dtype_));
      }
    }
    for (size_t i = 0; i < state_width_; ++i) {
      if (std::isnan(state()[i])) memset(&all[state_offset_ + i * sizeof(float)], 0xFF, 4);
    }
    return all;
  }

 private:
  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(quads_.data()); }

  DType dtype_;
  size_t dim_, state_width_, vector_offset_, state_offset_;
  std::vector<Quad<float>> quads_;
};

// Normally distributed numbers. `special`: one in four is an edge case.
std::vector<float> Numbers(std::mt19937* random, size_t n, bool special) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {Limits::quiet_NaN(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::denorm_min(),
                            -1e-41f,
                            1e-20f,
                            Limits::max(),
                            -3e38f,
                            1e20f,
                            0.0f,
                            -0.0f,
                            65519.0f,
                            3e-8f,
                            -Limits::quiet_NaN(),
                            6e-6f};
  std::normal_distribution<float> normal;
  std::vector<float> numbers(n);
  for (float& x : numbers) {
    x = normal(*random);
    if (special && (*random)() % 4 == 0) x = specials[(*random)() % std::size(specials)];
  }
  return numbers;
}

Rounding At(bool stochastic, uint64_t key) {
  return {stochastic, 0x0123456789ABCDEFu, key, uint64_t{77} + (key << 33)};
}

std::string Text(DType dtype, int64_t dim, size_t shift) {
  return "dtype " + std::to_string(static_cast<int>(dtype)) + " dim " + std::to_string(dim) +
         " shift " + std::to_string(shift);
}

void StoreOnHost(DType dtype, const float* vector, int64_t dim, const Rounding& rounding,
                 void* row) {
  if (rounding.stochastic) {
    dynemb::StoreVectorStochastic(dtype, vector, dim, row, rounding.seed, rounding.key,
                                  rounding.step);
  } else {
    dynemb::StoreVector(dtype, vector, dim, row);
  }
}

// Calls fn(dtype, dim, shift, rounding) for all combinations.
template <class Fn>
void ForEachRow(const Fn& fn) {
  uint64_t key = ~uint64_t{0} - 100;
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : kDims) {
      for (const size_t shift : kShifts) {
        for (const bool stochastic : {false, true}) fn(dtype, dim, shift, At(stochastic, ++key));
      }
    }
  }
}

TEST(RowMathTest, VectorsAreLoadedAndStoredAsOnTheHost) {
  std::mt19937 random(1);
  ForEachRow([&](DType dtype, int64_t dim, size_t shift, const Rounding& rounding) {
    const auto n = static_cast<size_t>(dim);
    const std::vector<float> in = Numbers(&random, n + 1, true);
    Row expected(dtype, dim, 0, shift);
    StoreOnHost(dtype, in.data() + shift / 4, dim, rounding, expected.vector());
    std::vector<float> loaded(n);
    dynemb::LoadVector(dtype, expected.vector(), dim, loaded.data());
    for (const uint32_t width : kWidths) {
      SCOPED_TRACE(Text(dtype, dim, shift) + " width " + std::to_string(width));
      Row got(dtype, dim, 0, shift);
      std::vector<float> out(n + 2, 42.0f);
      float* const to = out.data() + shift / 4;
      for (uint32_t r = 0; r < width; ++r) {
        Member member(r, width);
        StoreVector(member, dtype, in.data() + shift / 4, dim, rounding, got.vector());
        LoadVector(member, dtype, expected.vector(), dim, to);
      }
      ASSERT_EQ(got.Bytes(), expected.Bytes());
      ASSERT_EQ(memcmp(to, loaded.data(), n * sizeof(float)), 0);
      ASSERT_EQ(to[n], 42.0f);
      ASSERT_TRUE(shift == 0 || out[0] == 42.0f);
    }
  });
}

// Each member writes to a separate array of NaNs, which shows the columns that it writes.
TEST(RowMathTest, EveryColumnHasOneThread) {
  Initializer initializer;
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : kDims) {
      ASSERT_TRUE(
          Initializer::Create({{InitKind::kUniform, -1.0f, 1.0f}}, dim, 3, &initializer).ok());
      const InitializerView view{3, dim, initializer.runs().data(), 1};
      const std::vector<float> zeros(static_cast<size_t>(dim), 0.0f);
      for (const uint32_t width : kWidths) {
        SCOPED_TRACE(Text(dtype, dim, 0) + " width " + std::to_string(width));
        std::vector<int> filled(zeros.size(), 0), stored = filled, loaded = filled, seen = filled;
        for (uint32_t r = 0; r < width; ++r) {
          Member member(r, width);
          const std::vector<float> nans(zeros.size(), BitsToFloat(0xFFFFFFFFu));
          std::vector<float> fill = nans, store = nans, load = nans;
          FillInitialVector(member, view, 9, dtype, fill.data());
          StoreVector(member, dtype, zeros.data(), dim, Rounding{}, store.data());
          LoadVector(member, dtype, zeros.data(), dim, load.data());
          for (int64_t c = 0; c < dim; ++c) {
            const auto i = static_cast<size_t>(c);
            filled[i] += !std::isnan(LoadElement(dtype, fill.data(), c));
            stored[i] += !std::isnan(LoadElement(dtype, store.data(), c));
            loaded[i] += !std::isnan(load[i]);
            std::vector<float> one_bad = zeros;
            one_bad[i] = c % 2 == 0 ? NAN : -INFINITY;
            seen[i] += !IsFiniteTo(member, one_bad);
          }
          ASSERT_TRUE(IsFiniteTo(member, zeros));
        }
        const std::vector<int> once(zeros.size(), 1);
        ASSERT_EQ(filled, once);
        ASSERT_EQ(stored, once);
        ASSERT_EQ(loaded, once);
        ASSERT_EQ(seen, once);
      }
    }
  }
}

TEST(RowMathTest, LargestNumberIsFinite) {
  OneLane lane;
  const float max = std::numeric_limits<float>::max();
  EXPECT_TRUE(IsFiniteTo(lane, {max, -max, std::numeric_limits<float>::denorm_min(), 0.0f, -max}));
}

// One distribution for all columns, one per column, and runs that begin and end anywhere in a quad.
std::vector<std::vector<ColumnInit>> ColumnInits(int64_t dim) {
  const ColumnInit kinds[] = {{InitKind::kNormal, 0.5f, 2.0f},
                              {InitKind::kConstant, 7.0f, 0.0f},
                              {InitKind::kUniform, -1.0f, 1.0f},
                              {InitKind::kTruncatedNormal, 0.0f, 1.0f},
                              {InitKind::kUniform, 1e6f, 1e6f + 0.5f}};
  std::vector<std::vector<ColumnInit>> found;
  for (const ColumnInit& kind : kinds) found.push_back({kind});
  for (const int64_t run : {1, 2, 3, 5, 6, 13}) {
    found.emplace_back();
    for (int64_t c = 0; c < dim; ++c) found.back().push_back(kinds[c / run % 5]);
  }
  return found;
}

TEST(RowMathTest, RunsCoverTheColumns) {
  for (const int64_t dim : kDims) {
    for (const std::vector<ColumnInit>& columns : ColumnInits(dim)) {
      Initializer created;
      ASSERT_TRUE(Initializer::Create(columns, dim, 5, &created).ok());
      EXPECT_EQ(created.seed(), 5u);
      int64_t next = 0;
      for (const InitRun& run : created.runs()) {
        EXPECT_EQ(run.begin, next);
        EXPECT_GT(run.end, run.begin);
        next = run.end;
      }
      EXPECT_EQ(next, dim);
    }
  }
}

TEST(RowMathTest, InitialVectorsMatchTheInitializer) {
  for (const int64_t dim : kDims) {
    for (const std::vector<ColumnInit>& columns : ColumnInits(dim)) {
      for (const uint64_t key : {0ull, 1ull, 0x8000000000000001ull, ~0ull}) {
        const uint64_t seed = 0xFEDCBA9876543210u + key;
        Initializer created;
        ASSERT_TRUE(Initializer::Create(columns, dim, seed, &created).ok());
        const InitializerView view{created.seed(), created.dim(), created.runs().data(),
                                   static_cast<uint32_t>(created.runs().size())};
        std::vector<float> vector(static_cast<size_t>(dim));
        created.Fill(key, vector.data());
        for (const DType dtype : kDTypes) {
          for (const size_t shift : kShifts) {
            Row expected(dtype, dim, 0, shift);
            dynemb::StoreVector(dtype, vector.data(), dim, expected.vector());
            for (const uint32_t width : kWidths) {
              Row got(dtype, dim, 0, shift);
              for (uint32_t r = 0; r < width; ++r) {
                Member member(r, width);
                FillInitialVector(member, view, key, dtype, got.vector());
              }
              ASSERT_EQ(got.Bytes(), expected.Bytes())
                  << Text(dtype, dim, shift) << " width " << width << " runs " << view.num_runs;
            }
          }
        }
      }
    }
  }
}

struct Variant {
  OptimizerKind kind;
  OptimizerFlags flags;
  float learning_rate_power;
  std::string text;
};

// Every optimizer with every legal set of flags.
std::vector<Variant> Variants() {
  const std::string flags[] = {"nesterov", "amsgrad", "centered", "momentum"};
  std::vector<Variant> found;
  for (const char* name : {"sgd", "adagrad", "adam", "adamax", "rmsprop", "adadelta", "ftrl",
                           "lion", "rowwise_adagrad"}) {
    for (unsigned set = 0; set < 16; ++set) {
      std::vector<std::string> chosen;
      Variant v{{}, {}, -0.5f, name};
      for (unsigned f = 0; f < 4; ++f) {
        if ((set >> f & 1) == 0) continue;
        chosen.push_back(flags[f]);
        v.text += " " + flags[f];
      }
      if (ParseOptimizer(name, chosen, &v.kind, &v.flags).ok()) found.push_back(v);
    }
  }
  Variant power = found.back();
  for (const Variant& v : found) {
    if (v.kind == OptimizerKind::kFtrl) power = v;
  }
  power.learning_rate_power = -0.25f;
  power.text += " power";
  found.push_back(power);
  return found;
}

// A row that the host updates, and a copy that a team updates.
struct Pair {
  DType dtype;
  int64_t dim;
  size_t shift;
  bool special;
  Rounding rounding;
  Row host, device;
  std::vector<float> gradients;

  const float* gradient() const { return gradients.data() + shift / 4; }
};

std::vector<Pair> Pairs(const Variant& variant) {
  std::mt19937 random(4);
  std::vector<Pair> pairs;
  ForEachRow([&](DType dtype, int64_t dim, size_t shift, const Rounding& rounding) {
    for (const bool special : {false, true}) {
      int64_t state_width = 0;
      for (const int64_t w : StateWidths(variant.kind, variant.flags, dim)) state_width += w;
      Row row(dtype, dim, state_width, shift);
      const std::vector<float> vector = Numbers(&random, static_cast<size_t>(dim), special);
      dynemb::StoreVector(dtype, vector.data(), dim, row.vector());
      std::vector<float> state = Numbers(&random, static_cast<size_t>(state_width), special);
      for (float& s : state) s = std::fabs(s);
      std::copy(state.begin(), state.end(), row.state());
      pairs.push_back({dtype, dim, shift, special, rounding, row, row, {}});
    }
  });
  return pairs;
}

template <class Lanes>
class RowMathOptimizer : public ::testing::Test {
 protected:
  SerialExec exec_;
};
using Teams = ::testing::Types<OneLane, LockstepLanes<4>, LockstepLanes<8>, LockstepLanes<32>>;
TYPED_TEST_SUITE(RowMathOptimizer, Teams);

TYPED_TEST(RowMathOptimizer, RowsMatchTheHost) {
  using Lanes = TypeParam;
  constexpr int kSteps = 3;
  ASSERT_EQ(Variants().size(), 17u);
  for (const Variant& variant : Variants()) {
    std::mt19937 random(5);
    std::vector<Pair> pairs = Pairs(variant);
    for (int step = 0; step < kSteps; ++step) {
      Hyper hyper;
      hyper.learning_rate = 0.05f;
      hyper.momentum = 0.9f;
      hyper.l1 = 0.01f;
      hyper.l2 = 0.02f;
      hyper.l2_shrinkage = 0.03f;
      hyper.ftrl_beta = 0.04f;
      hyper.learning_rate_power = variant.learning_rate_power;
      hyper.weight_decay = step == 0 ? 0.0f : 0.01f;
      hyper.iteration = static_cast<float>(step + 1);
      for (Pair& p : pairs) {
        p.gradients = Numbers(&random, static_cast<size_t>(p.dim) + 1, p.special);
        p.rounding.step += 1;
        std::vector<float> vector(static_cast<size_t>(p.dim));
        dynemb::LoadVector(p.dtype, p.host.vector(), p.dim, vector.data());
        const RowOptimizer host(variant.kind, variant.flags, hyper, p.dim);
        host.Apply(vector.data(), p.host.state(), p.gradient());
        StoreOnHost(p.dtype, vector.data(), p.dim, p.rounding, p.host.vector());
      }
      const RowOptimizer optimizer(variant.kind, variant.flags, hyper, 1);
      const OptimizerCoefficients& c = optimizer.coefficients();
      WithFormula(optimizer.kind(), optimizer.flags(), c.power, [&](auto tag) {
        using Formula = typename decltype(tag)::Formula;
        Lanes::Launch(this->exec_, pairs.size(), 16, [&](Lanes& lanes, size_t begin, size_t end) {
          for (size_t i = begin; i < end; ++i) {
            Pair& p = pairs[i];
            const auto apply = [&](auto is_whole) {
              ApplyToRow<Formula, decltype(is_whole)::value>(lanes, c, p.dtype, p.dim,
                                                             p.device.vector(), p.device.state(),
                                                             p.gradient(), p.rounding);
            };
            const bool is_whole = p.dtype == DType::kFloat32 && p.dim % kQuad == 0 && p.shift == 0;
            is_whole ? apply(std::true_type{}) : apply(std::false_type{});
          }
        });
      });
      for (Pair& p : pairs) {
        ASSERT_EQ(p.device.Bytes(), p.host.Bytes())
            << variant.text << " " << Text(p.dtype, p.dim, p.shift) << " step " << step
            << " special " << p.special << " stochastic " << p.rounding.stochastic;
      }
    }
  }
}

}  // namespace
}  // namespace dynemb
