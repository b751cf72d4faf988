// The contract of CudaDevice beyond device.h: its errors without a GPU, calls that do not wait, the
// state after failures, and its treatment of other threads and streams.
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cc/device/cuda_driver.h"
#include "tests/cc/device_suite.h"
#include "tests/cuda/cuda_setup.h"

namespace dynemb {
namespace testing_device {

constexpr size_t kMiB = size_t{1} << 20;

struct CountRanks {
  uint32_t* counts;
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t) const {
    device::AtomicAdd(&counts[lanes.rank()], uint32_t{1});
  }
};

class CudaDeviceTest : public DeviceSuite<CudaSetup> {};

// Without a GPU

TEST(CudaDeviceGetTest, ErrorNamesWhatIsMissing) {
  CudaDevice* device = nullptr;
  const Status status = CudaDevice::Get(0, &device);
  if (status.ok()) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(device, nullptr);
  EXPECT_NE(status.message().find("NVIDIA driver"), std::string::npos) << status.message();
  // No device was created: a second call returns the same error.
  EXPECT_EQ(CudaDevice::Get(0, &device).message(), status.message());
}

TEST(CudaDeviceGetTest, StreamOfAnExec) {
  auto* const stream = reinterpret_cast<CUstream_st*>(uintptr_t{64});
  StreamExec on_stream(stream);
  SerialExec serial;
  EXPECT_EQ(CudaDevice::StreamOf(on_stream), stream);
  EXPECT_EQ(CudaDevice::StreamOf(serial), nullptr);
}

TEST(CudaDeviceSessionTest, TeamHasOneThreadPerQuad) {
  const auto width = [](size_t quads) { return CudaDevice::Session::RowWidth(quads); };
  for (const size_t quads : {0, 1, 4}) EXPECT_EQ(width(quads), 4u) << quads;
  for (const size_t quads : {5, 8}) EXPECT_EQ(width(quads), 8u) << quads;
  for (const size_t quads : {9, 16}) EXPECT_EQ(width(quads), 16u) << quads;
  for (const size_t quads : {17, 32, 33, 1000}) EXPECT_EQ(width(quads), 32u) << quads;
}

// With a GPU

TEST_F(CudaDeviceTest, OneDevicePerGpu) {
  CudaDevice* again = nullptr;
  ASSERT_TRUE(CudaDevice::Get(0, &again).ok());
  EXPECT_EQ(again, &device());
  EXPECT_EQ(again->ordinal(), 0);
  EXPECT_NE(again->name(), "");
  EXPECT_GE(again->memory(), CudaSetup::FreeMemory());
  for (const int ordinal : {-1, 1000}) {
    const Status status = CudaDevice::Get(ordinal, &again);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(std::to_string(ordinal)), std::string::npos);
  }
}

TEST_F(CudaDeviceTest, TooLargeTakeFailsTheSession) {
  for (const size_t n : {device().memory() / 8 + 1, std::numeric_limits<size_t>::max() / 8,
                         std::numeric_limits<size_t>::max()}) {
    const size_t used = device().used();
    {
      Session session(device(), CudaSetup::StreamOf(1));
      EXPECT_EQ(session.Take<uint64_t>(n), nullptr);
      const Status status = session.status();
      EXPECT_EQ(status.code(), Code::kResourceExhausted);
      // No more work is given, so invalid addresses are not used.
      session.ForEach(1000, Line{nullptr, 1, 1});
      session.Fill(nullptr, 0, 1000);
      session.ExclusiveSum(nullptr, 1000);
      session.SortPairs(static_cast<uint64_t*>(nullptr), nullptr, 1000);
      EXPECT_EQ(session.Take<char>(1), nullptr);
      EXPECT_EQ(session.Pinned<char>(1), nullptr);
      EXPECT_EQ(session.Synchronize().message(), status.message());
    }
    EXPECT_EQ(device().used(), used);
    Session next(device(), CudaSetup::StreamOf(1));
    auto* const words = next.Take<uint32_t>(100);
    next.ForEach(100, Line{words, 1, 1});
    EXPECT_EQ(OtherThanLine(next, words, 100, 1, 1), 0u);
  }
}

TEST_F(CudaDeviceTest, FirstErrorPersists) {
  {
    Session session(device(), CudaSetup::StreamOf(0));
    session.Fill(nullptr, 0, 1000);
    const Status status = session.status();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("cudaMemsetAsync"), std::string::npos) << status.message();
    EXPECT_EQ(session.Take<uint64_t>(std::numeric_limits<size_t>::max()), nullptr);
    EXPECT_EQ(session.Synchronize().message(), status.message());
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  Session next(device(), CudaSetup::StreamOf(0));
  EXPECT_EQ(next.Synchronize().message(), "");
}

// After a fault in a kernel, the process cannot use the GPU, so the fault is in a child process.
TEST_F(CudaDeviceTest, SynchronizeReportsKernelFaults) {
  if (std::getenv("DYNEMB_SANITIZE") != nullptr) {
    GTEST_SKIP() << "compute-sanitizer would report the intended fault";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fault = [] {
    Session session(device(), CudaSetup::StreamOf(0));
    session.ForEach(1, Line{reinterpret_cast<uint32_t*>(uintptr_t{256}), 1, 1});
    const Status status = session.Synchronize();
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(status.code() == Code::kInternal ? 17 : 18);
  };
  EXPECT_EXIT(fault(), ::testing::ExitedWithCode(17), "illegal|invalid|address");
}

TEST_F(CudaDeviceTest, GivingWorkDoesNotWait) {
  Range range;
  ASSERT_TRUE(range.Reserve(device(), 256 * kMiB).ok());
  ASSERT_TRUE(range.Commit(4 * kMiB).ok());
  // The first round loads the kernels and allocates the memory.
  for (int round = 0; round < 2; ++round) {
    const CudaDevice::Stream stream = CudaSetup::StreamOf(1);
    Session session(device(), stream);
    auto* const slow = session.Take<uint32_t>(40);
    for (int i = 0; i < 20; ++i) session.ForEach(40, Slow{slow});
    session.After(CudaSetup::StreamOf(2));
    auto* const keys = session.Take<uint64_t>(100000);
    auto* const values = session.Take<uint32_t>(100000);
    session.Fill(keys, 1, 100000 * sizeof(*keys));
    session.Fill(values, 1, 100000 * sizeof(*values));
    session.SortPairs(keys, values, 100000);
    session.ExclusiveSum(values, 100000);
    session.ForKeys(10, CountRanks{values});
    session.ForRows(10, 1, CountRanks{values});
    session.Copy(range.data(), values, 100000 * sizeof(*values));
    auto* const pinned = session.Pinned<uint32_t>(100);
    session.Copy(pinned, values, 100 * sizeof(*values));
    session.Copy(values, pinned, 100 * sizeof(*values));
    EXPECT_EQ(session.status().message(), "");
    if (round == 1) {
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      (void)cudaGetLastError();
    }
    EXPECT_EQ(session.Synchronize().message(), "");
  }
}

// Whether mapping memory waits for the GPU depends on the driver; CUDA promises nothing. The result
// is printed, not checked.
TEST_F(CudaDeviceTest, CommitsWhileAStreamIsBusy) {
  Range range;
  ASSERT_TRUE(range.Reserve(device(), 1024 * kMiB).ok());
  const CudaDevice::Stream stream = CudaSetup::StreamOf(1);
  const size_t words = 25 * kMiB;
  Session session(device(), stream);
  auto* const slow = session.Take<uint32_t>(40);
  session.ForEach(40, Slow{slow});
  ASSERT_EQ(session.Synchronize().message(), "");
  for (int i = 0; i < 20; ++i) session.ForEach(40, Slow{slow});
  ASSERT_EQ(range.Commit(words * sizeof(uint32_t)).message(), "");
  const bool waited = cudaStreamQuery(stream) == cudaSuccess;
  (void)cudaGetLastError();
  std::printf("Commit %s for the work of other streams\n", waited ? "waited" : "did not wait");
  auto* const p = reinterpret_cast<uint32_t*>(range.data());
  EXPECT_EQ(OtherThanLine(session, p, words, 0, 0), 0u);
  for (const uint32_t i : {0u, 39u}) EXPECT_EQ(Read(session, slow, 40)[i], Slow::Result(i));
}

// New memory is cleared on the device's own stream, which is busy here.
TEST_F(CudaDeviceTest, OtherStreamsWaitUntilNewMemoryIsCleared) {
  const size_t words = 2 * kMiB;
  for (int round = 0; round < 5; ++round) {
    {
      Range range;
      ASSERT_TRUE(range.Reserve(device(), words * sizeof(uint32_t)).ok());
      ASSERT_TRUE(range.Commit(words * sizeof(uint32_t)).ok());
      Session session(device(), CudaSetup::StreamOf(1));
      session.Fill(range.data(), 0xFF, words * sizeof(uint32_t));
    }
    Range range, little;
    {
      Session session(device(), nullptr);
      session.ForEach(40, Slow{session.Take<uint32_t>(40)});
    }
    Session session(device(), CudaSetup::StreamOf(1));
    ASSERT_TRUE(range.Reserve(device(), words * sizeof(uint32_t)).ok());
    ASSERT_TRUE(little.Reserve(device(), 4096).ok());
    ASSERT_TRUE(range.Commit(words * sizeof(uint32_t)).ok());
    auto* const p = reinterpret_cast<uint32_t*>(range.data());
    EXPECT_EQ(OtherThanLine(session, p, words, 0, 0), 0u);
    ASSERT_TRUE(little.Commit(4096).ok());
    auto* const q = reinterpret_cast<uint32_t*>(little.data());
    session.ForEach(1024, Line{q, 1, 1});
    EXPECT_EQ(OtherThanLine(session, q, 1024, 1, 1), 0u);
  }
}

// A large range commits more memory than is requested, unless too little is left.
TEST_F(CudaDeviceTest, CommitsAheadOnlyIfThereIsMemory) {
  Range range, other;
  const size_t left = CudaSetup::FreeMemory();
  ASSERT_TRUE(range.Reserve(device(), left).ok());
  ASSERT_TRUE(other.Reserve(device(), left).ok());
  ASSERT_EQ(range.Commit(left / 4).message(), "");
  const size_t committed = range.committed();
  const size_t spare = std::min(left / 64, 64 * kMiB);
  ASSERT_EQ(other.Commit(CudaSetup::FreeMemory() - spare).message(), "");
  EXPECT_EQ(range.Commit(committed + 1).message(), "");
  EXPECT_GT(range.committed(), committed);
  EXPECT_LT(range.committed(), committed + spare);
}

TEST_F(CudaDeviceTest, SmallRangesShareMemory) {
  std::vector<Range> ranges(1000);
  const size_t left = CudaSetup::FreeMemory();
  for (Range& range : ranges) {
    ASSERT_TRUE(range.Reserve(device(), 1000).ok());
    ASSERT_TRUE(range.Commit(1).ok());
    EXPECT_EQ(range.committed(), 1024u);
  }
  EXPECT_LE(left, CudaSetup::FreeMemory() + 2 * kMiB);
  const auto words = [&](uint32_t r) { return reinterpret_cast<uint32_t*>(ranges[r].data()); };
  Session session(device(), CudaSetup::StreamOf(1));
  for (uint32_t r = 0; r < ranges.size(); ++r) session.ForEach(256, Line{words(r), 1, r});
  for (uint32_t r = 0; r < ranges.size(); r += 9) {
    EXPECT_EQ(OtherThanLine(session, words(r), 256, 1, r), 0u) << r;
  }
}

TEST_F(CudaDeviceTest, RestoresTheContextOfTheThread) {
  (void)CudaSetup::StreamOf(1);  // creates the streams on this thread
  std::thread([] {
    const auto current = [] {
      CUcontext context = nullptr;
      EXPECT_EQ(CudaDriver::Get().ctx_get_current(&context), CUDA_SUCCESS);
      return context;
    };
    EXPECT_EQ(current(), nullptr);
    {
      Range range;
      ASSERT_TRUE(range.Reserve(device(), 8 * kMiB).ok());
      ASSERT_TRUE(range.Commit(8 * kMiB).ok());
      EXPECT_EQ(current(), nullptr);
      Session session(device(), CudaSetup::StreamOf(1));
      EXPECT_NE(current(), nullptr);
      session.Fill(range.data(), 1, range.committed());
      EXPECT_EQ(session.Synchronize().message(), "");
    }
    EXPECT_EQ(current(), nullptr);
  }).join();
}

// As after a reset of TensorFlow's context, which sends no notification.
TEST_F(CudaDeviceTest, StreamsMayBeDestroyed) {
  const uint32_t n = 40;
  Range range;
  ASSERT_TRUE(range.Reserve(device(), 4096).ok());
  ASSERT_TRUE(range.Commit(4096).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  for (uint32_t round = 0; round < 20; ++round) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      Session session(device(), stream);
      session.Fill(words, 0, n * sizeof(uint32_t));
      auto* const taken = session.Take<uint32_t>(n);
      // The first work of a later stream must not change these, even if it has the same workspace.
      for (int i = 0; i < 3; ++i) session.ForEach(n, Slow{taken});
      if (round % 2 == 0) *session.Pinned<uint32_t>(1) = round;
      session.Copy(words, taken, n * sizeof(uint32_t));
      ASSERT_EQ(session.status().message(), "");
    }
    // Returns before the work is done.
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    cudaStream_t next = nullptr;  // often with the same handle
    ASSERT_EQ(cudaStreamCreateWithFlags(&next, cudaStreamNonBlocking), cudaSuccess);
    {
      Session session(device(), next);
      session.Fill(session.Take<uint32_t>(n), 0xEE, n * sizeof(uint32_t));
      ASSERT_EQ(session.status().message(), "");
    }
    Session session(device(), CudaSetup::StreamOf(1));
    session.After(stream);
    session.After(next);
    const std::vector<uint32_t> all = Read(session, words, n);
    for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(all[i], Slow::Result(i)) << round;
    EXPECT_EQ(cudaStreamDestroy(next), cudaSuccess);
  }
}

TEST_F(CudaDeviceTest, AfterWaitsForWhatALiveSessionHasPublished) {
  const uint32_t n = 40;
  Range range;
  ASSERT_TRUE(range.Reserve(device(), 4096).ok());
  ASSERT_TRUE(range.Commit(4096).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  Session first(device(), CudaSetup::StreamOf(1));
  first.Fill(words, 0, n * sizeof(uint32_t));
  first.ForEach(n, Slow{words});
  first.Publish();
  Session second(device(), CudaSetup::StreamOf(2));
  second.After(CudaSetup::StreamOf(1));
  const std::vector<uint32_t> all = Read(second, words, n);
  for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(all[i], Slow::Result(i));
}

}  // namespace testing_device
}  // namespace dynemb
