// device_exchange_benchmark.h on a simulated device. Its figures say nothing about a GPU; the
// purpose is to test the benchmark's code. Arguments: [SHRINK] [--case TEXT], as in
// device_benchmark.h.
#include "benchmarks/cc/device_exchange_benchmark.h"
#include "cc/device/device_exchange.h"
#include "cc/table/exec.h"
#include "tests/simulated/simulated_tables.h"

int main(int argc, char** argv) {
  using Device = dynemb::ThreadsDevice;
  Device device;
  dynemb::ThreadsExec exec(2);
  dynemb::DeviceExchange<Device> exchange(&device);
  dynemb::benchmark_device::ExchangeBenchmark<Device> benchmark(&device, &exec, &exchange,
                                                                {argc, argv, 10});
  benchmark.Run();
  return 0;
}
