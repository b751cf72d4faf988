// Shared by the benchmarks of tables in a device's memory: generates keys there, measures time, and
// measures the bandwidth that moved bytes are compared with.
#ifndef DYNEMB_BENCHMARKS_CC_DEVICE_BENCHMARK_H_
#define DYNEMB_BENCHMARKS_CC_DEVICE_BENCHMARK_H_

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/status.h"

namespace dynemb::benchmark_device {

// keys[i] = the key of number first + i. Keys are distinct, and share no pattern.
struct MakeKeys {
  uint64_t first;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const { keys[i] = MixKey(first + i); }
};

// Keys of numbers below `most`, by zipf(1.05), approximating its sum over ranks by the integral.
// The frequency of a key is independent of its number.
struct DrawZipf {
  uint64_t seed, most;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const {
    const double u = static_cast<double>(MixKey(seed + i) >> 11) * 0x1p-53;
    const double last = pow(static_cast<double>(most), -0.05);
    const double rank = pow(1.0 - u * (1.0 - last), -1.0 / 0.05);
    keys[i] = MixKey(MixKey(static_cast<uint64_t>(rank)) % most);
  }
};

// Replaces one key in `each` by the key of number first + i.
struct ReplaceSome {
  uint64_t first;
  uint32_t each;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const {
    if (i % each == 0) keys[i] = MixKey(first + i);
  }
};

// The minimum that a find reads: the key's bucket, and the head of its row.
constexpr double kBucketBytes = 64;
constexpr double kHeadBytes = 16;

// [SHRINK] [--case TEXT] [--keys N]: log2 of the factor by which all sizes are divided, a part of
// the names of the cases to run, and the keys of each table before they are divided.
struct Arguments {
  // default_keys: 0 if the benchmark has no --keys.
  Arguments(int argc, char** argv, int default_shrink, uint64_t default_keys = 0)
      : shrink(default_shrink), keys(default_keys) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--case" && i + 1 < argc) {
        only = argv[++i];
      } else if (argument == "--keys" && default_keys != 0 && i + 1 < argc &&
                 std::atoll(argv[i + 1]) > 0) {
        keys = static_cast<uint64_t>(std::atoll(argv[++i]));
      } else if (!argument.empty() && argument.size() < 3 &&
                 argument.find_first_not_of("0123456789") == std::string::npos) {
        shrink = std::min(std::atoi(argv[i]), 20);
      } else {
        std::fprintf(stderr, "usage: %s [SHRINK] [--case TEXT]%s\n", argv[0],
                     default_keys != 0 ? " [--keys N]" : "");
        std::exit(2);
      }
    }
  }
  // Whether the case of this name runs.
  bool Runs(const std::string& name) {
    const bool runs = name.find(only) != std::string::npos;
    any = any || runs;
    return runs;
  }
  // Ends the program if no case did.
  void RequireCase() const {
    if (any) return;
    std::fprintf(stderr, "no case has '%s' in its name\n", only.c_str());
    std::exit(2);
  }

  int shrink;
  uint64_t keys;
  std::string only;
  bool any = false;  // whether a case has run
};

// Aborts the process if the call failed.
inline void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// A device that runs a benchmark on one stream.
template <class Device>
class Bench {
 public:
  static constexpr int kRepeats = 8;  // per measurement of time

  // `exec` represents the stream.
  Bench(Device* device, Exec* exec) : device_(*device), exec_(*exec) {}

  // An array in the device's memory, which lives as long as the Bench.
  template <class T>
  T* Array(size_t n) {
    arrays_.emplace_back();
    return reinterpret_cast<T*>(Commit(n * sizeof(T), &arrays_.back()));
  }

  template <class Body>
  void ForEach(size_t n, const Body& body) {
    Session session(device_, Device::StreamOf(exec_));
    session.ForEach(n, body);
    Require(session.status());
  }
  void Fill(void* p, uint8_t byte, size_t bytes) {
    Session session(device_, Device::StreamOf(exec_));
    session.Fill(p, byte, bytes);
    Require(session.status());
  }
  void CopyToHost(void* to, const void* from, size_t bytes) {
    Session session(device_, Device::StreamOf(exec_));
    session.Copy(to, from, bytes);
    Require(session.Synchronize());
  }
  void Wait() {
    Session session(device_, Device::StreamOf(exec_));
    Require(session.Synchronize());
  }

  // Returns the seconds of one call of fn(repeat): the median of a few rounds of kRepeats calls
  // without a wait in between. `repeat` counts up from the first call, which warms up. prepare() is
  // called before the first call and before each round; its work is not measured.
  double Seconds(
      const std::function<void(int)>& fn, const std::function<void()>& prepare = [] {}) {
    constexpr int kTimes = 5;
    std::vector<double> seconds;
    int repeat = 0;
    prepare();
    fn(repeat++);
    for (int t = 0; t < kTimes; ++t) {
      prepare();
      Wait();
      const auto begin = std::chrono::steady_clock::now();
      for (int r = 0; r < kRepeats; ++r) fn(repeat++);
      Wait();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds.push_back(took.count() / kRepeats);
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[kTimes / 2];
  }

  // Measures and prints the bandwidth of copying `bytes` within the device's memory, in bytes per
  // second, counting reads and writes.
  double CopyRate(size_t bytes) {
    Range from, to;
    Commit(bytes, &from);
    Commit(bytes, &to);
    const double rate = 2.0 * static_cast<double>(bytes) / Seconds([&](int) {
                          Session session(device_, Device::StreamOf(exec_));
                          session.Copy(to.data(), from.data(), bytes);
                        });
    std::printf("copy within the device: %.0f GB/s, reads and writes counted\n", rate / 1e9);
    return rate;
  }

 private:
  using Session = typename Device::Session;
  using Range = typename Device::Range;

  char* Commit(size_t bytes, Range* range) {
    Require(range->Reserve(device_, bytes));
    Require(range->Commit(bytes));
    return range->data();
  }

  Device& device_;
  Exec& exec_;
  std::vector<Range> arrays_;
};

}  // namespace dynemb::benchmark_device

#endif  // DYNEMB_BENCHMARKS_CC_DEVICE_BENCHMARK_H_
