// device_lookups_benchmark.h on a simulated device: not for its numbers, which say nothing of a
// GPU, but so that it runs before it is carried to one. An argument: log2 of how much smaller all
// is; with 16 there is an id a table, and a call takes what it takes to give out its work.
#include <cstdlib>

#include "benchmarks/cc/device_lookups_benchmark.h"
#include "cc/device/device_lookups.h"
#include "cc/device/simulated_tables.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  using Device = dynemb::ThreadsDevice;
  Device device;
  dynemb::ThreadsExec exec(2);
  dynemb::DeviceLookups<Device> lookups(&device);
  const auto make = [&](const dynemb::TableOptions& options, auto* table) {
    return dynemb::DeviceTable<Device>::Make(options, &device, table);
  };
  const int shrink = argc > 1 ? std::atoi(argv[1]) : 10;
  dynemb::benchmark_device::LookupsBenchmark<Device> benchmark(&device, &exec, &lookups, make,
                                                               shrink);
  benchmark.Run();
  return 0;
}
