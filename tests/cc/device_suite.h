// The contract suite of a device (device.h): the parts that its topics share. DeviceSetup is
//
//   using Device
//   static Device* Get()               null if there is no such device; Missing() says why
//   static std::string Missing()
//   static Device::Stream StreamOf(int i)   a stream, for i = 0, 1, 2; 0 is the default stream
//   static size_t FreeMemory()         the bytes that are left for ranges
//   static constexpr size_t kTeams     the maximal number of items of a launch of teams: emulated
//                                      teams are slow
//
// Bodies are at namespace scope, as nvcc requires.
#ifndef DYNEMB_TESTS_CC_DEVICE_SUITE_H_
#define DYNEMB_TESTS_CC_DEVICE_SUITE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/device/device.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/status.h"

namespace dynemb {
namespace testing_device {

template <class DeviceSetup>
class DeviceSuite : public ::testing::Test {
 protected:
  using Setup = DeviceSetup;
  using Device = typename Setup::Device;
  using Session = typename Device::Session;
  using Range = typename Device::Range;
  using HostRange = typename Device::HostRange;

  void SetUp() override {
    if (Setup::Get() == nullptr) GTEST_SKIP() << Setup::Missing();
  }

  static Device& device() { return *Setup::Get(); }

  // Copies n elements from p, in any memory, to the host.
  template <class T>
  static std::vector<T> Read(Session& session, const T* p, size_t n) {
    std::vector<T> values(n);
    session.Copy(values.data(), p, n * sizeof(T));
    EXPECT_EQ(session.Synchronize().message(), "");
    return values;
  }
  template <class T>
  static std::vector<T> Read(const T* p, size_t n) {
    Session session(device(), Setup::StreamOf(0));
    return Read(session, p, n);
  }
};

// Bodies

// to[i] = i * factor + first
struct Line {
  uint32_t* to;
  uint32_t factor, first;
  DYNEMB_HD void operator()(size_t i) const { to[i] = static_cast<uint32_t>(i) * factor + first; }
};

// Counts the elements that differ from Line's numbers (zeros if factor = first = 0).
struct CountOtherThanLine {
  const uint32_t* of;
  uint32_t factor, first;
  uint32_t* count;
  DYNEMB_HD void operator()(size_t i) const {
    if (of[i] != static_cast<uint32_t>(i) * factor + first) device::AtomicAdd(count, uint32_t{1});
  }
};

struct CountVisits {
  uint32_t* visits;
  DYNEMB_HD void operator()(size_t i) const { device::AtomicAdd(&visits[i], uint32_t{1}); }
};

// to[i] = from[i + 1] + 1, in a ring of n: the next launch needs what other threads have written.
struct Turn {
  const uint32_t* from;
  uint32_t* to;
  size_t n;
  DYNEMB_HD void operator()(size_t i) const { to[i] = from[i + 1 < n ? i + 1 : 0] + 1; }
};

// Takes long, and computes a number that the compiler cannot predict.
struct Slow {
  static constexpr uint32_t kRounds = 1000000;
  uint32_t* to;
  static DYNEMB_HD uint32_t Result(uint32_t x) {
    for (uint32_t r = 0; r < kRounds; ++r) x = (x ^ (x >> 7)) * 1664525u + 1013904223u;
    return x;
  }
  DYNEMB_HD void operator()(size_t i) const { to[i] = Result(static_cast<uint32_t>(i)); }
};

// Checks the contract of a team that works on buckets; `wrong` counts violations.
struct KeyTeam {
  uint32_t* visits;
  uint32_t* wrong;
  static DYNEMB_HD uint64_t Value(size_t i, uint32_t s) { return MixKey(i * 8 + s) >> (i % 40); }

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    device::AtomicAdd(&visits[i], uint32_t{1});
    const uint32_t mask = lanes.Mask([i](uint32_t s) { return (i >> s & 1) != 0; });
    const uint64_t least = lanes.Min([i](uint32_t s) { return Value(i, s); });
    uint64_t expected = ~uint64_t{0};
    for (uint32_t s = 0; s < 7; ++s) expected = Value(i, s) < expected ? Value(i, s) : expected;
    const uint32_t rank = lanes.rank();
    const uint32_t u32 = lanes.FromLeader(static_cast<uint32_t>(i) + 1000 * rank);
    const uint64_t u64 = lanes.FromLeader((uint64_t{1} << 40) + i + 1000 * rank);
    const auto some = static_cast<uint32_t>(i % lanes.width());
    const uint64_t from_some = lanes.FromRank((uint64_t{1} << 40) + rank, some);
    const uint32_t greatest = lanes.Max(~((rank + static_cast<uint32_t>(i)) % lanes.width()));
    const bool right = mask == (i & 0x7F) && least == expected && u32 == i && greatest == ~0u &&
                       u64 == (uint64_t{1} << 40) + i && from_some == (uint64_t{1} << 40) + some &&
                       rank < lanes.width();
    if (!right) device::AtomicAdd(wrong, uint32_t{1});
  }
};

// The number of elements of [p, p + n) that differ from Line(factor, first), by a launch in
// `session`.
template <class Session>
uint32_t OtherThanLine(Session& session, const uint32_t* p, size_t n, uint32_t factor,
                       uint32_t first) {
  auto* const count = session.template Take<uint32_t>(1);
  session.Fill(count, 0, sizeof(*count));
  session.ForEach(n, CountOtherThanLine{p, factor, first, count});
  uint32_t result = ~0u;
  session.Copy(&result, count, sizeof(result));
  EXPECT_EQ(session.Synchronize().message(), "");
  return result;
}

}  // namespace testing_device
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_SUITE_H_
