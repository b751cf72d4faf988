// Models over time: which snapshots are newer, the memory of replaced ones, long chains, and forks.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "cc/serving/served_model.h"
#include "tests/cc/replaced_new.h"
#include "tests/cc/served_world.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

static std::atomic<uint64_t> allocations{0};

static void* AllocateForTest(size_t bytes, size_t alignment) {
  ++allocations;
  void* const p =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

namespace dynemb {
namespace {

using namespace testing_files;
using namespace testing_served;
using ServedChainTest = ServedModelTest;

// The base was written by a machine whose clock was far ahead, the others by one whose clock is
// right. They are in the order of their publication.
TEST_F(ServedChainTest, AClockThatWasAhead) {
  const std::string path = folder_ / "ahead";
  Snapshot ahead = Of("base", 1, 1.0f), delta = Of("delta", 2, 2.0f), base = Of("base", 3, 3.0f);
  ahead.utc_ns = 600000000000;
  delta.utc_ns = 2000000000;
  base.utc_ns = 3000000000;
  ahead.Publish(path);
  MustOpen({{"tables", Quoted(path)}, {"follow", Quoted(path)}, {"follow_seconds", "0.001"}});
  delta.Publish(path);
  WaitFor([this] { return Value(0) == 2.0f && Value(1) == 2.0f; });
  base.Publish(path);
  WaitFor([this] { return Value(0) == 3.0f && Value(1) == 3.0f; });
  EXPECT_TRUE(model_->follow_error().ok());
  // So are the ticks of another process smaller.
  Snapshot restarted = Of("base", 4, 4.0f);
  restarted.watermark = 1;
  restarted.Publish(path);
  WaitFor([this] { return Value(0) == 4.0f && Value(1) == 4.0f; });
}

// The tables of the model came after the snapshots 5 and 6, which its base says.
TEST_F(ServedChainTest, SnapshotsThatAreOlderThanTheBase) {
  Snapshot base = Of("base", 9, 9.0f);
  base.watermark = 100;
  base.after = {5, 6};
  base.Publish(folder_ / "model");
  MustOpen({{"tables", Quoted(folder_ / "model")}});
  uint64_t count = 9;
  const std::string path = folder_ / "other";
  Of("base", 5, 5.0f).Publish(path);
  Of("delta", 6, 6.0f).Publish(path);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Apply(path, &count).ok());
    EXPECT_EQ(count, 0u);
    EXPECT_EQ(Value(0), 9.0f);
  }
  // One that is damaged, and whose predecessors are older, changes nothing.
  Snapshot delta = Of("delta", 7, 7.0f);
  const std::string file = delta.Publish(path) + "/000.r0.keys.npy";
  Flip(file, 127);
  ExpectError(Apply(path, &count), Code::kDataLoss, file + " is damaged");
  EXPECT_EQ(Value(0), 9.0f);
  Flip(file, 127);
  // The rows of the whole chain become visible with the first snapshot that is not older.
  ASSERT_TRUE(Apply(path, &count).ok());
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(Value(0), 7.0f);
  EXPECT_EQ(Value(1), 7.0f);
  EXPECT_EQ(model_->state()->last.id, IdOf(7));
}

// A base of tables with another history than those that are served.
TEST_F(ServedChainTest, BasesOfOtherTables) {
  const auto of = [](uint64_t number, uint64_t items, uint64_t users) {
    Snapshot base = Of("base", number, static_cast<float>(number));
    base.tables[0].history = items;
    base.tables[1].history = users;
    return base;
  };
  const std::string path = folder_ / "path";
  of(1, 101, 102).Publish(path);
  MustOpen({{"tables", Quoted(path)}});
  uint64_t count = 9;
  // The same tables, which their trainer has dumped again, in a process that knows no snapshots.
  of(2, 101, 102).Publish(path);
  ASSERT_TRUE(Apply(path, &count).ok());
  EXPECT_EQ(Value(1), 2.0f);
  // For one table it is not known.
  of(3, 101, 0).Publish(path);
  ASSERT_TRUE(Apply(path, &count).ok());
  EXPECT_EQ(Value(1), 3.0f);
  of(4, 101, 102).Publish(path);
  ASSERT_TRUE(Apply(path, &count).ok());
  for (int i = 0; i < 2; ++i) {
    const std::string directory = of(5 + i, 101, 103).Publish(path);
    ExpectError(Apply(path, &count), Code::kFailedPrecondition,
                directory + " is of another table 'user'");
    EXPECT_EQ(count, 0u);
    EXPECT_EQ(Value(1), 4.0f);
  }
  // It says that it comes after what is served.
  Snapshot after = of(7, 104, 105);
  after.after = {4};
  after.Publish(path);
  ASSERT_TRUE(Apply(path, &count).ok());
  EXPECT_EQ(Value(1), 7.0f);
  // A model that takes any base, and one with a damaged descriptor.
  MustOpen({{"tables", Quoted(path)}, {"unrelated", "true"}});
  of(8, 106, 107).Publish(path);
  ASSERT_TRUE(Apply(path, &count).ok());
  EXPECT_EQ(Value(1), 8.0f);
  ExpectError(Open({{"unrelated", "1"}}), Code::kDataLoss, "its member unrelated is wrong");
}

// A base that was merged from a chain is older than a state that has more of the chain, and
// replaces one that has no more.
TEST_F(ServedChainTest, MergedBases) {
  MustOpen();
  uint64_t count = 9;
  Of("delta", 2, 2.0f).Publish(tables_);
  Of("delta", 3, 3.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  Snapshot merged = Of("base", 7, 2.0f);
  merged.watermark = 20;
  merged.continues = {2};
  merged.Publish(folder_ / "merged");
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Apply(folder_ / "merged", &count).ok());
    EXPECT_EQ(count, 0u);
    EXPECT_EQ(model_->state()->last.id, IdOf(3));
  }
  merged = Of("base", 8, 3.0f);
  merged.watermark = 30;
  merged.continues = {3};
  merged.Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(model_->state()->last.id, IdOf(8));
}

// A base and the deltas after it become visible together, up to a damaged one.
TEST_F(ServedChainTest, ANewChainBecomesVisibleAtOnce) {
  MustOpen();
  uint64_t count = 9;
  Of("base", 4, 4.0f).Publish(tables_);
  Of("delta", 5, 5.0f).Publish(tables_);
  const std::string file = Of("delta", 6, 6.0f).Publish(tables_) + "/001.r0.vectors.npy";
  Flip(file, 127);
  ExpectError(Apply(tables_, &count), Code::kDataLoss, file + " is damaged");
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(Value(0), 5.0f);
  Flip(file, 127);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(Value(1), 6.0f);
}

// A delta that the state does not need, but whose parent it does not have, is not passed over in
// silence: it may belong to other tables.
TEST_F(ServedChainTest, ADeltaOfAnUnknownParent) {
  MustOpen();
  uint64_t count = 0;
  Snapshot other = Of("delta", 8, 8.0f);
  other.watermark = 5;
  other.since = 0;
  other.Publish(folder_ / "other");
  ExpectError(Apply(folder_ / "other", &count), Code::kDataLoss, "a gap before");
}

// A state that was replaced is freed kMemory later, although nothing else is published.
TEST_F(ServedChainTest, ReplacedStatesAreForgotten) {
  MustOpen();
  uint64_t count = 0;
  const std::weak_ptr<const ServedState> before = model_->state();
  Of("base", 2, 2.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_FALSE(before.expired());  // a request may still read it
  WaitFor([&before] { return before.expired(); });
  EXPECT_EQ(Value(0), 2.0f);
}

// A forked child has the model and not its thread, which has a lock at that moment.
TEST_F(ServedChainTest, AForkedChildEnds) {
  if (kSanitized) GTEST_SKIP() << "the thread sanitizer knows no threads of forked children";
  const std::string path = folder_ / "published";
  MustOpen({{"follow", Quoted(path)}, {"follow_seconds", "0.001"}});
  const std::string directory = path + "/" + Of("base", 2, 2.0f).Name();
  ASSERT_EQ(mkdir(path.c_str(), 0755) + mkdir(directory.c_str(), 0755), 0);
  // A reader that opens this manifest waits for a writer.
  ASSERT_EQ(mkfifo((directory + "/MANIFEST.json").c_str(), 0644), 0);
  int writer = -1;
  WaitFor([&] {
    if (writer < 0)
      writer = open((directory + "/MANIFEST.json").c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    return writer >= 0;  // the thread has opened it for reading, and holds the lock of Apply
  });
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a child that waits
    model_->Detach(0);
    model_.reset();
    std::shared_ptr<ServedModel> own;  // and not the parent's model
    const bool opened = ServedModel::Open(exec_, folder_ / "served.json", kTables[0], &own).ok() &&
                        own->Attach(OptionsOf(kTables[0]), std::make_unique<size_t>().get()).ok();
    _exit(opened ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  unlink((directory + "/MANIFEST.json").c_str());  // the next poll does not wait for it
  close(writer);
}

// The work of opening a chain is proportional to its length. The work of a poll that finds nothing
// does not depend on it.
TEST_F(ServedChainTest, LongChains) {
  uint64_t opened[2], polled[2];
  for (uint64_t length : {200, 400}) {
    const size_t i = length / 200 - 1;
    const std::string path = folder_ / std::to_string(length);
    for (uint64_t number = 1; number <= length; ++number) {
      Snapshot snapshot = Of(number == 1 ? "base" : "delta", number, 1.0f);
      for (TestTable& table : snapshot.tables) table.shards[0].rows = {{1, 1.0f}};
      snapshot.Publish(path);
    }
    const std::string descriptor = Describe({{"tables", Quoted(path)}});
    model_.reset();
    allocations = 0;
    ASSERT_TRUE(ServedModel::Open(exec_, descriptor, kTables[0], &model_).ok());
    opened[i] = allocations;
    uint64_t count = 9;
    allocations = 0;
    ASSERT_TRUE(Apply(path, &count).ok());
    polled[i] = allocations;
    EXPECT_EQ(count, 0u);
  }
  EXPECT_LT(opened[1], opened[0] * 5 / 2);
  EXPECT_LT(polled[1], polled[0] + 20);
}

}  // namespace
}  // namespace dynemb
