#include "cc/lookup/lookups.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

// Sums of one id per bag, of two tasks.
struct TwoTasks {
  TwoTasks() {
    EXPECT_TRUE(bags[0].InitUniform(1, 3, 3).ok());
    EXPECT_TRUE(bags[1].InitUniform(1, 2, 2).ok());
    tasks.resize(2);
    for (size_t t = 0; t < 2; ++t) {
      tasks[t].keys = keys;
      tasks[t].bags = &bags[t];
      tasks[t].upstream = upstream;
      tasks[t].dim = 1;
    }
  }

  const int64_t keys[3] = {5, 7, 5};
  const float upstream[3] = {1.0f, 2.0f, 4.0f};
  Bags bags[2];
  std::vector<BackwardTask> tasks;
};

TEST(HostLookupsTest, SumsAreWrittenToTheArraysOfEachTask) {
  TwoTasks given;
  SerialExec exec;
  std::vector<std::pair<size_t, size_t>> asked;
  uint64_t keys[2][2];
  float sums[2][2];
  const Status status = HostLookups().SumGradients(
      exec, given.tasks, [&](size_t task, size_t num_unique, BackwardOutput* output) {
        asked.emplace_back(task, num_unique);
        output->keys = keys[task];
        output->sums = sums[task];
        return Status();
      });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(asked, (std::vector<std::pair<size_t, size_t>>{{0, 2}, {1, 2}}));
  const float expected[2][2] = {{5.0f, 2.0f}, {1.0f, 2.0f}};  // of keys 5 and 7
  for (size_t t = 0; t < 2; ++t) {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(sums[t][i], expected[t][keys[t][i] == 7]) << t << ", key " << keys[t][i];
    }
  }
}

TEST(HostLookupsTest, ErrorOfTheAllocationIsReturned) {
  TwoTasks given;
  SerialExec exec;
  size_t asked = 0;
  const Status status =
      HostLookups().SumGradients(exec, given.tasks, [&](size_t, size_t, BackwardOutput*) {
        ++asked;
        return ResourceExhausted("no room");
      });
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.message(), "no room");
  EXPECT_EQ(asked, 1u);
}

}  // namespace
}  // namespace dynemb
