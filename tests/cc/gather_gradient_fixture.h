// The expected sums of GatherGradient, and the fixture that is typed by Places.
#ifndef DYNEMB_TESTS_CC_GATHER_GRADIENT_FIXTURE_H_
#define DYNEMB_TESTS_CC_GATHER_GRADIENT_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cc/device/gather_gradient.h"
#include "cc/lookup/gather.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/places.h"

namespace dynemb {

using GatherGradientTasks = std::vector<GatherGradient::Task>;

inline GatherGradient::Feature FeatureOf(const GatherCase& c) {
  GatherGradient::Feature feature;
  static_cast<UpstreamTask&>(feature) = c.ids->task;
  feature.index = c.index.data();
  return feature;
}

inline std::vector<float> Expected(const GradientCase& c, bool in_chunks) {
  std::vector<IndexedIds> features;
  for (const GatherCase& feature : c.features) {
    features.push_back({feature.ids.get(), &feature.index});
  }
  return ExactSums(c.n, c.dim, features, in_chunks);
}

// The tasks, and uninitialized memory for their sums: for each task one array or several outputs,
// each followed by a guard.
struct GatherOutputs {
  GatherOutputs(const GradientCases& cases, bool several_outputs) : tasks(cases.size()) {
    std::mt19937_64 random(99);
    for (size_t t = 0; t < cases.size(); ++t) {
      tasks[t].n = cases[t].n;
      tasks[t].dim = cases[t].dim;
      for (const GatherCase& c : cases[t].features) tasks[t].features.push_back(FeatureOf(c));
      if (!several_outputs) {
        tasks[t].sums = Add(t, cases[t].n);
        continue;
      }
      size_t left = cases[t].n;
      do {
        const size_t rows =
            std::min<size_t>(left, random() % 3 == 0 ? random() % 3 : random() % (left + 1));
        tasks[t].outputs.push_back({rows, Add(t, rows)});
        left -= rows;
      } while (left > 0);
    }
  }

  // The sums of task t, in the order of the rows.
  std::vector<float> Take(size_t t) const {
    std::vector<float> sums;
    for (const Array& array : arrays_) {
      if (array.task != t) continue;
      EXPECT_TRUE(std::isnan(array.floats[array.n]));
      sums.insert(sums.end(), array.floats.get(), array.floats.get() + array.n);
    }
    return sums;
  }

  GatherGradientTasks tasks;

 private:
  struct Array {
    size_t task, n;
    std::unique_ptr<float[]> floats;
  };
  float* Add(size_t t, size_t rows) {
    const size_t n = rows * static_cast<size_t>(tasks[t].dim);
    arrays_.push_back({t, n, std::make_unique<float[]>(n + 1)});
    std::fill_n(arrays_.back().floats.get(), n + 1, std::numeric_limits<float>::quiet_NaN());
    return arrays_.back().floats.get();
  }
  std::vector<Array> arrays_;
};

inline Status SumAt(HostPlace& at, const GatherGradientTasks& tasks, GatherGradient* scratch) {
  return scratch->Run(at.exec(), tasks);
}
template <class Device>
Status SumAt(DevicePlace<Device>& at, const GatherGradientTasks& tasks, GatherGradient*) {
  return at.Call([&](auto& session) { return device::GatherGradient(session, tasks); });
}

template <class Place>
class GatherGradientFixture : public testing::Test {
 protected:
  static constexpr bool kIsHost = Place::kIsHost;
  static constexpr bool kSlow = Place::kSlow;

  Status TryRun(const GatherGradientTasks& tasks) { return SumAt(place_, tasks, &scratch_); }

  // Checks the sums, bit by bit.
  void CheckAll(const GradientCases& cases) {
    std::vector<std::vector<float>> expected;
    for (const GradientCase& c : cases) expected.push_back(Expected(c, !kIsHost));
    place_.ForEach([&] {
      for (bool several_outputs : {false, true}) {
        SCOPED_TRACE(testing::Message() << "several outputs: " << several_outputs);
        const GatherOutputs outputs(cases, several_outputs);
        const Status status = TryRun(outputs.tasks);
        ASSERT_TRUE(status.ok()) << status.message();
        for (size_t t = 0; t < cases.size(); ++t) {
          ASSERT_NO_FATAL_FAILURE(ExpectSums(outputs.Take(t), expected[t])) << "task " << t;
        }
      }
    });
  }

  static void ExpectSums(const std::vector<float>& sums, const std::vector<float>& expected) {
    ASSERT_EQ(sums.size(), expected.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_TRUE(SameBits(&sums[i], &expected[i], 1))
          << i << ": " << sums[i] << ", " << expected[i];
    }
  }

  Place place_;

 private:
  GatherGradient scratch_;  // reused, so that features grow and shrink in number and size
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_GRADIENT_FIXTURE_H_
