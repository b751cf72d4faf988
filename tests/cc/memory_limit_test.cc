#include "cc/table/memory_limit.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

namespace dynemb {
namespace {

// A substitute for /, with the files that a test writes.
class ControlGroups : public ::testing::Test {
 protected:
  ControlGroups() {
    const char* const folder = std::getenv("TEST_TMPDIR");
    root_ = std::string(folder != nullptr ? folder : "/tmp") + "/groups." +
            ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void Write(const std::string& path, const std::string& text) {
    const std::string file = root_ + path;
    for (size_t slash = 1; (slash = file.find('/', slash)) != std::string::npos; ++slash) {
      mkdir(file.substr(0, slash).c_str(), 0755);
    }
    std::ofstream(file) << text;
  }
  size_t Limit() const { return ControlGroupLimit(root_); }
  std::string root_;
};

TEST_F(ControlGroups, None) {
  EXPECT_EQ(Limit(), SIZE_MAX);
  Write("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(Limit(), SIZE_MAX);
  Write("/sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(Limit(), SIZE_MAX);
}

TEST_F(ControlGroups, Version2OfAContainer) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/memory.max", "25769803776\n");
  EXPECT_EQ(Limit(), size_t{24} << 30);
}

TEST_F(ControlGroups, Version2LeastLimitOfAllAncestors) {
  Write("/proc/self/cgroup", "0::/kubepods/pod7/box\n");
  Write("/sys/fs/cgroup/kubepods/memory.max", "5000\n");
  Write("/sys/fs/cgroup/kubepods/pod7/memory.max", "3000\n");
  Write("/sys/fs/cgroup/kubepods/pod7/box/memory.max", "max\n");
  EXPECT_EQ(Limit(), 3000u);
  Write("/sys/fs/cgroup/kubepods/memory.max", "2000\n");
  EXPECT_EQ(Limit(), 2000u);
}

TEST_F(ControlGroups, Version1) {
  Write("/proc/self/cgroup", "12:cpu,cpuacct:/a\n5:memory:/docker/x\n0::/other\n");
  Write("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "7000\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Limit(), 7000u);
}

// Docker without a cgroup namespace: the path is the host's, but the mount is the container's.
TEST_F(ControlGroups, Version1WithThePathOfTheHost) {
  Write("/proc/self/cgroup", "5:hugetlb,memory:/docker/x\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  EXPECT_EQ(Limit(), 8000u);
}

TEST(MemoryLimit, ChargesThatDoNotFitAreRefused) {
  const size_t before = ChargedMemory();
  ASSERT_TRUE(ChargeMemory(1000));
  EXPECT_EQ(ChargedMemory(), before + 1000);
  EXPECT_FALSE(ChargeMemory(SIZE_MAX));
  EXPECT_FALSE(ChargeMemory(size_t{1} << 50));
  EXPECT_EQ(ChargedMemory(), before + 1000);
  DischargeMemory(1000);
  EXPECT_EQ(ChargedMemory(), before);
}

TEST(MemoryLimit, PhysicalMemoryIsAtMostTheGroupLimit) {
  EXPECT_GT(PhysicalMemory(), size_t{1} << 20);
  EXPECT_LE(PhysicalMemory(), ControlGroupLimit());
}

}  // namespace
}  // namespace dynemb
