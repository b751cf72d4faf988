// CudaTile at every width, in the kernel that ForRows launches.
#include "cc/table/lanes_cuda.cuh"
#include "tests/cc/device_suite.h"
#include "tests/cuda/cuda_setup.h"

namespace dynemb {
namespace testing_device {

// FromLeader also broadcasts floats and structs of 12 bytes; FromRank, floats and addresses.
struct LeaderTeam {
  uint32_t* wrong;
  struct Three {
    float a, b, c;
  };
  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const float rank = static_cast<float>(lanes.rank());
    const float x = static_cast<float>(i) + 0.5f;
    const float got = lanes.FromLeader(x + rank);
    const Three three = lanes.FromLeader(Three{x + rank, x - rank, rank});
    const uint32_t last = lanes.width() - 1;
    const float of_last = lanes.FromRank(x + rank, last);
    const uint32_t* const address = lanes.FromRank(wrong + lanes.rank(), last);
    const bool right = got == x && three.a == x && three.b == x && three.c == 0.0f &&
                       of_last == x + static_cast<float>(last) && address == wrong + last;
    if (!right) device::AtomicAdd(wrong, uint32_t{1});
  }
};

template <class Width>
class CudaTileTest : public DeviceSuite<CudaSetup> {};
using Widths =
    ::testing::Types<std::integral_constant<uint32_t, 1>, std::integral_constant<uint32_t, 2>,
                     std::integral_constant<uint32_t, 4>, std::integral_constant<uint32_t, 8>,
                     std::integral_constant<uint32_t, 16>, std::integral_constant<uint32_t, 32>>;
TYPED_TEST_SUITE(CudaTileTest, Widths);

TYPED_TEST(CudaTileTest, CollectivesAgree) {
  constexpr uint32_t kWidth = TypeParam::value;
  const CudaDevice::Stream stream = CudaSetup::StreamOf(1);
  const size_t n = 20011;
  CudaDevice::Session session(this->device(), stream);
  auto* const visits = session.template Take<uint32_t>(n + 2);
  session.Fill(visits, 0, (n + 2) * sizeof(*visits));
  internal_cuda_device::RowsKernel<kWidth, KeyTeam>
      <<<13, kCudaThreadsPerRowBlock, 0, stream>>>(n, KeyTeam{visits, visits + n});
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  internal_cuda_device::RowsKernel<kWidth, LeaderTeam>
      <<<13, kCudaThreadsPerRowBlock, 0, stream>>>(n, LeaderTeam{visits + n + 1});
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(OtherThanLine(session, visits, n, 0, kWidth), 0u);
  const std::vector<uint32_t> wrong = this->Read(session, visits + n, 2);
  EXPECT_EQ(wrong[0], 0u) << "masks, minima and integers";
  EXPECT_EQ(wrong[1], 0u) << "floats";
}

}  // namespace testing_device
}  // namespace dynemb
