#include "cc/table/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace dynemb {
namespace {

constexpr int64_t kDim = 5;
constexpr int kSteps = 200;
constexpr float kInitial[kDim] = {0.5f, -0.25f, 0.125f, -1.0f, 2.0f};

// The same as `gradients` in make_optimizer_golden.py; exact in float32.
float Gradient(int step, int64_t column, bool poison) {
  if (poison && step == 100 && column == 2) return std::numeric_limits<float>::quiet_NaN();
  if (poison && step == 120 && column == 3) return std::numeric_limits<float>::infinity();
  return static_cast<float>((step * 37 + column * 101 + step * column * 13) % 201 - 100) / 64.0f;
}

// A case of make_optimizer_golden.py, and the row after Keras's steps.
struct Golden {
  std::string name;
  std::vector<std::string> flags;
  Hyper hyper;
  bool poison;
  std::vector<float> inits;
  std::vector<float> vector;
  std::vector<float> state;
};

const std::vector<Golden>& Goldens() {
  static const auto* goldens = new std::vector<Golden>{
#include "tests/cc/optimizer_golden.inc"
  };
  return *goldens;
}

// The results of ParseOptimizer.
struct Parsed {
  OptimizerKind kind;
  OptimizerFlags flags;
};

Parsed Parse(const std::string& name, const std::vector<std::string>& flags) {
  Parsed p{};
  const Status status = ParseOptimizer(name, flags, &p.kind, &p.flags);
  EXPECT_TRUE(status.ok()) << status.message();
  return p;
}

// One case of each optimizer and set of flags.
std::vector<Golden> Variants() {
  std::vector<Golden> found;
  for (const Golden& g : Goldens()) {
    if (g.poison) found.push_back(g);  // there is one of each
  }
  return found;
}

int64_t StateWidth(const Parsed& p, int64_t dim) {
  int64_t width = 0;
  for (const int64_t w : StateWidths(p.kind, p.flags, dim)) width += w;
  return width;
}

std::string Text(const Golden& g) {
  std::string text = g.name;
  for (const std::string& f : g.flags) text += " " + f;
  return text + (g.poison ? " poisoned" : "");
}

void ExpectNear(float got, float expected, const std::string& what) {
  if (std::isnan(expected) || std::isinf(expected)) {
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected)
        << what << ": " << got << " instead of " << expected;
    return;
  }
  EXPECT_NEAR(got, expected, 1e-5f * std::fabs(expected) + 1e-9f) << what;
}

TEST(OptimizerTest, AgreesWithKerasOver200Steps) {
  ASSERT_GE(Goldens().size(), 40u);
  for (const Golden& g : Goldens()) {
    const Parsed p = Parse(g.name, g.flags);
    std::vector<float> vector(kInitial, kInitial + kDim), state;
    const std::vector<int64_t> widths = StateWidths(p.kind, p.flags, kDim);
    ASSERT_EQ(widths.size(), g.inits.size()) << Text(g);
    for (size_t s = 0; s < widths.size(); ++s) {
      state.insert(state.end(), static_cast<size_t>(widths[s]), g.inits[s]);
    }
    ASSERT_EQ(state.size(), g.state.size()) << Text(g);
    Hyper hyper = g.hyper;
    for (int step = 0; step < kSteps; ++step) {
      float grad[kDim];
      for (int64_t c = 0; c < kDim; ++c) grad[c] = Gradient(step, c, g.poison);
      hyper.iteration = static_cast<float>(step + 1);
      RowOptimizer(p.kind, p.flags, hyper, kDim).Apply(vector.data(), state.data(), grad);
    }
    for (size_t c = 0; c < vector.size(); ++c) ExpectNear(vector[c], g.vector[c], Text(g));
    for (size_t i = 0; i < state.size(); ++i) ExpectNear(state[i], g.state[i], Text(g) + " state");
  }
}

// Only rowwise_adagrad combines columns. With any other optimizer, a vector of any width must have
// the same bits as its columns one by one, whether SIMD or the rest of the loop computes them.
TEST(OptimizerTest, ColumnsAreIndependent) {
  for (const Golden& g : Variants()) {
    if (g.name == "rowwise_adagrad") continue;
    const Parsed p = Parse(g.name, g.flags);
    Hyper hyper = g.hyper;
    hyper.weight_decay = 0.01f;
    for (int64_t dim = 1; dim <= 70; ++dim) {
      const auto n = static_cast<size_t>(dim);
      const auto states = static_cast<size_t>(StateWidth(p, 1));
      std::vector<float> row(n * (states + 1) + 1, 0.5f), grad(n);
      std::vector<std::vector<float>> columns(n, std::vector<float>(states + 1, 0.5f));
      for (int step = 0; step < 3; ++step) {
        hyper.iteration = static_cast<float>(step + 1);
        for (int64_t c = 0; c < dim; ++c) {
          grad[static_cast<size_t>(c)] = Gradient(99 + step, c, true);
        }
        RowOptimizer(p.kind, p.flags, hyper, dim).Apply(row.data(), row.data() + n, grad.data());
        const RowOptimizer one(p.kind, p.flags, hyper, 1);
        for (size_t c = 0; c < n; ++c) one.Apply(&columns[c][0], &columns[c][1], &grad[c]);
      }
      ASSERT_EQ(row.back(), 0.5f) << Text(g);
      for (size_t c = 0; c < n; ++c) {
        for (size_t s = 0; s <= states; ++s) {
          const float got = row[s * n + c], expected = columns[c][s];
          ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
              << Text(g) << " dim " << dim << " column " << c << " state " << s;
        }
      }
    }
  }
}

TEST(OptimizerTest, RowwiseAdagradOfAnyWidth) {
  Hyper hyper;
  hyper.learning_rate = 0.1f;
  hyper.epsilon = 0.01f;
  for (int64_t dim = 1; dim <= 300; ++dim) {
    const auto n = static_cast<size_t>(dim);
    std::vector<float> vector(n, 1.0f), grad(n);
    float accumulator[2] = {0.25f, 42.0f};
    double squares = 0;
    for (size_t c = 0; c < n; ++c) {
      grad[c] = Gradient(3, static_cast<int64_t>(c), false);
      squares += static_cast<double>(grad[c]) * grad[c];
    }
    RowOptimizer(OptimizerKind::kRowwiseAdagrad, {}, hyper, dim)
        .Apply(vector.data(), accumulator, grad.data());
    const double sum = 0.25 + squares / static_cast<double>(dim);
    EXPECT_NEAR(accumulator[0], sum, 1e-6 * sum);
    EXPECT_EQ(accumulator[1], 42.0f);
    for (size_t c = 0; c < n; ++c) {
      EXPECT_NEAR(vector[c], 1.0 - 0.1 * grad[c] / (std::sqrt(sum) + 0.01), 1e-6);
    }
  }
}

TEST(OptimizerTest, EveryOptimizerConverges) {
  for (const Golden& g : Variants()) {
    const Parsed p = Parse(g.name, g.flags);
    Hyper hyper = g.hyper;
    hyper.learning_rate = g.name == "adadelta" ? 1.0f : 0.02f;
    hyper.epsilon = 1e-3f;
    constexpr int64_t kWidth = 16;
    std::vector<float> vector(kWidth, 2.0f), state(3 * kWidth, 0.1f), grad(kWidth);
    for (int step = 1; step <= 2000; ++step) {
      hyper.iteration = static_cast<float>(step);
      for (size_t c = 0; c < kWidth; ++c) grad[c] = vector[c] - 1.0f;
      RowOptimizer(p.kind, p.flags, hyper, kWidth).Apply(vector.data(), state.data(), grad.data());
    }
    for (const float x : vector) EXPECT_NEAR(x, 1.0f, 0.1f) << Text(g);
  }
}

TEST(OptimizerTest, AllFinite) {
  EXPECT_TRUE(AllFinite(nullptr, 0));
  for (int64_t dim = 1; dim <= 70; ++dim) {
    const auto n = static_cast<size_t>(dim);
    std::vector<float> g(n, -std::numeric_limits<float>::max());
    g[n / 2] = std::numeric_limits<float>::denorm_min();
    EXPECT_TRUE(AllFinite(g.data(), dim));
    for (size_t c = 0; c < n; ++c) {
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
            std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
        std::vector<float> poisoned = g;
        poisoned[c] = bad;
        EXPECT_FALSE(AllFinite(poisoned.data(), dim)) << dim << " " << c;
      }
    }
  }
}

TEST(OptimizerTest, StateWidths) {
  const auto widths = [](const std::string& name, const std::vector<std::string>& flags) {
    const Parsed p = Parse(name, flags);
    return StateWidths(p.kind, p.flags, 8);
  };
  using Widths = std::vector<int64_t>;
  EXPECT_EQ(widths("sgd", {}), Widths{});
  EXPECT_EQ(widths("sgd", {"momentum"}), Widths{8});
  EXPECT_EQ(widths("sgd", {"nesterov"}), Widths{});
  EXPECT_EQ(widths("adagrad", {}), Widths{8});
  EXPECT_EQ(widths("adam", {}), (Widths{8, 8}));
  EXPECT_EQ(widths("adamw", {"amsgrad"}), (Widths{8, 8, 8}));
  EXPECT_EQ(widths("adamax", {}), (Widths{8, 8}));
  EXPECT_EQ(widths("rmsprop", {}), Widths{8});
  EXPECT_EQ(widths("rmsprop", {"centered"}), (Widths{8, 8}));
  EXPECT_EQ(widths("rmsprop", {"momentum", "centered"}), (Widths{8, 8, 8}));
  EXPECT_EQ(widths("adadelta", {}), (Widths{8, 8}));
  EXPECT_EQ(widths("ftrl", {}), (Widths{8, 8}));
  EXPECT_EQ(widths("lion", {}), Widths{8});
  EXPECT_EQ(widths("rowwise_adagrad", {}), Widths{1});
}

TEST(OptimizerTest, ErrorsNameUnknownNamesAndFlags) {
  struct Bad {
    std::string name;
    std::vector<std::string> flags;
    std::string part;
  };
  const std::vector<Bad> bad = {
      {"Adam", {}, "got 'Adam'"},
      {"", {}, "one of sgd, adagrad, adam, adamw,"},
      {"adam", {"momentum"}, "'adam' has no flag 'momentum'"},
      {"adam", {"amsgrad", "nesterov"}, "no flag 'nesterov'"},
      {"sgd", {"amsgrad"}, "no flag 'amsgrad'"},
      {"sgd", {"centered"}, "no flag 'centered'"},
      {"rmsprop", {"centred"}, "no flag 'centred'"},
      {"lion", {""}, "no flag ''"},
  };
  for (const Bad& b : bad) {
    OptimizerKind kind = OptimizerKind::kLion;
    OptimizerFlags flags;
    const Status status = ParseOptimizer(b.name, b.flags, &kind, &flags);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(b.part), std::string::npos) << status.message();
    EXPECT_EQ(kind, OptimizerKind::kLion);
    EXPECT_FALSE(flags.amsgrad);
  }
}

}  // namespace
}  // namespace dynemb
