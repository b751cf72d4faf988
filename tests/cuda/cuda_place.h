// CudaPlace: arrays in the memory of GPU 0, and a stream on it, for the suites that are typed by a
// Place.
#ifndef DYNEMB_TESTS_CUDA_CUDA_PLACE_H_
#define DYNEMB_TESTS_CUDA_CUDA_PLACE_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cc/device/cuda_device.h"
#include "cc/device/stream_exec.h"

namespace dynemb {

inline void Succeeds(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

struct CudaPlace {
  class Arrays {
   public:
    Arrays() = default;
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;
    ~Arrays() {
      for (void* array : arrays_) (void)cudaFree(array);
    }
    template <class T>
    T* Up(const std::vector<T>& values) {
      if (values.empty()) return nullptr;  // like a tensor without elements
      const size_t bytes = values.size() * sizeof(T);
      void* array = nullptr;
      Succeeds(cudaMalloc(&array, bytes));
      arrays_.push_back(array);
      Succeeds(cudaMemcpy(array, values.data(), bytes, cudaMemcpyHostToDevice));
      return static_cast<T*>(array);
    }
    template <class T>
    std::vector<T> Down(const T* array, size_t n) const {
      std::vector<T> values(n);
      Succeeds(cudaDeviceSynchronize());
      Succeeds(cudaMemcpy(values.data(), array, n * sizeof(T), cudaMemcpyDeviceToHost));
      return values;
    }

   private:
    std::vector<void*> arrays_;
  };

  // The reason why GPU 0 cannot be used; empty if it can.
  static std::string Missing() {
    CudaDevice* device = nullptr;
    const Status status = CudaDevice::Get(0, &device);
    return status.ok() ? "" : "no GPU here: " + status.message();
  }
  static Exec& exec() {
    static cudaStream_t stream = [] {
      cudaStream_t made = nullptr;
      Succeeds(cudaStreamCreate(&made));
      return made;
    }();
    static StreamExec exec(stream);
    return exec;
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CUDA_CUDA_PLACE_H_
