// The contract suite of a device, for CudaDevice on the stand-in for CUDA; and the rules of CUDA
// that only the stand-in checks. tests/cuda runs the same suite on a GPU.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "cc/device/cuda_driver.h"
#include "tests/cc/device_suite_memory.h"
#include "tests/cc/device_suite_work.h"
#include "tests/fake_cuda/fake_kernels.h"

namespace dynemb {
namespace testing_device {
namespace {

// GPU 1: the calls of a thread without a context are for GPU 0.
struct OnFakeCuda {
  using Device = CudaDevice;
  static constexpr size_t kTeams = 200;

  static Device* Get() {
    Device* device = nullptr;
    return CudaDevice::Get(1, &device).ok() ? device : nullptr;
  }
  static std::string Missing() {
    Device* device = nullptr;
    return CudaDevice::Get(1, &device).message();
  }
  static Device::Stream StreamOf(int i) {
    static const std::array<Device::Stream, 3> streams = [] {
      std::array<Device::Stream, 3> made{};
      for (size_t s = 1; s < made.size(); ++s) made[s] = MakeStream();
      return made;
    }();
    return streams[static_cast<size_t>(i)];
  }
  static Device::Stream MakeStream() {
    Device::Stream stream = nullptr;
    std::thread([&] {
      EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }).join();
    return stream;
  }
  static size_t FreeMemory() {
    size_t bytes = 0;
    EXPECT_EQ(Get()->FreeMemory(&bytes).message(), "");
    return bytes;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(FakeCuda, DeviceMemory, OnFakeCuda);
INSTANTIATE_TYPED_TEST_SUITE_P(FakeCuda, DeviceWork, OnFakeCuda);

class FakeCudaTest : public DeviceSuite<OnFakeCuda> {};

CUcontext CurrentContext() {
  CUcontext context = nullptr;
  EXPECT_EQ(CudaDriver::Get().ctx_get_current(&context), CUDA_SUCCESS);
  return context;
}

TEST_F(FakeCudaTest, CallsLeaveTheContextOfTheThread) {
  (void)device();
  std::thread([] {
    ASSERT_EQ(CurrentContext(), nullptr);
    {
      Range range, small;
      HostRange host;
      ASSERT_TRUE(range.Reserve(device(), 8 * kMiB).ok());
      ASSERT_TRUE(range.Commit(8 * kMiB).ok());
      ASSERT_TRUE(small.Reserve(device(), 1000).ok());
      ASSERT_TRUE(small.Commit(1000).ok());
      ASSERT_TRUE(host.Reserve(device(), 8 * kMiB).ok());
      ASSERT_TRUE(host.Commit(3 * kMiB).ok());
      ASSERT_EQ(CurrentContext(), nullptr);
      range.Clear();
      host.Clear();
      ASSERT_EQ(CurrentContext(), nullptr);
      Session session(device(), OnFakeCuda::StreamOf(1));
      session.Fill(range.data(), 1, range.committed());
      session.Retire(std::move(range));
      ASSERT_EQ(session.Synchronize().message(), "");
    }
    ASSERT_EQ(CurrentContext(), nullptr);
  }).join();
}

// Work has not run when the calls that give it return, so that the tests of the suite see buffers
// that end or change too early.
TEST_F(FakeCudaTest, WorkIsLate) {
  Session session(device(), OnFakeCuda::StreamOf(1));
  ASSERT_EQ(session.Synchronize().message(), "");
  const size_t before = fake_cuda::PendingWork();
  auto* const pinned = session.Pinned<uint32_t>(10);
  auto* const taken = session.Take<uint32_t>(10);
  session.ForEach(10, Line{taken, 3, 1});
  session.Copy(pinned, taken, 10 * sizeof(uint32_t));
  EXPECT_EQ(fake_cuda::PendingWork(), before + 2);
  pinned[9] = 0;
  ASSERT_EQ(session.Synchronize().message(), "");
  EXPECT_EQ(pinned[9], 28u);
}

// As after a reset of TensorFlow's context: the next stream has the same handle.
TEST_F(FakeCudaTest, StreamsMayBeDestroyed) {
  const uint32_t n = 40;
  Range range;
  ASSERT_TRUE(range.Reserve(device(), 4096).ok());
  ASSERT_TRUE(range.Commit(4096).ok());
  auto* const words = reinterpret_cast<uint32_t*>(range.data());
  for (uint32_t round = 0; round < 20; ++round) {
    const CudaDevice::Stream stream = OnFakeCuda::MakeStream();
    {
      Session session(device(), stream);
      auto* const taken = session.Take<uint32_t>(n);
      session.ForEach(n, Line{taken, 5, round});
      if (round % 2 == 0) *session.Pinned<uint32_t>(1) = round;
      session.Copy(words, taken, n * sizeof(uint32_t));
      ASSERT_EQ(session.status().message(), "");
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    const CudaDevice::Stream next = OnFakeCuda::MakeStream();
    ASSERT_EQ(next, stream);
    {
      // It must not change the workspace before the work of the destroyed stream is done.
      Session session(device(), next);
      session.Fill(session.Take<uint32_t>(n), 0xEE, n * sizeof(uint32_t));
      ASSERT_EQ(session.Synchronize().message(), "");
    }
    const std::vector<uint32_t> all = Read(words, n);
    for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(all[i], 5 * i + round) << round;
    ASSERT_EQ(cudaStreamDestroy(next), cudaSuccess);
  }
}

// A retired range is given back when the work given so far is done, however often that is asked.
TEST_F(FakeCudaTest, RetiredMemoryOutlivesItsWork) {
  constexpr uint32_t kWords = 1000, kLaunches = 30;
  Session session(device(), OnFakeCuda::StreamOf(1));
  auto* const taken = session.Take<uint32_t>(kWords);
  Range old;
  ASSERT_TRUE(old.Reserve(device(), 4 * kMiB).ok());
  ASSERT_TRUE(old.Commit(4 * kMiB).ok());
  const size_t used = device().used();
  auto* const words = reinterpret_cast<uint32_t*>(old.data());
  for (uint32_t i = 0; i < kLaunches; ++i) session.ForEach(kWords, Line{words, 3, i});
  session.Copy(taken, words, kWords * sizeof(uint32_t));
  session.Retire(std::move(old));
  for (int i = 0; i < 3; ++i) {
    Range other;
    ASSERT_TRUE(other.Reserve(device(), 4 * kMiB).ok());
    ASSERT_TRUE(other.Commit(4 * kMiB).ok());
    session.Retire(std::move(other));  // gives back what is done
    ASSERT_GT(fake_cuda::PendingWork(), 3u);
  }
  EXPECT_EQ(OtherThanLine(session, taken, kWords, 3, kLaunches - 1), 0u);
  ASSERT_EQ(session.Synchronize().message(), "");
  Range last;
  ASSERT_TRUE(last.Reserve(device(), 4 * kMiB).ok());
  ASSERT_TRUE(last.Commit(4 * kMiB).ok());
  session.Retire(std::move(last));
  EXPECT_LE(device().used(), used) << "only the last range is still retired";
}

TEST_F(FakeCudaTest, FirstErrorPersists) {
  {
    Session session(device(), OnFakeCuda::StreamOf(0));
    session.Fill(nullptr, 0, 1000);
    const Status status = session.status();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("cudaMemsetAsync"), std::string::npos) << status.message();
    EXPECT_EQ(session.Synchronize().message(), status.message());
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  Session next(device(), OnFakeCuda::StreamOf(0));
  EXPECT_EQ(next.Synchronize().message(), "");
}

TEST_F(FakeCudaTest, MemoryThatRunsOutIsNamed) {
  Range range;
  ASSERT_TRUE(range.Reserve(device(), fake_cuda::kMemory).ok());
  const Status status = range.Commit(fake_cuda::kMemory);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("free"), std::string::npos) << status.message();
  EXPECT_EQ(range.committed(), 0u);
  EXPECT_TRUE(range.Commit(4 * kMiB).ok());
}

}  // namespace
}  // namespace testing_device
}  // namespace dynemb
