// CallFailure: how the last call of this thread on a served table ended. The tables have no lock,
// so that several threads call one at a time, and operators ask for the error of a call on the
// thread that has made it.
#ifndef DYNEMB_SERVING_DEVICE_CALL_FAILURE_H_
#define DYNEMB_SERVING_DEVICE_CALL_FAILURE_H_

#include "cc/table/status.h"

namespace dynemb {

struct CallFailure {
  const void* table = nullptr;
  Status status;
};

// Not inline: the operator library would list the symbol of such a variable.
CallFailure& LastCall();

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_CALL_FAILURE_H_
