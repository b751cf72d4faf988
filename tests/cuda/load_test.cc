// A library that links //cc/device:cuda loads without a driver, and reports the missing driver when
// it is used. With a driver, it runs its kernels.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

namespace {

TEST(LoadTest, LibraryWithKernelsLoadsWithoutADriver) {
  const std::vector<std::string> arguments = ::testing::internal::GetArgvs();
  ASSERT_EQ(arguments.size(), 2u);
  void* const library = dlopen(arguments[1].c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  auto* const run = reinterpret_cast<void (*)(char*, size_t)>(dlsym(library, "DynembRunKernel"));
  ASSERT_NE(run, nullptr) << dlerror();
  char message[1000] = "not written";
  run(message, sizeof(message));
  std::printf("%s\n", message);
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) {
    EXPECT_EQ(std::string(message), "no NVIDIA driver: libcuda.so.1 was not found");
  } else {
    EXPECT_TRUE(message[0] == '\0' || std::string(message).find("GPU") != std::string::npos ||
                std::string(message).find("driver") != std::string::npos);
  }
}

}  // namespace
