// FileRows against a model: random calls, cuts, space.
#include "cc/file/file_rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/cc/cold_world.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

// Many rows in a block, one row in a block, and rows of two blocks.
constexpr int64_t kDims[] = {1, 16, 900, 1100};

class FileRowsTest : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Dims, FileRowsTest, ::testing::ValuesIn(kDims));

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// A cut, and what it has to deliver.
struct ModelCut {
  ModelRows rows;
  size_t content_bytes = 0;
  bool runs = false;

  void Begin(ColdWorld* world, Stamp after) {
    rows.clear();
    for (const auto& [key, row] : world->model) {
      if (row.updated > after) rows.insert({key, row});
    }
    content_bytes = world->layout.content_bytes();
    world->rows->BeginCut([after](const RowTimes& times) { return times.updated > after; });
    EXPECT_EQ(world->rows->CutRows(), rows.size());
    runs = true;
  }
  // Returns whether there may be further rows.
  bool Read(ColdRows* cold, size_t limit) {
    const std::vector<ColdPlace> plan = cold->PlanCut(limit);
    EXPECT_LE(plan.size(), limit);
    if (plan.empty()) return false;
    std::set<size_t> read;
    const Status status = cold->ReadCut(plan, [&](size_t i, const ColdRow& row) {
      EXPECT_TRUE(read.insert(i).second);
      const auto at = rows.find(row.key);
      ASSERT_NE(at, rows.end()) << "key " << row.key << " twice, or not of the cut";
      // `times.updated` is not promised: the tick is.
      ModelRow expected = at->second, got = ColdWorld::RowOf(row, content_bytes);
      expected.updated = got.updated = 0;
      EXPECT_EQ(expected.content, got.content) << row.key;
      EXPECT_TRUE(expected == got) << row.key;
      rows.erase(at);
    });
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(read.size(), plan.size());
    EXPECT_EQ(cold->CutRows(), rows.size());
    return status.ok();
  }
  void End(ColdRows* cold) {
    while (Read(cold, 100)) {
    }
    EXPECT_TRUE(rows.empty());
    EXPECT_EQ(cold->CutRows(), 0u);
    cold->EndCut();
    runs = false;
  }
};

void ChangeLayout(ColdWorld* world, int64_t state_width) {
  const std::vector<float> initial(static_cast<size_t>(state_width), 0.5f);
  world->layout = RowLayout(8, DType::kFloat32, world->layout.dim, state_width);
  ExpectOk(world->rows->ChangeLayout(world->layout, initial));
  for (auto& [key, row] : world->model) {
    row.content.resize(world->layout.vector_bytes());
    row.content.append(reinterpret_cast<const char*>(initial.data()), initial.size() * 4);
  }
}

std::unique_ptr<ColdRows::Ahead> Plan(ColdWorld* world, const std::vector<uint64_t>& keys) {
  return world->rows->PlanAhead(keys.data(), keys.size());
}

TEST_P(FileRowsTest, RandomCalls) {
  for (const size_t blocks : {1, 2, 8}) {
    SCOPED_TRACE(blocks);
    ColdWorld world(GetParam(), blocks, blocks);
    auto& random = world.random;
    const uint64_t keys = GetParam() > 100 ? 200 : 2000;
    const size_t batch = GetParam() > 100 ? 20 : 300;
    ModelCut cut;
    std::unique_ptr<ColdRows::Ahead> ahead;  // of any call before
    const size_t calls = Longer(kSanitized ? 30 : 60);
    for (size_t call = 0; call < calls && !::testing::Test::HasFailure(); ++call) {
      switch (random() % 13) {
        case 0:
        case 1:
        case 2:
        case 3:
          ExpectOk(world.Add(world.NewRows(random() % batch, keys)));
          break;
        case 4:
        case 5:
          ExpectOk(world.Remove(world.SomeKeys(random() % batch, keys)));
          break;
        case 6:
          ExpectOk(world.Remove(world.SomeKeys(random() % 10, keys), /*wipe=*/true));
          break;
        case 7:
          ExpectOk(world.Compact());
          break;
        case 8:
          if (cut.runs && random() % 4 == 0) {
            cut.End(world.rows.get());
          } else if (cut.runs) {
            cut.Read(world.rows.get(), random() % 50 + 1);
          } else {
            cut.Begin(&world, static_cast<Stamp>(random() % 900));
          }
          break;
        case 9:
          if (random() % 8 == 0) {
            world.rows->Clear();
            world.model.clear();
          }
          if (random() % 3 == 0) ChangeLayout(&world, static_cast<int64_t>(random() % 20));
          break;
        case 10: {
          // More room than rows.
          ExpectOk(world.rows->Reserve(random() % batch));
          world.rows->Settle();
          break;
        }
        case 11:
          if (ahead != nullptr) ExpectOk(ahead->Read());  // KeepAhead refuses rows that were wiped
          if (random() % 3 != 0) world.rows->KeepAhead(std::move(ahead));
          ahead = Plan(&world, world.SomeKeys(random() % batch, keys));
          break;
        default:
          world.ExpectEqual();
      }
      if (call % 16 == 0) world.ExpectEqual();
    }
    if (cut.runs) cut.End(world.rows.get());
    world.ExpectEqual();
  }
}

// Moves of one segment while its rows are removed and added again, between plan, read and move.
TEST_P(FileRowsTest, ChangesBetweenTheStepsOfACompaction) {
  ColdWorld world(GetParam(), 4, 3);
  const uint64_t keys = GetParam() > 100 ? 100 : 1500;
  std::unique_ptr<ColdRows::Compaction> step;
  const auto change = [&] {
    ExpectOk(world.Remove(world.SomeKeys(keys / 8, keys), world.random() % 2 == 0));
    ExpectOk(world.Add(world.NewRows(keys / 8, keys)));
    if (world.random() % 20 == 0) {
      world.rows->Clear();
      world.model.clear();
      ChangeLayout(&world, static_cast<int64_t>(world.random() % 3));
      ExpectOk(world.Add(world.NewRows(keys, keys)));
    }
  };
  uint64_t steps = 0;
  for (size_t round = 0; round < Longer(30); ++round) {
    change();
    ExpectOk(world.rows->PlanCompaction(&step));
    if (step == nullptr) continue;
    ++steps;
    change();
    const Status read = step->Read();
    change();
    if (read.ok()) ExpectOk(world.rows->Compact(step.get(), nullptr));
    world.ExpectEqual();
  }
  EXPECT_GT(steps, 3u);
  EXPECT_GT(world.rows->stats().rows_compacted, 0u);
}

// A caller that fails in the middle, while reads are in flight, gets its own exception.
TEST_P(FileRowsTest, CallersMayThrow) {
  using Kind = BlockReader::Options::Kind;
  for (const Kind kind : {Kind::kAuto, Kind::kThreads}) {
    ColdWorld world(GetParam(), 8, 12, kind);
    const size_t rows = GetParam() > 100 ? 300 : 3000;
    ExpectOk(world.Add(world.NewRows(rows, 4 * rows)));
    const std::vector<uint64_t> keys = world.SomeKeys(2 * rows, 4 * rows);
    for (int calls = 0; calls < 100; calls += 9) {
      int left = calls;
      const auto find = [&] {
        return world.rows->Find(keys.data(), keys.size(), [&](size_t, const ColdRow&) {
          if (left-- == 0) throw std::bad_alloc();
        });
      };
      EXPECT_THROW((void)find(), std::bad_alloc) << calls;
    }
    world.ExpectEqual();
  }
}

// Rows that were read ahead need no file; the rows of the last two calls are kept.
TEST_P(FileRowsTest, ReadAhead) {
  ColdWorld world(GetParam(), 4, 8);
  const size_t rows = GetParam() > 100 ? 300 : 2000;
  ExpectOk(world.Add(world.NewRows(rows, 4 * rows)));
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : world.model) {
    if (Plan(&world, {key}) != nullptr) keys.push_back(key);  // it is in a file
  }
  ASSERT_GT(keys.size(), 40u);
  const auto read_ahead = [&](const std::vector<uint64_t>& some) {
    std::unique_ptr<ColdRows::Ahead> ahead = Plan(&world, some);
    ExpectOk(ahead->Read());
    world.rows->KeepAhead(std::move(ahead));
  };
  std::map<uint64_t, ColdPlace> places;
  const auto needs_no_file = [&](const std::vector<uint64_t>& some) {
    places.clear();
    world.files.Fail(FaultyFileSystem::kPread, 1, EIO, FaultyFileSystem::kForever);
    const bool ok = world.Find(some, &places).ok();
    world.files.Heal();
    return ok;
  };
  std::vector<uint64_t> parts[3];
  for (size_t i = 0; i < keys.size(); ++i) parts[i % 3].push_back(keys[i]);
  EXPECT_FALSE(needs_no_file(parts[0]));
  read_ahead(parts[0]);
  read_ahead(parts[1]);
  EXPECT_TRUE(needs_no_file(parts[0]));
  EXPECT_TRUE(needs_no_file(parts[1]));
  EXPECT_EQ(world.rows->stats().found_ahead, parts[0].size() + parts[1].size());
  EXPECT_FALSE(needs_no_file(keys));
  read_ahead(parts[2]);
  EXPECT_FALSE(needs_no_file(parts[0]));
  EXPECT_TRUE(needs_no_file(parts[1]));
  world.rows->KeepAhead(nullptr);
  world.rows->KeepAhead(nullptr);
  EXPECT_FALSE(needs_no_file(parts[2]));
  // Another layout, and rows that are added again elsewhere.
  read_ahead(parts[0]);
  ChangeLayout(&world, 3);
  EXPECT_TRUE(needs_no_file(parts[0]));
  ExpectOk(world.Remove(keys));
  ModelRows again;
  for (const uint64_t key : keys) again[key] = world.RandomRow();
  ExpectOk(world.Add(again));
  world.ExpectEqual();
}

// A wiped row is not kept, whether it was read before or is being read.
TEST_P(FileRowsTest, WipedRowsAreNotReadAhead) {
  ColdWorld world(GetParam(), 4, 9);
  const size_t rows = GetParam() > 100 ? 300 : 2000;
  ExpectOk(world.Add(world.NewRows(rows, 4 * rows)));
  for (const bool keep_first : {true, false}) {
    const std::vector<uint64_t> keys = world.SomeKeys(2 * rows, 4 * rows);
    std::unique_ptr<ColdRows::Ahead> ahead = Plan(&world, keys);
    ASSERT_NE(ahead, nullptr);
    ExpectOk(ahead->Read());
    if (keep_first) world.rows->KeepAhead(std::move(ahead));
    ExpectOk(world.Remove({keys[0], keys[1], keys[2], keys[3]}, /*wipe=*/true));
    if (!keep_first) world.rows->KeepAhead(std::move(ahead));
    const uint64_t found = world.rows->stats().found_ahead;
    std::map<uint64_t, ColdPlace> places;
    ExpectOk(world.Find(keys, &places));
    EXPECT_EQ(world.rows->stats().found_ahead, found);
  }
}

TEST_P(FileRowsTest, FilesStaySmall) {
  ColdWorld world(GetParam(), 8, 4);
  const uint64_t keys = GetParam() > 100 ? 300 : 10000;
  for (int round = 0; round < 12; ++round) {
    ExpectOk(world.Remove(world.SomeKeys(keys / 5, keys)));
    ExpectOk(world.Add(world.NewRows(keys / 4, keys)));
    ExpectOk(world.Compact());
    const RowFormat format(world.layout.content_bytes());
    const double row_bytes = static_cast<double>(format.unit_bytes) / format.rows_per_unit;
    const double live = static_cast<double>(world.model.size()) * row_bytes;
    const double segment = static_cast<double>(std::max(8 * kBlockBytes, format.unit_bytes));
    ASSERT_LE(static_cast<double>(world.rows->stats().file_bytes), 1.3 * live + 4 * segment);
  }
  world.ExpectEqual();
}

TEST_P(FileRowsTest, ScanListsWhatStaysOnce) {
  ColdWorld world(GetParam(), 4, 5);
  const uint64_t keys = GetParam() > 100 ? 300 : 4000;
  ExpectOk(world.Add(world.NewRows(keys / 2, keys)));
  const auto chosen = [](const RowTimes& times) { return times.updated % 3 != 0; };
  std::map<uint64_t, int> listed;
  ModelRows stays = world.model;
  uint64_t cursor = 0;
  while (cursor != ColdRows::kEnd) {
    const ColdRows::Scanned scanned = world.rows->Scan(cursor, 20, 40, chosen);
    EXPECT_LE(scanned.places.size(), 21u);
    ASSERT_EQ(scanned.places.size(), scanned.times.size());
    ExpectOk(world.rows->Read(scanned.places, [&](size_t i, const ColdRow& row) {
      const auto at = world.model.find(row.key);
      ASSERT_NE(at, world.model.end());
      EXPECT_EQ(scanned.times[i].updated, at->second.updated);
      EXPECT_EQ(scanned.times[i].score, at->second.score);
      EXPECT_TRUE(chosen(scanned.times[i]));
      ++listed[row.key];
    }));
    ASSERT_GT(scanned.next, cursor);
    cursor = scanned.next;
    const std::vector<uint64_t> gone = world.SomeKeys(keys / 100, keys);
    for (const uint64_t key : gone) stays.erase(key);
    ExpectOk(world.Remove(gone));
    ExpectOk(world.Add(world.NewRows(keys / 100, keys)));
    ExpectOk(world.Compact());
  }
  size_t expected = 0;
  for (const auto& [key, row] : stays) {
    const bool is_chosen = chosen({row.updated, row.score});
    EXPECT_EQ(listed[key], is_chosen ? 1 : 0) << key;
    expected += is_chosen;
  }
  EXPECT_GT(expected, 10u);
}

TEST_P(FileRowsTest, ChangesOfTimesReachEveryRowOnce) {
  ColdWorld world(GetParam(), 4, 6);
  ExpectOk(world.Add(world.NewRows(200, 1000)));
  const auto older = [](const RowTimes& times) {
    return RowTimes{times.updated + 1, times.score * 2};
  };
  world.rows->ChangeTimes(older);
  world.rows->RestartShares();
  for (const double share : {0.0, 0.1, 0.1, 0.5, 0.49, 0.999, 1.0, 1.0}) {
    world.rows->ChangeShare(share, older);
  }
  for (auto& [key, row] : world.model) {
    row.updated += 2;
    row.score *= 4;
  }
  world.ExpectEqual();
  // The moved rows keep them.
  ExpectOk(world.Remove(world.SomeKeys(900, 1000)));
  ExpectOk(world.Compact());
  world.ExpectEqual();
}

// A change of contents reaches every row, among rows that come and go, and compactions with it.
TEST_P(FileRowsTest, ChangesOfContentsReachEveryRow) {
  ColdWorld world(GetParam(), 4, 11);
  const uint64_t keys = GetParam() > 100 ? 300 : 4000;
  const size_t some = keys / 50;
  for (const uint64_t limit : {keys / 100, keys / 7, ~uint64_t{0}}) {
    SCOPED_TRACE(limit);
    world.rows->Clear();
    world.model.clear();
    ExpectOk(world.Add(world.NewRows(keys / 2, keys)));
    if (limit != keys / 7) {  // rows of an earlier layout
      ChangeLayout(&world, static_cast<int64_t>(world.random() % 5));
    }
    ExpectOk(world.Add(world.NewRows(keys / 4, keys)));
    ExpectOk(world.Remove(world.SomeKeys(keys / 5, keys)));
    ModelCut cut;
    cut.Begin(&world, 100);  // of the contents before
    const ColdWorld::Lift lift(world.layout);
    SerialExec exec;
    const uint64_t end = world.rows->EndOfRows();
    uint64_t position = 0;
    size_t calls = 0;
    while (position < end) {
      const uint64_t before = position;
      ExpectOk(world.rows->ChangeContents(exec, lift, limit, end, &position));
      ASSERT_GT(position, before);
      if (++calls % 3 == 0) {
        // The rows are found by place; the model does not say which of them have been changed.
        std::vector<uint64_t> gone;
        std::vector<ColdPlace> places;
        const std::vector<uint64_t> chosen = world.SomeKeys(some, keys);
        ExpectOk(world.rows->Find(chosen.data(), chosen.size(), [&](size_t i, const ColdRow& row) {
          gone.push_back(chosen[i]);
          places.push_back(row.place);
        }));
        world.rows->Remove(gone.data(), places.data(), gone.size());
        for (const uint64_t key : gone) world.model.erase(key);
        ModelRows added = world.NewRows(some, keys);
        for (auto& [key, row] : added) lift.Apply(key, row.content.data());
        ExpectOk(world.Add(added));
        if (calls % 2 == 0) ExpectOk(world.Compact(&lift));
        if (calls % 4 == 0) cut.Read(world.rows.get(), 30);
      }
    }
    world.LiftModel();
    world.ExpectEqual();
    cut.End(world.rows.get());
    // Nothing is left to change, and what is not changed stays where it is.
    const uint64_t written = world.rows->stats().bytes_written;
    position = 0;
    ExpectOk(
        world.rows->ChangeContents(exec, lift, ~uint64_t{0}, world.rows->EndOfRows(), &position));
    EXPECT_EQ(world.rows->stats().bytes_written, written);
    if (HasFailure()) return;
  }
}

// A cut keeps the places that it was planned with, whatever layouts the rows get.
TEST_P(FileRowsTest, CutAcrossClearAndLayouts) {
  for (const int64_t width : {0, 2000}) {
    ColdWorld world(GetParam(), 8, 7);
    ExpectOk(world.Add(world.NewRows(150, 1000)));
    ModelCut cut;
    cut.Begin(&world, 100);
    cut.Read(world.rows.get(), 20);
    world.rows->Clear();
    world.model.clear();
    ChangeLayout(&world, width);
    ExpectOk(world.Add(world.NewRows(150, 1000)));
    cut.Read(world.rows.get(), 20);
    ExpectOk(world.Remove(world.SomeKeys(300, 1000), /*wipe=*/true));
    cut.End(world.rows.get());
    world.ExpectEqual();
  }
}

// A score that changed while the row was cold, before the cut.
TEST(FileRows, CutHasTheScoresOfTheWatermark) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  world.rows->ChangeTimes([](const RowTimes& times) {
    return RowTimes{times.updated, times.score / 2};
  });
  for (auto& [key, row] : world.model) row.score /= 2;
  ModelCut cut;
  cut.Begin(&world, 0);
  ExpectOk(world.Remove(world.SomeKeys(500, 1000)));
  cut.End(world.rows.get());
}

TEST(FileRows, FilesEndWithTheirObjects) {
  ColdWorld world(16, 4);
  ExpectOk(world.Add(world.NewRows(300, 1000)));
  std::unique_ptr<ColdRows> second;
  ExpectOk(FileRows::Create(world.file_options, world.options, &second));
  std::vector<std::string> names;
  ASSERT_EQ(world.files.List(world.file_options.folder, &names), 0);
  EXPECT_EQ(names.size(), 1u);  // of the process
  second.reset();
  world.ExpectEqual();
  world.rows.reset();
  names.clear();
  ASSERT_EQ(world.files.List(world.file_options.folder, &names), 0);
  EXPECT_TRUE(names.empty());
  EXPECT_EQ(world.files.open_files(), 0);
}

}  // namespace
}  // namespace dynemb
