// CatchUpWorld: a table whose rows make up for missed steps, and the rows of an optimizer that
// steps every row in every step.
#ifndef DYNEMB_TESTS_CC_CATCH_UP_WORLD_H_
#define DYNEMB_TESTS_CC_CATCH_UP_WORLD_H_

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

struct CatchUpCase {
  std::string name;  // of the state
  Hyper hyper;
};

inline std::vector<CatchUpCase> CatchUpCases() {
  Hyper plain;
  plain.learning_rate = 0.01f;
  plain.momentum = 0.9f;
  Hyper decayed = plain;
  decayed.weight_decay = 0.05f;
  return {
      {"sgd catch_up", decayed},
      {"sgd momentum catch_up", plain},
      {"sgd nesterov momentum catch_up", decayed},
      {"adagrad catch_up", decayed},
      {"adam catch_up", plain},
      {"adam catch_up", decayed},
      {"adam amsgrad catch_up", decayed},
      {"adamax catch_up", decayed},
      {"rmsprop catch_up", decayed},
      {"rmsprop centered momentum catch_up", plain},
      {"adadelta catch_up", decayed},
      {"rowwise_adagrad catch_up", decayed},
  };
}

// A table with such a state, and the dense rows that it must be equal to.
class CatchUpWorld {
 public:
  struct Row {
    Floats vector, state;  // without the mark
  };

  CatchUpWorld(TableFixture& f, const CatchUpCase& c, TableOptions options)
      : t(f.Create(options)), hyper(c.hyper) {
    std::string word;
    std::vector<std::string> flag_words;
    for (const char letter : c.name + " ") {
      if (letter != ' ') {
        word += letter;
        continue;
      }
      if (word != "nesterov") spec.optimizer += (spec.optimizer.empty() ? "" : " ") + word;
      flag_words.push_back(word);
      word.clear();
    }
    const std::string name = flag_words.front();
    flag_words.erase(flag_words.begin());
    EXPECT_TRUE(ParseOptimizer(name, flag_words, &kind, &flags).ok());
    spec.widths = StateWidths(kind, flags, t.dim());
    spec.inits.assign(spec.widths.size(), 0.0f);
    if (name.find("adagrad") != std::string::npos) spec.inits[0] = 0.1f;
    EXPECT_TRUE(t->AttachState(t.exec(), spec).ok());
  }

  // Adds rows with these vectors.
  void Upsert(const Keys& keys, const Floats& vectors) {
    t.Upsert(keys, vectors);
    const auto dim = static_cast<size_t>(t.dim());
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto from = vectors.begin() + static_cast<int64_t>(i * dim);
      Row& row = rows.insert({keys[i], NewRow()}).first->second;
      row.vector.assign(from, from + t.dim());
    }
  }
  void Accumulate(const Keys& keys, const Floats& deltas) {
    EXPECT_TRUE(t.TryAccumulate(keys, deltas).ok());
    const auto dim = static_cast<size_t>(t.dim());
    for (size_t i = 0; i < keys.size(); ++i) {
      for (size_t c = 0; c < dim; ++c) rows[keys[i]].vector[c] += deltas[i * dim + c];
    }
  }
  void Erase(uint64_t key) {
    t.Erase({key});
    rows.erase(key);
  }
  // Moves all rows of a table that has files there, by lookups of other keys.
  void Cool() {
    if (!t->has_cold_rows()) return;
    constexpr uint64_t kPart = 50;
    for (uint64_t first = 0; first < 6 * kPart; first += kPart) {
      t.LookupOrInsert(Progression(kBallast + first, kPart));
    }
  }
  // The next step, with gradients for distinct keys.
  void Step(const Keys& keys, const Floats& gradients) {
    ++iteration;
    hyper.iteration = static_cast<float>(iteration);
    const RowIds found = t.Find(keys);
    const RowOptimizer optimizer(kind, flags, hyper, t.dim());
    ASSERT_TRUE(t->BeginStep(t.exec(), flags, hyper, t.tick() + 1).ok());
    t.Apply(optimizer, keys, found, gradients, iteration);
    t->EndStep(t.exec(), hyper, iteration, t.tick());
    const auto dim = static_cast<size_t>(t.dim());
    const Floats zeros(dim);
    std::map<uint64_t, const float*> of;
    for (size_t i = 0; i < keys.size(); ++i) of[keys[i]] = &gradients[i * dim];
    for (auto& [key, row] : rows) {
      const auto own = of.find(key);
      optimizer.Apply(row.vector.data(), row.state.data(),
                      own == of.end() ? zeros.data() : own->second);
    }
  }

  static void ExpectClose(float got, float expected, float tolerance) {
    EXPECT_NEAR(got, expected, tolerance * std::max(1.0f, std::abs(expected)));
  }
  void ExpectVectors(const Keys& keys, const Floats& got, float tolerance = 2e-6f) const {
    const auto dim = static_cast<size_t>(t.dim());
    for (size_t i = 0; i < keys.size(); ++i) {
      for (size_t c = 0; c < dim; ++c) {
        SCOPED_TRACE(keys[i]);
        ExpectClose(got[i * dim + c], rows.at(keys[i]).vector[c], tolerance);
      }
    }
  }
  Keys AllKeys() const {
    Keys keys;
    for (const auto& [key, row] : rows) keys.push_back(key);
    return keys;
  }
  // Reads that change no row, and then one that does.
  void ExpectEqual() {
    const Keys keys = AllKeys();
    Floats state;
    ExpectVectors(keys, t.Read(keys, &state));
    for (const Exported& row : t.Export()) {
      if (row.key >= kBallast) continue;
      SCOPED_TRACE(row.key);
      const Row& expected = rows.at(row.key);
      for (size_t c = 0; c < expected.vector.size(); ++c) {
        ExpectClose(row.vector[c], expected.vector[c], 2e-6f);
      }
      for (size_t c = 0; c < expected.state.size(); ++c) {
        ExpectClose(row.state[c], expected.state[c], 2e-6f);
      }
      EXPECT_EQ(row.state.back(), t->catch_up().mark());
    }
    ExpectVectors(keys, t.Lookup(keys));
    ExpectVectors(keys, t.LookupOrInsert(keys));
  }

  static constexpr uint64_t kBallast = 1000000;  // Cool uses the keys from here on

  Subject t;
  StateSpec spec{};
  OptimizerKind kind = OptimizerKind::kSgd;
  OptimizerFlags flags{};
  Hyper hyper;
  uint64_t iteration = 0;
  std::map<uint64_t, Row> rows{};

 private:
  Row NewRow() const {
    Row row;
    for (size_t i = 0; i + 1 < spec.widths.size(); ++i) {
      row.state.insert(row.state.end(), static_cast<size_t>(spec.widths[i]), spec.inits[i]);
    }
    return row;
  }
};

inline bool Is32Bit(const TableFixture& f) { return f.dtype() == DType::kFloat32; }

inline Floats RandomFloats(Random* random, size_t n) {
  Floats values(n);
  for (float& value : values) value = static_cast<float>(random->Below(2001)) / 1000 - 1;
  return values;
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_CATCH_UP_WORLD_H_
