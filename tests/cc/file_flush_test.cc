// Flushes of FileRows: what they contain, and what remains of them after faults.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"
#include "tests/cc/cold_world.h"
#include "tests/cc/flush_fixture.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

// Segments of a flush have the numbers of segments that the object had itself.
TEST_F(FileFlushTest, RowsThatWereReadAheadAreForgotten) {
  ColdWorld one(16, 4, 1), other(16, 4, 2);
  ExpectOk(one.Add(one.NewRows(2000, 8000)));
  ModelRows same_keys;
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : one.model) {
    same_keys[key] = other.RandomRow();
    keys.push_back(key);
  }
  ExpectOk(other.Add(same_keys));
  const std::string folder = NewFolder(&one);
  ExpectOk(Flush(&one, folder, {}));
  std::unique_ptr<ColdRows::Ahead> ahead = other.rows->PlanAhead(keys.data(), keys.size());
  ASSERT_NE(ahead, nullptr);
  ExpectOk(ahead->Read());
  other.rows->KeepAhead(std::move(ahead));
  other.rows->Clear();
  std::vector<uint64_t> forgotten;
  ExpectOk(other.rows->Restore(folder, &forgotten));
  other.model = one.model;
  other.ExpectEqual();
}

TEST_F(FileFlushTest, HasTheRowsOfItsTime) {
  for (const int64_t dim : {3, 16, 1100}) {
    SCOPED_TRACE(dim);
    ColdWorld world(dim, 4, static_cast<uint64_t>(dim));
    const size_t rows = dim > 100 ? 12 : 300;
    std::string last;
    ModelRows of_last;
    for (size_t round = 0; round < Longer(12); ++round) {
      SCOPED_TRACE(round);
      ExpectOk(world.Add(world.NewRows(world.random() % rows, 3 * rows)));
      ExpectOk(world.Remove(world.SomeKeys(world.random() % rows, 3 * rows)));
      if (world.random() % 3 == 0) ExpectOk(world.Compact());
      if (world.random() % 20 == 0) {
        world.rows->Clear();
        world.model.clear();
      }
      // Whatever happened since then, the last flush has not changed.
      if (!last.empty()) ExpectRestores(&world, last, of_last);
      const ModelRows hot = HotRows(&world, world.random() % 5000 / (dim > 100 ? 200 : 1));
      last = NewFolder(&world);
      ExpectOk(Flush(&world, last, hot));
      of_last = Union(world.model, hot);
      ExpectRestores(&world, last, of_last);
      world.ExpectEqual();
    }
  }
}

TEST_F(FileFlushTest, RestoredRowsAreRowsLikeOthers) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 2000)));
  const std::string first = NewFolder(&world);
  ExpectOk(Flush(&world, first, {}));
  std::unique_ptr<ColdRows> restored = Empty(&world);
  std::vector<uint64_t> forgotten;
  ExpectOk(restored->Restore(first, &forgotten));
  world.rows = std::move(restored);  // the old ones, and their files, are gone
  testing_files::RemoveAll(first);
  for (size_t round = 0; round < Longer(10); ++round) {
    ExpectOk(world.Remove(world.SomeKeys(100, 2000)));
    ExpectOk(world.Add(world.NewRows(200, 2000)));
    ExpectOk(world.Compact());
    world.ExpectEqual();
  }
  const std::string second = NewFolder(&world);
  ExpectOk(Flush(&world, second, {}));
  ExpectRestores(&world, second, world.model);
}

// Keys that are noted as forgotten do not come back, and no other row is lost. Nothing that the
// flush has is changed for that: others may have links to its files, or may be reading them.
TEST_F(FileFlushTest, ForgottenRowsStayAway) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 1000)));
  const std::string folder = NewFolder(&world);
  const ModelRows hot = HotRows(&world, 100);
  ExpectOk(Flush(&world, folder, hot));
  ModelRows left = Union(world.model, hot);
  const auto contents = [&folder] {
    std::map<std::string, std::string> files;
    for (const std::string& name : Names(folder)) {
      if (name != "forgotten") files[name] = testing_files::Read(folder + "/" + name);
    }
    return files;
  };
  const auto before = contents();
  std::vector<uint64_t> all;
  for (int round = 0; round < 4; ++round) {
    std::vector<uint64_t> keys = world.SomeKeys(50, 1000);
    keys.push_back(1000000 + static_cast<uint64_t>(round));  // of a row of memory
    keys.push_back(77777777);                                // of no row
    for (const uint64_t key : keys) left.erase(key);
    all.insert(all.end(), keys.begin(), keys.end());
    ExpectOk(world.rows->NoteForgotten(folder, all));
    ExpectOk(world.Remove(keys, /*wipe=*/true));
    world.ExpectEqual();
    EXPECT_TRUE(contents() == before);
    ExpectRestores(&world, folder, left);
  }
  std::unique_ptr<ColdRows> rows = Empty(&world);
  std::vector<uint64_t> forgotten;
  ExpectOk(rows->Restore(folder, &forgotten));
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  EXPECT_EQ(forgotten, all);
}

// A wiped row is in no file of the table: neither in those that it was in, nor in a flush.
TEST_F(FileFlushTest, WipedRowsAreInNoFile) {
  for (const bool in_cut : {false, true}) {
    SCOPED_TRACE(in_cut);
    ColdWorld world(16, 4);
    ExpectOk(world.Add(world.NewRows(500, 1000)));
    std::vector<std::string> patterns;
    std::vector<uint64_t> keys = world.SomeKeys(40, 1000);
    for (const uint64_t key : keys) {
      if (world.model.count(key) != 0) patterns.push_back(world.model[key].content);
    }
    ASSERT_GT(patterns.size(), 10u);
    const auto count = [&] {
      std::vector<std::string> files;
      ListFiles(world.folder.path(), &files);
      size_t found = 0;
      for (const std::string& file : files) {
        const std::string bytes = testing_files::Read(file);
        for (const std::string& pattern : patterns) found += bytes.find(pattern) != bytes.npos;
      }
      return found;
    };
    EXPECT_GT(count(), patterns.size() / 2);
    if (in_cut) world.rows->BeginCut([](const RowTimes&) { return true; });
    ExpectOk(world.Remove(keys, /*wipe=*/true));
    if (in_cut) {
      // The cut has all of its rows.
      size_t read = 0;
      for (auto plan = world.rows->PlanCut(100); !plan.empty(); plan = world.rows->PlanCut(100)) {
        ExpectOk(world.rows->ReadCut(plan, [&](size_t, const ColdRow&) { ++read; }));
      }
      EXPECT_EQ(read, world.model.size() + patterns.size());
      world.rows->EndCut();
    }
    EXPECT_EQ(count(), 0u);
    const std::string folder = NewFolder(&world);
    ExpectOk(Flush(&world, folder, {}));
    EXPECT_EQ(count(), 0u);
    world.ExpectEqual();
  }
}

// Files that cannot be rewritten are in no flush until they can.
TEST_F(FileFlushTest, ACondemnedFileIsInNoFlush) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 1000)));
  std::map<uint64_t, ColdPlace> places;
  ExpectOk(world.Find(world.SomeKeys(50, 1000), &places));
  for (const auto& [key, place] : places) {
    world.rows->Remove(&key, &place, 1);
    world.model.erase(key);
    world.rows->Condemn(&place, 1);
  }
  const auto none = [](const auto&) { return Status(); };
  for (const auto call : {FaultyFileSystem::kPread, FaultyFileSystem::kOpen}) {
    world.files.Fail(call, 1, EIO, FaultyFileSystem::kForever);
    EXPECT_EQ(world.Rewrite().code(), Code::kDataLoss);
    world.files.Heal();
    world.ExpectEqual();
    EXPECT_FALSE(world.rows->Flush(NewFolder(&world), "", none).ok());
  }
  const std::string folder = NewFolder(&world);
  ExpectOk(Flush(&world, folder, {}));
  ExpectRestores(&world, folder, world.model);
}

// If a key to forget cannot be noted, it is not forgotten. Keys that were forgotten before stay
// forgotten.
TEST_F(FileFlushTest, ForgottenKeysThatCannotBeNoted) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 1000)));
  const std::string folder = NewFolder(&world);
  ExpectOk(Flush(&world, folder, {}));
  ExpectOk(world.rows->NoteForgotten(folder, {world.model.begin()->first}));
  ModelRows left = world.model;
  left.erase(left.begin());
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    const uint64_t key = std::next(left.begin(), 5)->first;
    world.files.Crash(n, n % 3 * 9);
    const Status status = world.rows->NoteForgotten(folder, {world.model.begin()->first, key});
    world.files.Heal();
    ModelRows without = left;
    without.erase(key);
    if (status.ok()) {
      ExpectRestores(&world, folder, without);
      EXPECT_GT(n, 4);
      break;
    }
    std::unique_ptr<ColdRows> rows = Empty(&world);
    std::vector<uint64_t> forgotten;
    ExpectOk(rows->Restore(folder, &forgotten));
    ASSERT_LE(forgotten.size(), 2u);
    ExpectRestores(&world, folder, forgotten.size() == 2 ? without : left);
    ExpectOk(world.rows->NoteForgotten(folder, {world.model.begin()->first}));
  }
  testing_files::RemoveAll(folder);
  ExpectOk(world.rows->NoteForgotten(folder, {1}));  // there is no flush to note it in
}

// A call that fails at any point leaves no flush, changes no row, and the flush before it stays.
TEST_F(FileFlushTest, LossOfPower) {
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    ColdWorld world(16, 4, 5);
    ExpectOk(world.Add(world.NewRows(200, 1000)));
    const std::string before = NewFolder(&world);
    ExpectOk(Flush(&world, before, {}));
    const ModelRows of_before = world.model;
    ExpectOk(world.Add(world.NewRows(200, 1000)));
    const std::string folder = NewFolder(&world);
    const ModelRows hot = HotRows(&world, 700);
    world.files.Crash(n, n % 3 * 1000);
    const Status status = Flush(&world, folder, hot);
    world.files.Heal();
    if (status.ok()) {
      EXPECT_GT(n, 10);
      break;
    }
    EXPECT_NE(status.message().find("/"), std::string::npos) << status.message();
    world.ExpectEqual();
    ExpectRestores(&world, before, of_before);
    std::unique_ptr<ColdRows> rows = Empty(&world);
    std::string record;
    // The manifest may be there if only the last fsync failed; then everything is.
    if (rows->ReadFlush(folder, &record).ok()) {
      ExpectRestores(&world, folder, Union(world.model, hot));
    } else {
      std::vector<uint64_t> forgotten;
      EXPECT_FALSE(rows->Restore(folder, &forgotten).ok());
    }
    const std::string again = NewFolder(&world);
    ExpectOk(Flush(&world, again, hot));
    ExpectRestores(&world, again, Union(world.model, hot));
  }
}

// Nothing is a flush before its files are durable: each of them was synced.
TEST_F(FileFlushTest, SyncsEveryFile) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(400, 1000)));
  const std::string folder = NewFolder(&world);
  const int64_t synced = world.files.calls(FaultyFileSystem::kFsync);
  ExpectOk(Flush(&world, folder, HotRows(&world, 300)));
  const auto files = static_cast<int64_t>(Names(folder).size());
  EXPECT_GT(files, 4);
  EXPECT_EQ(world.files.calls(FaultyFileSystem::kFsync) - synced, files);
}

// Every damage is an error that names a file, when the flush is restored or when a row is read.
TEST_F(FileFlushTest, Damage) {
  ColdWorld world(16, 4, 9);
  ExpectOk(world.Add(world.NewRows(250, 1000)));
  const std::string folder = NewFolder(&world);
  const ModelRows hot = HotRows(&world, 60);
  ExpectOk(Flush(&world, folder, hot));
  const ModelRows flushed = Union(world.model, hot);
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : flushed) keys.push_back(key);

  const auto restores = [&] {
    std::vector<uint64_t> forgotten;
    return Empty(&world)->Restore(folder, &forgotten).ok();
  };
  const auto damaged = [&](const std::string& what) {
    SCOPED_TRACE(what);
    std::unique_ptr<ColdRows> rows = Empty(&world);
    std::vector<uint64_t> forgotten;
    Status status = rows->Restore(folder, &forgotten);
    size_t found = 0;
    if (status.ok()) {
      status = rows->Find(keys.data(), keys.size(), [&](size_t i, const ColdRow& row) {
        ++found;
        EXPECT_TRUE(ColdWorld::RowOf(row, flushed.at(keys[i]).content.size()) ==
                    flushed.at(keys[i]));
      });
    }
    if (status.ok()) return found;
    EXPECT_EQ(status.code(), Code::kDataLoss) << status.message();
    EXPECT_NE(status.message().find("/"), std::string::npos) << status.message();
    return size_t{0};
  };
  ASSERT_EQ(damaged("nothing"), flushed.size());
  size_t tried = 0;
  for (const std::string& name : Names(folder)) {
    const std::string path = folder + "/" + name;
    const std::string bytes = testing_files::Read(path);
    // A new file, so that the table's own link keeps its contents.
    const auto replace = [&](const std::string& with) {
      ASSERT_EQ(FileSystem::Posix().Unlink(path), 0);
      testing_files::Write(path, with);
    };
    for (size_t i = 0; i < Longer(25); ++i) {
      std::string flipped = bytes;
      flipped[world.random() % bytes.size()] ^= static_cast<char>(1 << world.random() % 8);
      replace(flipped);
      EXPECT_EQ(damaged(name + " flipped"), 0u);
      replace(bytes.substr(0, world.random() % bytes.size()));
      EXPECT_FALSE(restores()) << name << " truncated";
      EXPECT_EQ(damaged(name + " truncated"), 0u);
      tried += 2;
    }
    ASSERT_EQ(FileSystem::Posix().Unlink(path), 0);
    EXPECT_EQ(damaged(name + " missing"), 0u);
    testing_files::Write(path, bytes);
    ASSERT_EQ(damaged(name + " restored"), flushed.size());
  }
  EXPECT_GT(tried, 100u);
}

}  // namespace
}  // namespace dynemb
