// The work that the wire gives a device, and its failures.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cc/device/wire.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/wire_fixture.h"

namespace dynemb {
namespace {

template <class Place>
class DeviceWireTest : public WireFixture<Place> {};

TYPED_TEST_SUITE(DeviceWireTest, ForSimulatedDevices<DevicePlace>);

// The calls fail before they read an address.
TYPED_TEST(DeviceWireTest, TooManyRows) {
  const int64_t most = Bags::kMaxSize;
  int32_t word = 0;
  for (const uint32_t self : {kNoRank, 0u}) {
    const std::vector<int64_t> counts = {most, 1};
    WireLayout layout;
    ASSERT_TRUE(layout.Init({{DType::kFloat16, 1, WireType::kSame}}, counts.data(), 2, self).ok());
    if (self == kNoRank) {
      this->place_.ExpectTooMany("rows",
                                 [&] { return PackAt(this->place_, layout, {&word}, &word); });
    }
    this->place_.ExpectTooMany(
        "rows", [&] { return UnpackAt(this->place_, layout, &word, {&word}, {&word}); });
    this->place_.ExpectTooMany("rows", [&] {
      return FindRowsAt(this->place_, layout, &word, {&word}, [](const auto&) {});
    });
  }
}

TYPED_TEST(DeviceWireTest, WorkspaceAllocationFails) {
  Random random(8);
  Rows rows = MakeRows({{DType::kFloat32, 5, WireType::kInt8},
                        {DType::kFloat16, 3, WireType::kSame},
                        {DType::kFloat32, 4, WireType::kBfloat16}},
                       {1, 2, 0, 3, 1, 2}, &random);
  const Placed placed(rows, 0, &random);
  Output bytes = placed.Words();
  int32_t* const words = AsWords(bytes.get());
  std::vector<Output> unpacked = placed.Unpacked();
  auto& at = this->place_;
  EXPECT_EQ(at.FailEach([&] { return PackAt(at, placed.layout, Pointers(placed.rows), words); }),
            1u);
  EXPECT_EQ(
      at.FailEach([&] { return UnpackAt(at, placed.layout, words, {}, Pointers(&unpacked)); }), 1u);
  EXPECT_EQ(
      at.FailEach([&] { return FindRowsAt(at, placed.layout, words, {}, [](const auto&) {}); }),
      5u);
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
}

struct Work {
  std::vector<int> launches;  // of Pack, Unpack and ReceivedRows
  std::vector<size_t> quads;
  std::vector<size_t> copied;
};

Work WorkOf(const Rows& rows) {
  ThreadsDevice device;
  Random random(9);
  const Placed placed(rows, 0, &random);
  const std::vector<const void*> own = Pointers(placed.own);
  Output words = placed.Words();
  std::vector<Output> unpacked = placed.Unpacked();
  const std::vector<void*> to = Pointers(&unpacked);
  std::vector<const void* const*> received;
  Work work;
  const auto note = [&](CountingSession<>* session) {
    work.launches.push_back(std::exchange(session->launches, 0));
    work.quads.push_back(session->quads.empty() ? 0 : session->quads.back());
    session->quads.clear();
    work.copied.push_back(std::exchange(session->copied, 0));
  };
  CountingSession<> session(device, nullptr);
  EXPECT_TRUE(
      device::Pack(session, placed.layout, Pointers(placed.rows), AsWords(words.get())).ok());
  note(&session);
  EXPECT_TRUE(device::Unpack(session, placed.layout, AsWords(words.get()), own, to).ok());
  note(&session);
  EXPECT_TRUE(
      device::ReceivedRows(session, placed.layout, AsWords(words.get()), own, &received).ok());
  note(&session);
  return work;
}

TEST(DeviceWireWorkTest, LaunchesDoNotDependOnTheNumberOfTablesAndRanks) {
  Random random(10);
  for (const size_t tables : {1u, 30u}) {
    for (const size_t ranks : {2u, 9u}) {
      const std::vector<int64_t> counts(tables * ranks, 2);
      const auto launches = [&](WireType wire, uint32_t self) {
        const std::vector<WireTable> of(tables, WireTable{DType::kFloat32, 6, wire});
        Rows rows = MakeRows(of, counts, &random);
        rows.self = self;
        return WorkOf(rows).launches;
      };
      for (const uint32_t self : {kNoRank, 1u}) {
        EXPECT_EQ(launches(WireType::kSame, self), (std::vector<int>{1, 1, 1}));
        EXPECT_EQ(launches(WireType::kInt8, self), (std::vector<int>{1, 1, 2}));
        EXPECT_EQ(launches(WireType::kFloat16, self), (std::vector<int>{1, 1, 2}));
      }
    }
  }
  Rows own = MakeRows({{DType::kFloat32, 6, WireType::kInt8}}, {0, 5}, &random);
  own.self = 1;
  EXPECT_EQ(WorkOf(own).launches, (std::vector<int>{0, 1, 1}));
  EXPECT_EQ(WorkOf(MakeRows(own.tables, {0, 0}, &random)).launches, (std::vector<int>{0, 0, 0}));
}

// Three of 12,288 sections have rows.
TEST(DeviceWireWorkTest, EmptySectionsAreNotCopied) {
  Random random(12);
  constexpr uint32_t kRanks = Owners::kMaxRanks;
  std::vector<int64_t> counts(3 * kRanks);
  counts[5] = counts[kRanks + 9] = counts[2 * kRanks] = 3;
  const WireTable table{DType::kFloat32, 2, WireType::kInt8};
  for (const size_t copied : WorkOf(MakeRows({table, table, table}, counts, &random)).copied) {
    EXPECT_LE(copied, 3 * (sizeof(device::WireSection) + sizeof(device::RowRange)) + 32);
  }
}

TEST(DeviceWireWorkTest, CheckTotalLimitsTheRowsOfALaunch) {
  EXPECT_TRUE(device::CheckTotal(0, "rows").ok());
  EXPECT_TRUE(device::CheckTotal(0xFFFFFFFEu, "rows").ok());
  EXPECT_FALSE(device::CheckTotal(0xFFFFFFFFu, "rows").ok());
  EXPECT_FALSE(device::CheckTotal(size_t{1} << 40, "rows").ok());
}

// A quad is 16 bytes of a row that is copied, and four columns of a row that is converted. The
// widest row determines the width.
TEST(DeviceWireWorkTest, TeamWidthFitsTheWidestRow) {
  Random random(11);
  const auto quads = [&](const std::vector<WireTable>& tables, size_t self_rows) {
    std::vector<int64_t> counts;
    for (size_t t = 0; t < tables.size(); ++t) {
      counts.insert(counts.end(), {1, static_cast<int64_t>(self_rows)});
    }
    Rows rows = MakeRows(tables, counts, &random);
    rows.self = 1;
    return WorkOf(rows).quads;
  };
  const WireTable floats{DType::kFloat32, 33, WireType::kSame};
  const WireTable halves{DType::kFloat16, 64, WireType::kBfloat16};
  const WireTable bytes{DType::kFloat16, 64, WireType::kInt8};
  EXPECT_EQ(quads({floats, halves}, 0), (std::vector<size_t>{9, 9, 0}));
  EXPECT_EQ(quads({halves}, 1), (std::vector<size_t>{8, 8, 0}));
  EXPECT_EQ(quads({halves, bytes, halves}, 1), (std::vector<size_t>{16, 16, 16}));
}

}  // namespace
}  // namespace dynemb
