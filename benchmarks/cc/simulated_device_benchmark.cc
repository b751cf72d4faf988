// device_table_benchmark.h on a simulated device. Its figures say nothing about a GPU; the purpose
// is to test the benchmark's code. Arguments: [SHRINK] [--case TEXT], as in device_benchmark.h.
#include "benchmarks/cc/device_table_benchmark.h"
#include "cc/device/simulated_tables.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  dynemb::ThreadsDevice device;
  dynemb::ThreadsExec exec(2);
  dynemb::benchmark_device::Benchmark benchmark(&device, &exec, {argc, argv, 10});
  benchmark.Run();
  return 0;
}
