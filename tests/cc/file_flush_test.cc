// Flushes of FileRows: what they contain, and what remains of them after faults.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"
#include "tests/cc/cold_world.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

class FileFlushTest : public ::testing::Test {
 protected:
  static std::string NewFolder(ColdWorld* world) {
    static int number = 0;
    const std::string folder = world->folder / ("flush-" + std::to_string(number++));
    EXPECT_EQ(FileSystem::Posix().MakeDirectory(folder), 0);
    return folder;
  }

  // Flushes the rows of the world, and `hot` as rows of memory.
  static Status Flush(ColdWorld* world, const std::string& folder, const ModelRows& hot) {
    std::vector<char> bytes(world->layout.stride);
    return world->rows->Flush(folder, "the record", [&](const ColdRows::AddHotFn& add) -> Status {
      for (const auto& [key, row] : hot) {
        memcpy(bytes.data() + world->layout.vector_offset, row.content.data(), row.content.size());
        DYNEMB_RETURN_IF_ERROR(add(key, bytes.data(), {row.updated, row.score}, row.tick));
      }
      return Status();
    });
  }

  // Another object of the same layout, with other segments.
  static std::unique_ptr<ColdRows> Empty(ColdWorld* world) {
    std::unique_ptr<ColdRows> rows;
    FileOptions options = world->file_options;
    options.files = &FileSystem::Posix();
    options.segment_bytes *= 2;
    TableOptions table = world->options;
    table.seed = 77;
    ExpectOk(FileRows::Create(options, table, &rows));
    ExpectOk(rows->ChangeLayout(world->layout, {}));
    return rows;
  }

  // A flush restores these rows.
  static void ExpectRestores(ColdWorld* world, const std::string& folder, const ModelRows& model) {
    std::unique_ptr<ColdRows> rows = Empty(world);
    std::string record;
    ExpectOk(rows->ReadFlush(folder, &record));
    EXPECT_EQ(record, "the record");
    ExpectOk(rows->Restore(folder));
    std::swap(world->rows, rows);
    ModelRows had = model;
    std::swap(world->model, had);
    world->ExpectEqual();
    std::swap(world->model, had);
    std::swap(world->rows, rows);
  }

  static ModelRows HotRows(ColdWorld* world, size_t n) {
    ModelRows hot;
    for (size_t i = 0; i < n; ++i) hot[1000000 + i] = world->RandomRow();
    return hot;
  }
  static ModelRows Union(const ModelRows& a, const ModelRows& b) {
    ModelRows all = a;
    all.insert(b.begin(), b.end());
    return all;
  }
  static std::vector<std::string> Names(const std::string& folder) {
    std::vector<std::string> names;
    FileSystem::Posix().List(folder, &names);
    return names;
  }
};

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
  ExpectOk(other.rows->Restore(folder));
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
  ExpectOk(restored->Restore(first));
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

// Rows that were wiped after a flush do not come back, and no other row is lost.
TEST_F(FileFlushTest, WipedRowsStayAway) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 1000)));
  ModelRows flushed = world.model;
  const std::string folder = NewFolder(&world);
  ExpectOk(Flush(&world, folder, {}));
  const std::vector<uint64_t> keys = world.SomeKeys(50, 1000);
  // Rows that waited to be written were copied.
  std::map<uint64_t, ColdPlace> places;
  ExpectOk(world.Find(keys, &places));
  ExpectOk(world.Remove(keys, true));
  std::unique_ptr<ColdRows> rows = Empty(&world);
  ExpectOk(rows->Restore(folder));
  rows->CheckInvariants();
  EXPECT_LT(rows->size(), flushed.size());
  EXPECT_GE(rows->size(), world.model.size());
  size_t listed = 0;
  const auto any = [](const RowTimes&) { return true; };
  const ColdRows::Scanned all = rows->Scan(0, 100000, 100000, any);
  ExpectOk(rows->Read(all.places, [&](size_t, const ColdRow& row) {
    ASSERT_EQ(flushed.count(row.key), 1u);
    EXPECT_TRUE(ColdWorld::RowOf(row, flushed[row.key].content.size()).content ==
                flushed[row.key].content);
    ++listed;
  }));
  EXPECT_EQ(listed, rows->size());
}

// The marker of wiped rows is what makes them stay away; without it, they would be read as zeros.
TEST_F(FileFlushTest, WipeFailsIfItCannotBeNoted) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(500, 1000)));
  const std::string folder = NewFolder(&world);
  ExpectOk(Flush(&world, folder, {}));
  const ModelRows flushed = world.model;
  world.files.Fail(FaultyFileSystem::kSyncDirectory, 1, EIO);
  EXPECT_FALSE(world.Remove(world.SomeKeys(50, 1000), true).ok());
  std::unique_ptr<ColdRows> rows = Empty(&world);
  ExpectOk(rows->Restore(folder));
  EXPECT_EQ(rows->size(), flushed.size());
  testing_files::RemoveAll(folder);
  ExpectOk(world.Remove(world.SomeKeys(50, 1000), true));  // there is no flush to note it in
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
      EXPECT_FALSE(rows->Restore(folder).ok());
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

  const auto damaged = [&](const std::string& what) {
    SCOPED_TRACE(what);
    std::unique_ptr<ColdRows> rows = Empty(&world);
    Status status = rows->Restore(folder);
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
