// Fault injection: the k-th allocation of a call fails, until the call succeeds without a failure:
// for each k up to 32 and a sample of larger ones; in `make soak` for each k; under a sanitizer for
// fewer. Then the charges for memory from the k-th on are refused (memory_limit.h), in the same
// way. Each run has new tables. By the contract of cc/table/table.h and cc/lookup,
//
//   - the call fails with a Status or std::bad_alloc, and never ends the process;
//   - each table's invariants hold, and it has the rows from before the call, or the rows that a
//     successful call leaves;
//   - a call that reports success has done its work;
//   - the repeated call succeeds with the same outputs, and training continues.
#ifndef DYNEMB_TESTS_CC_FAULT_SUITE_H_
#define DYNEMB_TESTS_CC_FAULT_SUITE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/lookups.h"
#include "cc/table/memory_limit.h"
#include "cc/table/snapshot.h"
#include "cc/table/table.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace fault {

// The number of charges that are still granted; negative once one was refused.
inline std::atomic<int64_t> charges_left{0};
// Refuses charges for memory, from the k-th on.
inline void RefuseCharges(int64_t k) {
  charges_left = k - 1;
  SetMemoryFault([](size_t) { return charges_left.fetch_sub(1) > 0; });
}
// Ends RefuseCharges, and returns whether a charge was refused.
inline bool GrantCharges() {
  SetMemoryFault(nullptr);
  return charges_left < 0;
}

enum class Kind { kGrows, kFull, kCounts, kTracked, kExpired, kCut };

struct Setup {
  Kind kind;
  int64_t dim;
  DType dtype;
  size_t threads;
};

inline void PrintTo(const Setup& s, std::ostream* out) {
  static const char* const kKinds[] = {"Grows", "Full", "Counts", "Tracked", "Expired", "Cut"};
  *out << kKinds[static_cast<int>(s.kind)] << s.dim << (s.dtype == DType::kFloat32 ? "F32" : "Bf16")
       << "x" << s.threads;
}

// Dims below and above the limit up to which a VectorBuffer needs no heap memory.
inline std::vector<Setup> Setups() {
  std::vector<Setup> setups;
  for (Kind kind : {Kind::kGrows, Kind::kFull, Kind::kTracked, Kind::kCut}) {
    setups.push_back({kind, 4, DType::kFloat32, 1});
    setups.push_back({kind, 300, DType::kBfloat16, 1});
    setups.push_back({kind, 4, DType::kBfloat16, 4});
    // Other tests run long rows with threads under sanitizers.
    if (!kUnderAsan) setups.push_back({kind, 300, DType::kFloat32, 4});
  }
  // Full, and rows of the batch have to be pinned.
  setups.push_back({Kind::kCounts, 4, DType::kFloat32, 1});
  setups.push_back({Kind::kCounts, 300, DType::kBfloat16, 4});
  // Some rows of the batch have expired.
  setups.push_back({Kind::kExpired, 4, DType::kFloat32, 4});
  return setups;
}

inline Exec& ExecOf(size_t threads) {
  static auto* const serial = new SerialExec;
  static auto* const four = new ThreadsExec(4);
  return threads == 1 ? static_cast<Exec&>(*serial) : *four;
}

struct Row {
  std::string vector, state;
  bool operator==(const Row& o) const { return vector == o.vector && state == o.state; }
};
using Content = std::map<uint64_t, Row>;

// All rows, from Export; ReadRows must return the same.
inline Content ContentOf(const Table& table, Exec& exec) {
  const RowLayout& l = table.layout();
  const ExportPlan plan = table.PlanExport(exec, 0, uint64_t{1} << 40, 0);
  const size_t n = plan.rows.size(), dim = static_cast<size_t>(table.options().dim);
  std::vector<uint64_t> keys(n);
  std::string vectors(n * l.vector_bytes(), '\0'), state(n * l.state_bytes(), '\0');
  table.Export(
      exec, plan,
      {keys.data(), vectors.data(), reinterpret_cast<float*>(state.data()), nullptr, nullptr});
  std::vector<float> read(n * dim), read_state(n * static_cast<size_t>(l.state_width));
  const std::unique_ptr<bool[]> found(new bool[n + 1]);
  table.ReadRows(exec, {keys.data(), n}, read.data(), read_state.data(), found.get());
  Content content;
  for (size_t i = 0; i < n; ++i) {
    content[keys[i]] = {vectors.substr(i * l.vector_bytes(), l.vector_bytes()),
                        state.substr(i * l.state_bytes(), l.state_bytes())};
    EXPECT_TRUE(found[i]);
  }
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(read_state.data()), state.size()), state);
  EXPECT_EQ(content.size(), n) << "a key appears twice";
  if (table.options().ttl == 0) {
    EXPECT_EQ(table.size(), n);
  }
  return content;
}

// Two tables with rows, and the arrays of a batch. Some keys of the batch have rows. The others do
// not fit into the one segment that a table's index has before the call.
class World {
 public:
  static constexpr size_t kRows = 300, kBatch = 240, kDistinct = 200;

  explicit World(const Setup& setup, const StateSpec* state = nullptr)
      : setup(setup), exec(ExecOf(setup.threads)), dim(static_cast<size_t>(setup.dim)) {
    for (size_t i = 0; i < kBatch; ++i) keys.push_back((i % kDistinct + kRows - 60) * kOdd);
    rows.assign(2 * kBatch, kNoRow);
    floats.resize(kBatch * dim);
    for (size_t i = 0; i < floats.size(); ++i) floats[i] = static_cast<float>(i % 63) / 64;
    vectors.assign(kBatch * dim * sizeof(float), '\0');
    states.assign(kBatch * dim * 2, 0.5f);
    found.reset(new bool[kBatch]());
    times.assign(kBatch, 1);
    StateSpec adagrad{"adagrad", {setup.dim}, {0.125f}};
    for (int t = 0; t < 2; ++t) tables.push_back(Make(t, state != nullptr ? *state : adagrad));
    table = tables[0].get();
    other = tables[1].get();
    for (const auto& each : tables) {
      if (setup.kind == Kind::kTracked || setup.kind == Kind::kExpired) each->Track(clock.Next());
    }
    if (setup.kind == Kind::kCut) {
      at_cut = ContentOf(*table, exec);
      EXPECT_TRUE(Snapshot::Begin(exec, {table}, {0}, CutOf::kDelta, &clock, &snapshot).ok());
    }
    tick = clock.Next();
  }

  std::vector<Content> Read() const { return {ContentOf(*table, exec), ContentOf(*other, exec)}; }
  void Check() const {
    for (const auto& each : tables) each->CheckInvariants();
  }
  // A training step on new and existing keys.
  void ContinueTraining() {
    std::vector<uint64_t> next(100);
    for (size_t i = 0; i < next.size(); ++i) next[i] = (kRows + 100 + i) * kOdd;
    std::vector<float> read(next.size() * dim), state(next.size() * 4 * dim);
    for (const auto& each : tables) {
      ASSERT_TRUE(
          each->FindOrInsert(exec, {next.data(), next.size()}, clock.Next(), rows.data()).ok());
      each->ReadRows(exec, {next.data(), next.size()}, read.data(), state.data(), found.get());
      for (float& x : read) x = 0.25f;
      ASSERT_TRUE(each->WriteRows(exec, {next.data(), next.size()}, read.data(), state.data(),
                                  false, 1, clock.Next())
                      .ok());
      each->CheckInvariants();
    }
    if (snapshot != nullptr) CheckCut();
  }
  // Reads the next block of the running cut; *end if there is none.
  Status ReadBlock(bool* end) {
    Snapshot::Block block;
    DYNEMB_RETURN_IF_ERROR(snapshot->Next(64, &block));
    const failing::Suspended suspended;
    *end = block.n == 0;
    const RowLayout& l = snapshot->layout(0);
    const size_t n = block.n;
    std::vector<uint64_t> read(n);
    std::string bytes(n * l.vector_bytes(), '\0'), state(n * l.state_bytes(), '\0');
    if (n == 0) return Status();
    DYNEMB_RETURN_IF_ERROR(snapshot->Read(
        exec, &block,
        {read.data(), bytes.data(), reinterpret_cast<float*>(state.data()), nullptr, nullptr}));
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(got.count(read[i]), 0u) << "delivered twice";
      got[read[i]] = {bytes.substr(i * l.vector_bytes(), l.vector_bytes()),
                      state.substr(i * l.state_bytes(), l.state_bytes())};
    }
    return Status();
  }
  // Checks that the running cut is complete, or reports that it is not.
  void CheckCut() {
    for (bool end = false; !end;) {
      const Status status = ReadBlock(&end);
      if (!status.ok()) {
        ASSERT_EQ(status.code(), Code::kResourceExhausted) << status.message();
        return;
      }
    }
    EXPECT_TRUE(got == at_cut) << got.size() << " of " << at_cut.size() << " rows of the cut";
  }
  // Records the output of a call, which must be the same each time.
  void Deliver(const void* p, size_t n) {
    const failing::Suspended suspended;
    output.append(static_cast<const char*>(p), n);
  }

  const Setup setup;
  Exec& exec;
  const size_t dim;
  Clock clock;
  Tick tick = 0;  // the tick of the next call
  std::vector<std::unique_ptr<Table>> tables;
  Table *table, *other;
  // The batch. Its keys repeat from kDistinct on.
  std::vector<uint64_t> keys;
  std::vector<RowId> rows;  // of both tables
  std::vector<float> floats, states;
  std::vector<char> vectors;
  std::unique_ptr<bool[]> found;
  std::vector<CutTime> times;
  Content at_cut, got;
  std::unique_ptr<Snapshot> snapshot;
  std::string output;  // the output of a call

 private:
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  static constexpr int64_t kTtl = 10;
  static constexpr size_t kOld = kRows - 30;

  std::unique_ptr<Table> Make(int number, const StateSpec& state) {
    TableOptions options;
    options.name = number == 0 ? "one" : "other";
    options.dim = setup.dim;
    options.dtype = setup.dtype;
    options.stochastic_rounding = false;
    const bool is_full = setup.kind == Kind::kFull || setup.kind == Kind::kCounts;
    options.init_capacity = is_full ? kRows : 16;
    options.max_capacity = is_full ? kRows : 0;
    if (setup.kind == Kind::kCounts) options.evict_strategy = EvictStrategy::kLfu;
    if (setup.kind == Kind::kExpired) options.ttl = kTtl;
    options.ttl_clock = TtlClock::kData;
    options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    std::unique_ptr<Table> created;
    EXPECT_TRUE(Table::Create(options, &created).ok());
    EXPECT_TRUE(created->AttachState(exec, state).ok());
    const auto begin = static_cast<size_t>(number) * 50;
    if (options.ttl == 0) {
      Fill(created.get(), begin, begin + kRows);
    } else {
      // The rows from kOld on expire.
      const auto now = [&](int64_t time) {
        EXPECT_TRUE(created->SetDataTime(time, clock.Next()).ok());
      };
      now(0);
      Fill(created.get(), kOld, begin + kRows);
      now(kTtl / 2);
      Fill(created.get(), begin, kOld);
      now(kTtl);
    }
    created->OwnState(created->state_spec(), "first");
    return created;
  }
  // Inserts rows [begin, end). None keeps its initial vector and state.
  void Fill(Table* created, size_t begin, size_t end) {
    const size_t n = end - begin;
    std::vector<uint64_t> first(n);
    std::vector<RowId> places(n);
    for (size_t i = 0; i < n; ++i) first[i] = (i + begin) * kOdd;
    EXPECT_TRUE(created->FindOrInsert(exec, {first.data(), n}, clock.Next(), places.data()).ok());
    std::vector<float> trained(n * dim);
    std::vector<float> stepped(n * static_cast<size_t>(created->layout().state_width));
    for (size_t i = 0; i < trained.size(); ++i) trained[i] = static_cast<float>(i % 61) / 32;
    for (size_t i = 0; i < stepped.size(); ++i) stepped[i] = static_cast<float>(i % 59) / 16 + 1;
    EXPECT_TRUE(created
                    ->WriteRows(exec, {first.data(), n}, trained.data(), stepped.data(), false, 1,
                                clock.Next())
                    .ok());
  }
};

using Call = std::function<Status(World& w)>;

inline void CheckFaults(const std::function<std::unique_ptr<World>()>& make, const Call& call) {
  std::vector<Content> before, after;
  std::string output;
  {
    const auto w = make();
    before = w->Read();
    const Status status = call(*w);
    ASSERT_TRUE(status.ok()) << status.message();
    after = w->Read();
    output = w->output;
    ASSERT_NO_FATAL_FAILURE(w->ContinueTraining());
  }
  for (bool charges : {false, true}) {
    for (int64_t k = 1;; k += kSanitized ? 1 + k / 2 : TriesAll() ? 1 : 1 + k / 32) {
      SCOPED_TRACE((charges ? "charge " : "allocation ") + std::to_string(k));
      ASSERT_LT(k, 20000);
      const auto w = make();
      bool failed = false, threw = false;
      Status status;
      try {
        if (charges) {
          RefuseCharges(k);
          status = call(*w);
        } else {
          failing::WithFailure(k, &failed, [&] { status = call(*w); });
        }
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      if (charges) failed = GrantCharges();
      w->Check();
      std::vector<Content> now = w->Read();
      const bool done = !threw && status.ok();
      bool changed = false;
      for (size_t t = 0; t < now.size(); ++t) {
        const bool is_after = now[t] == after[t];
        ASSERT_TRUE(is_after || (!done && now[t] == before[t]))
            << w->tables[t]->options().name << " has neither the old rows nor the new ones";
        changed |= is_after && !(now[t] == before[t]);
      }
      if (!done) {
        ASSERT_TRUE(failed) << "an error without an injected failure: " << status.message();
        w->tick = w->clock.Next();
        w->output.clear();
        status = call(*w);
        ASSERT_TRUE(status.ok()) << "the repeated call: " << status.message();
        w->Check();
        if (!changed) {
          now = w->Read();
          ASSERT_TRUE(now == after) << "the repeated call had another effect";
          ASSERT_EQ(w->output, output);
        }
      } else {
        ASSERT_EQ(w->output, output);
      }
      ASSERT_NO_FATAL_FAILURE(w->ContinueTraining());
      if (!failed) break;
    }
  }
}

class FaultTest : public ::testing::TestWithParam<Setup> {
 protected:
  void Faults(const Call& call) const {
    CheckFaults([&] { return std::make_unique<World>(GetParam()); }, call);
  }
};

}  // namespace fault
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FAULT_SUITE_H_
