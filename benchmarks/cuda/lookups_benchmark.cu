// device_lookups_benchmark.h on GPU 0. Arguments: see `Arguments` in device_benchmark.h.
#include <cstdio>
#include <memory>

#include "benchmarks/cc/device_lookups_benchmark.h"
#include "cc/device/cuda_device.cuh"
#include "cc/device/cuda_table.h"
#include "cc/table/exec.h"

int main(int argc, char** argv) {
  dynemb::CudaDevice* device = nullptr;
  dynemb::Status status = dynemb::CudaDevice::Get(0, &device);
  dynemb::Lookups* lookups = nullptr;
  if (status.ok()) status = dynemb::CudaLookups(0, &lookups);
  if (!status.ok()) {
    std::printf("skipped: %s\n", status.message().c_str());
    return 0;
  }
  std::printf("%s\n", device->name().c_str());
  const auto make = [](const dynemb::TableOptions& options, std::unique_ptr<dynemb::Table>* table) {
    return dynemb::MakeCudaTable(options, 0, table);
  };
  dynemb::SerialExec exec;  // the device's own stream
  dynemb::benchmark_device::LookupsBenchmark<dynemb::CudaDevice> benchmark(
      device, &exec, lookups, make, {argc, argv, 0, dynemb::benchmark_device::kKeysOfTable});
  benchmark.Run();
  return 0;
}
