// The contract suite of a device, on simulated devices; tests/cuda runs it on a GPU. Also tests the
// components of devices that need no GPU.
#include <memory>
#include <string>

#include "cc/device/block_pool.h"
#include "cc/device/registered_memory.h"
#include "cc/device/stream_exec.h"
#include "cc/device/thread_lane.h"
#include "cc/table/exec.h"
#include "tests/cc/device_suite_memory.h"
#include "tests/cc/device_suite_work.h"
#include "tests/simulated/lanes_lockstep.h"
#include "tests/simulated/simulated_device.h"

namespace dynemb {
namespace testing_device {
namespace {

template <class KeyLanes, class RowLanes, size_t kMostTeams>
struct Simulated {
  using Device = SimulatedDevice<KeyLanes, RowLanes>;
  static constexpr size_t kMemory = 128 * kMiB;
  static constexpr size_t kTeams = kMostTeams;
  static Device* Get() {
    static Device device(kMemory);
    return &device;
  }
  static std::string Missing() { return ""; }
  static typename Device::Stream StreamOf(int i) {
    static ThreadsExec four(4);
    static SerialExec one;
    return i == 0 ? nullptr : i == 1 ? static_cast<Exec*>(&four) : &one;
  }
  static size_t FreeMemory() { return kMemory - Get()->used(); }
};

using Threads = Simulated<ThreadLane, ThreadLane, 20000>;
using Warps = Simulated<LockstepLanes<8>, LockstepLanes<4>, 200>;
// Under thread sanitizer, only the suites of tables run emulated warps.
#if defined(__SANITIZE_THREAD__)
using Devices = ::testing::Types<Threads>;
#elif defined(__SANITIZE_ADDRESS__)
using Devices = ::testing::Types<Warps>;
#else
using Devices = ::testing::Types<Threads, Warps>;
#endif
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, DeviceMemory, Devices);
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, DeviceWork, Devices);

TEST(BlockPoolTest, BlocksAreAlignedAndDisjoint) {
  BlockPool pool;
  std::vector<std::pair<size_t, size_t>> taken;  // offset, bytes
  std::vector<bool> used;
  for (size_t i = 0; i < 2000; ++i) {
    const uint64_t random = MixKey(i);
    if (random % 3 == 0 && !taken.empty()) {
      const auto [offset, bytes] = taken[random / 3 % taken.size()];
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(random / 3 % taken.size()));
      for (size_t b = 0; b < BlockPool::SizeOf(bytes); b += BlockPool::kLeast) {
        used[(offset + b) / BlockPool::kLeast] = false;
      }
      pool.Give(offset, bytes);
      continue;
    }
    const size_t bytes = (random >> 8) % (BlockPool::kMost >> (random % 13)) + 1;
    const size_t size = BlockPool::SizeOf(bytes);
    ASSERT_TRUE(size >= bytes && (size == BlockPool::kLeast || size / 2 < bytes));
    const size_t offset = pool.Take(bytes);
    ASSERT_EQ(offset % size, 0u);
    ASSERT_LE(offset + size, pool.end());
    used.resize(pool.end() / BlockPool::kLeast);
    for (size_t b = 0; b < size; b += BlockPool::kLeast) {
      ASSERT_FALSE(used[(offset + b) / BlockPool::kLeast]);
      used[(offset + b) / BlockPool::kLeast] = true;
    }
    taken.emplace_back(offset, bytes);
  }
}

TEST(BlockPoolTest, FreedBlocksAreReused) {
  BlockPool pool;
  std::vector<size_t> offsets;
  for (size_t bytes = 1; bytes <= BlockPool::kMost; bytes = bytes * 3 + 1) {
    offsets.push_back(pool.Take(bytes));
  }
  const size_t end = pool.end();
  for (int round = 0; round < 10; ++round) {
    size_t i = 0;
    for (size_t bytes = 1; bytes <= BlockPool::kMost; bytes = bytes * 3 + 1) {
      pool.Give(offsets[i++], bytes);
    }
    i = 0;
    for (size_t bytes = 1; bytes <= BlockPool::kMost; bytes = bytes * 3 + 1) {
      offsets[i++] = pool.Take(bytes);
    }
  }
  EXPECT_EQ(pool.end(), end);
}

TEST(RegisteredMemoryTest, WithinStopsWhereRangesEnd) {
  const char memory[1000] = {};
  RegisteredMemory map;
  EXPECT_EQ(map.Within(memory, 1000), 1000u);
  map.Add(memory + 100, 100);
  map.Add(memory + 200, 50);
  EXPECT_EQ(map.Within(memory, 1000), 1000u);
  EXPECT_EQ(map.Within(memory + 100, 1000), 100u);
  EXPECT_EQ(map.Within(memory + 150, 20), 20u);
  EXPECT_EQ(map.Within(memory + 150, 1000), 50u);
  EXPECT_EQ(map.Within(memory + 200, 1000), 50u);
  EXPECT_EQ(map.Within(memory + 250, 700), 700u);
  map.Remove(memory + 200);
  EXPECT_EQ(map.Within(memory + 200, 300), 300u);
}

TEST(RegisteredMemoryTest, PiecesConsistOfWholeHugePages) {
  constexpr size_t kPage = 4096;
  // Also a range that is smaller than a huge page, and one that ends within one.
  for (const size_t reserved : {kPage, kMiB, 1001 * kMiB + kPage, 4096 * kMiB}) {
    for (const bool ahead : {false, true}) {
      size_t end = 0, pieces = 0;
      while (end < reserved) {
        const size_t needed = std::min(end + 1 + (pieces * 7919 * kPage) % (3 * kMiB), reserved);
        const size_t next = RegisterUpTo(end, needed, reserved, ahead);
        ASSERT_GE(next, needed);
        ASSERT_LE(next, reserved);
        ASSERT_TRUE(next % (2 * kMiB) == 0 || next == reserved) << next;
        ASSERT_LE(next - end, std::max((needed - end) + 2 * kMiB, 66 * kMiB));
        end = next;
        ++pieces;
      }
      EXPECT_LE(pieces, ahead ? 110u : 4096u) << reserved;
    }
  }
}

TEST(StreamExecTest, RunsOnTheCallersThread) {
  auto* const stream = reinterpret_cast<CUstream_st*>(uintptr_t{64});
  StreamExec exec(stream);
  EXPECT_EQ(exec.stream(), stream);
  EXPECT_EQ(exec.parallelism(), 1u);
  size_t sum = 0;
  exec.ParallelFor(100, 7, [&](size_t begin, size_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 100u);
}

TEST(StreamExecTest, AnOperatorWithoutAStreamIsAnError) {
  auto* const stream = reinterpret_cast<CUstream_st*>(uintptr_t{64});
  std::unique_ptr<Exec> exec;
  const Status status = StreamExec::Make(nullptr, &exec);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("no stream"), std::string::npos) << status.message();
  EXPECT_EQ(exec, nullptr);
  ASSERT_EQ(StreamExec::Make(stream, &exec).message(), "");
  EXPECT_EQ(static_cast<StreamExec&>(*exec).stream(), stream);
}

}  // namespace
}  // namespace testing_device
}  // namespace dynemb
