// device_lookups_benchmark.h on a simulated device. Its figures say nothing about a GPU; the
// purpose is to test the benchmark's code. Arguments: see `Arguments`. With a SHRINK of 16 there is
// one id per table, and a call costs only the time to launch its work.
#include "benchmarks/cc/device_lookups_benchmark.h"
#include "cc/device/device_lookups.h"
#include "cc/table/exec.h"
#include "tests/simulated/simulated_tables.h"

int main(int argc, char** argv) {
  using Device = dynemb::ThreadsDevice;
  Device device;
  dynemb::ThreadsExec exec(2);
  dynemb::DeviceLookups<Device> lookups(&device);
  const auto make = [&](const dynemb::TableOptions& options, auto* table) {
    return dynemb::DeviceTable<Device>::Make(options, &device, table);
  };
  dynemb::benchmark_device::LookupsBenchmark<Device> benchmark(
      &device, &exec, &lookups, make, {argc, argv, 10, dynemb::benchmark_device::kKeysOfTable});
  benchmark.Run();
  return 0;
}
