// ServedLookups: the calls over several served tables (cc/lookup/lookups.h). Pooled vectors have
// the bits of HostLookups: the combiner is the same, and adds in the same order.
#ifndef DYNEMB_SERVING_SERVED_LOOKUPS_H_
#define DYNEMB_SERVING_SERVED_LOOKUPS_H_

#include "cc/lookup/lookups.h"

namespace dynemb {

// The tables of all tasks are ServedTables. Pool inserts nothing, whatever `insert` says. Apply is
// a FailedPrecondition. The object lives as long as the process.
Lookups& ServedLookups();

}  // namespace dynemb

#endif  // DYNEMB_SERVING_SERVED_LOOKUPS_H_
