// FileRows in a child of fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cc/file/file_rows.h"
#include "tests/cc/cold_world.h"

namespace dynemb {
namespace {

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// A child of fork has a copy of the rows, and the files are its parent's.
TEST(FileRows, AChildOfForkChangesNothing) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  const ModelRows rows = world.model;
  const std::vector<uint64_t> all = [&rows] {
    std::vector<uint64_t> keys;
    for (const auto& [key, row] : rows) keys.push_back(key);
    return keys;
  }();
  const pid_t child = fork();
  if (child == 0) {
    const auto fails = [](const Status& status) {
      return status.code() == Code::kFailedPrecondition;
    };
    std::map<uint64_t, ColdPlace> places;
    bool right = world.Find(all, &places).ok() && places.size() == all.size();
    right &= fails(world.rows->Reserve(10));
    right &=
        fails(world.rows->Flush(world.folder.path(), "", [](const auto&) { return Status(); }));
    right &= fails(world.rows->NoteForgotten(world.folder.path(), {1}));
    // Segments whose last rows go, and then all of them.
    std::vector<ColdPlace> at;
    for (const uint64_t key : all) at.push_back(places[key]);
    world.rows->Remove(all.data(), at.data(), 150);
    world.rows->Clear();
    world.rows.reset();
    std::unique_ptr<ColdRows> own;
    right &= FileRows::Create(world.file_options, world.options, &own).ok();
    right &= own != nullptr && own->Reserve(10).ok();
    own.reset();
    _exit(right && !::testing::Test::HasFailure() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  world.ExpectEqual();
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  ExpectOk(world.Compact());
  world.ExpectEqual();
}

}  // namespace
}  // namespace dynemb
