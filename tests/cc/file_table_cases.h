// The kinds of tables that random calls compare with tables in memory.
#ifndef DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_
#define DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_

#include <cstdint>
#include <ostream>
#include <string>

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
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FILE_TABLE_CASES_H_
