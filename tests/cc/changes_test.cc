#include "cc/table/changes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/table/deletion_log.h"
#include "cc/table/row_bits.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using failing::WithAllocations;
using testing_table::Random;

// ---- RowBits ----

void ExpectHolds(const RowBits& bits, const std::set<uint64_t>& rows) {
  ASSERT_EQ(bits.Count(), rows.size());
  uint64_t from = 0;
  for (uint64_t row : rows) {
    ASSERT_EQ(bits.Next(from), row);
    ASSERT_EQ(bits.Next(row), row);
    from = row + 1;
  }
  ASSERT_EQ(bits.Next(from), bits.rows());
  ASSERT_EQ(bits.Next(bits.rows()), bits.rows());
}

TEST(RowBits, AllOrNone) {
  for (uint64_t n : {0, 1, 63, 64, 65, 127, 128, 1000}) {
    RowBits bits;
    std::set<uint64_t> rows;
    bits.Reset(n, false);
    EXPECT_EQ(bits.rows(), n);
    ExpectHolds(bits, rows);
    bits.Reset(n, true);
    EXPECT_EQ(bits.rows(), n);
    for (uint64_t row = 0; row < n; ++row) rows.insert(row);
    ExpectHolds(bits, rows);
    bits.Extend(n + 70);  // the new rows are not in the set
    EXPECT_EQ(bits.rows(), n + 70);
    ExpectHolds(bits, rows);
    bits.Extend(n);  // does not shrink
    EXPECT_EQ(bits.rows(), n + 70);
    bits.Reset(n, false);
    EXPECT_EQ(bits.rows(), n);
    EXPECT_EQ(bits.Count(), 0u);
  }
}

TEST(RowBits, RandomOperations) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    RowBits bits;
    std::set<uint64_t> rows;
    uint64_t n = 1 + random.Below(200);
    bits.Reset(n, false);
    for (int step = 0; step < 500; ++step) {
      const uint64_t row = random.Below(n);
      switch (random.Below(8)) {
        default:
          bits.Add(static_cast<RowId>(row));
          rows.insert(row);
          break;
        case 0:
        case 1:
        case 2:
          ASSERT_EQ(bits.Take(static_cast<RowId>(row)), rows.erase(row) == 1);
          break;
        case 3: {
          n += random.Below(3);
          bits.Extend(n);
          break;
        }
        case 4: {
          const uint64_t from = random.Below(n + 1);
          const auto at = rows.lower_bound(from);
          ASSERT_EQ(bits.Next(from), at == rows.end() ? n : *at);
          break;
        }
      }
    }
    ExpectHolds(bits, rows);
  }
}

// Rows of the other set that are out of range are left out, be they of the last word.
TEST(RowBits, AddAllTakesWhatIsInRange) {
  Random random(1);
  for (uint64_t n : {0, 1, 10, 63, 64, 65, 130}) {
    for (uint64_t m : {0, 1, 10, 63, 64, 65, 130, 300}) {
      SCOPED_TRACE(std::to_string(n) + " of " + std::to_string(m));
      RowBits bits, other;
      bits.Reset(n, false);
      other.Reset(m, false);
      std::set<uint64_t> rows;
      for (uint64_t i = 0; i < m; ++i) {
        if (random.Below(2) == 0) continue;
        other.Add(static_cast<RowId>(i));
        if (i < n) rows.insert(i);
      }
      for (uint64_t i = 0; i < n; i += 3) {
        bits.Add(static_cast<RowId>(i));
        rows.insert(i);
      }
      bits.AddAll(other);
      EXPECT_EQ(bits.rows(), n);
      ExpectHolds(bits, rows);
    }
  }
}

TEST(RowBits, EachRowIsTakenOnce) {
  constexpr uint64_t kRows = 5000;
  RowBits bits;
  bits.Reset(kRows, false);
  std::vector<std::atomic<int>> taken(kRows);
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t row = id; row < kRows; row += 4) bits.Add(static_cast<RowId>(row));
    });
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  EXPECT_EQ(bits.Count(), kRows);
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      for (uint64_t row = 0; row < kRows; ++row) taken[row] += bits.Take(static_cast<RowId>(row));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& times : taken) ASSERT_EQ(times, 1);
  EXPECT_EQ(bits.Count(), 0u);
}

// ---- DeletionLog ----

class LogModel {
 public:
  void Restart(Tick known_since) {
    log_.Restart(known_since);
    keys_.clear();
    ASSERT_EQ(log_.known_since(), known_since);
    ASSERT_EQ(log_.size(), 0u);
  }
  void Add(Tick tick, uint64_t key) {
    log_.Add(tick, key);
    keys_.emplace_back(tick, key);
  }
  // What is left may be a little more than asked for, and begins after known_since.
  void Trim(size_t most) {
    const Tick before = log_.known_since();
    const size_t had = log_.size();
    log_.Trim(most);
    ASSERT_GE(log_.known_since(), before);
    ASSERT_LE(log_.size(), most + 10000);
    ASSERT_GE(log_.size(), std::min(had, most));
    if (had <= most && most > 0) {
      ASSERT_EQ(log_.known_since(), before);
      ASSERT_EQ(log_.size(), had);
    }
  }
  void Check(Tick since) const {
    ASSERT_GE(since, log_.known_since());
    std::set<uint64_t> keys;
    for (const auto& k : keys_) {
      if (k.first > since) keys.insert(k.second);
    }
    ASSERT_EQ(log_.Since(since), std::vector<uint64_t>(keys.begin(), keys.end())) << since;
  }
  const DeletionLog& log() const { return log_; }

 private:
  DeletionLog log_;
  std::vector<std::pair<Tick, uint64_t>> keys_;
};

TEST(DeletionLog, RandomOperations) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    LogModel model;
    EXPECT_EQ(model.log().known_since(), 0u);
    Tick tick = 0;
    for (int step = 0; step < 40 && !testing::Test::HasFatalFailure(); ++step) {
      tick += random.Below(3);
      for (uint64_t n = random.Below(4) == 0 ? random.Below(20000) : random.Below(20); n > 0; --n) {
        if (random.Below(1000) == 0) ++tick;
        model.Add(tick, random.Below(8) == 0 ? ~random.Below(9) : random.Below(30000));
      }
      if (random.Below(4) == 0) model.Trim(random.Below(40000));
      if (random.Below(25) == 0) model.Restart(++tick);
      const Tick known = model.log().known_since();
      model.Check(known);
      model.Check(known + random.Below(tick - known + 2));
      model.Check(tick);
    }
  }
}

TEST(DeletionLog, TrimAll) {
  LogModel model;
  model.Restart(5);
  model.Add(7, 1);
  model.Add(7, 1);
  model.Add(9, 0);
  model.Check(5);
  model.Check(6);
  model.Check(7);
  model.Check(8);
  model.Trim(3);
  EXPECT_EQ(model.log().size(), 3u);
  model.Trim(0);
  model.Check(model.log().known_since());
  model.Add(10, 4);
  model.Check(9);
  model.Check(10);
}

TEST(DeletionLog, ThreadsAdd) {
  DeletionLog log;
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&log, id] {
      for (uint64_t i = 0; i < 5000; ++i) log.Add(3, 4 * i + id);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.size(), 20000u);
  const std::vector<uint64_t> keys = log.Since(2);
  ASSERT_EQ(keys.size(), 20000u);
  for (uint64_t i = 0; i < keys.size(); ++i) ASSERT_EQ(keys[i], i);
  EXPECT_TRUE(log.Since(3).empty());
}

// A log without memory forgets, rather than to lose a key.
TEST(DeletionLog, WithoutMemoryItForgets) {
  for (size_t allocations : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(allocations);
    DeletionLog log;
    log.Add(3, 100);
    for (uint64_t i = 0; i < 20000; ++i) log.Add(4, i);
    WithAllocations(allocations, [&] {
      for (uint64_t i = 0; i < 50000; ++i) log.Add(5, i);
    });
    EXPECT_EQ(log.known_since(), 5u);
    for (uint64_t i = 0; i < 10; ++i) log.Add(6, i);
    EXPECT_EQ(log.Since(5).size(), 10u);
    log.Trim(5);
    EXPECT_LE(log.known_since(), 6u);
  }
}

// ---- EvictedRows ----

TEST(EvictedRows, ThereIsRoomForWhatWasReserved) {
  const RowLayout layout(8, DType::kFloat32, 5, 2);
  const std::vector<char> row(layout.stride, 7);
  EvictedRows rows(layout);
  rows.Add(0, row.data());
  rows.Reserve(100);
  ASSERT_NO_THROW(WithAllocations(0, [&] {
    for (uint64_t i = 1; i <= 100; ++i) rows.Add(i, row.data());
  }));
  // Further ones are added whole, or not at all.
  size_t added = 101;
  for (size_t allocations : {0, 1, 1, 1, 2, 2}) {
    try {
      WithAllocations(allocations, [&] { rows.Add(added, row.data()); });
      ++added;
    } catch (const std::bad_alloc&) {
    }
    std::vector<uint64_t> keys(rows.size());
    std::vector<char> vectors(rows.size() * layout.vector_bytes());
    rows.Copy(keys.data(), vectors.data());
    ASSERT_EQ(keys.size(), added);
    for (uint64_t i = 0; i < keys.size(); ++i) ASSERT_EQ(keys[i], i);
    ASSERT_EQ(vectors, std::vector<char>(vectors.size(), 7));
  }
  EXPECT_GT(added, 101u);
}

// ---- SavedRows ----

// A row that holds a number.
std::vector<char> RowOf(const RowLayout& layout, uint64_t number) {
  std::vector<char> row(layout.stride, static_cast<char>(number));
  std::memcpy(row.data(), &number, layout.key_size);
  return row;
}

uint64_t NumberOf(const SavedRows::Chunk& chunk, size_t i, const RowLayout& layout) {
  uint64_t number = 0;
  std::memcpy(&number, chunk.rows.data() + i * chunk.stride, layout.key_size);
  return number;
}

TEST(SavedRows, ComeInOrderAsTheyWere) {
  const RowLayout layouts[2] = {RowLayout(8, DType::kFloat32, 5, 2),
                                RowLayout(4, DType::kBfloat16, 3, 0)};
  SavedRows saved(size_t{64} << 20);
  SavedRows::Chunk chunk;
  EXPECT_FALSE(saved.Pop(&chunk));
  Random random(1);
  std::vector<std::pair<size_t, uint64_t>> pushed;
  for (uint64_t i = 0; i < 40000; ++i) {
    const size_t table = i < 30000 ? 0 : random.Below(2);
    saved.Push(table, layouts[table], RowOf(layouts[table], i).data(), static_cast<CutTime>(~i));
    pushed.emplace_back(table, i);
  }
  size_t at = 0;
  while (saved.Pop(&chunk)) {
    ASSERT_GT(chunk.n, 0u);
    const RowLayout& layout = layouts[chunk.table];
    ASSERT_EQ(chunk.stride, layout.stride);
    ASSERT_EQ(chunk.rows.size(), chunk.n * chunk.stride);
    for (size_t i = 0; i < chunk.n; ++i, ++at) {
      ASSERT_LT(at, pushed.size());
      ASSERT_EQ(pushed[at].first, chunk.table);
      std::vector<char> row = RowOf(layout, pushed[at].second);
      const auto updated = static_cast<CutTime>(~pushed[at].second);
      std::memcpy(row.data() + layout.key_size, &updated, sizeof(updated));
      ASSERT_EQ(std::memcmp(row.data(), chunk.rows.data() + i * chunk.stride, row.size()), 0);
    }
  }
  EXPECT_EQ(at, pushed.size());
}

// Never more rows than fit the bound wait, but one always may.
TEST(SavedRows, Bound) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  for (size_t most_rows : {0, 1, 3, 10}) {
    SCOPED_TRACE(most_rows);
    SavedRows saved(most_rows * layout.stride + layout.stride / 2);
    const uint64_t fit = std::max<size_t>(1, most_rows);
    constexpr uint64_t kRows = 100;
    std::atomic<uint64_t> pushed{0};
    std::vector<std::thread> threads;
    for (uint64_t id = 0; id < 2; ++id) {
      threads.emplace_back([&, id] {
        for (uint64_t i = id; i < kRows; i += 2) {
          saved.Push(0, layout, RowOf(layout, i).data(), 1);
          ++pushed;
        }
      });
    }
    std::set<uint64_t> seen;
    uint64_t popped = 0;
    SavedRows::Chunk chunk;
    while (popped < kRows) {
      if (popped < 20) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ASSERT_LE(pushed, popped + fit);
      if (!saved.Pop(&chunk)) {
        std::this_thread::yield();
        continue;
      }
      ASSERT_LE(chunk.n, fit);
      for (size_t i = 0; i < chunk.n; ++i) seen.insert(NumberOf(chunk, i, layout));
      popped += chunk.n;
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(seen.size(), kRows);
    EXPECT_FALSE(saved.Pop(&chunk));
  }
}

TEST(SavedRows, CloseWakesWhoWaits) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  SavedRows saved(layout.stride);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t i = 0; i < 100; ++i) saved.Push(id, layout, RowOf(layout, i).data(), 1);
      ++done;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(done, 0);
  saved.Close();
  for (std::thread& thread : threads) thread.join();
  SavedRows::Chunk chunk;
  EXPECT_FALSE(saved.Pop(&chunk));
  saved.Push(0, layout, RowOf(layout, 1).data(), 1);
  EXPECT_FALSE(saved.Pop(&chunk));
}

TEST(SavedRows, WithoutMemoryTheCutFails) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  for (size_t allocations : {0, 1}) {
    SavedRows saved(size_t{1} << 20);
    for (uint64_t i = 0; i < 100; ++i) saved.Push(0, layout, RowOf(layout, i).data(), 1);
    EXPECT_TRUE(saved.Error().ok());
    const std::vector<char> row = RowOf(layout, 100);
    // Also of a thread that is past the bound: it goes on.
    WithAllocations(allocations, [&] {
      for (uint64_t i = 0; i < 100000; ++i) saved.Push(1, layout, row.data(), 1);
    });
    EXPECT_EQ(saved.Error().code(), Code::kResourceExhausted);
    SavedRows::Chunk chunk;
    EXPECT_FALSE(saved.Pop(&chunk));
    saved.WaitForRoom(size_t{1} << 30);
    saved.PushAtOnce(0, layout, row.data(), 1);
    EXPECT_FALSE(saved.Pop(&chunk));
    EXPECT_EQ(saved.Error().code(), Code::kResourceExhausted);
  }
}

TEST(SavedRows, WhoWaitsGoesOnWhenTheCutFails) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  SavedRows saved(layout.stride);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t i = 0; i < 10; ++i) saved.Push(id, layout, RowOf(layout, i).data(), 1);
      ++done;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(done, 0);
  const std::vector<char> row = RowOf(layout, 1);
  WithAllocations(0, [&] { saved.PushAtOnce(0, layout, row.data(), 1); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(saved.Error().ok());
}

// ---- Cut and Changes ----

TEST(Cut, TimesAreOfTheBaseAndUpToTheWatermark) {
  Cut cut;
  cut.base = 100;
  cut.watermark = 200;
  EXPECT_EQ(cut.Time(99), 0u);
  EXPECT_EQ(cut.Time(100), 0u);
  EXPECT_EQ(cut.Time(101), 1u);
  EXPECT_EQ(cut.Time(200), 100u);
  EXPECT_EQ(cut.Time(201), 100u);
}

// Rows that a cut looks at are those updated since, and not all if the sets reach back so far.
class ChangesTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRows = 100;
  ChangesTest() : layout_(8, DType::kFloat32, 1, 0), updated_(kRows, 1) {
    changes_.Start(1, 0, kRows);
  }
  void Write(RowId row, Tick tick) {
    changes_.BeforeWrite(row, RowOf(layout_, row).data(), updated_[row]);
    updated_[row] = tick;
  }
  std::set<uint64_t> Todo(Tick watermark, Tick since) {
    auto cut = std::make_unique<Cut>();
    cut->saved = &saved_;
    cut->layout = layout_;
    cut->watermark = watermark;
    cut->since = since;
    changes_.BeginCut(std::move(cut), kRows);
    std::set<uint64_t> todo;
    const RowBits& bits = changes_.cut()->todo;
    for (uint64_t r = bits.Next(0); r < bits.rows(); r = bits.Next(r + 1)) todo.insert(r);
    changes_.EndCut();
    EXPECT_EQ(changes_.cut(), nullptr);
    return todo;
  }
  const RowLayout layout_;
  std::vector<Tick> updated_;
  SavedRows saved_{1 << 20};
  Changes changes_;
};

TEST_F(ChangesTest, SetsReachBackTwoCuts) {
  using Set = std::set<uint64_t>;
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (Set{3}));
  Write(3, 11);
  Write(4, 12);
  EXPECT_EQ(Todo(20, 10), (Set{3, 4}));
  Write(5, 21);
  EXPECT_EQ(Todo(30, 10), (Set{3, 4, 5}));  // since the cut before the last
  Write(6, 31);
  EXPECT_EQ(Todo(40, 30), (Set{6}));
  EXPECT_EQ(Todo(50, 35), (Set{6}));      // since a tick between two
  EXPECT_EQ(Todo(60, 29).size(), kRows);  // further back than they reach
  EXPECT_EQ(Todo(70, 0).size(), kRows);
  EXPECT_EQ(Todo(80, 70), Set{});
  changes_.AddAllRows(kRows);
  EXPECT_EQ(Todo(90, 80).size(), kRows);
}

TEST_F(ChangesTest, SavesWhatACutStillNeedsOnce) {
  for (RowId row = 0; row < 10; ++row) Write(row, 5);
  auto cut = std::make_unique<Cut>();
  cut->saved = &saved_;
  cut->table = 7;
  cut->layout = layout_;
  cut->watermark = 9;
  cut->since = 4;
  cut->base = 2;
  changes_.BeginCut(std::move(cut), kRows);
  changes_.Extend(kRows + 50);
  Write(3, 10);
  Write(3, 11);
  Write(20, 12);                                             // updated before `since`
  changes_.BeforeWrite(7, RowOf(layout_, 7).data(), 0);      // free
  changes_.BeforeWrite(130, RowOf(layout_, 130).data(), 0);  // did not exist
  SavedRows::Chunk chunk;
  ASSERT_TRUE(saved_.Pop(&chunk));
  EXPECT_EQ(chunk.n, 1u);
  EXPECT_EQ(chunk.table, 7u);
  EXPECT_EQ(NumberOf(chunk, 0, layout_), 3u);
  CutTime updated;
  std::memcpy(&updated, layout_.update(chunk.rows.data()), sizeof(updated));
  EXPECT_EQ(updated, 3u);
  EXPECT_FALSE(saved_.Pop(&chunk));
}

// A set that there is no memory for is given up: cuts look at all rows until there are sets again.
TEST_F(ChangesTest, WithoutMemoryForASetAllRowsAreLookedAt) {
  using Set = std::set<uint64_t>;
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (Set{3}));
  EXPECT_EQ(Todo(20, 10), Set{});
  WithAllocations(0, [&] { changes_.Extend(100 * kRows); });
  Write(4, 21);
  changes_.BeforeWrite(50 * kRows, RowOf(layout_, 1).data(), 0);  // not in the set
  EXPECT_EQ(Todo(30, 20).size(), kRows);
  Write(5, 31);
  EXPECT_EQ(Todo(40, 30), (Set{5}));
  WithAllocations(0, [&] { changes_.AddAllRows(1000 * kRows); });
  EXPECT_EQ(Todo(50, 40).size(), kRows);
  EXPECT_EQ(Todo(60, 40).size(), kRows);  // the set before the last is the one that was given up
  EXPECT_EQ(Todo(70, 60), Set{});
  Changes other;
  WithAllocations(0, [&] { other.Start(1, 0, kRows); });
  EXPECT_TRUE(other.tracking());
  other.BeforeWrite(7, RowOf(layout_, 7).data(), 1);
}

TEST_F(ChangesTest, ACutBeginsWholeOrNotAtAll) {
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (std::set<uint64_t>{3}));
  Write(4, 11);
  size_t failed = 0;
  for (size_t allocations = 0;; ++allocations) {
    auto cut = std::make_unique<Cut>();
    cut->saved = &saved_;
    cut->layout = layout_;
    cut->watermark = 20;
    cut->since = 1;
    try {
      WithAllocations(allocations, [&] { changes_.BeginCut(std::move(cut), kRows); });
      break;
    } catch (const std::bad_alloc&) {
      ++failed;
      ASSERT_EQ(changes_.cut(), nullptr);
    }
  }
  EXPECT_EQ(failed, 2u);
  EXPECT_EQ(changes_.cut()->todo.Count(), 2u);
  changes_.EndCut();
  EXPECT_EQ(Todo(30, 10), (std::set<uint64_t>{4}));
}

}  // namespace
}  // namespace dynemb
