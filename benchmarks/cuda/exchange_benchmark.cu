// device_exchange_benchmark.h on GPU 0. Arguments: [SHRINK] [--case TEXT], as in
// device_benchmark.h.
#include <cstdio>

#include "benchmarks/cc/device_exchange_benchmark.h"
#include "cc/device/cuda_device.cuh"
#include "cc/device/cuda_exchange.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  const dynemb::benchmark_device::Arguments arguments(argc, argv, 0);
  dynemb::CudaDevice* device = nullptr;
  dynemb::Status status = dynemb::CudaDevice::Get(0, &device);
  dynemb::Exchange* exchange = nullptr;
  if (status.ok()) status = dynemb::CudaExchange(0, &exchange);
  if (!status.ok()) {
    std::printf("skipped: %s\n", status.message().c_str());
    return 0;
  }
  std::printf("%s\n", device->name().c_str());
  dynemb::SerialExec exec;  // the device's own stream
  dynemb::benchmark_device::ExchangeBenchmark<dynemb::CudaDevice> benchmark(device, &exec, exchange,
                                                                            arguments);
  benchmark.Run();
  return 0;
}
