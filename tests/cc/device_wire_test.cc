// Pack, Unpack and ReceivedRows on simulated devices: the same bits as on the host, for rows of any
// numbers at any address, of many tables and ranks in one launch. The tests of the host's functions
// are wire_test and wire_int8_test.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/device/wire.h"
#include "cc/table/codec.h"
#include "tests/cc/device_wire_model.h"
#include "tests/cc/simulated_devices.h"
#include "tests/cc/wire_model.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr WireType kWires[] = {WireType::kSame, WireType::kFloat16, WireType::kBfloat16,
                               WireType::kInt8};
template <class Device>
class DeviceWireTest : public testing::Test {
 protected:
  // Emulated teams are slow.
  static constexpr bool kThreads = std::is_same_v<Device, ThreadsDevice>;

  // Compares all three functions with the host's. The tables in `left_out` are not packed; their
  // words in the message stay unchanged.
  void Check(const Rows& rows, size_t shift = 0, const std::vector<size_t>& left_out = {}) {
    const Placed placed(rows, shift, &random_);
    const uint64_t waits = device_.waits();
    std::vector<char> message;
    ASSERT_NO_FATAL_FAILURE(CheckPack(placed, left_out, &message));
    const Input words(message.data(), message.size(), shift * sizeof(int32_t));
    ASSERT_NO_FATAL_FAILURE(CheckUnpack(placed, reinterpret_cast<const int32_t*>(words.get())));
    ASSERT_EQ(device_.waits(), waits);
  }

  Device device_;
  ThreadsExec exec_{3};
  Random random_{99};

 private:
  void CheckPack(const Placed& placed, const std::vector<size_t>& left_out,
                 std::vector<char>* message) {
    std::vector<const void*> from = Placed::Pointers(placed.rows);
    for (const size_t t : left_out) from[t] = nullptr;
    Output words = placed.Words(), expected = placed.Words();
    SerialExec serial;
    Pack(serial, placed.layout, from, AsWords(expected.get()));
    {
      typename Device::Session session(device_, &exec_);
      const Status status = device::Pack(session, placed.layout, from, AsWords(words.get()));
      ASSERT_TRUE(status.ok()) << status.message();
    }
    *message = expected.Take();
    ASSERT_EQ(words.Take(), *message);
  }

  void CheckUnpack(const Placed& placed, const int32_t* words) {
    const WireLayout& layout = placed.layout;
    const std::vector<const void*> own = Placed::Pointers(placed.own);
    std::vector<Output> unpacked = placed.Unpacked(), on_host = placed.Unpacked();
    std::vector<void*> to, to_host;
    for (Output& output : unpacked) to.push_back(output.get());
    for (Output& output : on_host) to_host.push_back(output.get());
    SerialExec serial;
    Unpack(serial, layout, words, own, to_host);
    {
      typename Device::Session session(device_, &exec_);
      const Status status = device::Unpack(session, layout, words, own, to);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    typename Device::Session session(device_, &exec_);
    std::vector<const void* const*> received(7, own.data());  // garbage
    const Status status = device::ReceivedRows(session, layout, words, own, &received);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(received.size(), layout.tables().size());
    for (size_t t = 0; t < layout.tables().size(); ++t) {
      SCOPED_TRACE(testing::Message() << "table " << t);
      const std::vector<char> expected = on_host[t].Take();
      ASSERT_EQ(unpacked[t].Take(), expected);
      ASSERT_NO_FATAL_FAILURE(CheckReceived(layout, t, words, own, received[t], expected));
    }
  }

  // Rows that need no conversion must be found in place.
  static void CheckReceived(const WireLayout& layout, size_t t, const int32_t* words,
                            const std::vector<const void*>& own, const void* const* received,
                            const std::vector<char>& expected) {
    const WireTable& table = layout.tables()[t];
    const size_t bytes = RowBytes(table);
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      const WireLayout::Section& s = layout.section(t, rank);
      for (size_t r = 0; r < s.rows; ++r) {
        const size_t row = s.first_row + r;
        ASSERT_EQ(memcmp(received[row], expected.data() + row * bytes, bytes), 0)
            << "rank " << rank << ", row " << r;
        const void* from = received[row];
        if (rank == layout.self()) {
          from = static_cast<const char*>(own[t]) + r * bytes;
        } else if (WireLayout::AsTheyAre(table)) {
          from = reinterpret_cast<const char*>(words + s.word) + r * bytes;
        }
        ASSERT_EQ(received[row], from);
      }
    }
  }
};

TYPED_TEST_SUITE(DeviceWireTest, SimulatedDevices);

// Rows of every dtype, dim and wire type in one launch, with numbers of every kind.
TYPED_TEST(DeviceWireTest, EveryTypeDimAndAddress) {
  Random random(1);
  std::vector<WireTable> tables;
  for (DType dtype : kDTypes) {
    for (WireType wire : kWires) {
      for (int64_t dim : {1, 2, 3, 4, 5, 7, 8, 16, 33, 130}) tables.push_back({dtype, dim, wire});
    }
  }
  for (size_t kind = 0; kind < 4; ++kind) {
    SCOPED_TRACE(testing::Message() << "kind " << kind);
    std::vector<int64_t> counts;
    for (size_t t = 0; t < tables.size(); ++t) {
      for (int64_t most : {3, 5, 2}) counts.push_back(static_cast<int64_t>(random()) & most);
    }
    Rows rows = MakeRows(tables, counts, &random);
    rows.self = kind == 3 ? kNoRank : static_cast<uint32_t>(kind);
    for (size_t t = 0; t < tables.size() && kind < 3; ++t) {
      FillNumbers(tables[t], kind, &random, &rows.vectors[t]);
    }
    // All kinds are tested at all addresses, except with emulated teams.
    for (size_t shift = 0; shift < 8; ++shift) {
      if (!this->kThreads && shift % 4 != kind) continue;
      SCOPED_TRACE(testing::Message() << "shift " << shift);
      ASSERT_NO_FATAL_FAILURE(this->Check(rows, shift));
    }
  }
}

TYPED_TEST(DeviceWireTest, ManyTablesAndRanks) {
  Random random(2);
  for (int round = 0; round < (this->kThreads ? 150 : 12); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Rows rows = RandomRows(random() % 7, 1 + static_cast<uint32_t>(random() % 6),
                           this->kThreads ? 40 : 6, &random);
    FillNumbers(&random, &rows);
    std::vector<size_t> left_out;
    for (size_t t = 0; t < rows.tables.size(); ++t) {
      if (random() % 4 == 0) left_out.push_back(t);
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(rows, random() % 4, left_out));
  }
}

// Rows longer than the width of a team, and more rows than one wave of a launch has.
TYPED_TEST(DeviceWireTest, LongRows) {
  Random random(3);
  const int64_t most = this->kThreads ? 700 : 70;
  for (WireType wire : kWires) {
    for (DType dtype : kDTypes) {
      Rows rows =
          MakeRows({{dtype, 300, wire}, {dtype, 1, WireType::kInt8}}, {2, 1, 7, most}, &random);
      for (size_t t = 0; t < 2; ++t) FillNumbers(rows.tables[t], 0, &random, &rows.vectors[t]);
      ASSERT_NO_FATAL_FAILURE(this->Check(rows, 1));
    }
  }
}

// The largest element of a row, or an element that is not finite, may be in any column.
TYPED_TEST(DeviceWireTest, ScaleDependsOnAllColumns) {
  Random random(4);
  for (DType dtype : kDTypes) {
    constexpr size_t kDim = 70;
    Rows rows = MakeRows({{dtype, kDim, WireType::kInt8}}, {kDim, kDim}, &random);
    std::vector<float> x(2 * kDim * kDim);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 11) - 5.0f;
    for (size_t r = 0; r < kDim; ++r) {
      x[r * kDim + r] = r % 2 == 0 ? -100.0f : 90.0f;
      x[(kDim + r) * kDim + r] = r % 2 == 0 ? HUGE_VALF : std::nanf("");
    }
    StoreVector(dtype, x.data(), static_cast<int64_t>(x.size()), rows.vectors[0].data());
    ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  }
}

TYPED_TEST(DeviceWireTest, FewOrNoRows) {
  Random random(5);
  Rows rows;
  rows.ranks = 4;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));  // no tables
  rows.self = 2;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  const std::vector<WireTable> tables = {{DType::kFloat32, 5, WireType::kInt8},
                                         {DType::kFloat16, 3, WireType::kSame},
                                         {DType::kFloat32, 4, WireType::kBfloat16}};
  for (const uint32_t self : {kNoRank, 0u, 2u}) {
    Rows empty = MakeRows(tables, std::vector<int64_t>(9, 0), &random);
    empty.self = self;
    ASSERT_NO_FATAL_FAILURE(this->Check(empty));  // all pointers are null
    Rows first = MakeRows(tables, {2, 0, 0, 3, 0, 0, 1, 0, 0}, &random);
    first.self = self;  // if that is 0, nothing is sent
    ASSERT_NO_FATAL_FAILURE(this->Check(first));
    ASSERT_NO_FATAL_FAILURE(this->Check(first, 0, {0, 1, 2}));
    ASSERT_NO_FATAL_FAILURE(this->Check(first, 0, {0, 2}));
  }
}

// Only a few of many sections have rows.
TYPED_TEST(DeviceWireTest, MaximalNumberOfRanks) {
  Random random(6);
  constexpr uint32_t kRanks = Owners::kMaxRanks;
  std::vector<int64_t> counts(3 * kRanks);
  for (int i = 0; i < 60; ++i) counts[random() % counts.size()] = 1;
  counts[kRanks - 1] = counts[kRanks] = counts.back() = 2;
  Rows rows = MakeRows({{DType::kFloat32, 6, WireType::kInt8},
                        {DType::kBfloat16, 5, WireType::kSame},
                        {DType::kFloat32, 3, WireType::kFloat16}},
                       counts, &random);
  rows.self = kRanks - 1;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  if (!this->kThreads) return;
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % 3);
  rows = MakeRows(rows.tables, counts, &random);
  ASSERT_NO_FATAL_FAILURE(this->Check(rows, 1));
}

// Rows that are only copied keep the bits of their NaNs.
TYPED_TEST(DeviceWireTest, CopiesKeepEveryBit) {
  Random random(7);
  for (DType dtype : kDTypes) {
    for (int64_t dim : {1, 5, 8}) {
      Rows rows = MakeRows({{dtype, dim, WireType::kSame}}, {3, 20, 4}, &random);
      const Placed placed(rows, 0, &random);
      Output words = placed.Words();
      std::vector<Output> unpacked = placed.Unpacked();
      typename TypeParam::Session session(this->device_, &this->exec_);
      ASSERT_TRUE(
          device::Pack(session, placed.layout, Placed::Pointers(placed.rows), AsWords(words.get()))
              .ok());
      ASSERT_TRUE(
          device::Unpack(session, placed.layout, AsWords(words.get()), {}, {unpacked[0].get()})
              .ok());
      ASSERT_EQ(unpacked[0].Take(), rows.vectors[0]);
    }
  }
}

// The calls fail before any work is given, and before they read an address.
TYPED_TEST(DeviceWireTest, TooManyRows) {
  const int64_t most = Bags::kMaxSize;
  int32_t word = 0;
  const auto expect = [&](const Status& status) {
    EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(),
              "all tables together may have at most 2^32 - 2 rows in a batch, got 4294967295");
  };
  for (const uint32_t self : {kNoRank, 0u}) {
    const std::vector<int64_t> counts = {most, 1};
    WireLayout layout;
    ASSERT_TRUE(layout.Init({{DType::kFloat16, 1, WireType::kSame}}, counts.data(), 2, self).ok());
    typename TypeParam::Session session(this->device_, &this->exec_);
    std::vector<const void* const*> rows;
    this->device_.FailTake(0);
    if (self == kNoRank) expect(device::Pack(session, layout, {&word}, &word));
    this->device_.FailTake(0);
    expect(device::Unpack(session, layout, &word, {&word}, {&word}));
    this->device_.FailTake(0);
    expect(device::ReceivedRows(session, layout, &word, {&word}, &rows));
    EXPECT_TRUE(session.status().ok());
  }
}

TYPED_TEST(DeviceWireTest, WorkspaceAllocationFails) {
  Random random(8);
  Rows rows = MakeRows({{DType::kFloat32, 5, WireType::kInt8},
                        {DType::kFloat16, 3, WireType::kSame},
                        {DType::kFloat32, 4, WireType::kBfloat16}},
                       {1, 2, 0, 3, 1, 2}, &random);
  const Placed placed(rows, 0, &random);
  const std::vector<const void*> from = Placed::Pointers(placed.rows);
  // Returns the number of arrays that `call` takes. The allocation of each of them fails once.
  const auto takes = [&](const auto& call) {
    for (uint64_t n = 0;; ++n) {
      Output words = placed.Words();
      std::vector<Output> unpacked = placed.Unpacked();
      typename TypeParam::Session session(this->device_, &this->exec_);
      this->device_.FailTake(n);
      const Status status = call(session, AsWords(words.get()), &unpacked);
      if (this->device_.FailTake(TypeParam::kNever)) {
        EXPECT_TRUE(status.ok());
        return n;
      }
      EXPECT_EQ(status.code(), Code::kResourceExhausted) << "take " << n;
      EXPECT_EQ(session.status().code(), Code::kResourceExhausted);
    }
  };
  EXPECT_EQ(takes([&](auto& session, int32_t* words, std::vector<Output>*) {
              return device::Pack(session, placed.layout, from, words);
            }),
            1u);
  EXPECT_EQ(takes([&](auto& session, int32_t* words, std::vector<Output>* unpacked) {
              std::vector<void*> to;
              for (Output& output : *unpacked) to.push_back(output.get());
              return device::Unpack(session, placed.layout, words, {}, to);
            }),
            1u);
  EXPECT_EQ(takes([&](auto& session, int32_t* words, std::vector<Output>*) {
              std::vector<const void* const*> received;
              return device::ReceivedRows(session, placed.layout, words, {}, &received);
            }),
            5u);
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
}

// Counts the work that is given to the device.
class CountingSession : public ThreadsDevice::Session {
 public:
  using Base = ThreadsDevice::Session;
  using Base::Base;
  int launches = 0;
  size_t quads = 0;   // of the last ForRows
  size_t copied = 0;  // bytes

  template <class Body>
  void ForEach(size_t n, const Body& body) {
    launches += n != 0;
    Base::ForEach(n, body);
  }
  template <class Body>
  void ForRows(size_t n, size_t of_row, const Body& body) {
    launches += n != 0;
    quads = of_row;
    Base::ForRows(n, of_row, body);
  }
  void Copy(void* to, const void* from, size_t bytes) {
    copied += bytes;
    Base::Copy(to, from, bytes);
  }
};

struct Work {
  std::vector<int> launches;  // of Pack, Unpack and ReceivedRows
  std::vector<size_t> quads;
  std::vector<size_t> copied;
};

Work WorkOf(const Rows& rows) {
  ThreadsDevice device;
  Random random(9);
  const Placed placed(rows, 0, &random);
  const std::vector<const void*> own = Placed::Pointers(placed.own);
  Output words = placed.Words();
  std::vector<Output> unpacked = placed.Unpacked();
  std::vector<void*> to;
  for (Output& output : unpacked) to.push_back(output.get());
  std::vector<const void* const*> received;
  Work work;
  const auto note = [&](CountingSession* session) {
    work.launches.push_back(std::exchange(session->launches, 0));
    work.quads.push_back(std::exchange(session->quads, 0));
    work.copied.push_back(std::exchange(session->copied, 0));
  };
  CountingSession session(device, nullptr);
  EXPECT_TRUE(
      device::Pack(session, placed.layout, Placed::Pointers(placed.rows), AsWords(words.get()))
          .ok());
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
