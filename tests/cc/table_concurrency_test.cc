// Calls from several threads under TableLock, to find deadlocks, torn rows and, under the thread
// sanitizer, data races.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cc/table/clock.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {
namespace {

constexpr int64_t kDim = 4;

std::unique_ptr<Table> MakeTable(int64_t max_capacity, int64_t ttl = 0) {
  TableOptions options;
  options.name = "shared";
  options.dim = kDim;
  options.init_capacity = 1;
  options.max_capacity = max_capacity;
  options.ttl = ttl;
  options.ttl_since_access = true;
  options.initializer = {{InitKind::kConstant, 1.0f, 0.0f}};
  std::unique_ptr<Table> table;
  const Status status = Table::Create(options, &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return table;
}

Keys RandomKeys(Random& random, size_t n) {
  Keys keys(n);
  for (uint64_t& key : keys) key = random.Below(4000);
  return keys;
}

// All threads write vectors whose elements are equal, so that a torn row is visible.
void ExpectWhole(const Floats& vectors) {
  for (size_t i = 0; i < vectors.size(); i += kDim) {
    for (size_t c = 1; c < kDim; ++c) ASSERT_EQ(vectors[i], vectors[i + c]);
  }
}

void Read(Table& table, Exec& exec, Clock& clock, Random& random) {
  const Keys keys = RandomKeys(random, 300);
  RowIds rows(keys.size());
  Floats vectors(keys.size() * kDim);
  const Tick tick = clock.Next();
  switch (random.Below(5)) {
    case 0:
      table.Find(exec, {keys.data(), keys.size()}, tick, rows.data());
      break;
    case 1:
      table.Lookup(exec, {keys.data(), keys.size()}, tick, nullptr, vectors.data(), rows.data());
      ExpectWhole(vectors);
      break;
    case 2: {
      const ExportPlan plan = table.PlanExport(exec, random.Below(100), 500, random.Below(tick));
      vectors.resize(plan.rows.size() * kDim);
      table.Export(exec, plan, {nullptr, vectors.data(), nullptr, nullptr, nullptr});
      ExpectWhole(vectors);
      break;
    }
    case 3: {
      const std::unique_ptr<bool[]> found(new bool[keys.size()]);
      table.Contains(exec, {keys.data(), keys.size()}, found.get());
      table.ReadRows(exec, {keys.data(), keys.size()}, vectors.data(), nullptr, found.get());
      ExpectWhole(vectors);
      break;
    }
    case 4:
      EXPECT_GE(table.stats().slots, table.size());
      break;
  }
}

void Write(Table& table, Exec& exec, Clock& clock, Random& random) {
  const Keys keys = RandomKeys(random, 200);
  RowIds rows(keys.size());
  const Tick tick = clock.Next();
  switch (random.Below(5)) {
    case 0:
    case 1: {
      const Status status = table.FindOrInsert(exec, {keys.data(), keys.size()}, tick, rows.data());
      EXPECT_TRUE(status.ok()) << status.message();
      break;
    }
    case 2: {
      Floats vectors(keys.size() * kDim);
      for (size_t i = 0; i < vectors.size(); ++i) vectors[i] = static_cast<float>(i / kDim);
      const Status status = table.Upsert(exec, {keys.data(), keys.size()}, vectors.data(), tick);
      EXPECT_TRUE(status.ok()) << status.message();
      break;
    }
    case 3:
      table.Erase(exec, {keys.data(), 50}, tick);
      break;
    case 4: {
      Keys distinct = keys;
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      table.Find(exec, {distinct.data(), distinct.size()}, tick, rows.data());
      const RowOptimizer sgd(OptimizerKind::kSgd, {}, Hyper(), kDim);
      const Tick apply_tick = clock.Next();
      table.BeginBatch(exec, apply_tick, distinct.size());
      const Floats gradients(distinct.size() * kDim, 0.5f);
      exec.ParallelFor(distinct.size(), 32, [&](size_t begin, size_t end) {
        table.ApplyRange(exec, sgd, {distinct.data(), distinct.size()}, rows.data(),
                         gradients.data(), begin, end, apply_tick, apply_tick);
      });
      break;
    }
  }
}

// Random tables, in any order, with repeats.
std::vector<Table*> Pick(const std::vector<std::unique_ptr<Table>>& tables, Random& random) {
  std::vector<Table*> picked;
  for (size_t i = 0; i <= random.Below(4); ++i) {
    picked.push_back(tables[random.Below(tables.size())].get());
  }
  return picked;
}

TEST(TableConcurrency, ReadersAndWritersOfOverlappingSets) {
  std::vector<std::unique_ptr<Table>> tables;
  for (int64_t max_capacity : {0, 1000, 0, 500}) tables.push_back(MakeTable(max_capacity));
  tables.push_back(MakeTable(0, 20));
  Clock clock;
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 6; ++id) {
    threads.emplace_back([&, id] {
      Random random(id);
      SerialExec serial;
      ThreadsExec two(2);
      Exec& exec = id % 2 == 0 ? static_cast<Exec&>(serial) : two;
      for (int step = 0; step < 150; ++step) {
        const std::vector<Table*> picked = Pick(tables, random);
        if (id < 3) {
          TableLock lock(picked, TableLock::Mode::kShared);
          for (Table* table : picked) Read(*table, exec, clock, random);
        } else {
          TableLock lock(picked, TableLock::Mode::kExclusive);
          for (Table* table : picked) Write(*table, exec, clock, random);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& table : tables) {
    table->CheckInvariants();
    EXPECT_GT(table->stats().inserts, 0u);
  }
  EXPECT_LE(tables[1]->size(), 1000u);
  EXPECT_LE(tables[3]->size(), 500u);
  EXPECT_GT(tables[4]->stats().expired, 0u);
}

// Threads that hold the lock (shared) stamp the same slots at the same time.
TEST(TableConcurrency, ReadersStampTheSameSlots) {
  std::vector<std::unique_ptr<Table>> tables;
  tables.push_back(MakeTable(0));
  Table& table = *tables[0];
  SerialExec serial;
  Clock clock;
  const Keys keys = Progression(0, 2000);
  RowIds rows(keys.size());
  ASSERT_TRUE(
      table.FindOrInsert(serial, {keys.data(), keys.size()}, clock.Next(), rows.data()).ok());
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      SerialExec own;
      for (int step = 0; step < 30; ++step) {
        TableLock lock({&table, &table}, TableLock::Mode::kShared);
        RowIds got(keys.size());
        table.Find(own, {keys.data(), keys.size()}, clock.Next(), got.data());
        ASSERT_EQ(got, rows);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  table.CheckInvariants();
  EXPECT_EQ(table.stats().hits, 4u * 30u * keys.size());
}

// Locks are taken in one order for any order of the arguments, and all are released.
TEST(TableConcurrency, LockExcludes) {
  std::vector<std::unique_ptr<Table>> tables;
  for (int i = 0; i < 3; ++i) tables.push_back(MakeTable(0));
  std::vector<Table*> forwards, backwards;
  for (const auto& table : tables) {
    forwards.push_back(table.get());
    backwards.insert(backwards.begin(), table.get());
  }
  int64_t counter = 0;  // not atomic: only the lock protects it
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (int step = 0; step < 2000; ++step) {
        TableLock lock(id % 2 == 0 ? forwards : backwards, TableLock::Mode::kExclusive);
        ++counter;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter, 8000);
  for (Table* table : forwards) {
    EXPECT_TRUE(table->mutex().try_lock());
    table->mutex().unlock();
  }
  {
    TableLock lock({forwards[1]}, TableLock::Mode::kShared);
    EXPECT_TRUE(forwards[1]->mutex().try_lock_shared());
    forwards[1]->mutex().unlock_shared();
    EXPECT_FALSE(forwards[1]->mutex().try_lock());
  }
  TableLock none({}, TableLock::Mode::kExclusive);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
