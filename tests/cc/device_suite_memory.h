// The contract suite of a device: ranges, and arrays of sessions.
#ifndef DYNEMB_TESTS_CC_DEVICE_SUITE_MEMORY_H_
#define DYNEMB_TESTS_CC_DEVICE_SUITE_MEMORY_H_

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/device_suite.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace testing_device {

constexpr size_t kMiB = size_t{1} << 20;

template <class Setup>
class DeviceMemory : public DeviceSuite<Setup> {
 protected:
  using typename DeviceSuite<Setup>::Session;

  // Grows a range, and checks all of it each time.
  template <class Range>
  static void GrowInPlace(size_t reserved, const std::vector<size_t>& sizes) {
    Range range;
    EXPECT_EQ(range.committed(), 0u);
    ASSERT_EQ(range.Reserve(DeviceSuite<Setup>::device(), reserved).message(), "");
    char* const data = range.data();
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
    EXPECT_GE(range.reserved(), reserved);
    auto* const words = reinterpret_cast<uint32_t*>(data);
    size_t filled = 0;
    for (const size_t bytes : sizes) {
      ASSERT_EQ(range.Commit(bytes).message(), "");
      EXPECT_EQ(range.data(), data);
      EXPECT_GE(range.committed(), bytes);
      EXPECT_LE(range.committed(), range.reserved());
      const size_t committed = range.committed() / sizeof(uint32_t);
      Session session(DeviceSuite<Setup>::device(), Setup::StreamOf(0));
      EXPECT_EQ(OtherThanLine(session, words, filled, 7, 1), 0u) << "after growing to " << bytes;
      EXPECT_EQ(OtherThanLine(session, words + filled, committed - filled, 0, 0), 0u)
          << "new memory, after growing to " << bytes;
      session.ForEach(committed, Line{words, 7, 1});
      EXPECT_EQ(OtherThanLine(session, words, committed, 7, 1), 0u);
      filled = committed;
    }
    // A smaller request changes nothing.
    const size_t committed = range.committed();
    EXPECT_EQ(range.Commit(1).message(), "");
    EXPECT_EQ(range.committed(), committed);
    EXPECT_EQ(range.Commit(range.reserved() + 1).code(), Code::kResourceExhausted);
    EXPECT_EQ(range.committed(), committed);
    range.Clear();
    EXPECT_EQ(range.committed(), committed);
    Session session(DeviceSuite<Setup>::device(), Setup::StreamOf(0));
    EXPECT_EQ(OtherThanLine(session, words, filled, 0, 0), 0u) << "after Clear";
  }
};
TYPED_TEST_SUITE_P(DeviceMemory);

TYPED_TEST_P(DeviceMemory, RangesGrowInPlace) {
  using Range = typename TestFixture::Range;
  TestFixture::template GrowInPlace<Range>(100, {1, 100});
  TestFixture::template GrowInPlace<Range>(40 * kMiB, {1, kMiB, 3 * kMiB, 17 * kMiB, 40 * kMiB});
}

// A new range does not have the contents that the previous range left.
TYPED_TEST_P(DeviceMemory, ReusedMemoryIsZero) {
  for (const size_t bytes : {size_t{4096}, 4 * kMiB}) {
    for (int round = 0; round < 3; ++round) {
      SCOPED_TRACE(bytes);
      TestFixture::template GrowInPlace<typename TestFixture::Range>(bytes, {bytes});
    }
  }
}

TYPED_TEST_P(DeviceMemory, HostRangesGrowInPlaceAndBodiesAccessThem) {
  using HostRange = typename TestFixture::HostRange;
  TestFixture::template GrowInPlace<HostRange>(40 * kMiB, {1, kMiB, 3 * kMiB, 17 * kMiB});

  HostRange range;
  ASSERT_TRUE(range.Reserve(this->device(), kMiB).ok());
  ASSERT_TRUE(range.Commit(4000).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  session.ForEach(1000, Line{words, 3, 5});
  ASSERT_EQ(session.Synchronize().message(), "");
  for (uint32_t i = 0; i < 1000; ++i) ASSERT_EQ(words[i], i * 3 + 5);
  for (uint32_t i = 0; i < 1000; ++i) words[i] = i * 11 + 2;
  EXPECT_EQ(OtherThanLine(session, words, 1000, 11, 2), 0u);
}

// Copies do not depend on how a range grew.
TYPED_TEST_P(DeviceMemory, CopiesCrossCommitBoundaries) {
  typename TestFixture::Range range;
  typename TestFixture::HostRange host;
  const size_t bytes = 9 * kMiB, n = bytes / sizeof(uint32_t);
  ASSERT_TRUE(range.Reserve(this->device(), bytes).ok());
  ASSERT_TRUE(host.Reserve(this->device(), bytes).ok());
  for (size_t b = kMiB; b <= bytes; b += kMiB) {
    ASSERT_TRUE(range.Commit(b).ok());
    ASSERT_TRUE(host.Commit(b).ok());
  }
  auto* const on_host = reinterpret_cast<uint32_t*>(host.data());
  auto* const on_device = reinterpret_cast<uint32_t*>(range.data());
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  session.ForEach(n, Line{on_host, 9, 4});
  session.Copy(on_device, on_host, bytes);
  EXPECT_EQ(OtherThanLine(session, on_device, n, 9, 4), 0u);
  session.Fill(on_host, 0, bytes);
  EXPECT_EQ(OtherThanLine(session, on_host, n, 0, 0), 0u);
  session.Copy(on_host + 1, on_device, bytes - sizeof(uint32_t));
  EXPECT_EQ(OtherThanLine(session, on_host + 1, n - 1, 9, 4), 0u);
  std::vector<uint32_t> values = TestFixture::Read(session, on_host, n);
  EXPECT_EQ(values[n - 1], (n - 2) * 9 + 4);
  std::fill(values.begin(), values.end(), 8u);
  session.Copy(on_host, values.data(), bytes);
  EXPECT_EQ(OtherThanLine(session, on_host, n, 0, 8), 0u);
}

TYPED_TEST_P(DeviceMemory, FailedCommitChangesNothing) {
  typename TestFixture::Range range;
  ASSERT_TRUE(range.Reserve(this->device(), TypeParam::FreeMemory() + 2 * kMiB).ok());
  ASSERT_TRUE(range.Commit(3 * kMiB).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  const size_t committed = range.committed(), n = committed / sizeof(uint32_t);
  {
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
    session.ForEach(n, Line{words, 1, 9});
  }
  // Makes the whole range larger than the free memory.
  typename TestFixture::Range other;
  ASSERT_TRUE(other.Reserve(this->device(), 4 * kMiB).ok());
  ASSERT_TRUE(other.Commit(4 * kMiB).ok());
  const size_t used = this->device().used();

  const Status status = range.Commit(range.reserved());
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find(std::to_string(range.reserved() - committed)), std::string::npos)
      << status.message();
  EXPECT_EQ(range.committed(), committed);
  EXPECT_EQ(this->device().used(), used);
  {
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
    EXPECT_EQ(OtherThanLine(session, words, n, 1, 9), 0u);
  }
  ASSERT_EQ(range.Commit(committed + kMiB).message(), "");
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  EXPECT_EQ(OtherThanLine(session, words, n, 1, 9), 0u);
  EXPECT_EQ(OtherThanLine(session, words + n, kMiB / sizeof(uint32_t), 0, 0), 0u);
}

TYPED_TEST_P(DeviceMemory, RangesMove) {
  const size_t used = this->device().used();
  {
    typename TestFixture::Range a, b;
    ASSERT_TRUE(a.Reserve(this->device(), 4 * kMiB).ok());
    ASSERT_TRUE(a.Commit(4096).ok());
    ASSERT_TRUE(b.Reserve(this->device(), 1000).ok());
    ASSERT_TRUE(b.Commit(1000).ok());
    auto* const words = reinterpret_cast<uint32_t*>(a.data());
    const size_t committed = a.committed();
    {
      typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
      session.ForEach(1024, Line{words, 5, 5});
    }
    b = std::move(a);
    EXPECT_EQ(b.data(), reinterpret_cast<char*>(words));
    EXPECT_EQ(b.committed(), committed);
    EXPECT_EQ(a.committed(), 0u);  // as new
    ASSERT_TRUE(a.Reserve(this->device(), 4 * kMiB).ok());
    ASSERT_TRUE(a.Commit(1).ok());
    typename TestFixture::Range c(std::move(b));
    ASSERT_TRUE(c.Commit(3 * kMiB).ok());
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
    EXPECT_EQ(OtherThanLine(session, words, 1024, 5, 5), 0u);

    typename TestFixture::HostRange h, i;
    ASSERT_TRUE(h.Reserve(this->device(), kMiB).ok());
    ASSERT_TRUE(h.Commit(4096).ok());
    auto* const on_host = reinterpret_cast<uint32_t*>(h.data());
    i = std::move(h);
    EXPECT_EQ(i.data(), reinterpret_cast<char*>(on_host));
    EXPECT_EQ(h.committed(), 0u);
    session.ForEach(1024, Line{on_host, 5, 5});
    EXPECT_EQ(OtherThanLine(session, on_host, 1024, 5, 5), 0u);
  }
  EXPECT_EQ(this->device().used(), used);
}

// Each range takes more than half of the memory, so that a range must be given back before the next
// one has memory. The work of its session is done by then.
TYPED_TEST_P(DeviceMemory, RetiredRangesAreGivenBack) {
  constexpr size_t kWords = 100000;
  constexpr uint32_t kRounds = 4;
  typename TestFixture::Range copies;
  ASSERT_TRUE(copies.Reserve(this->device(), kRounds * kWords * sizeof(uint32_t)).ok());
  ASSERT_TRUE(copies.Commit(kRounds * kWords * sizeof(uint32_t)).ok());
  auto* const copied = reinterpret_cast<uint32_t*>(copies.data());
  {
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
    session.Fill(copied, 0, kRounds * kWords * sizeof(uint32_t));
    ASSERT_EQ(session.Synchronize().message(), "");
  }
  const size_t used = this->device().used();
  const size_t bytes = TypeParam::FreeMemory() / 2 + 8 * kMiB;
  for (uint32_t round = 0; round <= kRounds; ++round) {
    SCOPED_TRACE(round);
    typename TestFixture::Range range;
    ASSERT_TRUE(range.Reserve(this->device(), bytes).ok());
    ASSERT_EQ(range.Commit(bytes).message(), "");
    if (round == kRounds) break;  // the destructor gives it back
    auto* const words = reinterpret_cast<uint32_t*>(range.data());
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(round % 2));
    session.ForEach(kWords, Line{words, 3, round});
    session.Copy(copied + round * kWords, words, kWords * sizeof(uint32_t));
    session.Retire(std::move(range));
    EXPECT_EQ(range.committed(), 0u);
    ASSERT_EQ(session.status().message(), "");
  }
  EXPECT_EQ(this->device().used(), used);
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(1));
  for (uint32_t round = 0; round < kRounds; ++round) {
    EXPECT_EQ(OtherThanLine(session, copied + round * kWords, kWords, 3, round), 0u) << round;
  }
}

// Like tables that are created and destroyed; work may still be running when the ranges are
// destroyed.
TYPED_TEST_P(DeviceMemory, ThousandRoundsLeakNoMemory) {
  SKIP_UNDER_TSAN("a long test in one thread");
  size_t used = 0, left = 0;
  for (int round = 0; round < 1001; ++round) {
    {
      typename TestFixture::Range rows, index, counters;
      typename TestFixture::HostRange host;
      ASSERT_TRUE(rows.Reserve(this->device(), 64 * kMiB).ok());
      ASSERT_TRUE(index.Reserve(this->device(), 100000).ok());
      ASSERT_TRUE(counters.Reserve(this->device(), 100).ok());
      ASSERT_TRUE(host.Reserve(this->device(), kMiB).ok());
      ASSERT_EQ(rows.Commit(4096).message(), "");
      ASSERT_EQ(index.Commit(5000).message(), "");
      ASSERT_EQ(counters.Commit(100).message(), "");
      if (round % 10 == 0) {
        ASSERT_EQ(host.Commit(4096).message(), "");
      }
      typename TestFixture::Session session(this->device(), TypeParam::StreamOf(round % 2));
      for (typename TestFixture::Range* range : {&rows, &index, &counters}) {
        session.ForEach(25, Line{reinterpret_cast<uint32_t*>(range->data()), 1, 1});
      }
      if (host.committed() > 0) {
        session.ForEach(1000, Line{reinterpret_cast<uint32_t*>(host.data()), 1, 1});
      }
      ASSERT_EQ(session.status().message(), "");
    }
    if (round == 0) {
      used = this->device().used();
      left = TypeParam::FreeMemory();
    }
  }
  EXPECT_EQ(this->device().used(), used);
  // The memory that the driver keeps may differ slightly.
  EXPECT_GE(TypeParam::FreeMemory() + 8 * kMiB, left);
}

TYPED_TEST_P(DeviceMemory, TakenArraysAreDisjointAndAligned) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  std::vector<uint32_t*> arrays;
  const std::vector<size_t> sizes = {1, 0, 63, 64, 65, 1000, 300000};
  for (const size_t n : sizes) {
    arrays.push_back(session.template Take<uint32_t>(n));
    ASSERT_NE(arrays.back(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arrays.back()) % 256, 0u);
    session.ForEach(n, Line{arrays.back(), 2, static_cast<uint32_t>(n)});
  }
  for (size_t a = 0; a < sizes.size(); ++a) {
    EXPECT_EQ(OtherThanLine(session, arrays[a], sizes[a], 2, static_cast<uint32_t>(sizes[a])), 0u);
  }
}

TYPED_TEST_P(DeviceMemory, ScratchFreesTheArraysOfItsScope) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  auto* const kept = session.template Take<uint32_t>(1000);
  session.ForEach(1000, Line{kept, 1, 2});
  size_t used = 0;
  for (int round = 0; round < 20; ++round) {
    typename TestFixture::Session::Scratch scratch(session);
    auto* const mine = session.template Take<uint32_t>(kMiB);
    session.ForEach(kMiB, Line{mine, 3, 4});
    if (round == 0) used = this->device().used();
  }
  EXPECT_EQ(this->device().used(), used);
  EXPECT_EQ(OtherThanLine(session, kept, 1000, 1, 2), 0u);
}

TYPED_TEST_P(DeviceMemory, SecondRoundAllocatesNothing) {
  size_t used = 0, left = 0;
  for (int round = 0; round < 3; ++round) {
    {
      typename TestFixture::Session session(this->device(), TypeParam::StreamOf(1));
      auto* const values = session.template Take<uint32_t>(500000);
      auto* const keys = session.template Take<uint64_t>(100000);
      ASSERT_NE(keys, nullptr);
      session.Fill(values, 1, 500000 * sizeof(*values));
      session.Fill(keys, 1, 100000 * sizeof(*keys));
      session.ExclusiveSum(values, 500000);
      session.SortPairs(keys, values, 100000);
      EXPECT_EQ(session.Synchronize().message(), "");
    }
    if (round == 0) {
      used = this->device().used();
      left = TypeParam::FreeMemory();
    }
  }
  EXPECT_EQ(this->device().used(), used);
  EXPECT_EQ(TypeParam::FreeMemory(), left);
}

REGISTER_TYPED_TEST_SUITE_P(DeviceMemory, RangesGrowInPlace, ReusedMemoryIsZero,
                            HostRangesGrowInPlaceAndBodiesAccessThem, CopiesCrossCommitBoundaries,
                            FailedCommitChangesNothing, RangesMove, RetiredRangesAreGivenBack,
                            ThousandRoundsLeakNoMemory, TakenArraysAreDisjointAndAligned,
                            ScratchFreesTheArraysOfItsScope, SecondRoundAllocatesNothing);

}  // namespace testing_device
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_SUITE_MEMORY_H_
