// device_table_benchmark.h on a simulated device. Its figures say nothing about a GPU; the purpose
// is to test the benchmark's code. Arguments: [SHRINK] [--case TEXT], as in device_benchmark.h.
#include "benchmarks/cc/device_table_benchmark.h"
#include "cc/table/exec.h"
#include "tests/simulated/simulated_tables.h"

int main(int argc, char** argv) {
  dynemb::ThreadsDevice device;
  dynemb::ThreadsExec exec(2);
  const auto make = [&](const dynemb::TableOptions& options,
                        std::unique_ptr<dynemb::Table>* table) {
    return dynemb::DeviceTable<dynemb::ThreadsDevice>::Make(options, &device, table);
  };
  dynemb::benchmark_device::Benchmark<dynemb::ThreadsDevice> benchmark(&device, &exec, make,
                                                                       {argc, argv, 10});
  benchmark.Run();
  return 0;
}
