// device_table_benchmark.h on a simulated device: not for its numbers, which say nothing of a GPU,
// but so that it runs before it is carried to one. An argument: log2 of how much smaller all is.
#include <cstdlib>

#include "benchmarks/cc/device_table_benchmark.h"
#include "cc/device/simulated_tables.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  dynemb::ThreadsDevice device;
  dynemb::ThreadsExec exec(2);
  const int shrink = argc > 1 ? std::atoi(argv[1]) : 10;
  dynemb::benchmark_device::Benchmark benchmark(&device, &exec, shrink);
  benchmark.Run();
  return 0;
}
