// device_exchange_benchmark.h on a simulated device. Its figures say nothing about a GPU; the
// purpose is to test the benchmark's code. Argument: log2 of the factor by which all sizes are
// divided.
#include <cstdlib>

#include "benchmarks/cc/device_exchange_benchmark.h"
#include "cc/device/device_exchange.h"
#include "cc/device/simulated_tables.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  using Device = dynemb::ThreadsDevice;
  Device device;
  dynemb::ThreadsExec exec(2);
  dynemb::DeviceExchange<Device> exchange(&device);
  const int shrink = argc > 1 ? std::atoi(argv[1]) : 10;
  dynemb::benchmark_device::ExchangeBenchmark<Device> benchmark(&device, &exec, &exchange, shrink);
  benchmark.Run();
  return 0;
}
