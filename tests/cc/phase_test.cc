#include "cc/table/phase.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

class Recorder final : public PhaseListener {
 public:
  Recorder() { Phase::Listen(this); }
  ~Recorder() override { Phase::Listen(nullptr); }
  int64_t Begin(const char* name) override {
    log.push_back(std::string(depth_++, ' ') + name);
    return static_cast<int64_t>(log.size());
  }
  void End(int64_t id) override {
    --depth_;
    ended.push_back(id);
  }
  std::vector<std::string> log;
  std::vector<int64_t> ended;

 private:
  size_t depth_ = 0;
};

TEST(PhaseTest, EndGetsTheIdOfBeginInNestedPhases) {
  Recorder recorder;
  {
    Phase outer("outer");
    { Phase inner("inner"); }
    Phase second("second");
  }
  EXPECT_EQ(recorder.log, (std::vector<std::string>{"outer", " inner", " second"}));
  EXPECT_EQ(recorder.ended, (std::vector<int64_t>{2, 3, 1}));
}

TEST(PhaseTest, WithoutAListener) {
  { Recorder recorder; }
  Phase phase("unheard");
}

// A listener that is removed while a phase is open is notified of its end, but not of later phases.
TEST(PhaseTest, RemovedListenerIsNotifiedOfTheEnd) {
  Recorder recorder;
  {
    Phase phase("heard");
    Phase::Listen(nullptr);
    Phase unheard("unheard");
  }
  EXPECT_EQ(recorder.log, std::vector<std::string>{"heard"});
  EXPECT_EQ(recorder.ended, std::vector<int64_t>{1});
}

TEST(PhaseTest, PhasesOfABatch) {
  TableOptions options;
  options.dim = 4;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  const std::vector<int64_t> keys = {1, 2, 2};
  std::vector<RowId> rows(3);
  Recorder recorder;
  SerialExec exec;
  {
    TableLock lock({table.get()}, TableLock::Mode::kExclusive);
    ASSERT_TRUE(table->FindOrInsert(exec, {keys.data(), 3}, 1, rows.data()).ok());
  }
  EXPECT_EQ(recorder.log,
            (std::vector<std::string>{"wait for locks", "find", "insert", " find repeated keys",
                                      " fault in memory", " grow the index", " fill rows",
                                      " claim slots"}));
}

}  // namespace
}  // namespace dynemb
