#include "cc/serving_device/call_failure.h"

namespace dynemb {

CallFailure& LastCall() {
  static thread_local CallFailure last;
  return last;
}

}  // namespace dynemb
