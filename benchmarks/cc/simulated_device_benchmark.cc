// device_table_benchmark.h on a simulated device. Its figures say nothing about a GPU; the purpose
// is to test the benchmark's code. Argument: log2 of the factor by which all sizes are divided.
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
