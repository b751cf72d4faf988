// The kinds of tables that random calls compare with tables in memory.
#ifndef DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_
#define DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_

#include <cstdint>
#include <ostream>
#include <string>

#include "cc/lookup/apply.h"
#include "cc/table/optimizer.h"
#include "cc/table/table_options.h"

namespace dynemb {
namespace testing_table {

struct Case {
  std::string name;
  EvictStrategy strategy = EvictStrategy::kLru;
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  int64_t ttl = 0;
  bool since_access = false;
  bool admits_second = false;
  int64_t epoch_steps = 0;
  int64_t tick_jump = 1;
  bool catch_up = false;
};
inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

inline const Case kCases[] = {
    {"Lru"},
    {"LruInt32Bf16", EvictStrategy::kLru, KeyType::kInt32, DType::kBfloat16},
    {"Lfu", EvictStrategy::kLfu, KeyType::kInt32, DType::kFloat32},
    {"EpochLfu", EvictStrategy::kEpochLfu, KeyType::kInt64, DType::kFloat16, 0, false, false, 3},
    {"Score", EvictStrategy::kScore, KeyType::kInt64, DType::kBfloat16},
    {"None", EvictStrategy::kNone},
    {"Ttl", EvictStrategy::kLru, KeyType::kInt64, DType::kFloat32, 12, false},
    {"TtlSinceAccess", EvictStrategy::kLru, KeyType::kInt64, DType::kFloat32, 9, true},
    {"TtlLfu", EvictStrategy::kLfu, KeyType::kInt32, DType::kBfloat16, 15, false},
    {"Admission", EvictStrategy::kLru, KeyType::kInt64, DType::kFloat32, 0, false, true},
    {"AdmissionTtlLfu", EvictStrategy::kLfu, KeyType::kInt64, DType::kFloat32, 20, false, true},
    {"LateTicks", EvictStrategy::kLru, KeyType::kInt64, DType::kFloat32, 0, false, false, 0,
     int64_t{1} << 28},
    {"CatchUp", EvictStrategy::kLru, KeyType::kInt64, DType::kFloat32, 0, false, false, 0, 1, true},
    {"CatchUpTtlLfuBf16", EvictStrategy::kLfu, KeyType::kInt32, DType::kBfloat16, 15, false, false,
     0, 1, true},
};

// The step of a case in this iteration. With catch_up, the learning rate changes often, and another
// hyperparameter sometimes.
inline OptimizerStep AdamStep(const Case& c, uint64_t iteration) {
  OptimizerStep step;
  step.kind = OptimizerKind::kAdam;
  step.state = "adam";
  step.inits = {0.0f, 0.0f};
  step.iteration = iteration;
  step.hyper.learning_rate = 0.1f;
  step.hyper.beta_1 = 0.9f;
  step.hyper.beta_2 = 0.99f;
  step.hyper.epsilon = 1e-6f;
  step.hyper.iteration = static_cast<float>(iteration);
  if (!c.catch_up) return step;
  step.flags.catch_up = true;
  step.state += " catch_up";
  step.inits.push_back(0.0f);
  step.hyper.learning_rate = 0.01f * static_cast<float>(1 + iteration / 3 % 2);
  step.hyper.weight_decay = iteration / 20 % 2 == 0 ? 0.05f : 0.0f;
  return step;
}

inline StateSpec AdamState(const OptimizerStep& step, int64_t dim) {
  return {step.state, StateWidths(step.kind, step.flags, dim), step.inits};
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_
