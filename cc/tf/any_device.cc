// Operators that may run on another device than their tables. Without an exemption, TensorFlow
// places an operator on the device that its handles come from.
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"

namespace tensorflow {

// These operators read cuts of tables, or swap tables, with calls whose arrays are in host memory.
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembSnapshot");
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembSwapRows");
// Uses the handles of its tables only in its gradient.
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembPoolRows");

}  // namespace tensorflow
