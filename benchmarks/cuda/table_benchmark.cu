// device_table_benchmark.h on GPU 0. Arguments: [SHRINK] [--case TEXT], as in device_benchmark.h.
#include <cstdio>
#include <memory>

#include "benchmarks/cc/device_table_benchmark.h"
#include "cc/device/cuda_device.cuh"
#include "cc/device/cuda_table.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  const dynemb::benchmark_device::Arguments arguments(argc, argv, 0);
  dynemb::CudaDevice* device = nullptr;
  const dynemb::Status status = dynemb::CudaDevice::Get(0, &device);
  if (!status.ok()) {
    std::printf("skipped: %s\n", status.message().c_str());
    return 0;
  }
  std::printf("%s\n", device->name().c_str());
  const auto make = [](const dynemb::TableOptions& options, std::unique_ptr<dynemb::Table>* table) {
    return dynemb::MakeCudaTable(options, 0, table);
  };
  dynemb::SerialExec exec;  // the device's own stream
  dynemb::benchmark_device::Benchmark<dynemb::CudaDevice> benchmark(device, &exec, make, arguments);
  benchmark.Run();
  return 0;
}
