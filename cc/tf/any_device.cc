// Operators that need not run where the tables are that they name: otherwise TensorFlow would want
// them to run where their handles come from.
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"

namespace tensorflow {

// Cuts of tables are read, and tables change places, by calls on arrays of the host.
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembSnapshot");
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembAdopt");
// Names its tables for the sake of its gradient only.
REGISTER_INPUT_COLOCATION_EXEMPTION("DynembPoolRows");

}  // namespace tensorflow
