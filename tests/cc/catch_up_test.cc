// The contract suites of catch-up on host tables, serial and with threads; the record of steps.
#include "cc/table/catch_up.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kHostTables[] = {HostTable(KeyType::kInt64, DType::kFloat32),
                                 HostTable(KeyType::kInt32, DType::kFloat32),
                                 HostTable(KeyType::kUint64, DType::kBfloat16)};
// Threads divide the work in the same way for all types.
INSTANTIATE_CATCH_UP_SUITES(HostCatchUp, OnlyIf(kUnderTsan, {0}, kHostTables));

// A record since a watermark has all later steps, or says that it has forgotten some of them.
TEST(CatchUpRecord, StepsSinceAWatermarkAreComplete) {
  for (const uint64_t rate_changes_until : {0, 3, 8}) {
    for (uint64_t watermark = 0; watermark <= 8; ++watermark) {
      for (uint64_t forget = 0; forget <= 8; ++forget) {
        CatchUp steps({"sgd catch_up", {1}, {0.0f}}, 4);
        Hyper hyper;
        hyper.learning_rate = 0.1f;
        steps.Start(10);
        steps.Restart(hyper, false);
        for (uint64_t i = 0; i <= 8; ++i) {
          if (i != 0) {
            if (i <= rate_changes_until) hyper.learning_rate = i % 2 == 0 ? 0.1f : 0.2f;
            steps.Reserve();
            steps.Record(hyper, i, 10 + i);
          }
          if (i == watermark) steps.NoteCut(10 + i);
        }
        steps.Forget(10 + forget);
        const std::vector<double> saved = steps.Save(10 + watermark);
        if (10 + watermark >= steps.forgotten()) {
          EXPECT_EQ(saved[1], 10.0 + static_cast<double>(watermark)) << forget;
        }
        EXPECT_LE(steps.forgotten(), steps.last_tick());
        EXPECT_TRUE(forget != 0 || steps.forgotten() == 0u);
      }
    }
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
