// The contract suite of a device: launches, copies, sums, sorting, and streams.
#ifndef DYNEMB_TESTS_CC_DEVICE_SUITE_WORK_H_
#define DYNEMB_TESTS_CC_DEVICE_SUITE_WORK_H_

#include <algorithm>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/device_suite.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace testing_device {

// A team that strides over the bytes of a row.
struct RowTeam {
  uint8_t* rows;
  size_t bytes;
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    for (size_t b = lanes.rank(); b < bytes; b += lanes.width()) {
      rows[i * bytes + b] = static_cast<uint8_t>(rows[i * bytes + b] + i * 31 + b);
    }
  }
};

// ranks[i] gets a bit for each thread of item i's team. `wrong` counts threads that appear twice,
// or in teams of another width.
struct TeamRanks {
  uint32_t width;
  uint32_t* ranks;
  uint32_t* wrong;
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t bit = 1u << lanes.rank();
    const bool again = (device::AtomicOr(&ranks[i], bit) & bit) != 0;
    if (again || lanes.width() != width) device::AtomicAdd(wrong, uint32_t{1});
  }
};

// All bodies access the same words.
struct Contend {
  uint32_t* words;  // sum, least, greatest, and, or, first thread, exchanged
  uint64_t* sum;
  DYNEMB_HD void operator()(size_t i) const {
    const auto x = static_cast<uint32_t>(i);
    device::AtomicAdd(&words[0], x);
    device::AtomicMin(&words[1], x + 5);
    device::AtomicMax(&words[2], x);
    device::AtomicAnd(&words[3], ~(1u << (x % 8)));
    device::AtomicOr(&words[4], 1u << (x % 8));
    if (device::AtomicCompareExchange(&words[5], 0, x + 1) == 0) {
      device::AtomicAdd(&words[6], uint32_t{1});
    }
    device::AtomicAdd(sum, uint64_t{1} << 33);
    // Each body puts one number in and takes another out. Together with the last one left, the
    // numbers taken out are all numbers.
    device::AtomicAdd(&words[8], device::AtomicExchange(&words[7], x));
  }
};

template <class Setup>
class DeviceWork : public DeviceSuite<Setup> {};
TYPED_TEST_SUITE_P(DeviceWork);

TYPED_TEST_P(DeviceWork, ForEachVisitsEachOnce) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  // The last is more than the threads of a launch.
  for (const size_t n : {size_t{0}, size_t{1}, size_t{31}, size_t{257}, size_t{3000001}}) {
    typename TestFixture::Session::Scratch scratch(session);
    auto* const visits = session.template Take<uint32_t>(n + 1);
    session.Fill(visits, 0, (n + 1) * sizeof(*visits));
    session.ForEach(n, CountVisits{visits});
    EXPECT_EQ(OtherThanLine(session, visits, n, 0, 1), 0u);
    EXPECT_EQ(TestFixture::Read(session, visits + n, 1)[0], 0u) << "after the last of " << n;
  }
}

TYPED_TEST_P(DeviceWork, TeamsForKeysAgree) {
  using Lanes = typename TestFixture::Session::KeyLanes;
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  for (const size_t n : {size_t{0}, size_t{1}, size_t{33}, TypeParam::kTeams}) {
    auto* const visits = session.template Take<uint32_t>(n + 1);
    session.Fill(visits, 0, (n + 1) * sizeof(*visits));
    session.ForKeys(n, KeyTeam{visits, visits + n});
    EXPECT_EQ(OtherThanLine(session, visits, n, 0, Lanes::width()), 0u);
    EXPECT_EQ(TestFixture::Read(session, visits + n, 1)[0], 0u) << "wrong, of " << n;
  }
}

TYPED_TEST_P(DeviceWork, EachRowHasOneTeamOfRowWidth) {
  using Session = typename TestFixture::Session;
  Session session(this->device(), TypeParam::StreamOf(0));
  const size_t n = TypeParam::kTeams;
  for (const size_t quads : {0, 1, 4, 5, 8, 9, 16, 17, 32, 33, 1000}) {
    SCOPED_TRACE(quads);
    const uint32_t width = Session::RowWidth(quads);
    ASSERT_TRUE(width >= 1 && width <= 32);
    typename Session::Scratch scratch(session);
    auto* const ranks = session.template Take<uint32_t>(n + 2);
    session.Fill(ranks, 0, (n + 2) * sizeof(*ranks));
    session.ForRows(n, quads, TeamRanks{width, ranks, ranks + n + 1});
    EXPECT_EQ(OtherThanLine(session, ranks, n, 0, ~0u >> (32 - width)), 0u);
    EXPECT_EQ(TestFixture::Read(session, ranks + n, 2), std::vector<uint32_t>(2, 0))
        << "after the last, and wrong";
  }
}

TYPED_TEST_P(DeviceWork, TeamsForRowsAgreeAndShareTheBytes) {
  using Session = typename TestFixture::Session;
  Session session(this->device(), TypeParam::StreamOf(0));
  for (const size_t quads : {4, 8, 16, 32}) {
    for (const size_t n : {size_t{0}, size_t{1}, TypeParam::kTeams}) {
      SCOPED_TRACE(std::to_string(n) + " rows of " + std::to_string(quads) + " quads");
      typename Session::Scratch scratch(session);
      auto* const visits = session.template Take<uint32_t>(n + 1);
      session.Fill(visits, 0, (n + 1) * sizeof(*visits));
      session.ForRows(n, quads, KeyTeam{visits, visits + n});
      EXPECT_EQ(OtherThanLine(session, visits, n, 0, Session::RowWidth(quads)), 0u);
      EXPECT_EQ(TestFixture::Read(session, visits + n, 1)[0], 0u) << "wrong";

      const size_t bytes = 77;
      auto* const rows = session.template Take<uint8_t>(n * bytes);
      session.Fill(rows, 3, n * bytes);
      session.ForRows(n, quads, RowTeam{rows, bytes});
      const std::vector<uint8_t> all = TestFixture::Read(session, rows, n * bytes);
      for (size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], static_cast<uint8_t>(3 + i / bytes * 31 + i % bytes)) << i;
      }
    }
  }
}

TYPED_TEST_P(DeviceWork, AtomicsOnOneAddress) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  const uint32_t n = 100000;
  auto* const words = session.template Take<uint32_t>(9);
  auto* const sum = session.template Take<uint64_t>(1);
  const std::vector<uint32_t> start = {0, ~0u, 0, ~0u, 0, 0, 0, 0, 0};
  session.Copy(words, start.data(), start.size() * sizeof(start[0]));
  session.Fill(sum, 0, sizeof(*sum));
  session.ForEach(n, Contend{words, sum});
  const std::vector<uint32_t> all = TestFixture::Read(session, words, 9);
  const uint32_t total = static_cast<uint32_t>(uint64_t{n} * (n - 1) / 2);
  EXPECT_EQ(all[0], total);
  EXPECT_EQ(all[1], 5u);
  EXPECT_EQ(all[2], n - 1);
  EXPECT_EQ(all[3], ~0xFFu);
  EXPECT_EQ(all[4], 0xFFu);
  EXPECT_TRUE(all[5] > 0 && all[5] <= n);
  EXPECT_EQ(all[6], 1u);
  EXPECT_EQ(all[8] + all[7], total);
  EXPECT_EQ(TestFixture::Read(session, sum, 1)[0], uint64_t{n} << 33);
}

TYPED_TEST_P(DeviceWork, LaunchesSeeEarlierWrites) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  const uint32_t n = 70000, rounds = 40;
  auto* from = session.template Take<uint32_t>(n);
  auto* to = session.template Take<uint32_t>(n);
  session.ForEach(n, Line{from, 1, 0});
  for (uint32_t r = 0; r < rounds; ++r, std::swap(from, to)) {
    session.ForEach(n, Turn{from, to, n});
  }
  const std::vector<uint32_t> all = TestFixture::Read(session, from, n);
  for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(all[i], (i + rounds) % n + rounds) << i;
}

TYPED_TEST_P(DeviceWork, CopiesAreInOrderWithLaunches) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  const uint32_t n = 50000;
  std::vector<uint32_t> here(n), back(n), first(n);
  std::iota(here.begin(), here.end(), 0u);
  auto* const a = session.template Take<uint32_t>(n);
  auto* const b = session.template Take<uint32_t>(n);
  session.Copy(a, here.data(), n * sizeof(uint32_t));
  std::fill(here.begin(), here.end(), 77u);  // the memory may be reused
  session.ForEach(n, Turn{a, b, n});
  session.Copy(a, b, n * sizeof(uint32_t));
  session.Fill(b, 0xFF, n * sizeof(uint32_t));
  session.Copy(first.data(), b, n * sizeof(uint32_t));
  session.ForEach(n, Turn{a, b, n});
  session.Copy(back.data(), b, n * sizeof(uint32_t));
  session.Copy(nullptr, nullptr, 0);
  session.Fill(nullptr, 0, 0);
  ASSERT_EQ(session.Synchronize().message(), "");
  for (uint32_t i = 0; i < n; ++i) {
    ASSERT_EQ(first[i], ~0u);
    ASSERT_EQ(back[i], (i + 2) % n + 2) << i;
  }
}

TYPED_TEST_P(DeviceWork, PinnedMemoryIsValidUntilCopied) {
  const uint32_t n = 200;
  typename TestFixture::Range range;
  ASSERT_TRUE(range.Reserve(this->device(), 4 * n).ok());
  ASSERT_TRUE(range.Commit(4 * n).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  // Sessions that do not wait, each with slow work before its copy.
  for (uint32_t i = 0; i < n; ++i) {
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(1));
    auto* const slow = session.template Take<uint32_t>(1);
    if (i % 64 == 0) session.ForEach(1, Slow{slow});
    auto* const value = session.template Pinned<uint32_t>(1);
    auto* const other = session.template Pinned<uint32_t>(1);
    ASSERT_TRUE(value != nullptr && other != nullptr && value != other);
    *other = ~0u;
    *value = i * 3;
    session.Copy(words + i, value, sizeof(*value));
  }
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(1));
  auto* const all = session.template Pinned<uint32_t>(n);
  session.Copy(all, words, n * sizeof(*all));
  ASSERT_EQ(session.Synchronize().message(), "");
  for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(all[i], i * 3);
}

TYPED_TEST_P(DeviceWork, ExclusiveSumMatchesTheStandardLibrary) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{1023}, size_t{1500001}}) {
    std::vector<uint32_t> values(n), expected(n);
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<uint32_t>(MixKey(i) >> 40);
    std::exclusive_scan(values.begin(), values.end(), expected.begin(), 0u);
    typename TestFixture::Session::Scratch scratch(session);
    auto* const there = session.template Take<uint32_t>(n);
    session.Copy(there, values.data(), n * sizeof(uint32_t));
    session.ExclusiveSum(there, n);
    EXPECT_TRUE(TestFixture::Read(session, there, n) == expected) << n;
  }
}

// A body whose number of items only the device knows.
struct CountSome {
  const uint32_t* items;
  uint32_t* visits;

  DYNEMB_HD size_t Items() const { return *items; }
  DYNEMB_HD void operator()(size_t i) const { device::AtomicAdd(&visits[i], 1u); }
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (lanes.rank() == 0) device::AtomicAdd(&visits[i], 1u);
  }
};

TYPED_TEST_P(DeviceWork, ItemsThatOnlyTheDeviceKnows) {
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  constexpr size_t kMost = 70000;
  for (const uint32_t n : {0u, 1u, 300u, uint32_t{kMost}, uint32_t{kMost} + 5}) {
    typename TestFixture::Session::Scratch scratch(session);
    auto* const items = session.template Take<uint32_t>(1);
    auto* const visits = session.template Take<uint32_t>(kMost);
    session.Copy(items, &n, sizeof(n));
    session.Fill(visits, 0, kMost * sizeof(*visits));
    session.ForEach(kMost, CountSome{items, visits});
    session.ForKeys(kMost, CountSome{items, visits});
    session.ForRows(kMost, 8, CountSome{items, visits});
    const size_t some = std::min<size_t>(n, kMost);
    EXPECT_EQ(OtherThanLine(session, visits, some, 0, 3), 0u) << n;
    EXPECT_EQ(OtherThanLine(session, visits + some, kMost - some, 0, 0), 0u) << n;
  }
}

// SortPairs with keys of type Key, for each number of different keys and each number of bits.
// read(session, array, n) copies an array to the host.
template <class Key, class Session, class Read>
void ExpectSorts(Session& session, const Read& read,
                 const std::vector<std::pair<Key, int>>& cases) {
  constexpr int kAll = 8 * sizeof(Key);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{1023}, size_t{300001}}) {
    for (const auto& [different, bits] : cases) {
      std::vector<Key> keys(n), expected_keys(n);
      std::vector<uint32_t> values(n);
      for (size_t i = 0; i < n; ++i) keys[i] = static_cast<Key>(MixKey(i)) % different;
      std::iota(values.begin(), values.end(), 0u);
      typename Session::Scratch scratch(session);
      auto* const device_keys = session.template Take<Key>(n);
      auto* const device_values = session.template Take<uint32_t>(n);
      session.Copy(device_keys, keys.data(), n * sizeof(Key));
      session.Copy(device_values, values.data(), n * sizeof(uint32_t));
      if (bits == kAll) {
        session.SortPairs(device_keys, device_values, n);
      } else {
        session.SortPairs(device_keys, device_values, n, bits);
      }
      // Pairs with equal keys stay in order.
      const Key low = bits == kAll ? ~Key{0} : (Key{1} << bits) - 1;
      std::stable_sort(values.begin(), values.end(),
                       [&](uint32_t a, uint32_t b) { return (keys[a] & low) < (keys[b] & low); });
      for (size_t i = 0; i < n; ++i) expected_keys[i] = keys[values[i]];
      EXPECT_TRUE(read(session, device_keys, n) == expected_keys) << n << ", " << bits;
      EXPECT_TRUE(read(session, device_values, n) == values) << n << ", " << bits;
    }
  }
}

TYPED_TEST_P(DeviceWork, SortPairsMatchesTheStandardLibrary) {
  SKIP_UNDER_TSAN("a long test in one thread");
  typename TestFixture::Session session(this->device(), TypeParam::StreamOf(0));
  const auto read = [](auto& s, const auto* p, size_t n) { return TestFixture::Read(s, p, n); };
  constexpr uint64_t kAny = ~uint64_t{0};
  ExpectSorts<uint64_t>(session, read,
                        {{kAny, 64}, {17, 64}, {kAny, 19}, {kAny, 8}, {kAny, 1}, {kAny, 0}});
  constexpr uint32_t kAny32 = ~uint32_t{0};
  ExpectSorts<uint32_t>(session, read,
                        {{kAny32, 32}, {17, 32}, {kAny32, 19}, {kAny32, 8}, {kAny32, 0}});
}

TYPED_TEST_P(DeviceWork, AfterWaitsForAnotherStream) {
  const size_t n = 40;
  typename TestFixture::Range range;
  ASSERT_TRUE(range.Reserve(this->device(), 4096).ok());
  ASSERT_TRUE(range.Commit(4096).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  for (const auto& [first, second] : {std::pair(1, 2), std::pair(2, 0), std::pair(0, 1)}) {
    {
      typename TestFixture::Session session(this->device(), TypeParam::StreamOf(first));
      session.Fill(words, 0, n * sizeof(uint32_t));
      session.ForEach(n, Slow{words});
      session.After(TypeParam::StreamOf(first));  // itself: nothing to wait for
      ASSERT_EQ(session.status().message(), "");
    }
    typename TestFixture::Session session(this->device(), TypeParam::StreamOf(second));
    session.After(TypeParam::StreamOf(first));
    const std::vector<uint32_t> all = TestFixture::Read(session, words, n);
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(all[i], Slow::Result(static_cast<uint32_t>(i)));
  }
}

TYPED_TEST_P(DeviceWork, ConcurrentSessionsDoNotInterfere) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 3; ++t) {
    // Two of them share a stream.
    threads.emplace_back([this, t] {
      for (uint32_t round = 0; round < 30; ++round) {
        typename TestFixture::Range range;
        ASSERT_TRUE(range.Reserve(this->device(), 1000).ok());
        ASSERT_TRUE(range.Commit(1000).ok());
        typename TestFixture::Session session(this->device(), TypeParam::StreamOf(1 + t % 2));
        const uint32_t n = 1000 + 400 * t + round;
        auto* const ones = session.template Take<uint32_t>(n);
        session.ForEach(n, Line{ones, 0, t + 1});
        session.ExclusiveSum(ones, n);
        EXPECT_EQ(OtherThanLine(session, ones, n, t + 1, 0), 0u);
        EXPECT_EQ(OtherThanLine(session, reinterpret_cast<uint32_t*>(range.data()), 250, 0, 0), 0u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

REGISTER_TYPED_TEST_SUITE_P(DeviceWork, ForEachVisitsEachOnce, TeamsForKeysAgree,
                            EachRowHasOneTeamOfRowWidth, TeamsForRowsAgreeAndShareTheBytes,
                            AtomicsOnOneAddress, LaunchesSeeEarlierWrites,
                            CopiesAreInOrderWithLaunches, PinnedMemoryIsValidUntilCopied,
                            ExclusiveSumMatchesTheStandardLibrary, ItemsThatOnlyTheDeviceKnows,
                            SortPairsMatchesTheStandardLibrary, AfterWaitsForAnotherStream,
                            ConcurrentSessionsDoNotInterfere);

}  // namespace testing_device
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_SUITE_WORK_H_
