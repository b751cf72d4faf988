// A library that links //cc/device:cuda, or cuda12, loads without a driver, and reports a missing
// or old driver when it is used. With a driver and a GPU, it runs its kernels.
//
//   load_test LIBRARY STAND_IN_DRIVER [CUDA]      the library has to be for this CUDA, such as 12
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace {

std::string Argument(size_t i) {
  const std::vector<std::string> arguments = ::testing::internal::GetArgvs();
  return i < arguments.size() ? arguments[i] : "";
}

// What DynembRunKernel of the library reports.
std::string Report() {
  void* const library = dlopen(Argument(1).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  auto* const run = reinterpret_cast<void (*)(char*, size_t)>(dlsym(library, "DynembRunKernel"));
  if (run == nullptr) return dlerror();
  char message[1000] = "not written";
  run(message, sizeof(message));
  return message;
}

// The same in a process whose driver is of this CUDA version, such as 12040.
std::string ReportWithDriver(int version) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    setenv("STAND_IN_CUDA", std::to_string(version).c_str(), 1);
    // The loader finds it when CUDA's runtime library looks for libcuda.so.1, which is its name,
    // too.
    const std::string report =
        dlopen(Argument(2).c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr ? dlerror() : Report();
    const bool written = write(ends[1], report.data(), report.size()) >= 0;
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  std::string report;
  char part[1000];
  for (ssize_t n; (n = read(ends[0], part, sizeof(part))) > 0;) report.append(part, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? report : report + " (and ended with " + std::to_string(status) + ")";
}

// Before the other test, whose process has CUDA's runtime library loaded.
TEST(LoadTest, AnOldDriverIsNamed) {
  const auto old = [](const std::string& version) {
    return "the NVIDIA driver is too old: it is for CUDA " + version + ", this library for ";
  };
  const std::string oldest = ReportWithDriver(11080);
  ASSERT_EQ(oldest.find(old("11.8")), 0u) << oldest;
  const int cuda = std::atoi(oldest.c_str() + old("11.8").size());
  if (!Argument(3).empty()) {
    EXPECT_EQ(cuda, std::stoi(Argument(3)));
  }
  for (const int version : {12000, 12040, 12090, 13000, 13020}) {
    const std::string report = ReportWithDriver(version);
    const std::string text =
        std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    std::printf("%s: %s\n", text.c_str(), report.c_str());
    const std::string expected = version / 1000 < cuda
                                     ? old(text)
                                     : "no GPU: the NVIDIA driver is installed, but finds none";
    EXPECT_EQ(report.find(expected), 0u) << report;
  }
}

TEST(LoadTest, LibraryWithKernelsLoadsWithoutADriver) {
  const std::string report = Report();
  std::printf("%s\n", report.c_str());
  if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr) {
    EXPECT_EQ(report, "no NVIDIA driver: libcuda.so.1 was not found");
  } else {
    EXPECT_TRUE(report.empty() || report.find("GPU") != std::string::npos ||
                report.find("driver") != std::string::npos)
        << report;
  }
}

}  // namespace
