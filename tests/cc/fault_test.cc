// Fault injection into the calls of Table and Snapshot (fault_suite.h).
#include "tests/cc/fault_suite.h"

namespace dynemb {
namespace fault {
namespace {

class TableFaultTest : public FaultTest {};

Status Done() { return Status(); }

TEST_P(TableFaultTest, Create) {
  TableOptions options;
  options.name = "t";
  options.dim = GetParam().dim;
  options.dtype = GetParam().dtype;
  options.init_capacity = 1000;
  Exec& exec = ExecOf(GetParam().threads);
  bool failed = true;
  for (int64_t k = 1; failed; ++k) {
    SCOPED_TRACE(k);
    std::unique_ptr<Table> table;
    Status status = ResourceExhausted("");
    try {
      failing::WithFailure(k, &failed, [&] { status = Table::Create(options, &table, &exec); });
    } catch (const std::bad_alloc&) {
    }
    ASSERT_EQ(status.ok(), table != nullptr);
    ASSERT_TRUE(status.ok() || failed) << status.message();
    if (table != nullptr) table->CheckInvariants();
  }
}

TEST_P(TableFaultTest, AttachState) {
  const StateSpec adam{"adam", {GetParam().dim, GetParam().dim}, {0.0f, 0.25f}};
  Faults([&](World& w) { return w.table->AttachState(w.exec, adam); });
}

// Equal state of another owner: it is reset or, if the call fails, unchanged.
TEST_P(TableFaultTest, TakeState) {
  Faults([](World& w) {
    bool was_reset = false;
    const StateSpec spec = w.table->state_spec();
    return w.table->TakeState(w.exec, spec, "a second optimizer, whose name is on the heap",
                              &was_reset);
  });
}

TEST_P(TableFaultTest, Clear) {
  Faults([](World& w) { return w.table->Clear(w.exec, w.tick); });
}

TEST_P(TableFaultTest, Find) {
  Faults([](World& w) {
    w.table->Find(w.exec, {w.keys.data(), w.keys.size()}, w.tick, w.rows.data());
    return Done();
  });
}

TEST_P(TableFaultTest, Contains) {
  Faults([](World& w) {
    w.table->Contains(w.exec, {w.keys.data(), w.keys.size()}, w.found.get());
    w.Deliver(w.found.get(), w.keys.size());
    return Done();
  });
}

TEST_P(TableFaultTest, Lookup) {
  Faults([](World& w) {
    w.table->Lookup(w.exec, {w.keys.data(), w.keys.size()}, w.tick, nullptr, w.vectors.data(),
                    w.rows.data());
    w.Deliver(w.vectors.data(), w.vectors.size());
    return Done();
  });
}

TEST_P(TableFaultTest, ReadRows) {
  Faults([](World& w) {
    w.table->ReadRows(w.exec, {w.keys.data(), w.keys.size()}, w.floats.data(), w.states.data(),
                      w.found.get());
    w.Deliver(w.floats.data(), w.floats.size() * sizeof(float));
    return Done();
  });
}

TEST_P(TableFaultTest, FindOrInsert) {
  Faults([](World& w) {
    return w.table->FindOrInsert(w.exec, {w.keys.data(), w.keys.size()}, w.tick, w.rows.data());
  });
}

TEST_P(TableFaultTest, InsertAndEvict) {
  Faults([](World& w) {
    EvictedRows evicted(w.table->layout());
    return w.table->InsertAndEvict(w.exec, {w.keys.data(), w.keys.size()}, w.tick, w.rows.data(),
                                   &evicted);
  });
}

TEST_P(TableFaultTest, LookupOrInsert) {
  Faults([](World& w) {
    DYNEMB_RETURN_IF_ERROR(w.table->LookupOrInsert(w.exec, {w.keys.data(), w.keys.size()}, w.tick,
                                                   w.vectors.data(), w.rows.data()));
    w.Deliver(w.vectors.data(), w.vectors.size());
    return Done();
  });
}

TEST_P(TableFaultTest, Upsert) {
  Faults([](World& w) {
    return w.table->Upsert(w.exec, {w.keys.data(), w.keys.size()}, w.floats.data(), w.tick);
  });
}

TEST_P(TableFaultTest, Accumulate) {
  Faults([](World& w) {
    return w.table->Accumulate(w.exec, {w.keys.data(), World::kDistinct}, w.floats.data(), w.tick);
  });
}

TEST_P(TableFaultTest, WriteRows) {
  Faults([](World& w) {
    return w.table->WriteRows(w.exec, {w.keys.data(), World::kDistinct}, w.floats.data(),
                              w.states.data(), true, 1, w.tick);
  });
}

TEST_P(TableFaultTest, Erase) {
  Faults([](World& w) {
    const size_t n = w.table->Erase(w.exec, {w.keys.data(), w.keys.size()}, w.tick, Removal::kWipe);
    w.Deliver(&n, sizeof(n));
    return Done();
  });
}

TEST_P(TableFaultTest, LoadRows) {
  Faults([](World& w) {
    Table::LoadedRows rows;
    rows.keys = {w.keys.data(), World::kDistinct};
    rows.vectors = w.floats.data();
    rows.state = w.states.data();
    rows.updates = rows.scores = w.times.data();
    return w.table->LoadRows(w.exec, rows, w.tick);
  });
}

TEST_P(TableFaultTest, SwapRows) {
  Faults([](World& w) {
    w.table->SwapRows(w.other, w.tick);
    return Done();
  });
}

TEST_P(TableFaultTest, Scores) {
  Faults([](World& w) {
    std::vector<int64_t> scores(w.keys.size());
    w.table->Scores(w.exec, {w.keys.data(), w.keys.size()}, scores.data());
    return Done();
  });
}

TEST_P(TableFaultTest, SetScores) {
  if (GetParam().kind != Kind::kCounts) GTEST_SKIP() << "scores are times";
  Faults([](World& w) {
    const std::vector<Score> scores(w.keys.size(), 7);
    DYNEMB_RETURN_IF_ERROR(
        w.table->SetScores(w.exec, {w.keys.data(), w.keys.size()}, scores.data()));
    return w.table->AddCounts(w.exec, {w.keys.data(), w.keys.size()}, scores.data());
  });
}

TEST_P(TableFaultTest, Explain) {
  Faults([](World& w) {
    std::vector<Table::KeyState> states(w.keys.size());
    w.table->Explain(w.exec, {w.keys.data(), w.keys.size()}, states.data());
    return Done();
  });
}

TEST_P(TableFaultTest, Expire) {
  Faults([](World& w) {
    uint64_t expired = 0;
    DYNEMB_RETURN_IF_ERROR(w.table->Expire(w.exec, w.tick, &expired));
    const failing::Suspended suspended;  // its thousands of allocations are not the subject
    EXPECT_EQ(w.table->size(), ContentOf(*w.table, w.exec).size());
    return Done();
  });
}

TEST_P(TableFaultTest, EvictTo) {
  Faults([](World& w) {
    uint64_t evicted = 0;
    return w.table->EvictTo(w.exec, 100, w.tick, &evicted);
  });
}

TEST_P(TableFaultTest, Export) {
  Faults([](World& w) {
    const ExportPlan plan = w.table->PlanExport(w.exec, 0, 300, 0);
    w.table->Export(w.exec, plan, TickColumns::Keys(w.floats.data()));
    w.Deliver(w.floats.data(), plan.rows.size() * sizeof(uint64_t));
    return Done();
  });
}

TEST_P(TableFaultTest, Track) {
  Faults([](World& w) {
    w.table->Track(w.tick);
    return Done();
  });
}

TEST_P(TableFaultTest, SnapshotBegin) {
  if (GetParam().kind == Kind::kCut) GTEST_SKIP() << "a cut is running";
  // If the keys that expire cannot be recorded, the next delta is refused.
  const CutOf of = GetParam().kind != Kind::kExpired ? CutOf::kDelta : CutOf::kRows;
  Faults([of](World& w) {
    for (const auto& table : w.tables) EXPECT_EQ(table->cut(), nullptr) << "a cut is left";
    std::unique_ptr<Snapshot> snapshot;
    return Snapshot::Begin(w.exec, {w.table, w.other}, {0, 0}, of, &w.clock, &snapshot);
  });
}

// A batch saves rows for the cut. A failed call delivers nothing, and a later one continues.
TEST_P(TableFaultTest, SnapshotNextAndRead) {
  if (GetParam().kind != Kind::kCut) GTEST_SKIP() << "no cut is running";
  Faults([](World& w) {
    if (w.got.empty()) {
      const failing::Suspended suspended;
      const int64_t charges = charges_left.exchange(1000);
      EXPECT_TRUE(
          w.table->Upsert(w.exec, {w.keys.data(), w.keys.size()}, w.floats.data(), w.tick).ok());
      charges_left = charges;
    }
    for (bool end = false; !end;) DYNEMB_RETURN_IF_ERROR(w.ReadBlock(&end));
    return Done();
  });
}

// Under the address sanitizer, not every kind of table has long rows.
std::vector<Setup> TableSetups() {
  std::vector<Setup> setups;
  for (const Setup& s : Setups()) {
    const bool runs = s.dim == 4 || s.kind == Kind::kGrows || s.kind == Kind::kCounts;
    if (!kUnderAsan || runs) setups.push_back(s);
  }
  return setups;
}

INSTANTIATE_TEST_SUITE_P(Setups, TableFaultTest, ::testing::ValuesIn(TableSetups()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace fault
}  // namespace dynemb
