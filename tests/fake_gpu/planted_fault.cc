// A planted fault: with FAKE_GPU_PLANT=DynembLookup.handle in the environment, the kernel of that
// operator is registered without HostMemory for that argument, as if its declaration were missing.
//
// Each registration of a kernel in this library comes here, instead of to TensorFlow's function:
// the linker renames both (--wrap in BUILD).
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace {

using tensorflow::KernelDef;
using Factory = std::unique_ptr<tensorflow::kernel_factory::OpKernelFactory>;

// Takes over `kernel`.
const KernelDef* WithoutPlanted(const KernelDef* kernel) {
  const char* const planted = std::getenv("FAKE_GPU_PLANT");
  if (planted == nullptr || kernel->device_type() != "GPU") return kernel;
  auto* const changed = new KernelDef(*kernel);
  changed->clear_host_memory_arg();
  for (const std::string& argument : kernel->host_memory_arg()) {
    if (kernel->op() + "." + argument != planted) changed->add_host_memory_arg(argument);
  }
  delete kernel;
  return changed;
}

}  // namespace

// OpKernelRegistrar::InitInternal
#define INIT_INTERNAL(prefix) \
  prefix##_ZN10tensorflow14kernel_factory17OpKernelRegistrar12InitInternalEPKNS_9KernelDefESt17basic_string_viewIcSt11char_traitsIcEESt10unique_ptrINS0_15OpKernelFactoryESt14default_deleteISA_EE

extern "C" {
void INIT_INTERNAL(__real_)(void* registrar, const KernelDef* kernel, std::string_view kernel_class,
                            Factory factory);
void INIT_INTERNAL(__wrap_)(void* registrar, const KernelDef* kernel, std::string_view kernel_class,
                            Factory factory) {
  INIT_INTERNAL(__real_)(registrar, WithoutPlanted(kernel), kernel_class, std::move(factory));
}
}
