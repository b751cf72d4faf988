// FileRows with damaged files, a full or broken disk, and without memory.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/table/warning.h"
#include "tests/cc/cold_world.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

class FileRowsFaultsTest : public ::testing::Test {
 protected:
  // The files of the rows.
  static std::vector<std::string> Files(ColdWorld* world) {
    std::vector<std::string> files;
    ListFiles(&world->files, world->file_options.folder, &files);
    return files;
  }

  static void ListFiles(FileSystem* files, const std::string& path,
                        std::vector<std::string>* found) {
    std::vector<std::string> names;
    if (files->List(path, &names) < 0) return found->push_back(path);
    for (const std::string& name : names) {
      if (name != "LOCK") ListFiles(files, path + "/" + name, found);
    }
  }

  // Every key is found as it is in the model, or its read fails with an error that names `file`.
  static size_t CountFailures(ColdWorld* world, const std::string& file) {
    size_t failures = 0;
    for (const auto& [key, row] : world->model) {
      std::map<uint64_t, ColdPlace> places;
      const Status status = world->Find({key}, &places);
      if (status.ok()) continue;
      ++failures;
      EXPECT_EQ(status.code(), Code::kDataLoss) << status.message();
      EXPECT_NE(status.message().find(file), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("offset"), std::string::npos) << status.message();
    }
    return failures;
  }
};

TEST_F(FileRowsFaultsTest, FlippedBits) {
  for (const int64_t dim : {16, 1100}) {
    ColdWorld world(dim, 4);
    ExpectOk(world.Add(world.NewRows(dim > 100 ? 10 : 200, 1000)));
    const std::vector<std::string> files = Files(&world);
    ASSERT_FALSE(files.empty());
    for (size_t i = 0; i < (kSanitized ? 20u : Longer(60)); ++i) {
      const std::string& file = files[world.random() % files.size()];
      const int fd = open(file.c_str(), O_RDWR);
      const off_t size = lseek(fd, 0, SEEK_END);
      if (size > 0) {
        const auto at = static_cast<off_t>(world.random() % static_cast<uint64_t>(size));
        char byte;
        ASSERT_EQ(pread(fd, &byte, 1, at), 1);
        const char flipped = static_cast<char>(byte ^ 1 << world.random() % 8);
        ASSERT_EQ(pwrite(fd, &flipped, 1, at), 1);
        EXPECT_GT(CountFailures(&world, file), 0u);
        ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
      }
      close(fd);
    }
    world.ExpectEqual();
  }
}

// Blocks whose checksums are right.
TEST_F(FileRowsFaultsTest, ABlockInThePlaceOfAnotherIsDamage) {
  ColdWorld world(16, 8);
  ExpectOk(world.Add(world.NewRows(6000, 8000)));
  std::vector<std::string> full;
  for (const std::string& file : Files(&world)) {
    if (testing_files::Read(file).size() == 8 * kBlockBytes) full.push_back(file);
  }
  ASSERT_GE(full.size(), 2u);
  const std::string content = testing_files::Read(full[0]);
  const std::string other_file = testing_files::Read(full[1]).substr(3 * kBlockBytes, kBlockBytes);
  const std::string other_place = content.substr(5 * kBlockBytes, kBlockBytes);
  const int fd = open(full[0].c_str(), O_RDWR);
  for (const std::string& block : {other_file, other_place}) {
    ASSERT_EQ(pwrite(fd, block.data(), kBlockBytes, 3 * kBlockBytes),
              static_cast<ssize_t>(kBlockBytes));
    EXPECT_GT(CountFailures(&world, full[0]), 10u);
  }
  ASSERT_EQ(pwrite(fd, content.data(), content.size(), 0), static_cast<ssize_t>(content.size()));
  close(fd);
  world.ExpectEqual();
}

// Rows that cannot be read cost their segment, and not the space of all others.
TEST_F(FileRowsFaultsTest, CompactionGoesRoundDamage) {
  ColdWorld world(16, 8);
  ExpectOk(world.Add(world.NewRows(6000, 8000)));
  std::string damaged;
  for (const std::string& file : Files(&world)) {
    if (testing_files::Read(file).size() == 8 * kBlockBytes) damaged = file;
  }
  testing_files::Flip(damaged, 5 * kBlockBytes + 100);
  // The rows of this unit, which no call asks for.
  ModelRows lost;
  for (const auto& [key, row] : world.model) {
    std::map<uint64_t, ColdPlace> places;
    if (!world.Find({key}, &places).ok()) lost[key] = row;
  }
  ASSERT_GT(lost.size(), 20u);
  for (const auto& [key, row] : lost) world.model.erase(key);
  const auto without_lost = [&](std::vector<uint64_t> keys) {
    keys.erase(std::remove_if(keys.begin(), keys.end(),
                              [&](uint64_t key) { return lost.count(key) != 0; }),
               keys.end());
    return keys;
  };
  size_t failed = 0;
  for (int round = 0; round < 30; ++round) {
    ExpectOk(world.Remove(without_lost(world.SomeKeys(800, 8000))));
    ModelRows added = world.NewRows(800, 8000);
    for (const auto& [key, row] : lost) added.erase(key);
    ExpectOk(world.Add(added));
    const Status status = world.Compact();
    if (!status.ok()) {
      EXPECT_NE(status.message().find(damaged), std::string::npos) << status.message();
      ++failed;
      ExpectOk(world.Compact());
    }
    const double live = static_cast<double>(world.rows->stats().row_bytes) * 4096 / 4048;
    ASSERT_LE(static_cast<double>(world.rows->stats().file_bytes),
              1.3 * live + 8 * 8 * kBlockBytes);
  }
  EXPECT_EQ(failed, 1u);
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : world.model) keys.push_back(key);
  std::map<uint64_t, ColdPlace> places;
  ExpectOk(world.Find(keys, &places));
  for (const auto& [key, row] : lost) EXPECT_EQ(world.Find({key}, &places).code(), Code::kDataLoss);
  EXPECT_EQ(world.rows->size(), world.model.size() + lost.size());
}

// A process without descriptors or memory for a while does not give its files up.
TEST_F(FileRowsFaultsTest, ErrorsThatPassAreNoDamage) {
  ColdWorld world(16, 8);
  ExpectOk(world.Add(world.NewRows(6000, 8000)));
  ExpectOk(world.Remove(world.SomeKeys(4000, 8000)));
  for (int i = 0; i < 30; ++i) {
    std::unique_ptr<ColdRows::Compaction> step;
    ExpectOk(world.rows->PlanCompaction(&step));
    ASSERT_NE(step, nullptr);
    world.files.Fail(FaultyFileSystem::kPread, 1, ENOMEM, FaultyFileSystem::kForever);
    EXPECT_EQ(step->Read().code(), Code::kResourceExhausted);
    world.files.Heal();
    ExpectOk(world.rows->Compact(step.get(), nullptr));
  }
  ExpectOk(world.Compact());
  const double live = static_cast<double>(world.rows->stats().row_bytes) * 4096 / 4048;
  EXPECT_LE(static_cast<double>(world.rows->stats().file_bytes), 1.3 * live + 8 * 8 * kBlockBytes);
  world.ExpectEqual();
}

// Files that cannot be removed are counted.
TEST_F(FileRowsFaultsTest, FilesThatCannotBeRemoved) {
  static int warned;
  warned = 0;
  SetWarningFn([](const char* text) { warned += strstr(text, ".rows") != nullptr; });
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(1000, 3000)));
  EXPECT_EQ(world.rows->stats().errors, 0u);
  world.files.Fail(FaultyFileSystem::kUnlink, 1, EIO, 3);
  ExpectOk(world.Remove(world.SomeKeys(2900, 3000)));
  ExpectOk(world.Compact());
  EXPECT_EQ(world.rows->stats().errors, 3u);
  EXPECT_EQ(warned, 3);
  SetWarningFn(nullptr);
  world.ExpectEqual();
}

// A name that exists, whatever it is, is not a file of the table's.
TEST_F(FileRowsFaultsTest, FilesOfOthersAreNotOverwritten) {
  ColdWorld world(16, 4);
  const std::string victim = world.folder / "victim";
  testing_files::Write(victim, "mine");
  std::vector<std::string> names;
  world.files.List(world.file_options.folder, &names);
  ASSERT_EQ(names.size(), 1u);
  const std::string file = world.file_options.folder + "/" + names[0] + "/0/1.rows";
  ASSERT_EQ(symlink(victim.c_str(), file.c_str()), 0);
  EXPECT_FALSE(world.rows->Reserve(10).ok());
  EXPECT_EQ(testing_files::Read(victim), "mine");
  ASSERT_EQ(unlink(file.c_str()), 0);
  testing_files::Write(file, "mine");
  EXPECT_FALSE(world.rows->Reserve(10).ok());
  EXPECT_EQ(testing_files::Read(file), "mine");
}

TEST_F(FileRowsFaultsTest, TruncatedFiles) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  const std::string file = Files(&world)[0];
  const std::string bytes = testing_files::Read(file);
  ASSERT_GT(bytes.size(), 0u);
  for (size_t size = 0; size < bytes.size(); size += kSanitized ? 3001 : 509) {
    ASSERT_EQ(truncate(file.c_str(), static_cast<off_t>(size)), 0);
    EXPECT_GT(CountFailures(&world, file), 0u);
    testing_files::Write(file, bytes);
  }
  world.ExpectEqual();
}

// Blocks that are right, at wrong places.
TEST_F(FileRowsFaultsTest, SwappedBlocks) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  const std::vector<std::string> files = Files(&world);
  ASSERT_GE(files.size(), 2u);
  const std::string first = testing_files::Read(files[0]), second = testing_files::Read(files[1]);
  ASSERT_GE(first.size(), 2 * kBlockBytes);
  testing_files::Write(files[0], first.substr(kBlockBytes, kBlockBytes) +
                                     first.substr(0, kBlockBytes) + first.substr(2 * kBlockBytes));
  EXPECT_GT(CountFailures(&world, files[0]), 0u);
  testing_files::Write(files[0], second.substr(0, kBlockBytes) + first.substr(kBlockBytes));
  EXPECT_GT(CountFailures(&world, files[0]), 0u);
  testing_files::Write(files[0], first);
  world.ExpectEqual();
}

// The n-th call of a kind fails, or transfers less than it should, for each n.
TEST_F(FileRowsFaultsTest, EachCallFails) {
  struct Fault {
    FaultyFileSystem::Call call;
    int error;  // 0: short
    int64_t times;
  };
  const Fault kFaults[] = {
      {FaultyFileSystem::kPwrite, ENOSPC, 1}, {FaultyFileSystem::kPwrite, EIO, 3},
      {FaultyFileSystem::kPwrite, 0, 2},      {FaultyFileSystem::kOpen, EMFILE, 1},
      {FaultyFileSystem::kOpen, ENOSPC, 2},   {FaultyFileSystem::kPread, EIO, 1},
      {FaultyFileSystem::kPread, 0, 1},       {FaultyFileSystem::kClose, EDQUOT, 2}};
  for (const int64_t dim : {16, 900}) {
    for (const Fault& fault : kFaults) {
      for (const int64_t n : {1, 2, 3, 5, 8, 13, 21}) {
        SCOPED_TRACE(::testing::Message()
                     << dim << " " << fault.call << " " << fault.error << " " << n);
        ColdWorld world(dim, 4, static_cast<uint64_t>(n));
        const size_t batch = dim > 100 ? 10 : 120;
        ExpectOk(world.Add(world.NewRows(batch, 1000)));
        if (fault.error != 0) {
          world.files.Fail(fault.call, n, fault.error, fault.times);
        } else {
          world.files.Shorten(fault.call, n, 100, fault.times);
        }
        size_t failed = 0;
        for (int i = 0; i < 4; ++i) {
          failed += !world.Add(world.NewRows(batch, 1000)).ok();
          failed += !world.Remove(world.SomeKeys(batch / 2, 1000)).ok();
          failed += !world.Compact().ok();
          if (i != 2) continue;
          const RowLayout layout(8, DType::kFloat32, dim, 3);
          if (!world.rows->ChangeLayout(layout, {1, 2, 3}).ok()) {
            ++failed;
            continue;
          }
          world.layout = layout;
          for (auto& [key, row] : world.model) {
            const float initial[] = {1, 2, 3};
            row.content.append(reinterpret_cast<const char*>(initial), sizeof(initial));
          }
        }
        SerialExec exec;
        const ColdWorld::Lift lift(world.layout);
        uint64_t position = 0;
        const uint64_t end = world.rows->EndOfRows();
        (void)world.rows->ChangeContents(exec, lift, ~uint64_t{0}, end, &position);
        EXPECT_EQ(world.rows->size(), world.model.size());
        world.files.Heal();
        ExpectOk(world.rows->ChangeContents(exec, lift, ~uint64_t{0}, end, &position));
        EXPECT_GE(position, end);
        world.LiftModel();
        world.ExpectEqual();
        ExpectOk(world.Add(world.NewRows(batch, 1000)));
        ExpectOk(world.Compact());
        world.ExpectEqual();
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// Rows that cannot be written wait in memory, which has room for few of them.
TEST_F(FileRowsFaultsTest, ADiskThatStaysFullRefusesRows) {
  ColdWorld world(16, 4);
  world.files.Fail(FaultyFileSystem::kPwrite, 1, ENOSPC, int64_t{1} << 40);
  size_t added = 0;
  for (int i = 0; i < 20; ++i) {
    const Status status = world.Add(world.NewRows(300, 10'000));
    added += status.ok();
    EXPECT_TRUE(status.ok() || status.message().find("No space left") != std::string::npos)
        << status.message();
  }
  EXPECT_EQ(added, 1u);
  world.ExpectEqual();
  world.files.Heal();
  ExpectOk(world.Add(world.NewRows(300, 10'000)));
  world.ExpectEqual();
}

// Each allocation of a change of contents fails in turn. It continues where it has stopped.
TEST_F(FileRowsFaultsTest, EachAllocationOfAChangeFails) {
  ColdWorld world(16, 4);
  SerialExec exec;
  for (size_t round = 0; round < 4; ++round) {
    ExpectOk(world.Add(world.NewRows(150, 3000)));
    const ColdWorld::Lift lift(world.layout);
    uint64_t position = 0;
    const uint64_t end = world.rows->EndOfRows();
    size_t failed = 0;
    for (size_t allocations = 0; position < end; ++allocations) {
      failing::WithAllocations(allocations, [&] {
        try {
          (void)world.rows->ChangeContents(exec, lift, 100, end, &position);
        } catch (const std::bad_alloc&) {
          ++failed;
        }
      });
      world.rows->CheckInvariants();
    }
    EXPECT_GT(failed, 3u);
    world.LiftModel();
    world.ExpectEqual();
  }
}

// Each allocation fails in turn. The calls that promise so do not throw, and nothing is lost.
TEST_F(FileRowsFaultsTest, EachAllocationFails) {
  ColdWorld world(16, 4);
  const size_t step = kSanitized ? 5 : 1;
  for (size_t allocations = 0; allocations < 60; allocations += step) {
    SCOPED_TRACE(allocations);
    const ModelRows added = world.NewRows(150, 3000);
    std::vector<char> bytes(world.layout.stride);
    bool reserved = false;
    failing::WithAllocations(allocations, [&] {
      try {
        reserved = world.rows->Reserve(added.size()).ok();
      } catch (const std::bad_alloc&) {
      }
    });
    if (reserved) {
      for (const auto& [key, row] : added) {
        memcpy(bytes.data() + world.layout.vector_offset, row.content.data(), row.content.size());
        world.rows->Add(key, bytes.data(), {row.updated, row.score}, row.tick);
      }
      failing::WithAllocations(allocations % 7, [&] { world.rows->Settle(); });
      world.model.insert(added.begin(), added.end());
    }
    world.ExpectEqual();

    std::map<uint64_t, ColdPlace> places;
    ExpectOk(world.Find(world.SomeKeys(60, 3000), &places));
    std::vector<uint64_t> keys;
    std::vector<ColdPlace> at;
    for (const auto& [key, place] : places) {
      keys.push_back(key);
      at.push_back(place);
    }
    if (allocations % 3 == 0) world.rows->BeginCut([](const RowTimes&) { return true; });
    failing::WithAllocations(allocations % 5,
                             [&] { world.rows->Remove(keys.data(), at.data(), keys.size()); });
    for (const uint64_t key : keys) world.model.erase(key);
    if (allocations % 3 == 0) world.rows->EndCut();

    for (size_t left = 0; left < 40; left += 3) {
      std::unique_ptr<ColdRows::Compaction> next;
      failing::WithAllocations(left, [&] {
        try {
          (void)(world.rows->PlanCompaction(&next).ok() && next != nullptr && next->Read().ok() &&
                 world.rows->Compact(next.get(), nullptr).ok());
        } catch (const std::bad_alloc&) {
        }
      });
    }
    world.ExpectEqual();
    ASSERT_FALSE(HasFailure());
  }
}

}  // namespace
}  // namespace dynemb
